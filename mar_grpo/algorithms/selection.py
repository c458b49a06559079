"""Which tokens an update trusts: uncertainty of the head, consistency with the finished image (arXiv 2604.06966)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

Unit = Literal["token", "pixel"]


class SelectionConfig(BaseModel):
    """Consistency-aware token selection. It weighs the policy term, never the KL, and does not depend on MTE.

    Args:
        mode: `delta`, as released, keeps a token whose cosine with the finished image rose by more than `threshold`
            since the AR step before; `absolute` one whose cosine itself exceeds it; `off` keeps all. Committed tokens
            are always kept: selection is for scope `unknown`.
        threshold: see mode.
        unit: whole tokens, or, as released for NOVA, each `pixel` of the latent by itself.
        first_ar_step: earlier AR steps keep all. `delta` needs a step before, so 1; released: 2.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    mode: Literal["delta", "absolute", "off"] = "delta"
    threshold: float = Field(0.0, ge=-2, le=2)
    unit: Unit = "token"
    first_ar_step: int = Field(1, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _off(cls, values: Any) -> Any:
        return off_is_a_word(values, "mode")


def off_is_a_word(values: Any, key: str) -> Any:
    """YAML 1.1 reads `off` as false."""
    return {**values, key: "off"} if isinstance(values, Mapping) and values.get(key) is False else values


def units(tokens: Tensor, count: int) -> Tensor:
    """Tokens [..., C] as their `count` units, [..., count, C / count]; a token's last axis is (pixel, channel)."""
    return tokens.unflatten(-1, (count, -1))


def uncertainty(final: Tensor) -> Tensor:
    """Population deviation over S final values, averaged over channels: [S, ..., C] -> [...]."""
    return final.float().std(dim=0, correction=0).mean(dim=-1)


def most_uncertain(spread: Tensor, share: float) -> Tensor:
    """bool [B, N]: the int(N * share), at least one, of each image with the largest spread."""
    count = max(1, int(spread.shape[1] * share))
    return torch.zeros_like(spread, dtype=torch.bool).scatter_(1, spread.topk(count, dim=1).indices, True)


def consistent(now: Tensor, before: Tensor | None, final: Tensor, committed: Tensor, config: SelectionConfig) -> Tensor:
    """What to keep, bool [...].

    Args:
        now: what the units look like at the end of this AR step's diffusion, [..., c].
        before: the same one AR step earlier; None where there is none: `delta` then keeps all.
        final: those of the finished image.
        committed: bool, broadcastable to [...]: committed by this step.
    """
    if config.mode == "off" or (config.mode == "delta" and before is None):
        return torch.ones(now.shape[:-1], dtype=torch.bool, device=now.device)
    alignment = F.cosine_similarity(now.float(), final.float(), dim=-1)
    if config.mode == "delta" and before is not None:
        alignment = alignment - F.cosine_similarity(before.float(), final.float(), dim=-1)
    return (alignment > config.threshold) | committed
