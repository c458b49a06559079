"""Which tokens an update trusts: uncertainty of the head, consistency with the finished image (arXiv 2604.06966)."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor


class SelectionConfig(BaseModel):
    """Consistency-aware token selection. It weighs the policy term, never the KL, and does not depend on MTE.

    Args:
        mode: `delta` keeps a token whose cosine with the finished image rose by more than `threshold` since the AR step
            before; `absolute` one whose cosine itself exceeds it; `none` keeps all. Committed tokens are always kept,
            so the mode matters where scope is `unknown`.
        threshold: see mode.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    mode: Literal["delta", "absolute", "none"] = "delta"
    threshold: float = Field(0.0, ge=-2, le=2)


def uncertainty(final: Tensor) -> Tensor:
    """Population deviation over S final tokens, averaged over channels: [S, B, L, C] -> [B, L]."""
    return final.float().std(dim=0, correction=0).mean(dim=-1)


def most_uncertain(spread: Tensor, share: float) -> Tensor:
    """bool [B, L]: the int(L * share), at least one, tokens of each image with the largest spread."""
    count = max(1, int(spread.shape[1] * share))
    return torch.zeros_like(spread, dtype=torch.bool).scatter_(1, spread.topk(count, dim=1).indices, True)


def consistent(now: Tensor, before: Tensor | None, final: Tensor, committed: Tensor, config: SelectionConfig) -> Tensor:
    """Tokens to keep, bool [B, M].

    Args:
        now: what the tokens look like at the end of this AR step's diffusion, [B, M, C].
        before: the same one AR step earlier; None at the first step, where `delta` keeps all.
        final: the tokens of the finished image.
        committed: bool [M] or [B, M], committed by this step.
    """
    alignment = F.cosine_similarity(now.float(), final.float(), dim=-1)
    if config.mode == "none" or (config.mode == "delta" and before is None):
        return torch.ones_like(alignment, dtype=torch.bool)
    if config.mode == "delta" and before is not None:
        alignment = alignment - F.cosine_similarity(before.float(), final.float(), dim=-1)
    return (alignment > config.threshold) | committed
