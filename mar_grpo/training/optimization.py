"""Optimiser of the trained part, and the moving average of what it moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.distributed.tensor import DTensor


class OptimizerConfig(BaseModel):
    """Args:
    kind: adamw; or sgd (momentum beta1), which keeps weak directions weak where the gradient is mostly noise.
    learning_rate: constant after a linear warm-up over `warmup_updates`.
    head_learning_rate: the diffusion head's, where it is trained; None is `learning_rate`.
    head_ema_decay: held-out looks and the published checkpoint use a moving average of the trained head with this
        decay (less in the first updates), rollouts the head itself, whose steps are mostly noise; None: no average.
    max_grad_norm: the gradient's norm, over all that is trained, is cut to this.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = Field(1e-4, gt=0)
    head_learning_rate: float | None = Field(None, gt=0)
    head_ema_decay: float | None = Field(None, gt=0, lt=1)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.99, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    warmup_updates: int = Field(5, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)


def make_optimizer(
    parameters: Sequence[nn.Parameter], config: OptimizerConfig, head: Sequence[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """The optimiser of a recipe; those of `parameters` that belong to the `head` have their own learning rate."""
    own = {id(parameter) for parameter in head}
    rate = config.learning_rate
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in parameters if (id(p) in own, isinstance(p, DTensor)) == (is_head, sharded)],
            "peak": peak,
        }
        for is_head, peak in ((False, rate), (True, config.head_learning_rate or rate))
        for sharded in (False, True)  # no kernel takes both
    ]
    groups = [group for group in groups if group["params"]]
    if config.kind == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=config.beta1, weight_decay=config.weight_decay)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, weight_decay=config.weight_decay)


def set_rate(optimizer: torch.optim.Optimizer, update: int, config: OptimizerConfig) -> float:
    """Set the learning rates of update number `update` (from 0); returns the first (the trunk's, if it is trained)."""
    warmth = min(1.0, (update + 1) / max(1, config.warmup_updates))
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * warmth
    return float(optimizer.param_groups[0]["lr"])


class Ema:
    """Exponential moving average of parameters; warms up so that early averages forget the start."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.decay, self.parameters = decay, parameters
        self.average = {name: value.detach().clone() for name, value in parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.average.values()), list(self.parameters.values()), 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange parameters and averages (call twice to restore)."""
        for name, value in self.parameters.items():
            kept = value.detach().clone()
            value.copy_(self.average[name])
            self.average[name].copy_(kept)
