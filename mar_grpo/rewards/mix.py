"""Which scorers a recipe trains on, and their scores for a batch of pictures.

Scores are returned one by one, never summed: advantages are standardised per component before they are weighted
(algorithms/advantage.py).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator

from mar_grpo.errors import InputError, MarGrpoError
from mar_grpo.rewards import templates
from mar_grpo.rewards.geneval import Record
from mar_grpo.rewards.heatmap import HeatmapJudge


class Scorer(Protocol):
    """Something that gives pictures one or more named scores from one look at them."""

    def scores(self, images: np.ndarray | torch.Tensor, records: Sequence[Record]) -> Mapping[str, np.ndarray]: ...


REWARDS: dict[str, Callable[..., Scorer]] = {
    "heatmap/graded": HeatmapJudge,
    "heatmap/strict": HeatmapJudge,
    "heatmap/presence": HeatmapJudge,
}


class RewardConfig(BaseModel):
    """Components of the training reward, name -> weight.

    A name is one of REWARDS, or `module:function` for a scorer of the user's: a function that takes the pictures (numpy
    uint8 [B, H, W, 3]) and the B prompt records and returns B finite numbers, higher is better.

    `device`: where scorers that are networks compute in training: cpu, cuda, cuda:N, or auto for the policy's device.
    Functions of the user's look after themselves.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    components: dict[str, float] = Field(default_factory=lambda: {"heatmap/graded": 1.0})
    device: str = Field("cpu", pattern=r"^(cpu|auto|cuda(:\d+)?)$")

    @field_validator("components")
    @classmethod
    def _known(cls, components: dict[str, float]) -> dict[str, float]:
        if not components:
            raise ValueError("at least one reward component is needed")
        for name, weight in components.items():
            if name.split("/")[0] == templates.NAME:
                raise ValueError(f"{name!r} is the held-out judge: training on it would blind the promotion gate")
            if name not in REWARDS and ":" not in name:
                raise ValueError(f"unknown reward {name!r}: choose from {', '.join(REWARDS)} or give module:function")
            if not math.isfinite(weight) or weight == 0:
                raise ValueError(f"the weight of {name!r} must be a finite number other than 0, got {weight}")
        return components


def reward_device(config: RewardConfig, policy: torch.device) -> torch.device:
    """The device of a recipe's scorers, given the policy's. InputError: this machine does not have it."""
    device, count = policy if config.device == "auto" else torch.device(config.device), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        what = f"there is no device {config.device}: this machine has {count} GPUs"
        raise InputError(what, where="rewards.device", hint="use cpu or auto")
    return device


class RewardMix:
    """The scorers of a recipe, loaded once.

    Args:
        device: where scorers that are networks compute.

    Raises:
        InputError: a scorer of the user's cannot be imported.
    """

    def __init__(self, config: RewardConfig, device: torch.device | str = "cpu") -> None:
        self.config = config
        factories = {REWARDS[name] for name in config.components if name in REWARDS}
        self._scorers = {factory: factory(device=device) for factory in factories}
        self._functions = {name: _import(name) for name in config.components if name not in REWARDS}

    def compute(self, images: np.ndarray | torch.Tensor, records: Sequence[Record]) -> dict[str, np.ndarray]:
        """Score of every component, float32 [B], in the order of the configuration.

        Args:
            images: uint8 [B, H, W, 3].
            records: B prompt records.
        Raises:
            InputError: a prompt the scorer cannot judge, or a user's scorer that returns something else than B numbers
                (that they are finite is for those to check who know which image is which).
            MarGrpoError: a user's scorer failed. Both name the scorer.
        """
        looked = {factory: scorer.scores(images, records) for factory, scorer in self._scorers.items()}
        scores = {}
        for name in self.config.components:
            if name in REWARDS:
                scores[name] = looked[REWARDS[name]][name.split("/")[1]]
            else:
                scores[name] = _call(name, self._functions[name], images, records)
        return scores


def _import(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"the reward scorer {name!r} cannot be imported",
            where="rewards.components",
            hint=f"{error}; give module:function of an importable module",
        ) from error


def _call(
    name: str, function: Callable[..., Any], images: np.ndarray | torch.Tensor, records: Sequence[Record]
) -> np.ndarray:
    pixels = images.cpu().numpy() if isinstance(images, torch.Tensor) else images
    try:
        values = np.asarray(function(pixels, list(records)), dtype=np.float32)
    except Exception as error:  # code of the user's: whatever it raises, say whose it is
        raise MarGrpoError(f"the reward scorer {name!r} failed", hint=f"{type(error).__name__}: {error}") from error
    if values.shape != (len(records),):
        raise InputError(
            f"the reward scorer {name!r} returned shape {values.shape}",
            hint=f"expected ({len(records)},), one a picture",
        )
    return values
