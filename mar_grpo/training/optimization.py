"""Optimiser of the trained part."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn


class OptimizerConfig(BaseModel):
    """Args:
    kind: adamw; or sgd (momentum beta1), which keeps weak directions weak where the gradient is mostly noise.
    learning_rate: constant after a linear warm-up over `warmup_updates`.
    max_grad_norm: the gradient's norm is cut to this.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = Field(1e-4, gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.99, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    warmup_updates: int = Field(5, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)


def make_optimizer(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimiser of a recipe."""
    if config.kind == "sgd":
        return torch.optim.SGD(
            parameters, lr=config.learning_rate, momentum=config.beta1, weight_decay=config.weight_decay
        )
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(parameters, lr=config.learning_rate, betas=betas, weight_decay=config.weight_decay)


def set_rate(optimizer: torch.optim.Optimizer, update: int, config: OptimizerConfig) -> float:
    """Set and return the learning rate of update number `update` (from 0)."""
    rate = config.learning_rate * min(1.0, (update + 1) / max(1, config.warmup_updates))
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate
