"""Group-relative advantages (GRPO, arXiv 2402.03300; here per reward component, then weighted)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor


class AdvantageConfig(BaseModel):
    """How rewards become advantages.

    Args:
        scale: what a group's centred rewards are divided by: the deviation of the `group` itself (GRPO), of the whole
            `batch` (groups that differ little then weigh little), or `none`.
        clip: advantages are clamped to +- this.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    scale: Literal["group", "batch", "none"] = "group"
    clip: float = Field(5.0, gt=0)


EPSILON = 1e-4


def advantages(rewards: Mapping[str, Tensor], weights: Mapping[str, float], config: AdvantageConfig) -> Tensor:
    """Advantages float32 [P, G] of P groups of G images.

    Each component is standardised by itself and only then weighted and summed, so that a component with a small range
    is not drowned. A group whose rewards are all equal gets exactly 0.

    Args:
        rewards: component -> [P, G].
        weights: component -> weight.
    """
    total = torch.zeros(next(iter(rewards.values())).shape)
    for name, values in rewards.items():
        centred = values.float() - values.float().mean(dim=1, keepdim=True)
        if config.scale == "group":
            centred = centred / (centred.square().sum(1, keepdim=True) / (values.shape[1] - 1)).sqrt().add(EPSILON)
        elif config.scale == "batch":
            centred = centred / centred.square().mean().sqrt().add(EPSILON)
        equal = values.amax(dim=1, keepdim=True) == values.amin(dim=1, keepdim=True)
        total += weights[name] * centred.masked_fill(equal, 0.0)
    return total.clamp(-config.clip, config.clip)
