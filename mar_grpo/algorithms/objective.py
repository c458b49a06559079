"""Score-function objective and Gaussian KL of diffusion transitions, elementwise, float32."""

from __future__ import annotations

import torch
from torch import Tensor

from mar_grpo.diffusion.gaussian import Std, log_prob


def policy_term(x_next: Tensor, mean: Tensor, std: Std) -> Tensor:
    """exp(log p - stopgrad log p): 1 everywhere, with the gradient of the log-density (one on-policy update)."""
    density = log_prob(x_next, mean, std)
    return torch.exp(density - density.detach())


def gaussian_kl(mean: Tensor, reference: Tensor, std: Std) -> Tensor:
    """KL of two Gaussians with one deviation, per element: (mean - reference)^2 / (2 std^2), nats."""
    return 0.5 * ((mean - reference) / std).square()
