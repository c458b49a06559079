"""What every diffusion schedule is to the rest of the house: steps that are Gaussian transitions.

All arithmetic is float32 whatever the dtype of the network. Steps are counted by integers: step 0 is the noisiest,
step T - 1 the last; never looked up by the value of t.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from mar_grpo.errors import InputError

Std = float | Tensor


class Schedule(ABC):
    """T Gaussian transitions x_t -> x_{t-1} whose mean is linear in the predicted clean sample and x_t.

    A prediction has the C channels of x_t, or more where the schedule takes the deviation from it (`respaced`).

    Attributes:
        num_steps: T.
        timesteps: float32 [T], what the head takes as t (0..1000 scale).
        std: T floats, the deviation of each step; 0.0 where a step is deterministic.
        temperature: what deviations are multiplied by, already in `std`.
    """

    temperature = 1.0

    def __init__(self, timesteps: Tensor, std: list[float]) -> None:
        self.num_steps = len(timesteps)
        self.timesteps = timesteps.float()
        self._steps = self.timesteps.unbind()
        self.std = std
        self._std = torch.tensor(std, dtype=torch.float32)

    def at_temperature(self, temperature: float) -> Self:
        """Multiply every deviation, in sampling and in scoring alike; the noise a token starts from stays as it is."""
        if temperature != 1.0:
            self.temperature *= temperature
            self.std = [temperature * std for std in self.std]
            self._std = temperature * self._std
        return self

    def to(self, device: torch.device | str) -> Self:
        """Move the tables that are used as tensors."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        self._steps = self.timesteps.unbind()
        return self

    def timestep(self, j: int | Tensor) -> Tensor:
        """t of step j: 0-dim float32, the same object every time, or shaped like an index tensor."""
        return self._steps[j] if isinstance(j, int) else self.timesteps[j]

    def stochastic(self, j: int) -> bool:
        """Whether step j has a density. Deterministic steps must not be scored."""
        return self.std[j] > 0.0

    @abstractmethod
    def mean(self, j: int | Tensor, x_t: Tensor, prediction: Tensor) -> Tensor:
        """Mean of step j, float32, shaped like x_t."""

    @abstractmethod
    def predicted_sample(self, j: int | Tensor, x_t: Tensor, prediction: Tensor) -> Tensor:
        """The clean sample that the prediction of step j stands for, float32."""

    @abstractmethod
    def training_pair(self, x_0: Tensor, noise: Tensor, level: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(x_t, t, target of the head) for clean tokens [..., C], unit noise [..., C] and noise levels [...] in (0, 1).

        level 1 is pure noise; how the levels are distributed is up to the caller. t has the shape of `level`.
        """

    def transition(self, j: int | Tensor, x_t: Tensor, prediction: Tensor) -> tuple[Tensor, Std]:
        """Gaussian of step j.

        Args:
            j: step number; or int64 index tensor [k] (or any shape) against the leading axes of x_t [k, ..., C].
            x_t: state before the step.
            prediction: head output [..., P], guided already (`guidance.guide`).

        Returns:
            mean float32 shaped like x_t, and std: a float, or a tensor that broadcasts against x_t.
        """
        mean = self.mean(j, x_t, prediction)
        return mean, self.std[j] if isinstance(j, int) else self._column(self._std, j, x_t)

    def step(self, j: int, x_t: Tensor, prediction: Tensor, noise: Tensor) -> Tensor:
        """State after step j, given unit normal noise shaped like x_t (not read when the step is deterministic)."""
        mean, std = self.transition(j, x_t, prediction)
        if isinstance(std, Tensor):
            return torch.addcmul(mean, noise.float(), std)
        return torch.add(mean, noise.float(), alpha=self.std[j]) if std else mean

    @staticmethod
    def _column(table: Tensor, j: Tensor, x: Tensor) -> Tensor:
        """table[j] with axes of size 1 added behind, so that it broadcasts against x."""
        picked = table[j]
        return picked.reshape(picked.shape + (1,) * (x.dim() - picked.dim()))


def log_prob(x: Tensor, mean: Tensor, std: Std) -> Tensor:
    """Elementwise natural-log density of N(mean, std^2) at x, float32, unreduced.

    Raises:
        ValueError: std is the number 0; a deterministic transition has no density.
    """
    if isinstance(std, Tensor):
        scale, log_scale = std.float().reciprocal(), std.float().log()
        return -0.5 * ((x.float() - mean.float()) * scale).square() - log_scale - 0.5 * math.log(2 * math.pi)
    if std <= 0.0:
        raise ValueError("a transition with zero variance has no density and must not be scored")
    constant = math.log(std) + 0.5 * math.log(2 * math.pi)
    return -0.5 * ((x.float() - mean.float()) / std).square() - constant


def read_config(
    config: Mapping[str, Any],
    family: str,
    defaults: Mapping[str, Any],
    unsupported: Mapping[str, Any],
    *,
    where: str = "scheduler/scheduler_config.json",
) -> dict[str, Any]:
    """Keys of a diffusers scheduler config over `defaults` (keys that start with an underscore are notes).

    Raises:
        InputError: another class, an unknown key, or a key of `unsupported` with another value than the one there.
    """
    name = config.get("_class_name", family)
    if name != family:
        raise InputError(f"_class_name is {name!r}, not {family!r}", where=where)
    given = {key: value for key, value in config.items() if not key.startswith("_")}
    for key, value in given.items():
        if key not in defaults and key not in unsupported:
            raise InputError(f"unknown key {key!r}", where=where)
        if key in unsupported and value != unsupported[key]:
            raise InputError(f"{key} = {value!r} is not supported", where=where, hint=f"only {unsupported[key]!r} is")
    return {**defaults, **given}
