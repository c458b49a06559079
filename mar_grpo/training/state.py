"""Everything a run needs to go on where it stopped, saved beside and then pointed at."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

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
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
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
            "parameters": {name: value.detach() for name, value in parameters.items()},
            "optimizer": optimizer.state_dict(),
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


def load_state(
    store: Store,
    prefix: str,
    *,
    fingerprint: str,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any] | None:
    """Restore parameters and optimiser; returns update, stream, metrics and seconds, or None when there is no state.

    Raises:
        InputError: the state is damaged or belongs to another recipe, checkpoint or prompt set.
    """
    if not store.exists(f"{prefix}/{LATEST}"):
        return None
    target = store.read_pointer(f"{prefix}/{LATEST}")
    data = store.read_bytes(store.key(target.uri), sha256=target.sha256)
    state = torch.load(io.BytesIO(data), weights_only=True)
    if state["fingerprint"] != fingerprint:
        hint = "give the run another name, or delete its state to start anew"
        raise InputError(
            "the saved state belongs to another recipe, checkpoint or prompt set", where=target.uri, hint=hint
        )
    saved: dict[str, Tensor] = state["parameters"]
    with torch.no_grad():
        for name, value in parameters.items():
            value.copy_(saved[name])
    optimizer.load_state_dict(state["optimizer"])
    return {
        "update": state["update"],
        "stream": state["stream"],
        "metrics": json.loads(state["metrics"]),
        "seconds": state["seconds"],
    }
