"""The paper's claims at small scale: one recipe with parts of the method left out, several seeds (`mar-grpo ablate`).

Every training is an ordinary run (runs.py) made by the pipeline's own steps, from one checkpoint, on one set of
prompts, with one evaluation before. Beside the runs lies what came of them; what is there is not done again:

    runs/...                                the base (prompts, checkpoint, evaluation before), and each arm and seed
    ablations/NAME/runs/ARM-seedN.json      numbers of a finished run
    ablations/NAME/noise/ARM.json           noise of an arm's gradient at the start
    ablations/NAME/sweep/shareSHARE.json    what S trajectories on a share of the tokens do to it
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel

from mar_grpo import __version__
from mar_grpo.ablation import work
from mar_grpo.ablation.arms import ARMS, arm_recipe
from mar_grpo.ablation.work import SWEEP_COUNTS, SWEEP_SHARES, Base
from mar_grpo.config import Recipe, load_recipe
from mar_grpo.errors import InputError
from mar_grpo.evaluation.ablation_report import build_page
from mar_grpo.evaluation.ablation_tables import Ablation, ArmRun, GradientNoise, Sweep, SweepPoint, markdown
from mar_grpo.evaluation.report import software_versions
from mar_grpo.launch import processes
from mar_grpo.progress import emit
from mar_grpo.runs import WORK
from mar_grpo.store import Store, canonical_json

R = TypeVar("R", bound=BaseModel)


@dataclass(frozen=True)
class Options:
    """What is run.

    Args:
        batches: batches of one update's images for the noise of a gradient, at least 3; 0 measures none. The sweep
            takes half as many (at least 3), of half the prompts.
        out: local folder of results.json, tables.md and page.html, written anew after every run.
    """

    arms: Sequence[str]
    seeds: Sequence[int]
    batches: int
    out: Path
    command: str


def ablate_here(
    recipe: str,
    overrides: Sequence[str],
    *,
    arms: str | None,
    seeds: str,
    store: str | None,
    batches: int,
    out: Path | None,
    work: Path,
    command: str,
) -> str:
    """The `ablate` command: reads its texts, holds `work` for itself, returns the tables and where the page is."""
    loaded = load_recipe(recipe, overrides)
    if batches and batches < 3:
        raise InputError(f"{batches} batches have no jackknife error", where="--gradient-batches", hint="use 24, or 0")
    try:
        numbers = list(dict.fromkeys(int(seed) for seed in seeds.split(",")))
    except ValueError:
        raise InputError("seeds are whole numbers with commas between them", where=f"--seeds {seeds}") from None
    names = list(dict.fromkeys(arms.split(","))) if arms else list(ARMS)
    place = out or work / "ablations" / loaded.name
    if loaded.training.threads:  # what is measured here is as small as what the training processes do
        torch.set_num_threads(loaded.training.threads)
    torch.set_flush_denormal(True)
    with processes.locked(work):
        os.environ.setdefault(WORK, str(work / "steps"))
        options = Options(names, numbers, batches, place, command)
        found = run_ablation(loaded, store or f"file://{work}/ablation-store", options)
    return f"{markdown(found)}\nPage: {place / 'page.html'}"


def run_ablation(
    recipe: Recipe,
    store: str,
    options: Options,
    *,
    prepare: Callable[[Recipe, str], Base] = work.prepare,
    train: Callable[[Base, Recipe, str], ArmRun] = work.train_arm,
    noise: Callable[[Base, Recipe, str, int], GradientNoise] = work.measure_noise,
    sweep: Callable[[Base, Recipe, int, float], Sweep] = work.measure_sweep,
) -> Ablation:
    """Do what is not done yet; all recipes are checked before anything is made.

    Raises:
        InputError: an arm that does not exist or does not fit the recipe; what the pipeline's steps raise.
    """
    algorithm = recipe.algorithm
    if algorithm.trajectories.mode != "composite" or algorithm.selection.mode == "off":
        what = "the recipe of an ablation is its arm `full`: trajectories.mode composite, selection on"
        raise InputError(what, where="algorithm", hint="start from the recipe emoji-ablation")
    if unknown := [arm for arm in options.arms if arm not in ARMS]:
        raise InputError(f"there is no arm {unknown[0]!r}", where="--arms", hint=f"choose from {', '.join(ARMS)}")
    plan = [(arm, seed, arm_recipe(recipe, arm, seed)) for seed in options.seeds for arm in options.arms]
    base = prepare(recipe, store)
    given = {name: getattr(base, name).sha256 for name in ("checkpoint", "train", "evaluation")}
    place = _Place(base.run.store, f"ablations/{base.run.name}")
    runs: list[ArmRun] = []
    noises: list[GradientNoise] = []
    points: list[SweepPoint] = []

    def write() -> Ablation:
        return _write(recipe, base, options, runs, noises, points)

    for number, (arm, seed, one) in enumerate(plan, 1):
        emit("note", text=f"{arm}, seed {seed}: run {number} of {len(plan)}")
        inputs = given | {"recipe": one.digest}
        runs.append(place.once(f"runs/{arm}-seed{seed}", inputs, ArmRun, partial(train, base, one, arm)))
        write()
    if not options.batches:
        return write()
    for arm in options.arms:
        one = arm_recipe(recipe, arm, recipe.seed)
        inputs = given | {"recipe": one.digest, "batches": options.batches}
        make = partial(noise, base, one, arm, options.batches)
        noises.append(place.once(f"noise/{arm}", inputs, GradientNoise, make))
        write()
    one, batches = arm_recipe(recipe, "mte_topk", recipe.seed), max(3, options.batches // 2)
    for share in SWEEP_SHARES:
        inputs = given | {"recipe": one.digest, "batches": batches, "counts": list(SWEEP_COUNTS)}
        swept = partial(sweep, base, one, batches, share)
        points += place.once(f"sweep/share{share:g}", inputs, Sweep, swept).points
    return write()


# --- shared ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """A folder of the store with things that are done once."""

    store: Store
    prefix: str

    def once(self, name: str, inputs: Mapping[str, Any], kind: type[R], make: Callable[[], R]) -> R:
        """What `make` gives, or gave when it was called with these inputs by this release of the code."""
        identity = hashlib.sha256(canonical_json({"inputs": dict(inputs), "code": __version__})).hexdigest()
        key = f"{self.prefix}/{name}.json"
        if self.store.exists(key):
            record = self.store.read_json(key)
            if record["inputs"] == identity:
                emit("step", step=name, state="reused", text="")
                return kind.model_validate(record["result"])
        made = make()
        self.store.write_json(key, {"inputs": identity, "result": made.model_dump(mode="json")})
        return made


def _write(
    recipe: Recipe, base: Base, options: Options, runs: list[ArmRun], noises: list[GradientNoise],
    points: list[SweepPoint],
) -> Ablation:  # fmt: skip
    """Results so far, as JSON, tables and page."""
    found = Ablation(
        name=recipe.name,
        command=options.command,
        finished=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        recipe=recipe.model_dump(mode="json"),
        versions=software_versions(),
        arms={arm: (ARMS[arm].title, ARMS[arm].what) for arm in options.arms},
        seeds=tuple(options.seeds),
        score=recipe.gate.score,
        accuracy_before=base.accuracy,
        images=base.images,
        runs=tuple(runs),
        gradients=tuple(noises),
        sweep=tuple(points),
    )
    place = Store(options.out)
    place.make_root()
    place.write_bytes("results.json", (found.model_dump_json(indent=1) + "\n").encode())
    place.write_bytes("tables.md", markdown(found).encode())
    place.write_bytes("page.html", build_page(found).encode())
    return found
