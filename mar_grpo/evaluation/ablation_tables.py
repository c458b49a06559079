"""What an ablation found: its numbers as one JSON document, and its tables. What they mean is written by a reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from mar_grpo.evaluation.statistics import Estimate, clustered_mean, paired_difference
from mar_grpo.evaluation.words import NARROW, percent, points, signed

REFERENCE = "frozen"
"""The arm that the others are compared with."""
PARTS = {"condition": "Condition path", "trunk": "Image trunk", "head": "Head"}


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ArmRun(_Record):
    """One training run.

    Numbers are absent where training stopped before its end (`stopped` says why). Rewards are means over the first and
    the last fifth of the updates, the gradient norm over all; `diversity` is the share that is left of the diversity
    before; `kl` is from the start model, nats an element of the committed tokens' transitions.
    """

    arm: str
    seed: int
    stopped: str = ""
    accuracy: float | None = None
    reward_first: float | None = None
    reward_last: float | None = None
    diversity: float | None = None
    gradient_norm: float | None = None
    kl: float | None = None
    seconds_per_update: float | None = None


class PartNoise(_Record):
    """Mean cosine between gradients of independent batches in one part, its jackknife standard error, and images a
    batch needs for a cosine of 0.5: about `images_needed`, or more than `images_at_least` where the cosine cannot be
    told from 0 (absent too where not even that is known)."""

    cosine: float
    standard_error: float
    images_needed: float | None = None
    images_at_least: float | None = None


class GradientNoise(_Record):
    """Of one arm at the start model: `batches` independent batches of `images` images."""

    arm: str
    batches: int
    images: int
    parts: dict[str, PartNoise]


class SweepPoint(_Record):
    """The gradient under S extra trajectories on a share of the tokens, at the start model.

    `redraw_variance` is over fresh trajectories for the same rollouts, `total_variance` over independent batches (sums
    over parameters). The first is of the extra trajectories alone, the second of their average with the rollout's.
    """

    count: int
    share: float
    redraw_variance: float = Field(gt=0)
    redraw_error: float
    total_variance: float = Field(gt=0)
    images: int
    noise: PartNoise


class Sweep(_Record):
    """All S of one share."""

    points: tuple[SweepPoint, ...]


class Ablation(_Record):
    """Everything the tables and the page show. `arms`: name -> (title, what it is)."""

    name: str
    command: str
    finished: str = ""
    recipe: dict[str, Any]
    versions: dict[str, str]
    arms: dict[str, tuple[str, str]]
    seeds: tuple[int, ...]
    score: str
    accuracy_before: float
    images: int
    """Held-out pictures of each evaluation."""
    runs: tuple[ArmRun, ...]
    gradients: tuple[GradientNoise, ...] = ()
    sweep: tuple[SweepPoint, ...] = ()


Write = Callable[[float], str]


def _plain(value: float) -> str:
    return f"{value:.3g}"


COLUMNS: dict[str, tuple[str, Write]] = {
    "accuracy": ("Accuracy", percent),
    "reward_first": ("Reward, first", lambda v: f"{v:.3f}"),
    "reward_last": ("Reward, last", lambda v: f"{v:.3f}"),
    "diversity": ("Diversity left", percent),
    "gradient_norm": ("Gradient norm", _plain),
    "kl": ("KL to the start", _plain),
    "seconds_per_update": ("Seconds an update", lambda v: f"{v:.2f}"),
}
"""Field of ArmRun -> title, and how it is written."""

CLAIMS: tuple[tuple[str, str, str], ...] = (
    ("Freezing the head is better than training it", "frozen", "head"),
    ("MTE on all tokens is better than none", "mte_all", "frozen"),
    ("MTE on the most uncertain tokens is better than none", "mte_topk", "frozen"),
    ("MTE on the most uncertain is better than on all", "mte_topk", "mte_all"),
    ("Consistency selection is better than none", "consistency", "frozen"),
    ("Both together are better than neither", "full", "frozen"),
    ("Selection adds to MTE", "full", "mte_topk"),
    ("MTE on uncertain tokens is better than leaving them out", "mte_topk", "drop_topk"),
    ("Uncertain tokens matter: better than a random part", "mte_topk", "random"),
    ("The corrected preset is better than the released one", "corrected", "released"),
)
"""Claim, the arm it says is better, and the other."""


# --- numbers -----------------------------------------------------------------------------------------------------


def values(found: Ablation, arm: str, field: str) -> dict[int, float]:
    """Seed -> number of an arm's runs that have it."""
    runs = [run for run in found.runs if run.arm == arm and getattr(run, field) is not None]
    return {run.seed: getattr(run, field) for run in runs}


def over_seeds(numbers: Mapping[int, float]) -> Estimate | None:
    """Mean over seeds and its standard error; None without numbers."""
    return clustered_mean(list(numbers.values()), [str(seed) for seed in numbers]) if numbers else None


def difference(found: Ablation, arm: str, other: str, field: str = "accuracy") -> Estimate | None:
    """Mean of arm - other over the seeds that both have, paired by seed; None where they share none."""
    first, second = values(found, other, field), values(found, arm, field)
    seeds = [seed for seed in first if seed in second]
    if not seeds or arm == other:
        return None
    return paired_difference([first[s] for s in seeds], [second[s] for s in seeds], [str(s) for s in seeds])


# --- tables ------------------------------------------------------------------------------------------------------


