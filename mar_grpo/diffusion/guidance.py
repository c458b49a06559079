"""Classifier-free guidance, in one place for sampling and for scoring."""

from __future__ import annotations

import torch
from torch import Tensor


def guide(cond: Tensor, uncond: Tensor, scale: float, renorm: float = 1.0) -> Tensor:
    """uncond + scale (cond - uncond), float32.

    Args:
        cond, uncond: head outputs [B, ..., C]; axis 0 is the image.
        scale: guidance scale; at 1 the result is `cond`.
        renorm: below 1, multiply by clamp(|cond| / |result|, renorm, 1) with norms per image over all other axes, that
            is over exactly the tokens that are given.
    """
    cond, uncond = cond.float(), uncond.float()
    if scale == 1.0:
        return cond
    guided = torch.lerp(uncond, cond, scale)
    if renorm >= 1.0:
        return guided
    axes = tuple(range(1, cond.dim()))
    ratio = cond.square().sum(axes, keepdim=True).sqrt() / guided.square().sum(axes, keepdim=True).sqrt()
    return guided * ratio.clamp(renorm, 1.0)


def decayed_scale(scale: float, min_scale: float, ar_step: int, num_ar_steps: int) -> float:
    """Scale of AR step i of A: min + (scale - min) (i + 1) / A (it grows from the first step to the last)."""
    return min_scale + (scale - min_scale) * (ar_step + 1) / num_ar_steps
