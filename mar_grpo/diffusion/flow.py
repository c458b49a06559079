"""Rectified flow as a Markov chain of Gaussians (Flow-GRPO's SDE, arXiv 2505.05470; diffusers' Euler sigmas)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mar_grpo.diffusion.gaussian import Schedule, read_config
from mar_grpo.errors import InputError

FAMILY = "FlowMatchEulerDiscreteScheduler"
_DEFAULTS = {"num_train_timesteps": 1000, "shift": 1.0}
_UNSUPPORTED = {
    "use_dynamic_shifting": False,
    "invert_sigmas": False,
    "shift_terminal": None,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "stochastic_sampling": False,
}
_WITHOUT_EFFECT = {  # read by diffusers only with dynamic shifting
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
    "time_shift_type": "exponential",
}


class FlowSchedule(Schedule):
    """x_sigma = (1 - sigma) x_0 + sigma noise; the head predicts the velocity noise - x_0.

    With e = eta sqrt(s / (1 - s)) (s = 1 replaced by sigma[1] in the denominator) and dt = s' - s < 0, a step is
    N(x (1 + e^2 dt / (2 s)) + v (1 + e^2 (1 - s) / (2 s)) dt, e^2 |dt|); eta = 0 is the Euler ODE.

    Args:
        num_steps: diffusion steps T.
        shift: shift of the sigmas; applied twice, as diffusers does (sigma_min is shifted when it is read again).
        num_train_timesteps: scale of t.
        eta: noise level of the SDE (0.7 in Flow-GRPO), 0 for the ODE.
        last_step_deterministic: the step to sigma 0 is the Euler step without noise (the corrected form); False
            keeps it noisy, as the public MAR-GRPO code does.
    """

    prediction_type = "velocity"

    def __init__(
        self,
        num_steps: int,
        *,
        shift: float = 1.0,
        num_train_timesteps: int = 1000,
        eta: float = 0.7,
        last_step_deterministic: bool = True,
    ) -> None:
        if num_steps < 1 or shift <= 0 or eta < 0 or num_train_timesteps < 1:
            raise InputError(
                "a flow schedule needs num_steps >= 1, shift > 0, eta >= 0 and num_train_timesteps >= 1",
                where=f"num_steps {num_steps}, shift {shift}, eta {eta}, num_train_timesteps {num_train_timesteps}",
            )
        self.shift, self.num_train_timesteps, self.eta = shift, num_train_timesteps, eta
        self.last_step_deterministic = last_step_deterministic
        smallest = _shifted(1.0 / num_train_timesteps, shift)
        steps = _shifted(np.linspace(1.0, smallest, num_steps), shift)
        self.sigmas = torch.tensor([*steps, 0.0], dtype=torch.float32)
        sigmas = self.sigmas.double().tolist()
        rows = []
        for j, (now, after) in enumerate(pairwise(sigmas)):
            noisy = eta > 0 and not (last_step_deterministic and j == num_steps - 1)
            room = 1.0 - (now if now < 1.0 else sigmas[1])
            variance = eta**2 * now / room if noisy else 0.0
            dt = after - now
            x_factor = 1.0 + variance * dt / (2 * now)
            velocity_factor = (1.0 + variance * (1.0 - now) / (2 * now)) * dt
            rows.append((x_factor, velocity_factor, math.sqrt(-variance * dt)))
        self._factors = [(x_factor, velocity_factor) for x_factor, velocity_factor, _ in rows]
        self._x_factor = torch.tensor([row[0] for row in rows], dtype=torch.float32)
        self._velocity_factor = torch.tensor([row[1] for row in rows], dtype=torch.float32)
        super().__init__(self.sigmas[:-1] * num_train_timesteps, [row[2] for row in rows])

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], num_steps: int, *, eta: float = 0.7, last_step_deterministic: bool = True
    ) -> FlowSchedule:
        """From the JSON of a FlowMatchEulerDiscreteScheduler; InputError names an unknown or unsupported key."""
        read = read_config(config, FAMILY, {**_DEFAULTS, **_WITHOUT_EFFECT}, _UNSUPPORTED)
        return cls(
            num_steps,
            shift=read["shift"],
            num_train_timesteps=read["num_train_timesteps"],
            eta=eta,
            last_step_deterministic=last_step_deterministic,
        )

    def mean(self, j: int | Tensor, x_t: Tensor, prediction: Tensor) -> Tensor:
        if isinstance(j, int):
            x_factor, velocity_factor = self._factors[j]
            return torch.add(x_t.float() * x_factor, prediction.float(), alpha=velocity_factor)
        x_column = self._column(self._x_factor, j, x_t)
        return x_column * x_t.float() + self._column(self._velocity_factor, j, x_t) * prediction.float()

    def ode_step(self, j: int, x_t: Tensor, velocity: Tensor) -> Tensor:
        """Euler step x + (sigma' - sigma) v, float32, whatever eta is."""
        return torch.add(x_t.float(), velocity.float(), alpha=float(self.sigmas[j + 1] - self.sigmas[j]))

    def predicted_sample(self, j: int | Tensor, x_t: Tensor, prediction: Tensor) -> Tensor:
        sigma = self.sigmas[j] if isinstance(j, int) else self._column(self.sigmas, j, x_t)
        return x_t.float() - sigma * prediction.float()

    def training_pair(self, x_0: Tensor, noise: Tensor, level: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sigma = _shifted(level.float(), self.shift)
        x_0, noise = x_0.float(), noise.float()
        return torch.lerp(x_0, noise, sigma[..., None]), sigma * self.num_train_timesteps, noise - x_0


def _shifted(sigma: Any, shift: float) -> Any:
    return shift * sigma / (1 + (shift - 1) * sigma)
