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
        combine: `standardised` gives each reward component its own scale before they are weighted and summed, so that
            one with a small range is not drowned; `summed`, as released, weights and sums the rewards first.
        baseline: `mean` of the group, the image itself included; `leave_one_out`, the mean of the others (RLOO, arXiv
            2402.14740), which does not depend on the image's own reward and is G / (G - 1) times as large.
        scale: what a group's centred rewards are divided by: the deviation of the `group` itself (GRPO), of the whole
            `batch` (groups that differ little then weigh little), or `none`.
        equal_groups: groups of equal rewards have advantage 0. `zero` counts them in the batch's deviation and in the
            averages of the loss; `leave_out` does not, so that the step does not shrink with their number.
        clip: advantages are clamped to +- this; None, as released, does not.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    combine: Literal["standardised", "summed"] = "standardised"
    baseline: Literal["mean", "leave_one_out"] = "mean"
    scale: Literal["group", "batch", "none"] = "group"
    equal_groups: Literal["zero", "leave_out"] = "zero"
    clip: float | None = Field(5.0, gt=0)


EPSILON = 1e-4


def advantages(rewards: Mapping[str, Tensor], weights: Mapping[str, float], config: AdvantageConfig) -> Tensor:
    """Advantages float32 [P, G] of P groups of G images; a group whose rewards are all equal gets exactly 0.

    Args:
        rewards: component -> [P, G].
        weights: component -> weight.
    """
    if config.combine == "summed":
        total = torch.stack([weights[name] * values.float() for name, values in rewards.items()]).sum(0)
        rewards, weights = {"sum": total}, {"sum": 1.0}
    total = torch.zeros(next(iter(rewards.values())).shape)
    for name, values in rewards.items():
        total += weights[name] * _standardised(values.float(), config)
    return total if config.clip is None else total.clamp(-config.clip, config.clip)


def _standardised(values: Tensor, config: AdvantageConfig) -> Tensor:
    size = values.shape[1]
    equal = values.amax(dim=1) == values.amin(dim=1)
    centred = values - values.mean(dim=1, keepdim=True)
    if config.baseline == "leave_one_out":
        centred = centred * (size / (size - 1))
    if config.scale == "group":
        centred = centred / (centred.square().sum(1, keepdim=True) / (size - 1)).sqrt().add(EPSILON)
    elif config.scale == "batch":
        counted = centred[~equal] if config.equal_groups == "leave_out" and not equal.all() else centred
        centred = centred / counted.square().mean().sqrt().add(EPSILON)
    return centred.masked_fill(equal[:, None], 0.0)


def counted_share(advantage: Tensor, config: AdvantageConfig) -> float:
    """Share of the groups [P, G] that the averages of the loss count."""
    if config.equal_groups == "zero":
        return 1.0
    return advantage.ne(0).any(dim=1).double().mean().item()
