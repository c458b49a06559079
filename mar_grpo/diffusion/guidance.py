"""Classifier-free guidance, in one place for sampling and for scoring."""

from __future__ import annotations

import torch
from torch import Tensor


def guide(
    cond: Tensor, uncond: Tensor, scale: float | Tensor, renorm: float = 1.0, *, channels: int | None = None
) -> Tensor:
    """uncond + scale (cond - uncond), float32.

    Args:
        cond, uncond: head outputs [B, ..., P]; axis 0 is the image.
        scale: guidance scale; at 1 the result is `cond`. A tensor broadcasts against the outputs.
        renorm: below 1, multiply by clamp(|cond| / |result|, renorm, 1) with norms per image over all other axes, that
            is over exactly the tokens that are given.
        channels: guide only the first so many of P; what is behind them (a learned variance) is that of `cond`.
    """
    cond, uncond = cond.float(), uncond.float()
    if isinstance(scale, float) and scale == 1.0:
        return cond
    if channels is not None and channels < cond.shape[-1]:
        guided = guide(cond[..., :channels], uncond[..., :channels], scale, renorm)
        return torch.cat([guided, cond[..., channels:]], dim=-1)
    guided = torch.lerp(uncond, cond, scale)
    if renorm >= 1.0:
        return guided
    axes = tuple(range(1, cond.dim()))
    ratio = cond.square().sum(axes, keepdim=True).sqrt() / guided.square().sum(axes, keepdim=True).sqrt()
    return guided * ratio.clamp(renorm, 1.0)


def decayed_scale(scale: float, min_scale: float, ar_step: int, num_ar_steps: int) -> float:
    """Scale of AR step i of A: min + (scale - min) (i + 1) / A (it grows from the first step to the last)."""
    return min_scale + (scale - min_scale) * (ar_step + 1) / num_ar_steps
