"""What each training process runs, whoever started it: torchrun on this machine or on a pod."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mar_grpo.config import Recipe
from mar_grpo.data.prompts import PromptRecord
from mar_grpo.data.shards import read_shards
from mar_grpo.documents import DocumentRef, PromptSet, read_document
from mar_grpo.errors import RetryableError
from mar_grpo.launch import processes
from mar_grpo.launch.failures import reach
from mar_grpo.models.policy import Policy
from mar_grpo.noise import noise_key
from mar_grpo.progress import emit
from mar_grpo.rewards.templates import NAME, TemplateJudge
from mar_grpo.rollout import generate
from mar_grpo.store import Store
from mar_grpo.training.distributed import Processes
from mar_grpo.training.trainer import train


def work(
    recipe: Recipe,
    store: Store,
    prefix: str,
    *,
    checkpoint: DocumentRef,
    prompts: DocumentRef,
    evaluation: DocumentRef,
    folder: Path,
) -> DocumentRef | None:
    """Train as `trainer.train` does and say how it goes.

    Args:
        evaluation: held-out prompts, looked at for the curves only.
        folder: local files that come from the store.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        processes.end_with_parent(os.getppid(), signal.SIGKILL)  # whoever comes next must not meet it
    try:
        return train(
            recipe,
            store,
            prefix,
            checkpoint=checkpoint,
            prompts=prompts,
            held_out=held_out_look(recipe, evaluation) if recipe.training.held_out_every else None,
            work=folder,
            report=lambda row: _report(recipe, row),
        )
    except RuntimeError as error:
        if not _lost_peer(error):
            raise
        raise RetryableError("another training process has ended", hint="its own message says why") from error


def held_out_look(recipe: Recipe, evaluation: DocumentRef) -> Callable[[Policy, Processes], dict[str, float]]:
    """A function that draws one image of some held-out prompts and gives the judge's mean, each process its share."""
    records: list[PromptRecord] = []
    judge = TemplateJudge()

    def look(policy: Policy, group: Processes) -> dict[str, float]:
        with group.together():
            if not records:
                samples = read_shards(read_document(evaluation, PromptSet))
                distinct = {sample.record.prompt_id: sample.record for sample in samples}
                records.extend(list(distinct.values())[: recipe.training.held_out_prompts])
            mine = records[group.rank :: group.world]
            strict = _judged(policy, recipe, judge, mine) if mine else np.zeros(0)
        return {f"held_out/{NAME}/strict": float(np.mean(np.concatenate(group.gather(strict))))}

    return look


def _judged(policy: Policy, recipe: Recipe, judge: TemplateJudge, records: Sequence[PromptRecord]) -> np.ndarray:
    keys = [noise_key(recipe.evaluation.seed, int(record.prompt_id, 16), 0) for record in records]
    images = generate(policy, [record.prompt for record in records], keys, recipe.evaluation_sampling)
    return np.asarray(judge.strict(images, [record.as_dict() for record in records]), dtype=np.float64)


def _report(recipe: Recipe, row: dict[str, Any]) -> None:
    shown = {name: value for name, value in row.items() if name.startswith(("reward/", "held_out/", "seconds"))}
    reach(row["update"])
    emit("progress", step="grpo_training", done=row["update"], total=recipe.training.updates, **shown)


def _lost_peer(error: RuntimeError) -> bool:
    text = f"{type(error).__name__} {error}".lower()
    return any(word in text for word in ("gloo", "connection closed by peer", "connection reset", "distbackenderror"))
