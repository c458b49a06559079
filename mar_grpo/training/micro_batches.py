"""The images of an update in parts that fit in memory: made and scored, then walked through for the gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mar_grpo.algorithms.loss import Batch, LossParts, Scales, Steps, backward, record
from mar_grpo.data.prompts import PromptRecord
from mar_grpo.errors import UnhealthyError
from mar_grpo.models.policy import Policy
from mar_grpo.rewards.mix import RewardMix
from mar_grpo.rollout import Guided

if TYPE_CHECKING:
    from mar_grpo.config import Recipe

Scores = dict[str, np.ndarray]


@dataclass(frozen=True)
class Wanted:
    """An image to make: the `member`-th of the group of the prompt at `place` in the update (both from 0)."""

    place: int
    member: int
    record: PromptRecord
    key: int


@dataclass
class MicroBatch:
    """Images of one process that are rolled out together, their prompts, and component -> reward of each image [B]."""

    records: Sequence[PromptRecord]
    batch: Batch
    rewards: Scores


@torch.no_grad()
def make_images(
    recipe: Recipe,
    policy: Policy,
    wanted: Sequence[Wanted],
    steps: Steps,
    rewards: RewardMix,
) -> list[MicroBatch]:
    """Images, recorded for the update and scored, `micro_batch` at once. A prompt is encoded once in each micro-batch.

    Where the policy is on a GPU, images are scored while the next ones are made.

    Raises:
        UnhealthyError: an image's tokens or a reward are not finite; names prompt, place in the group, and component.
    """
    at_once = recipe.training.micro_batch
    waiting: list[tuple[Sequence[PromptRecord], Batch, Callable[[], Scores]]] = []
    with _beside(policy.device) as worker:
        for start in range(0, len(wanted), at_once):
            some = wanted[start : start + at_once]
            prompts = {one.place: one.record for one in some}
            row = {place: number for number, place in enumerate(prompts)}
            index = torch.tensor([row[one.place] for one in some], device=policy.device)
            conditioning = policy.encode_prompts([r.prompt for r in prompts.values()])
            guided = Guided.of(policy, conditioning, recipe.sampling).rows(index)
            batch = record(guided, index, [one.key for one in some], steps, recipe.algorithm)
            images = policy.decode(batch.rollout.tokens).cpu()
            finite = batch.rollout.tokens.isfinite().flatten(1).all(1).cpu().numpy()  # bytes would not show it
            for bad in np.flatnonzero(~finite)[:1]:
                hint = "lower optimizer.learning_rate; the last checkpoint is intact"
                raise UnhealthyError("the tokens of an image are not finite", where=_place(some[bad]), hint=hint)
            scores = partial(_scores, rewards, images, some)
            waiting.append((list(prompts.values()), batch, worker.submit(scores).result if worker else scores))
        return [MicroBatch(records, batch, scored()) for records, batch, scored in waiting]


def gradient(
    recipe: Recipe,
    policy: Policy,
    reference: Policy | None,
    batches: Sequence[MicroBatch],
    advantage: Tensor,
    steps: Steps,
    scales: Scales,
    always: bool = False,
) -> LossParts:
    """Add the gradient of the loss to whatever of the policy requires one.

    Args:
        advantage: of each image, in the order of the micro-batches.
        scales: of the whole update.
        always: see `backward`.

    Raises:
        UnhealthyError: see `backward`.
    """
    parts, unguided = LossParts(), recipe.algorithm.likelihood_guidance == "none"
    sizes = [len(each.batch.index) for each in batches]
    for each, part in zip(batches, advantage.to(policy.device).split(sizes), strict=True):
        conditioning = policy.encode_prompts([r.prompt for r in each.records])
        anchor = None
        if reference is not None:
            with torch.no_grad():
                anchor = Guided.of(reference, conditioning, recipe.sampling, unguided=unguided)
        live = Guided.of(policy, conditioning, recipe.sampling, unguided=unguided)
        parts.merge(backward(live, anchor, each.batch, part, steps, scales, recipe.algorithm, always))
    return parts


def _beside(device: torch.device) -> AbstractContextManager[ThreadPoolExecutor | None]:
    """A thread that scores, where the policy leaves the CPU to it."""
    return ThreadPoolExecutor(1) if device.type == "cuda" else nullcontext()


def _scores(rewards: RewardMix, images: Tensor, wanted: Sequence[Wanted]) -> Scores:
    scores = rewards.compute(images, [one.record.as_dict() for one in wanted])
    for name, values in scores.items():
        for bad in np.flatnonzero(~np.isfinite(values))[:1]:
            raise UnhealthyError(
                f"the reward {name!r} is {values[bad]}",
                where=_place(wanted[bad]),
                hint="the scorer must return a finite number for every image",
            )
    return scores


def _place(one: Wanted) -> str:
    """Which image it is, for messages."""
    return f"prompt {one.record.prompt_id} {one.record.prompt[:80]!r}, image {one.member} of its group"
