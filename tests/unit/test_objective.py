"""The policy term and the KLs: closed forms against autograd and torch's own distributions, values against slopes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from mar_grpo.algorithms.objective import density, gaussian_kl, policy_term
from mar_grpo.rollout import SamplingConfig
from tests.unit import toy

SAMPLING = SamplingConfig(ar_steps=4, diffusion_steps=4)
INDEX, KEYS = [0, 0, 1, 1], [21, 22, 23, 24]


def test_kl_is_zero_at_the_start_and_so_is_its_gradient() -> None:
    policy = toy.policy()
    u = toy.update(policy, INDEX, KEYS, SAMPLING, toy.configured(kl={"kind": "gaussian", "coefficient": 1.0}))
    gradient, parts = u.gradient(torch.zeros(4), toy.moved(policy, size=0.0))
    assert parts.means()["kl"] == 0.0 and not gradient.any()
    _, parts = u.gradient(torch.zeros(4), toy.moved(policy))
    assert parts.means()["kl"] > 1e-5


@pytest.mark.parametrize("kind", ["gaussian", "k3", "mean_k3"])
def test_gradient_of_the_kl_against_finite_differences(kind: str) -> None:
    """On fixed states: the value that is reported is the one whose gradient is taken."""
    policy = toy.policy(transformer=toy.few_tokens(4))
    reference = toy.policy(seed=1, transformer=toy.few_tokens(4)).requires_grad_(False)
    reference.transformer.image_decoder.load_state_dict(policy.transformer.image_decoder.state_dict())
    sampling = SamplingConfig(ar_steps=2, diffusion_steps=3, guidance_scale=2.0)
    u = toy.update(policy, INDEX, KEYS, sampling, toy.configured(kl={"kind": kind, "coefficient": 0.7}))
    gradient, _ = u.gradient(torch.zeros(4), reference)
    parameters = policy.trunk_parameters()
    generator = torch.Generator().manual_seed(3)
    direction = [torch.randn(p.shape, generator=generator) for p in parameters]
    expected = torch.dot(gradient, torch.cat([d.flatten() for d in direction])).item()
    values = []
    for step in (3e-4, -3e-4):
        with torch.no_grad():
            for parameter, d in zip(parameters, direction, strict=True):
                parameter.add_(d, alpha=step)
        u.batch.rollout = rescored(u)
        values.append(0.7 * u.gradient(torch.zeros(4), reference)[1].numbers()["kl"] * u.scale)
        with torch.no_grad():
            for parameter, d in zip(parameters, direction, strict=True):
                parameter.sub_(d, alpha=step)
    assert (values[0] - values[1]) / 6e-4 == pytest.approx(expected, rel=1e-2)


def rescored(u: toy.Update) -> Any:
    """The same states with z of the policy as it is now, so that the check of z lets them pass."""
    conditioning = u.policy.encode_prompts(toy.PROMPTS)
    with torch.no_grad():
        cond = u.policy.condition(conditioning)[u.index]
        steps = [
            replace(step, z=u.policy.ar_latents(step.tokens, step.known, cond, wanted=step.places))
            for step in u.rollout.steps
        ]
    return replace(u.rollout, steps=steps)


def test_density_is_that_of_a_normal_and_its_score_the_derivative() -> None:
    mean = torch.tensor([0.3, -2.0], requires_grad=True)
    x = torch.tensor([1.0, -2.5])
    for std in (0.5, torch.tensor([0.5, 0.2])):
        law = Normal(mean, std)
        found, score = density(x, mean.detach(), std)
        torch.testing.assert_close(found, law.log_prob(x).detach())
        torch.testing.assert_close(score, torch.autograd.grad(law.log_prob(x).sum(), mean)[0])
    _, score = density(x, mean.detach(), torch.tensor([0.5, 1e-6]), variance_floor=0.01)
    torch.testing.assert_close(score, torch.tensor([0.7 / 0.25, -0.5 / 0.01]))


@pytest.mark.parametrize("clip", [None, 0.2])
def test_policy_term_is_ppo_s_and_its_slope_the_derivative(clip: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(400, generator=generator, requires_grad=True)
    x = (mean + 0.5 * torch.randn(400, generator=generator)).detach()
    old = Normal(mean.detach() + 0.2 * torch.randn(400, generator=generator), 0.5).log_prob(x)
    weight = torch.randn(400, generator=generator)
    ratio = (Normal(mean, 0.5).log_prob(x) - old).exp()
    expected = weight * ratio
    if clip is not None:
        expected = torch.minimum(expected, weight * ratio.clamp(1 - clip, 1 + clip))
    value, slope, found = policy_term(*density(x, mean.detach(), 0.5), weight, old, clip)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(found, ratio.detach())
    torch.testing.assert_close(slope, torch.autograd.grad(expected.sum(), mean)[0])
    assert (slope == 0).any() == (clip is not None)


def test_an_on_policy_ratio_is_one_and_its_slope_reinforce_s() -> None:
    x, mean, weight = torch.tensor([1.0, -2.5]), torch.tensor([0.3, -2.0]), torch.tensor([2.0, -1.0])
    log_prob, score = density(x, mean, 0.5)
    value, slope, ratio = policy_term(log_prob, score, weight)
    assert torch.equal(value, weight) and torch.equal(ratio, torch.ones(2)) and torch.equal(slope, weight * score)
    again = policy_term(log_prob, score, weight, old=log_prob, clip=0.2)
    assert all(torch.equal(a, b) for a, b in zip(again, (value, slope, ratio), strict=True))


def test_gaussian_kl_is_that_of_two_normals() -> None:
    first, second = torch.tensor([0.0, 1.0, -3.0]), torch.tensor([0.5, 1.0, 2.0])
    expected = kl_divergence(Normal(first, 0.2), Normal(second, 0.2))
    torch.testing.assert_close(gaussian_kl(first, second, 0.2, 0.2), expected)
    assert math.isclose(gaussian_kl(first, second, 0.2, 0.2)[0].item(), 0.5 * 2.5**2, rel_tol=1e-6)
