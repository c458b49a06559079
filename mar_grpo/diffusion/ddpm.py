"""Ancestral DDPM (arXiv 2006.11239) over the inference timesteps, read from a diffusers DDPMScheduler config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mar_grpo.diffusion.gaussian import Schedule, read_config
from mar_grpo.errors import InputError

FAMILY = "DDPMScheduler"
WHERE = "scheduler/scheduler_config.json"
_DEFAULTS = {
    "num_train_timesteps": 1000,
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "trained_betas": None,
    "variance_type": "fixed_small",
    "clip_sample": True,
    "prediction_type": "epsilon",
    "clip_sample_range": 1.0,
    "timestep_spacing": "leading",
    "steps_offset": 0,
    "rescale_betas_zero_snr": False,
    "dynamic_thresholding_ratio": 0.995,
    "sample_max_value": 1.0,
}
_UNSUPPORTED = {"thresholding": False}  # needs whole samples; the head sees single tokens
_CHOICES = {
    "variance_type": ("fixed_small", "fixed_small_log", "fixed_large"),
    "prediction_type": ("epsilon", "v_prediction", "sample"),
    "beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"),
    "timestep_spacing": ("leading", "trailing", "linspace"),
}


class DdpmSchedule(Schedule):
    """The posterior q(x_{t'} | x_t, x_0) with t' the NEXT inference timestep (clean after the last).

    With a = abar / abar' and b = 1 - a: mean = sqrt(abar') b / (1 - abar) x_0 + sqrt(a) (1 - abar') / (1 - abar) x_t,
    variance = b (1 - abar') / (1 - abar) ("fixed_small", the two names of it) or b ("fixed_large"); no noise at t = 0.

    Args:
        config: JSON of a DDPMScheduler; absent keys have diffusers' defaults.
        num_steps: diffusion steps T.

    Raises:
        InputError: an unknown key or a value that is not supported, by name; a contradiction between keys.
    """

    def __init__(self, config: Mapping[str, Any], num_steps: int) -> None:
        read = read_config(config, FAMILY, _DEFAULTS, _UNSUPPORTED)
        for key, choices in _CHOICES.items():
            if read[key] not in choices:
                raise InputError(f"{key} = {read[key]!r} is not supported", where=WHERE, hint=f"one of {choices}")
        self.prediction_type: str = read["prediction_type"]
        self.clip: float | None = read["clip_sample_range"] if read["clip_sample"] else None
        self.alphas_cumprod = torch.cumprod(1.0 - _betas(read), dim=0)
        steps = _timesteps(read, num_steps)
        abar = [*self.alphas_cumprod.double()[steps].tolist(), 1.0]
        if self.prediction_type == "epsilon" and abar[0] <= 0:
            raise InputError(
                "rescale_betas_zero_snr with prediction_type 'epsilon' leaves the first step without a clean sample",
                where=WHERE,
            )
        std, self._mean_factors = [], []
        for t, now, after in zip(steps, abar[:-1], abar[1:], strict=True):
            a = now / after
            b = 1.0 - a
            variance = b if read["variance_type"] == "fixed_large" else b * (1.0 - after) / (1.0 - now)
            std.append(math.sqrt(variance) if t > 0 else 0.0)
            self._mean_factors.append((math.sqrt(after) * b / (1.0 - now), math.sqrt(a) * (1.0 - after) / (1.0 - now)))
        self._sample_factors = [_sample_factors(self.prediction_type, now) for now in abar[:-1]]
        self._mean_table = torch.tensor(self._mean_factors, dtype=torch.float32)
        self._sample_table = torch.tensor(self._sample_factors, dtype=torch.float32)
        super().__init__(torch.tensor(steps), std)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], num_steps: int) -> DdpmSchedule:
        return cls(config, num_steps)

    def predicted_sample(self, j: int | Tensor, x_t: Tensor, prediction: Tensor) -> Tensor:
        """x_0 of the prediction, clamped when the config says clip_sample."""
        sample = self._combine(self._sample_factors, self._sample_table, j, x_t, prediction)
        return sample if self.clip is None else sample.clamp(-self.clip, self.clip)

    def mean(self, j: int | Tensor, x_t: Tensor, prediction: Tensor) -> Tensor:
        sample = self.predicted_sample(j, x_t, prediction)
        return self._combine(self._mean_factors, self._mean_table, j, sample, x_t)

    def _combine(
        self, factors: list[tuple[float, float]], table: Tensor, j: int | Tensor, first: Tensor, second: Tensor
    ) -> Tensor:
        if isinstance(j, int):
            return torch.add(first.float() * factors[j][0], second.float(), alpha=factors[j][1])
        one, two = (self._column(table[:, i], j, first) for i in (0, 1))
        return one * first.float() + two * second.float()

    def training_pair(self, x_0: Tensor, noise: Tensor, level: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Schedule.training_pair`; level picks the integer timestep floor(level * num_train_timesteps)."""
        last = len(self.alphas_cumprod) - 1
        t = (level.float() * (last + 1)).floor().clamp(0, last)
        abar = self.alphas_cumprod[t.long()][..., None]
        x_0, noise = x_0.float(), noise.float()
        keep, add = abar.sqrt(), (1 - abar).sqrt()
        target = {"epsilon": noise, "sample": x_0, "v_prediction": keep * noise - add * x_0}[self.prediction_type]
        return keep * x_0 + add * noise, t, target


def _sample_factors(prediction_type: str, abar: float) -> tuple[float, float]:
    """x_0 = first * x_t + second * prediction."""
    if prediction_type == "epsilon":
        return 1 / math.sqrt(abar), -math.sqrt(1 - abar) / math.sqrt(abar)
    if prediction_type == "v_prediction":
        return math.sqrt(abar), -math.sqrt(1 - abar)
    return 0.0, 1.0


def _betas(read: Mapping[str, Any]) -> Tensor:
    """float32 [num_train_timesteps], in the arithmetic of diffusers."""
    total, start, end = read["num_train_timesteps"], read["beta_start"], read["beta_end"]
    kind = read["beta_schedule"]
    if read["trained_betas"] is not None:
        betas = torch.tensor(read["trained_betas"], dtype=torch.float32)
        if len(betas) != total:
            raise InputError(f"trained_betas has {len(betas)} values, num_train_timesteps is {total}", where=WHERE)
    elif kind == "linear":
        betas = torch.linspace(start, end, total, dtype=torch.float32)
    elif kind == "scaled_linear":
        betas = torch.linspace(start**0.5, end**0.5, total, dtype=torch.float32) ** 2
    elif kind == "sigmoid":
        betas = torch.sigmoid(torch.linspace(-6, 6, total)) * (end - start) + start
    else:
        level = [math.cos((i / total + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(total + 1)]
        betas = torch.tensor([min(1 - level[i + 1] / level[i], 0.999) for i in range(total)], dtype=torch.float32)
    if read["rescale_betas_zero_snr"]:  # arXiv 2305.08891, algorithm 1
        root = torch.cumprod(1 - betas, dim=0).sqrt()
        root = (root - root[-1]) * root[0] / (root[0] - root[-1])
        abar = root**2
        betas = 1 - torch.cat([abar[:1], abar[1:] / abar[:-1]])
    return betas


def _timesteps(read: Mapping[str, Any], num_steps: int) -> list[int]:
    """Inference timesteps, largest first."""
    total = read["num_train_timesteps"]
    if not 1 <= num_steps <= total:
        raise InputError(
            f"{num_steps} diffusion steps are not within 1..{total}", where=f"{WHERE}: num_train_timesteps"
        )
    if read["timestep_spacing"] == "linspace":
        steps = np.linspace(0, total - 1, num_steps).round()[::-1]
    elif read["timestep_spacing"] == "leading":
        steps = np.arange(num_steps)[::-1] * (total // num_steps) + read["steps_offset"]
    else:
        steps = np.round(np.arange(total, 0, -total / num_steps)) - 1
    if steps.max() >= total or steps.min() < 0:
        raise InputError(f"steps_offset = {read['steps_offset']} puts a timestep outside 0..{total - 1}", where=WHERE)
    return [int(step) for step in steps]
