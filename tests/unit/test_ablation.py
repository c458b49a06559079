"""Arms change what they say, runs are done once, tables compute what they print, the page stands alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mar_grpo.ablation.arms import ARMS, arm_recipe
from mar_grpo.ablation.run import Options, ablate_here, run_ablation
from mar_grpo.ablation.work import SWEEP_COUNTS, SWEEP_SHARES, Base
from mar_grpo.algorithms.config import AlgorithmConfig
from mar_grpo.config import Recipe, load_recipe
from mar_grpo.documents import DocumentRef
from mar_grpo.errors import InputError, RetryableError
from mar_grpo.evaluation.ablation_report import build_page
from mar_grpo.evaluation.ablation_tables import (
    CLAIMS,
    Ablation,
    ArmRun,
    GradientNoise,
    PartNoise,
    Sweep,
    SweepPoint,
    arm_table,
    claim_table,
    difference,
    markdown,
    noise_table,
    over_seeds,
    run_table,
    sweep_table,
    values,
)
from mar_grpo.evaluation.charts import Dot, DotChart, Dots, dot_chart
from mar_grpo.runs import Run
from mar_grpo.store import Store
from tests.unit.test_report import Page

RECIPE = load_recipe("emoji-ablation")
FORBIDDEN = ("script", "link", "iframe", "object")

# --- arms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_changes_the_algorithm_and_nothing_else(arm: str) -> None:
    recipe = arm_recipe(RECIPE, arm, 3)
    kept = {"algorithm": RECIPE.algorithm, "name": RECIPE.name, "seed": RECIPE.seed}
    assert recipe.model_copy(update=kept) == RECIPE
    assert recipe.seed == 3
    assert (recipe.algorithm == RECIPE.algorithm) == (arm == "full")


def test_arms_are_what_they_say() -> None:
    made = {arm: arm_recipe(RECIPE, arm, 0).algorithm for arm in ARMS}
    mte = {arm for arm, a in made.items() if a.trajectories.mode == "composite"}
    assert mte == {"mte_all", "mte_topk", "full", "random", "corrected", "released"}
    selection = {arm for arm, a in made.items() if a.selection.mode != "off"}
    assert selection == {"consistency", "full", "corrected", "released"}
    assert {arm for arm, a in made.items() if a.trained != "trunk"} == {"head"}
    assert made["mte_all"].trajectories.share == 1.0
    assert made["random"].trajectories == made["mte_topk"].trajectories.model_copy(update={"pick": "random"})
    assert made["drop_topk"].trajectories.share == made["mte_topk"].trajectories.share
    for preset in ("corrected", "released"):
        assert made[preset] == AlgorithmConfig.model_validate({"preset": preset})
    assert len({arm_recipe(RECIPE, arm, 0).digest for arm in ARMS}) == len(ARMS)


def test_every_claim_is_about_arms_there_are() -> None:
    assert {arm for _, better, other in CLAIMS for arm in (better, other)} <= set(ARMS)


# --- runs --------------------------------------------------------------------------------------------------------


class Lab:
    """Stands for the work: counts it, and dies when it is told to."""

    def __init__(self, folder: Path) -> None:
        self.store, self.trained, self.measured = Store(folder / "store"), list[tuple[str, int]](), list[str]()
        self.store.make_root()
        self.die_at: int | None = None

    def prepare(self, recipe: Recipe, store: str) -> Base:
        reference = DocumentRef(uri="file:///x", sha256="a" * 64)
        return Base(Run(self.store, "base"), reference, reference, reference, 0.2, 0.5, 480)

    def train(self, base: Base, recipe: Recipe, arm: str) -> ArmRun:
        if len(self.trained) == self.die_at:
            raise RetryableError("killed")
        self.trained.append((arm, recipe.seed))
        if arm == "random" and recipe.seed == 1:
            return ArmRun(arm=arm, seed=1, stopped="the loss is not finite")
        gain = 0.01 * list(ARMS).index(arm) + 0.02 * recipe.seed
        return ArmRun(
            arm=arm, seed=recipe.seed, accuracy=0.2 + gain, reward_first=0.4, reward_last=0.5 + gain,
            diversity=0.99 - gain, gradient_norm=0.01 + gain, kl=0.001 + gain, seconds_per_update=2.0 + gain,
        )  # fmt: skip

    def noise(self, base: Base, recipe: Recipe, arm: str, batches: int) -> GradientNoise:
        self.measured.append(arm)
        parts = {
            "condition": PartNoise(cosine=0.2, standard_error=0.02, images_needed=512.0),
            "trunk": PartNoise(cosine=0.01, standard_error=0.02, images_at_least=2432.0),
        }
        if arm == "head":
            parts["head"] = PartNoise(cosine=-0.1, standard_error=0.01)
        return GradientNoise(arm=arm, batches=batches, images=128, parts=parts)

    def sweep(self, base: Base, recipe: Recipe, batches: int, share: float) -> Sweep:
        self.measured.append(f"share {share:g}")
        noise = PartNoise(cosine=0.1, standard_error=0.02, images_needed=576.0)
        return Sweep(points=tuple(
            SweepPoint(count=s, share=share, redraw_variance=8.0 / s, redraw_error=0.4 / s, total_variance=20 + 8 / s,
                       images=64, noise=noise)
            for s in SWEEP_COUNTS
        ))  # fmt: skip

    def run(self, out: Path, recipe: Recipe = RECIPE, **changes: Any) -> Ablation:
        given = {"arms": list(ARMS), "seeds": (0, 1), "batches": 12, "out": out, "command": "mar-grpo ablate x"}
        return run_ablation(
            recipe, "file:///nowhere", Options(**given | changes), prepare=self.prepare, train=self.train,
            noise=self.noise, sweep=self.sweep,
        )  # fmt: skip


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_what_is_done_is_not_done_again(lab: Lab, tmp_path: Path) -> None:
    lab.die_at = 7
    with pytest.raises(RetryableError):
        lab.run(tmp_path)
    partial = Ablation.model_validate_json((tmp_path / "results.json").read_bytes())
    assert [(run.arm, run.seed) for run in partial.runs] == lab.trained
    lab.die_at = None
    found = lab.run(tmp_path)
    assert len(lab.trained) == len(set(lab.trained)) == 2 * len(ARMS)
    assert [(run.arm, run.seed) for run in found.runs] == lab.trained
    assert lab.measured == [*ARMS, *(f"share {share:g}" for share in SWEEP_SHARES)]
    again = lab.run(tmp_path)
    assert again.model_copy(update={"finished": ""}) == found.model_copy(update={"finished": ""})
    assert len(lab.trained) == 2 * len(ARMS)
    assert len(lab.measured) == len(ARMS) + len(SWEEP_SHARES)
    assert Ablation.model_validate_json((tmp_path / "results.json").read_bytes()) == again
    assert (tmp_path / "tables.md").read_text() == markdown(again)
    assert (tmp_path / "page.html").read_text() == build_page(again)


def test_more_seeds_add_runs_and_another_recipe_does_all_anew(lab: Lab, tmp_path: Path) -> None:
    lab.run(tmp_path, arms=["frozen"], batches=0)
    lab.run(tmp_path, arms=["frozen"], batches=0, seeds=(0, 1, 2))
    assert lab.trained == [("frozen", seed) for seed in (0, 1, 2)]
    assert lab.measured == []
    lab.run(tmp_path, load_recipe("emoji-ablation", ["training.updates=3"]), arms=["frozen"], batches=0)
    assert len(lab.trained) == 5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"arms": ["full", "empty"]}, "empty"),
        ({"recipe": load_recipe("emoji-ablation", ["algorithm.selection.mode=off"])}, "selection on"),
        ({"recipe": load_recipe("emoji-ablation", ["sampling.ar_steps=8"])}, "scored_ar_steps"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_made(
    change: dict[str, Any], named: str, lab: Lab, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=named):
        lab.run(tmp_path, **change)
    assert lab.store.list() == []
    assert lab.trained == []


@pytest.mark.parametrize(("change", "named"), [({"seeds": "0,x"}, "--seeds"), ({"batches": 2}, "--gradient-batches")])
def test_wrong_words_are_refused(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"arms": None, "seeds": "0", "store": None, "batches": 0, "out": None, "command": ""}
    with pytest.raises(InputError, match=named):
        ablate_here("emoji-ablation", [], work=tmp_path / "work", **given | change)
    assert not (tmp_path / "work").exists()


# --- tables ------------------------------------------------------------------------------------------------------


@pytest.fixture
def found(lab: Lab, tmp_path: Path) -> Ablation:
    return lab.run(tmp_path)


def test_means_over_seeds_and_paired_differences(found: Ablation) -> None:
    estimate = over_seeds({0: 0.2, 1: 0.3, 2: 0.7})
    assert estimate is not None
    assert (estimate.n, estimate.mean) == (3, pytest.approx(0.4))
    assert estimate.standard_error == pytest.approx((0.07 / 3) ** 0.5)  # sample variance 0.07
    change = difference(found, "full", "frozen")
    assert change is not None
    assert change.mean == pytest.approx(0.04)  # the same for each seed, so that pairing leaves no error
    assert change.standard_error == pytest.approx(0.0, abs=1e-12)
    assert difference(found, "frozen", "frozen") is None
    assert values(found, "random", "accuracy") == {0: pytest.approx(0.27)}


def test_tables_print_what_was_found(found: Ablation) -> None:
    header, rows = arm_table(found)
    table = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert table["Frozen head"]["Accuracy"] == "22.0\u202f% ± 1.0"
    assert table["Full"]["Against frozen head, points"] == "+4.0 ± 0.0"
    assert table["Frozen head"]["Against frozen head, points"] == "–"
    assert table["MTE, random"]["Seeds"] == "1 (1 stopped)"
    _, claims = claim_table(found)
    assert claims[0][1:4] == ["Frozen head − Head trained", "2", "+1.0 ± 0.0"]
    header, rows = noise_table(found)
    first = dict(zip(header, rows[0], strict=True))
    assert first["Condition path: images for 0.5"] == "512"
    assert first["Image trunk: images for 0.5"] == "more than 2,432"
    assert first["Head: images for 0.5"] == "unknown"
    assert dict(zip(header, rows[1], strict=True))["Head: cosine"] == "–"
    header, rows = sweep_table(found)
    for row in (dict(zip(header, row, strict=True)) for row in rows):
        assert float(row["times S"]) == pytest.approx(1.0)
        assert row["Variance over batches"] == f"{(20 + 8 / int(row['S'])) / 28:.3f}"
    stopped = next(row for row in run_table(found)[1] if row[-1])
    assert stopped[2:] == ["–"] * 7 + ["the loss is not finite"]


def test_an_empty_or_partial_ablation_has_tables_and_a_page(found: Ablation) -> None:
    for runs in ((), found.runs[:1], found.runs[1:2]):
        some = found.model_copy(update={"runs": runs, "gradients": (), "sweep": ()})
        assert "## Claims" in markdown(some)
        Page(build_page(some))
    one_arm = found.model_copy(update={"arms": {"full": ("Full", "all")}, "runs": (), "gradients": (), "sweep": ()})
    Page(build_page(one_arm))


# --- page --------------------------------------------------------------------------------------------------------


def test_the_page_stands_alone_and_says_what_the_tables_say(found: Ablation) -> None:
    html = build_page(found)
    page = Page(html)
    assert not [tag for tag, _ in page.tags if tag in FORBIDDEN]
    assert not re.search(r"(src|href)=|url\(|@import|https?://", html)
    assert html.count('role="img"') == 7 + 1 + 3
    for cell in ("22.0\u202f%", "+4.0", "more than 2,432", "mar-grpo ablate x", "algorithm.trajectories.share"):
        assert cell in page.text
    for title, what in found.arms.values():
        assert title in page.text
        assert what in page.text
    assert not re.search(r"\bnan\b", html)


def test_dots_are_where_their_numbers_are() -> None:
    series = Dots("a <b>", (Dot(1.0, 0.5, (0.5, 1.5)), None, Dot(2.0)), "first")
    chart = DotChart("Title", "note", "points", ("one", "two", "three"), (series,), reference=0.0)
    svg = dot_chart(chart)
    ticks = {float(text): float(x) for x, text in re.findall(r'class="tick" x="([\d.]+)" [^>]*>([\d.]+)<', svg)}
    dots = [(float(x), float(y)) for x, y in re.findall(r'class="dot first" cx="([\d.]+)" cy="([\d.]+)"', svg)]
    assert [x for x, _ in dots] == pytest.approx([ticks[1.0], ticks[2.0]], abs=0.1)
    bar = re.search(r'class="error first" x1="([\d.]+)" x2="([\d.]+)"', svg)
    assert bar is not None
    unit = ticks[1.0] - ticks[0.0]
    assert [float(x) for x in bar.groups()] == pytest.approx([ticks[1.0] - unit / 2, ticks[1.0] + unit / 2], abs=0.1)
    assert svg.count('class="each first"') == 2
    names = [float(y) - 4 for y in re.findall(r'class="label" x="104" y="([\d.]+)"', svg)]
    assert [y for _, y in dots] == pytest.approx([names[0], names[2]], abs=0.1)
    assert "a &lt;b&gt;" in svg


def test_results_hold_no_number_that_is_not_finite(found: Ablation) -> None:
    def refuse(text: str) -> Any:
        raise AssertionError(text)

    json.loads(found.model_dump_json(), parse_constant=refuse)