def text(estimate: Estimate | None, write: Write) -> str:
    """An estimate with its standard error; a dash where there is none."""
    if estimate is None:
        return "–"
    if estimate.standard_error is None:
        return write(estimate.mean)
    error = write(estimate.standard_error).removeprefix("+").replace(f"{NARROW}%", "")
    return f"{write(estimate.mean)} ± {error}"


Table = tuple[list[str], list[list[str]]]


def arm_table(found: Ablation) -> Table:
    """Header and rows: mean and standard error over seeds, and the change against REFERENCE paired by seed."""
    header = ["Arm", "Seeds", *(title for title, _ in COLUMNS.values())]
    header.insert(3, f"Against {found.arms[REFERENCE][0].lower()}, points" if REFERENCE in found.arms else "Against –")
    rows = []
    for arm, (title, _) in found.arms.items():
        cells = [text(over_seeds(values(found, arm, field)), write) for field, (_, write) in COLUMNS.items()]
        cells.insert(1, text(difference(found, arm, REFERENCE), points))
        stopped = sum(bool(run.stopped) for run in found.runs if run.arm == arm)
        seeds = f"{len(values(found, arm, 'accuracy'))}" + (f" ({stopped} stopped)" if stopped else "")
        rows.append([title, seeds, *cells])
    return header, rows


def claim_table(found: Ablation) -> Table:
    """What the paper claims as differences of held-out accuracy, paired by seed."""
    rows = []
    for claim, better, other in CLAIMS:
        if better in found.arms and other in found.arms:
            change = difference(found, better, other)
            ratio = signed(change.mean / change.standard_error, 1) if change and change.standard_error else "–"
            pair = f"{found.arms[better][0]} − {found.arms[other][0]}"
            rows.append([claim, pair, str(change.n if change else 0), text(change, points), ratio])
    return ["Claim", "Difference", "Seeds", "Points", "Standard errors"], rows


def needed(noise: PartNoise) -> str:
    """Images a batch needs for a cosine of 0.5, as text."""
    if noise.images_needed is not None:
        return f"{noise.images_needed:,.0f}"
    return "unknown" if noise.images_at_least is None else f"more than {noise.images_at_least:,.0f}"


def noise_table(found: Ablation) -> Table:
    """Cosine of each arm's gradients and images for a cosine of 0.5, part by part."""
    parts = [part for part in PARTS if any(part in one.parts for one in found.gradients)]
    header = ["Arm", "Batches × images"]
    header += [f"{PARTS[part]}: {what}" for part in parts for what in ("cosine", "images for 0.5")]
    rows = []
    for one in found.gradients:
        cells = [found.arms[one.arm][0], f"{one.batches} × {one.images}"]
        for part in parts:
            noise = one.parts.get(part)
            cells += [f"{signed(noise.cosine)} ± {noise.standard_error:.3f}", needed(noise)] if noise else ["–", "–"]
        rows.append(cells)
    return header, rows


def sweep_table(found: Ablation) -> Table:
    """What S and the share buy; variances relative to those of S = 1 at the same share."""
    header = ["Share", "S", "Variance over redraws", "times S", "Variance over batches", "Cosine", "Images for 0.5"]
    rows = []
    for point in found.sweep:
        one = single(found, point)
        redraw = Estimate(1, point.redraw_variance / one.redraw_variance, point.redraw_error / one.redraw_variance)
        cosine = f"{signed(point.noise.cosine)} ± {point.noise.standard_error:.3f}"
        rows.append([
            f"{point.share:g}", str(point.count), text(redraw, lambda v: f"{v:.3f}"),
            f"{redraw.mean * point.count:.2f}", f"{point.total_variance / one.total_variance:.3f}", cosine,
            needed(point.noise),
        ])  # fmt: skip
    return header, rows


def run_table(found: Ablation) -> Table:
    """Every run."""
    rows = []
    for run in found.runs:
        numbers = [(write, getattr(run, field)) for field, (_, write) in COLUMNS.items()]
        cells = ["–" if value is None else write(value) for write, value in numbers]
        rows.append([found.arms[run.arm][0], str(run.seed), *cells, run.stopped])
    return ["Arm", "Seed", *(title for title, _ in COLUMNS.values()), "Stopped"], rows


def single(found: Ablation, point: SweepPoint) -> SweepPoint:
    """The point with the fewest trajectories at the same share."""
    return min((other for other in found.sweep if other.share == point.share), key=lambda other: other.count)


TABLES: dict[str, tuple[str, Callable[[Ablation], Table]]] = {
    "arms": ("Arms", arm_table),
    "claims": ("Claims", claim_table),
    "noise": ("Gradient noise at the start model", noise_table),
    "sweep": ("What S and the share buy", sweep_table),
    "runs": ("Every run", run_table),
}


def markdown(found: Ablation) -> str:
    """All tables but that of single runs."""
    blocks = [f"    {found.command}", summary(found)]
    for name, (title, make) in TABLES.items():
        header, rows = make(found)
        if rows and name != "runs":
            lines = [header, ["---"] * len(header), *rows]
            body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
            blocks.append(f"## {title}\n\n{body}")
    return "\n\n".join(blocks) + "\n"


def summary(found: Ablation) -> str:
    """What was run, in two sentences."""
    training = found.recipe["training"]
    batch = training["prompts_per_update"] * training["group_size"]
    done = len(found.runs)
    return (
        f"{done} of {len(found.arms) * len(found.seeds)} runs ({len(found.arms)} arms, {len(found.seeds)} seeds), each "
        f"{training['updates']} updates of {batch} images from the same start. Accuracy is the share of {found.images} "
        f"held-out pictures that {found.score} finds exactly right, {percent(found.accuracy_before)} before training."
    )
