"""The DDPM of MAR and Harmon: 1000 cosine steps, respaced, with a variance that the head predicts.

Source: Improved DDPM (arXiv 2102.09672), sections 3.1 (learned variance), 3.2 (cosine) and 4 (fewer steps); MAR
(arXiv 2406.11838) uses it unchanged. Tables are float64 and become float32 where they meet a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mar_grpo.diffusion.gaussian import Schedule, Std
from mar_grpo.errors import InputError

TRAINING_STEPS = 1000


class RespacedSchedule(Schedule):
    """The posterior q(x_{t-1} | x_t, x_0) over the kept steps; a prediction is [eps | v], 2 C channels for C.

    log variance = f log(beta) + (1 - f) log(posterior variance) with f = (v + 1) / 2, which may leave [0, 1]. It is
    used without gradient: reinforcement learning moves the mean. The step to t = 0 has no noise and is not scored.

    Tables run over the kept steps from t = 0 up, as published; steps of the interface (`j`) run from the noisiest down,
    so j = T - 1 - t.

    Args:
        spacing: T, or a respacing: "n" or "n1,n2,..." (even strides, equal sections) or "ddimN" (an integer stride).

    Attributes:
        timestep_map: the original timestep (0..999) of each kept step, which is what the head sees.
        std: upper ends of the learned deviations (sqrt(beta)); 0.0 for the last step.

    Raises:
        InputError: the spacing cannot be read, or asks for more steps than there are.
    """

    prediction_type = "epsilon"

    def __init__(self, spacing: int | str = TRAINING_STEPS) -> None:
        level = [math.cos((i / TRAINING_STEPS + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(TRAINING_STEPS + 1)]
        training = np.cumprod(1 - np.array([min(1 - level[i + 1] / level[i], 0.999) for i in range(TRAINING_STEPS)]))
        self.training_alphas_cumprod = torch.tensor(training, dtype=torch.float32)
        self.timestep_map = kept_steps(spacing)
        kept = training[self.timestep_map]
        self.betas = 1 - kept / np.append(1.0, kept[:-1])
        self.alphas_cumprod = np.cumprod(1 - self.betas)
        before = np.append(1.0, self.alphas_cumprod[:-1])
        variance = self.betas * (1 - before) / (1 - self.alphas_cumprod)
        smallest = variance[1] if len(kept) > 1 else self.betas[0]  # t = 0 has none; its entry is that of t = 1
        self.posterior_log_variance_clipped = np.log(np.append(smallest, variance[1:]))
        self.posterior_mean_coef1 = self.betas * np.sqrt(before) / (1 - self.alphas_cumprod)
        self.posterior_mean_coef2 = (1 - before) * np.sqrt(1 - self.betas) / (1 - self.alphas_cumprod)
        self.sqrt_recip_alphas_cumprod = np.sqrt(1 / self.alphas_cumprod)
        self.sqrt_recipm1_alphas_cumprod = np.sqrt(1 / self.alphas_cumprod - 1)
        rows = (
            self.sqrt_recip_alphas_cumprod, self.sqrt_recipm1_alphas_cumprod, self.posterior_mean_coef1,
            self.posterior_mean_coef2, np.log(self.betas), self.posterior_log_variance_clipped,
        )  # fmt: skip
        self._table = torch.tensor(np.stack(rows)[:, ::-1].copy(), dtype=torch.float32)  # [6, T], by j
        super().__init__(
            torch.tensor(self.timestep_map[::-1], dtype=torch.float32), [*np.sqrt(self.betas[:0:-1]).tolist(), 0.0]
        )

    def predicted_sample(self, j: int | Tensor, x_t: Tensor, prediction: Tensor) -> Tensor:
        """x_0 of the eps half of the prediction; not clipped."""
        scale, back = self._values(0, j, x_t), self._values(1, j, x_t)
        return scale * x_t.float() - back * prediction[..., : x_t.shape[-1]].float()

    def mean(self, j: int | Tensor, x_t: Tensor, prediction: Tensor) -> Tensor:
        return self.posterior_mean(j, self.predicted_sample(j, x_t, prediction), x_t)

    def posterior_mean(self, j: int | Tensor, x_0: Tensor, x_t: Tensor) -> Tensor:
        """Mean of q(x_{t-1} | x_t, x_0), float32."""
        return self._values(2, j, x_t) * x_0 + self._values(3, j, x_t) * x_t.float()

    def log_variance(self, j: int | Tensor, prediction: Tensor) -> Tensor:
        """The learned log variance [..., C] of a prediction [..., 2 C], temperature aside; gradient flows."""
        share = (prediction[..., prediction.shape[-1] // 2 :].float() + 1) / 2
        return share * self._values(4, j, prediction) + (1 - share) * self._values(5, j, prediction)

    def transition(self, j: int | Tensor, x_t: Tensor, prediction: Tensor) -> tuple[Tensor, Std]:
        """See `Schedule.transition`; std is a tensor shaped like x_t, without gradient (0.0 for the last step)."""
        mean = self.mean(j, x_t, prediction)
        if isinstance(j, int) and not self.stochastic(j):
            return mean, 0.0
        std = (0.5 * self.log_variance(j, prediction.detach())).exp() * self.temperature
        return mean, std if isinstance(j, int) else std * (self._column(self._std, j, std) > 0)

    def training_pair(self, x_0: Tensor, noise: Tensor, level: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Schedule.training_pair`; level picks the original timestep floor(1000 level)."""
        t = (level.float() * TRAINING_STEPS).floor().clamp(0, TRAINING_STEPS - 1)
        abar = self.training_alphas_cumprod[t.long()][..., None]
        return abar.sqrt() * x_0.float() + (1 - abar).sqrt() * noise.float(), t, noise.float()

    def _values(self, row: int, j: int | Tensor, like: Tensor) -> Tensor:
        """One table at step j, broadcasting against `like`."""
        return self._table[row, j] if isinstance(j, int) else self._column(self._table[row], j, like)


