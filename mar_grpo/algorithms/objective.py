"""Score-function objective and Gaussian KL of diffusion transitions, elementwise, float32."""

from __future__ import annotations

import torch
from torch import Tensor

from mar_grpo.diffusion.gaussian import Std, log_prob


def policy_term(x_next: Tensor, mean: Tensor, std: Std) -> Tensor:
    """exp(log p - stopgrad log p): 1 everywhere, with the gradient of the log-density (one on-policy update)."""
    density = log_prob(x_next, mean, std)
    return torch.exp(density - density.detach())


def gaussian_kl(mean: Tensor, reference: Tensor, std: Std, reference_std: Std | None = None) -> Tensor:
    """KL(N(mean, std^2) || N(reference, reference_std^2)) per element, nats.

    Where both have the deviation of the schedule it is (mean - reference)^2 / (2 std^2).
    """
    if not isinstance(std, Tensor) or not isinstance(reference_std, Tensor):
        return 0.5 * ((mean - reference) / std).square()
    ratio = std / reference_std
    return 0.5 * (((mean - reference) / reference_std).square() + ratio.square() - 1) - ratio.log()
