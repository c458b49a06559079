"""The policy term and the KL of diffusion transitions, elementwise, float32, with their gradients in closed form.

A transition's density is Gaussian, so the gradient with respect to its mean is known without a graph: only the head
between the mean and its condition needs one. Deviations carry no gradient.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from mar_grpo.diffusion.gaussian import Std


def density(x_next: Tensor, mean: Tensor, std: Std, variance_floor: float = 0.0) -> tuple[Tensor, Tensor]:
    """Log-density of N(mean, std^2) at x_next and its derivative with respect to the mean, elementwise.

    Args:
        variance_floor: the least variance of the quadratic term (the logarithm has none).
    """
    if isinstance(std, Tensor):
        score, log_std = (x_next - mean) / std.square().clamp(min=variance_floor), std.log()
    else:
        score, log_std = (x_next - mean) / max(std * std, variance_floor), torch.tensor(math.log(std))
    return -0.5 * score * (x_next - mean) - log_std - 0.5 * math.log(2 * math.pi), score


def policy_term(
    log_prob: Tensor, score: Tensor, weight: Tensor, old: Tensor | None = None, clip: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(weight times ratio, its derivative with respect to the mean, ratio), elementwise.

    Args:
        log_prob, score: from `density`.
        weight: advantage times whatever an element counts; broadcasts.
        old: log-density under the policy that made x_next; None on-policy, where the ratio is 1 and the derivative that
            of REINFORCE.
        clip: the lesser of weight * ratio and weight * (ratio cut to 1 +- clip), as in PPO (arXiv 1707.06347, eq. 7).
    """
    if old is None:
        return weight.expand_as(score), weight * score, torch.ones_like(score)
    ratio = (log_prob - old).exp()
    value = (weight * ratio).masked_fill(weight == 0, 0.0)  # a ratio may be infinite
    slope = value * score
    if clip is not None:
        cut = weight * ratio.clamp(1 - clip, 1 + clip)
        value, slope = torch.minimum(value, cut), slope.masked_fill(cut < value, 0.0)
    return value, slope, ratio


def kl_term(
    kind: Literal["gaussian", "k3", "mean_k3"],
    mean: Tensor,
    reference: Tensor,
    std: Std,
    reference_std: Std,
    x_next: Tensor,
    variance_floor: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(KL of the policy to the reference, its derivative with respect to the policy's mean); kinds: `KlConfig`."""
    if kind == "gaussian":
        return gaussian_kl(mean, reference, std, reference_std), (mean - reference) / reference_std**2
    if kind == "mean_k3":
        shift = reference - mean
        return shift.exp() - shift - 1, 1 - shift.exp()
    log_prob, score = density(x_next, mean, std, variance_floor)
    other, _ = density(x_next, reference, reference_std, variance_floor)
    difference = other - log_prob
    return difference.exp() - difference - 1, (1 - difference.exp()) * score


def gaussian_kl(mean: Tensor, reference: Tensor, std: Std, reference_std: Std) -> Tensor:
    """KL(N(mean, std^2) || N(reference, reference_std^2)) per element, nats.

    Where both have the deviation of the schedule it is (mean - reference)^2 / (2 std^2).
    """
    if not isinstance(std, Tensor) or not isinstance(reference_std, Tensor):
        return 0.5 * ((mean - reference) / std).square()
    ratio = std / reference_std
    return 0.5 * (((mean - reference) / reference_std).square() + ratio.square() - 1) - ratio.log()