def kept_steps(spacing: int | str) -> list[int]:
    """Original timesteps that a respacing keeps, ascending.

    "n1,n2,...": section i of equal sections keeps n_i steps at the stride (size - 1) / (n_i - 1), both ends included,
    rounded half to even. "ddimN": every s-th step, where s is the first integer that keeps exactly N.
    """
    text = str(spacing)
    hint = "a number of steps, 'n1,n2,...' or 'ddimN'"
    if text.startswith("ddim") and text[4:].isdecimal():
        for stride in range(1, TRAINING_STEPS):
            kept = list(range(0, TRAINING_STEPS, stride))
            if len(kept) == int(text[4:]):
                return kept
        raise InputError(
            f"no integer stride keeps {text[4:]} of {TRAINING_STEPS} steps", where=f"diffusion steps {text}"
        )
    counts = text.split(",")
    if not all(count.isdecimal() and int(count) > 0 for count in counts):
        raise InputError(f"diffusion steps {text!r} cannot be read", hint=hint)
    steps: list[int] = []
    start = 0
    for section, count in enumerate(map(int, counts)):
        size = TRAINING_STEPS // len(counts) + (section < TRAINING_STEPS % len(counts))
        if size < count:
            raise InputError(f"{count} of {size} diffusion steps are too many", where=f"diffusion steps {text!r}")
        gap, position = (size - 1) / (count - 1) if count > 1 else 1.0, 0.0
        for _ in range(count):
            steps.append(start + round(position))
            position += gap
        start += size
    return steps


def noised(schedule: RespacedSchedule, x_0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """x_t float32 [..., C] of clean tokens at original timesteps t int64 [...]."""
    abar = torch.from_numpy(schedule.alphas_cumprod).to(x_0.device)[t][..., None]
    return abar.sqrt().float() * x_0.float() + (1 - abar).sqrt().float() * noise.float()


def training_loss(
    predict: Callable[[Tensor, Tensor], Tensor], x_0: Tensor, noise: Tensor, t: Tensor, schedule: RespacedSchedule
) -> tuple[Tensor, Tensor]:
    """MAR's loss of each token, (mse [N], vb [N]); it is the mean of their sum over the masked tokens.

    mse = mean_C (noise - eps)^2 trains the mean. vb, a term of the variational bound in bits per dimension with eps
    held fixed, trains the variance: KL(q posterior || prediction), and at t = 0 the likelihood of bins of 2/255.

    Args:
        predict: (x_t [N, C], t [N]) -> [eps | v] [N, 2 C].
        x_0: clean tokens [N, C]; noise: unit noise [N, C]; t: original timesteps int64 [N].
        schedule: `RespacedSchedule()`, all 1000 steps.
    """
    x_0 = x_0.float()
    x_t, j = noised(schedule, x_0, noise, t), schedule.num_steps - 1 - t
    output = predict(x_t, t).float()
    eps, v = output.chunk(2, dim=-1)
    fixed = torch.cat([eps.detach(), v], dim=-1)
    mean, log_variance = schedule.mean(j, x_t, fixed), schedule.log_variance(j, fixed)
    smallest = torch.tensor(schedule.posterior_log_variance_clipped, dtype=torch.float32, device=t.device)
    true_log_variance = smallest[t][..., None]
    distance = (schedule.posterior_mean(j, x_0, x_t) - mean).square() * torch.exp(-log_variance)
    kl = 0.5 * (log_variance - true_log_variance - 1 + torch.exp(true_log_variance - log_variance) + distance)
    bound = torch.where((t == 0)[..., None], -_log_bin(x_0, mean, 0.5 * log_variance), kl)
    return (noise.float() - eps).square().mean(-1), bound.mean(-1) / math.log(2)


def _log_bin(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-probability of the bin of width 2/255 around x in [-1, 1] (end bins are open); the CDF is approximated."""
    upper, lower = (_cdf((x - mean + side / 255) * torch.exp(-log_std)) for side in (1, -1))
    inside = (upper - lower).clamp(min=1e-12).log()
    inside = torch.where(x > 0.999, (1 - lower).clamp(min=1e-12).log(), inside)
    return torch.where(x < -0.999, upper.clamp(min=1e-12).log(), inside)


def _cdf(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
