"""Everything a run needs to go on where it stopped, saved beside and then pointed at."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import torch

from mar_grpo.errors import InputError
from mar_grpo.store import Store

LATEST = "state/LATEST"
KEEP = 2


def save_state(
    store: Store,
    prefix: str,
    update: int,
    *,
    fingerprint: str,
    learner: Mapping[str, Any],
    stream: Mapping[str, Any],
    metrics: list[dict[str, Any]],
    seconds: float,
) -> None:
    """Write the state after `update` updates; the pointer is written last, older states are then pruned."""
    buffer = io.BytesIO()
    torch.save(
        {
            "fingerprint": fingerprint,
            "update": update,
            "learner": dict(learner),
            "stream": dict(stream),
            "metrics": json.dumps(metrics),
            "seconds": seconds,
        },
        buffer,
    )
    entry = store.write_bytes(f"{prefix}/state/update-{update:06d}.pt", buffer.getvalue())
    store.write_pointer(f"{prefix}/{LATEST}", entry)
    for old in sorted(key for key in store.list(f"{prefix}/state") if key.endswith(".pt"))[:-KEEP]:
        store.delete(old)


def load_state(store: Store, prefix: str, *, fingerprint: str) -> dict[str, Any] | None:
    """Update, learner, stream, metrics and seconds of the last state, on the CPU; None when there is none.

    Raises:
        InputError: the state is damaged or belongs to another recipe, checkpoint or prompt set.
    """
    if not store.exists(f"{prefix}/{LATEST}"):
        return None
    target = store.read_pointer(f"{prefix}/{LATEST}")
    data = store.read_bytes(store.key(target.uri), sha256=target.sha256)
    state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    if state["fingerprint"] != fingerprint:
        hint = "give the run another name, or delete its state to start anew"
        raise InputError(
            "the saved state belongs to another recipe, checkpoint or prompt set", where=target.uri, hint=hint
        )
    return state | {"metrics": json.loads(state["metrics"])}
