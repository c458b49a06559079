"""What an ablation does: the base, a training run of an arm, the noise of its gradient, what S and the share buy."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mar_grpo import steps
from mar_grpo.config import Recipe
from mar_grpo.data.build import prompt_records
from mar_grpo.documents import DocumentRef, ScoreTable, TrainingRun, read_document
from mar_grpo.errors import InputError, UnhealthyError
from mar_grpo.evaluation.ablation_tables import ArmRun, GradientNoise, PartNoise, Sweep, SweepPoint
from mar_grpo.evaluation.statistics import clustered_mean
from mar_grpo.launch import processes
from mar_grpo.models.checkpoint import fetch_checkpoint, load_policy
from mar_grpo.models.policy import Policy
from mar_grpo.progress import emit
from mar_grpo.runs import Run
from mar_grpo.store import read_uri
from mar_grpo.training.gradients import (
    Probe,
    distance,
    images_for_half,
    mean_cosine,
    some_trajectories,
    variance,
)

T = TypeVar("T")
KL_PROMPTS = 128
SWEEP_COUNTS, SWEEP_SHARES = (1, 2, 4, 8), (0.1, 0.3, 1.0)


@dataclass(frozen=True)
class Base:
    """What all arms start from: references, and the scores of the evaluation before."""

    run: Run
    checkpoint: DocumentRef
    train: DocumentRef
    evaluation: DocumentRef
    accuracy: float
    diversity: float
    images: int


def prepare(recipe: Recipe, store: str) -> Base:
    """Prompts, checkpoint and the evaluation before, once for all arms."""
    run = steps.validate_inputs(recipe.model_dump_json(), store)
    prompts = steps.prompt_data(run)
    checkpoint = steps.sft_checkpoint(run)["checkpoint"]
    reference = steps.benchmark_evaluation(run, "before", checkpoint, prompts["evaluation"])["score_table"]
    summary = read_document(reference, ScoreTable).summary
    if "picture/diversity" not in summary:
        raise InputError("one picture a prompt has no diversity", where="evaluation.samples_per_prompt", hint="use 2")
    score = summary[recipe.gate.score].overall
    diversity = summary["picture/diversity"].overall.mean
    return Base(run, checkpoint, prompts["train"], prompts["evaluation"], score.mean, diversity, score.n)


def train_arm(base: Base, recipe: Recipe, arm: str) -> ArmRun:
    """One training run and its evaluation, from wherever an earlier call stopped.

    A run that was unhealthy is a result. States and local files are removed once the numbers are there.
    """
    run, _ = steps.locate_run(recipe.model_dump_json(), base.run.store.uri())
    run.store.write_bytes(f"{run.prefix}/recipe.json", recipe.model_dump_json().encode())
    try:
        trained = steps.grpo_training(run, base.checkpoint, base.train, base.evaluation)
    except UnhealthyError as error:
        emit("step", step="grpo_training", state="failed")
        return ArmRun(arm=arm, seed=recipe.seed, stopped=str(error))
    table = steps.benchmark_evaluation(run, "after", trained["checkpoint"], base.evaluation)["score_table"]
    summary, document = read_document(table, ScoreTable).summary, read_document(trained["run"], TrainingRun)
    rows = [json.loads(line) for line in read_uri(document.metrics_uri).splitlines()]
    rows = [row for row in rows if "gradient_norm" in row]
    fifth = max(1, len(rows) // 5)
    weights = recipe.rewards.components.items()
    rewards = [sum(weight * row[f"reward/{name}"] for name, weight in weights) for row in rows]
    found = ArmRun(
        arm=arm,
        seed=recipe.seed,
        accuracy=summary[recipe.gate.score].overall.mean,
        reward_first=sum(rewards[:fifth]) / fifth,
        reward_last=sum(rewards[-fifth:]) / fifth,
        diversity=summary["picture/diversity"].overall.mean / base.diversity if base.diversity else None,
        gradient_norm=sum(row["gradient_norm"] for row in rows) / len(rows),
        kl=_distance(base, run, recipe, trained["checkpoint"]),
        seconds_per_update=document.seconds_per_step,
    )
    for key in run.store.list(f"{run.prefix}/training/state"):
        run.store.delete(key)
    shutil.rmtree(run.work(), ignore_errors=True)
    return found


def measure_noise(base: Base, recipe: Recipe, arm: str, batches: int) -> GradientNoise:
    """Cosine between gradients of independent batches at the start, part by part; the same images for all arms."""
    images = recipe.training.prompts_per_update * recipe.training.group_size
    gradients = list(_each(base, recipe, batches, partial(_gradient, images=images), f"noise {arm}"))
    stacked = {part: torch.from_numpy(np.stack([found[part] for found in gradients])) for part in gradients[0]}
    parts = {part: _part_noise(rows, images) for part, rows in stacked.items() if rows.any(1).all()}
    return GradientNoise(arm=arm, batches=batches, images=images, parts=parts)


def measure_sweep(base: Base, recipe: Recipe, batches: int, share: float) -> Sweep:
    """What S buys on a share of the tokens, all trained parts together, on batches of half an update's prompts.

    Twice as many trajectories as the largest S are drawn once and choose the uncertain tokens; of S of them twice the
    gradient is taken without the trajectory that made the image (their difference is the redraw's), and once with it.
    """
    images = max(1, recipe.training.prompts_per_update // 2) * recipe.training.group_size
    every = _with_trajectories(recipe, share=share, count=2 * max(SWEEP_COUNTS))
    found = list(_each(base, every, batches, partial(_swept, images=images), f"sweep, share {share:g}"))
    points = []
    for place, count in enumerate(SWEEP_COUNTS):
        redraws, rows = [redraw[place] for redraw, _ in found], np.stack([row[place] for _, row in found])
        points.append(_sweep_point(share, count, redraws, torch.from_numpy(rows), images))
    return Sweep(points=tuple(points))


# --- batches, shared by as many processes as train ---------------------------------------------------------------

_probe: Probe  # of the processes that `_each` starts


def _each(base: Base, recipe: Recipe, batches: int, make: Callable[[int], T], what: str) -> Iterator[T]:
    """`make` of every batch number, in order."""
    fetch_checkpoint(base.checkpoint, base.run.work() / "checkpoints")
    given = (os.getpid(), base, recipe)
    with multiprocessing.get_context("spawn").Pool(min(batches, recipe.training.processes), _begin, given) as pool:
        for done, found in enumerate(pool.imap(make, range(batches)), 1):
            emit("progress", step=what, done=done, total=batches)
            yield found


def _begin(parent: int, base: Base, recipe: Recipe) -> None:
    global _probe
    processes.end_with_parent(parent)
    torch.set_num_threads(recipe.training.threads or torch.get_num_threads())
    torch.set_flush_denormal(True)
    _probe = Probe(recipe, _policy(base.run, base.checkpoint), prompt_records(recipe.data, "train"))


def _gradient(number: int, images: int) -> dict[str, np.ndarray]:
    """Gradient of a batch, part by part."""
    return {part: values.numpy() for part, values in _probe.gradient(_probe.draw(number, images)).items()}


def _swept(number: int, images: int) -> tuple[list[float], list[np.ndarray]]:
    """Half the squared difference of two redraws, and a gradient as in training, for each S."""
    drawn, largest = _probe.draw(number, images), max(SWEEP_COUNTS)

    def whole(first: int, count: int, **changes: Any) -> Tensor:
        algorithm = _with_trajectories(_probe.recipe, count=count, **changes).algorithm
        some = some_trajectories(drawn, slice(first, first + count))
        return torch.cat(list(_probe.gradient(some, algorithm).values()))

    redraws, rows = [], []
    for count in SWEEP_COUNTS:
        one, other = (whole(first, count, include_rollout=False) for first in (0, largest))
        redraws.append((one - other).square().sum().item() / 2)
        rows.append(whole(0, count).numpy())
    return redraws, rows


# --- shared ---------------------------------------------------------------------------------------------------------


def _policy(run: Run, checkpoint: DocumentRef) -> Policy:
    policy = load_policy(fetch_checkpoint(checkpoint, run.work() / "checkpoints"))
    policy.keep_features(run.store)
    return policy


def _distance(base: Base, run: Run, recipe: Recipe, end: DocumentRef) -> float:
    records = list({record.prompt_id: record for record in prompt_records(recipe.data, "train")}.values())
    return distance(recipe, _policy(run, end), _policy(base.run, base.checkpoint), records[:KL_PROMPTS])


def _part_noise(rows: Tensor, images: int) -> PartNoise:
    cosine, error = mean_cosine(rows)
    needed, at_least = images_for_half(cosine, error, images)
    return PartNoise(cosine=cosine, standard_error=error, images_needed=needed, images_at_least=at_least)


def _with_trajectories(recipe: Recipe, **changes: Any) -> Recipe:
    trajectories = recipe.algorithm.trajectories.model_copy(update=changes)
    return recipe.model_copy(update={"algorithm": recipe.algorithm.model_copy(update={"trajectories": trajectories})})


def _sweep_point(share: float, count: int, redraws: list[float], rows: Tensor, images: int) -> SweepPoint:
    redraw = clustered_mean(redraws, [str(number) for number in range(len(redraws))])
    return SweepPoint(
        count=count,
        share=share,
        redraw_variance=redraw.mean,
        redraw_error=redraw.standard_error or 0.0,
        total_variance=variance(rows),
        images=images,
        noise=_part_noise(rows, images),
    )
