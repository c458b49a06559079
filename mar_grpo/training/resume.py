"""Which changes of a recipe a run may be resumed with: those that leave what was done as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mar_grpo.errors import InputError

MAY_CHANGE = (
    "name", "data.cache_bytes", "evaluation", "evaluation_sampling", "gate", "training.updates", "training.micro_batch",
    "training.processes", "training.threads", "training.save_every", "training.keep", "training.held_out_every",
    "training.held_out_prompts", "training.max_relaunches", "training.stop_grace_seconds",
    "training.store_patience_seconds", "training.health", "training.activation_checkpointing",
)  # fmt: skip
"""Keys, or parts of which every key may change. How an update is split changes its rounding only."""


def refuse_changes(was: Mapping[str, Any], now: Mapping[str, Any], *, where: str, done: int = 0) -> None:
    """Check that a run of recipe `was`, `done` updates old, may go on with recipe `now` (both as JSON data).

    Raises:
        InputError: it may not; names every key in question as `key: was -> is`.
    """
    before, after = dict(_leaves(was)), dict(_leaves(now))
    refused = [
        f"{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not _may_change(key)
    ]
    if now["training"]["updates"] < done:
        refused.append(f"training.updates: {was['training']['updates']} -> {now['training']['updates']}, {done} done")
    if refused:
        raise InputError(
            f"the saved state belongs to another recipe: {'; '.join(refused)}",
            where=where,
            hint="go on with these as they were, or give the run another name; only what changes no update may change",
        )


def _may_change(key: str) -> bool:
    return any(key == part or key.startswith(f"{part}.") for part in MAY_CHANGE)


def _leaves(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield before + key, value
