"""MAR through rollout, extra trajectories and update: what is sampled is scored, and the gradient is the loss's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mar_grpo.algorithms.loss import AlgorithmConfig, backward
from mar_grpo.algorithms.objective import gaussian_kl
from mar_grpo.algorithms.selection import consistent
from mar_grpo.algorithms.trajectories import Trajectories, draw_trajectories
from mar_grpo.diffusion.guidance import guide
from mar_grpo.diffusion.respaced import RespacedSchedule
from mar_grpo.errors import InputError
from mar_grpo.models.mar import MarPolicy
from mar_grpo.models.policy import Policy
from mar_grpo.rollout import Guided, Rollout, SamplingConfig, draw_noise, roll_out, schedule_of
from mar_grpo.training.trainer import trained_parameters
from tests.unit import tiny
from tests.unit.toy import flat

PROMPTS, INDEX, KEYS = ["3", "goldfish"], torch.tensor([0, 0, 1]), [11, 12, 13]
ADVANTAGE = torch.tensor([1.0, -0.5, 2.0])
SAMPLING = SamplingConfig(
    ar_steps=4, diffusion_steps="ddim5", guidance_scale=3.0, guidance_schedule="linear", temperature=0.8
)


def made(seed: int = 0) -> MarPolicy:
    """Only the trunk wants gradients, as in training."""
    policy = tiny.mar_policy(seed).requires_grad_(False)
    for parameter in policy.trunk_parameters():
        parameter.requires_grad_(True)
    return policy


def rolled_out(policy: MarPolicy, sampling: SamplingConfig, **options: Any) -> Rollout:
    return roll_out(Guided.of(policy, policy.encode_prompts(PROMPTS), sampling).rows(INDEX), KEYS, **options)


def transition(
    policy: MarPolicy, sampling: SamplingConfig, x: Tensor, t: int, z: tuple[Tensor, Tensor], scale: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Mean and deviation at respaced step t, written down again: eps guided, the variance that of the condition."""
    tables, channels = RespacedSchedule(sampling.diffusion_steps), x.shape[-1]
    cond, uncond = (policy.head(x, torch.tensor(float(tables.timestep_map[t])), part) for part in z)
    eps = uncond[..., :channels] + scale * (cond - uncond)[..., :channels]
    share = (cond[..., channels:].detach() + 1) / 2
    log_variance = share * math.log(tables.betas[t]) + (1 - share) * tables.posterior_log_variance_clipped[t]
    x_0 = tables.sqrt_recip_alphas_cumprod[t] * x - tables.sqrt_recipm1_alphas_cumprod[t] * eps
    mean = tables.posterior_mean_coef1[t] * x_0 + tables.posterior_mean_coef2[t] * x
    return mean, (0.5 * log_variance).exp() * sampling.temperature


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_what_is_sampled_is_what_is_scored(schedule: str) -> None:
    """The noise of each token is what lies between its states and the mean that scoring computes."""
    policy, sampling = made(), SAMPLING.model_copy(update={"guidance_schedule": schedule})
    rollout = rolled_out(policy, sampling, recorded=range(4))
    _, noise = draw_noise(KEYS, 16, 4, 6)
    guided = Guided.of(policy, policy.encode_prompts(PROMPTS), sampling).rows(INDEX)
    diffusion = schedule_of(policy, sampling)
    for step, share in zip(rollout.steps, (2, 5, 10, 15), strict=True):
        z, z_uncond = guided.latents(step.tokens, step.known, step.num_known, step.places)
        torch.testing.assert_close(z, step.z)
        assert z_uncond is not None
        scale = 1 + 2.0 * share / 16 if schedule == "linear" else 3.0
        assert guided.scale(step.num_known + step.num_committed) == scale
        predict = guided.predictor(guided.head_conditions(z, z_uncond), scale)
        for j in range(4):
            mean, std = diffusion.transition(j, step.path[j], predict(step.path[j], diffusion.timestep(j)))
            again = transition(policy, sampling, step.path[j], 4 - j, (z, z_uncond), scale)
            torch.testing.assert_close(mean, again[0])
            torch.testing.assert_close(std, again[1])
            own = noise[j + 1].gather(1, step.places[..., None].expand(-1, -1, 4))
            torch.testing.assert_close((step.path[j + 1] - mean) / std, own, atol=1e-3, rtol=1e-3)
        mean, std = diffusion.transition(4, step.path[4], predict(step.path[4], diffusion.timestep(4)))
        assert std == 0.0
        torch.testing.assert_close(step.path[5], mean)


def test_trajectories_are_guided_as_each_token_was() -> None:
    policy = made()
    rollout = rolled_out(policy, SAMPLING, recorded=range(4))
    assert rollout.scale is not None and rollout.z.shape == (3, 16, 24)
    for step in rollout.steps:
        done = min(step.num_known + step.num_committed, 15)
        assert torch.equal(
            rollout.scale.gather(1, step.places[..., None]).unique(), torch.tensor([1 + 2.0 * done / 16])
        )
        torch.testing.assert_close(rollout.z.gather(1, step.places[..., None].expand(-1, -1, 24)), step.z)
    guided = Guided.of(policy, policy.encode_prompts(PROMPTS), SAMPLING).rows(INDEX)
    config = AlgorithmConfig().trajectories
    extra = draw_trajectories(guided, rollout, schedule_of(policy, SAMPLING), KEYS, config)
    assert extra.paths.shape == (3, 6, 3, 16, 4) and rollout.z_unconditional is not None
    z = (rollout.z, rollout.z_unconditional)
    mean, _ = transition(policy, SAMPLING, extra.paths[:, 4], 0, z, rollout.scale)
    torch.testing.assert_close(extra.paths[:, 5], mean)
    assert rolled_out(policy, SAMPLING.model_copy(update={"guidance_schedule": "constant"})).scale is None


def slow_loss(
    policy: MarPolicy, reference: MarPolicy, rollout: Rollout, extra: Trajectories, config: AlgorithmConfig
) -> Tensor:
    """The loss in one expression per token and transition, for autograd."""
    total = torch.zeros(())
    for step in rollout.steps:
        latents = []
        for model in (policy, reference):
            conditioning = model.encode_prompts(PROMPTS)
            cond, none = model.condition(conditioning)[INDEX], model.condition(conditioning.unconditional(3))
            latents.append([model.ar_latents(step.tokens, step.known, row) for row in (cond, none)])
        scale = 1 + 2.0 * min(step.num_known + step.num_committed, 15) / 16
        committed = torch.arange(step.places.shape[1]) < step.num_committed
        final = rollout.tokens.gather(1, step.places[..., None].expand(-1, -1, 4))
        keep = consistent(step.path[-1], step.before, final, committed, config.selection)
        for b in range(3):
            for m, place in enumerate(step.places[b].tolist()):
                z, z_start = (tuple(part[b, place] for part in pair) for pair in latents)
                paths = [(step.path[:, b, m], 1.0)]
                if extra.uncertain[b, place]:
                    paths = [(paths[0][0], 1 / 3)] + [(path[:, b, place], 1 / 3) for path in extra.paths]
                for j in range(4):
                    for number, (path, weight) in enumerate(paths):
                        mean, std = transition(policy, SAMPLING, path[j], 4 - j, z, scale)
                        density = torch.distributions.Normal(mean, std).log_prob(path[j + 1])
                        ratio = (density - density.detach()).exp().sum()
                        total = total - ratio * weight * ADVANTAGE[b] * keep[b, m]
                        if number == 0:
                            start, start_std = transition(reference, SAMPLING, path[j], 4 - j, z_start, scale)
                            ours, theirs = (
                                torch.distributions.Normal(mean, std),
                                torch.distributions.Normal(start, start_std),
                            )
                            total = total + config.kl * torch.distributions.kl_divergence(ours, theirs).sum()
    return total / 100


@pytest.mark.parametrize("scope", ["committed", "unknown"])
def test_the_gradient_is_that_of_the_loss(scope: str) -> None:
    policy = made()
    config = AlgorithmConfig.model_validate({"scope": scope, "kl": 0.5, "trajectories": {"count": 2, "share": 0.4}})
    rollout = rolled_out(policy, SAMPLING, recorded=[0, 2], scope=scope, keep_before=True)
    conditioning, diffusion = policy.encode_prompts(PROMPTS), schedule_of(policy, SAMPLING)
    guided = Guided.of(policy, conditioning, SAMPLING)
    extra = draw_trajectories(guided.rows(INDEX), rollout, diffusion, KEYS, config.trajectories)
    reference = made().requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for parameter in reference.trunk_parameters():
        parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    parts = backward(
        guided, Guided.of(reference, conditioning, SAMPLING), INDEX, rollout, extra, ADVANTAGE, diffusion, [0, 1, 2, 3],
        config, 1 / 100,
    )  # fmt: skip
    found = flat(policy.trunk_parameters())
    for parameter in policy.trunk_parameters():
        parameter.grad = None
    loss = slow_loss(policy, reference, rollout, extra, config)
    loss.backward()
    expected = flat(policy.trunk_parameters())
    assert expected.abs().max() > 1e-2
    torch.testing.assert_close(found, expected, atol=1e-4 * expected.abs().max().item(), rtol=1e-3)
    assert parts.policy - config.kl * parts.kl == pytest.approx(-100 * loss.item(), rel=1e-4)
    for trained in (policy.transformer.class_emb.weight, policy.transformer.fake_latent):
        assert trained.grad is not None and trained.grad.any()
    assert all(parameter.grad is None for parameter in policy.head_parameters())


def test_a_frozen_condition_gets_no_gradient_and_needs_none() -> None:
    policy = made()
    for parameter in policy.condition_parameters():
        parameter.requires_grad_(False)
    rollout = rolled_out(policy, SAMPLING, recorded=[1])
    config = AlgorithmConfig.model_validate({"trajectories": {"count": 0}, "selection": {"mode": "none"}})
    live = Guided.of(policy, policy.encode_prompts(PROMPTS), SAMPLING)
    backward(live, None, INDEX, rollout, None, ADVANTAGE, schedule_of(policy, SAMPLING), [0, 2], config, 1.0)
    assert policy.transformer.fake_latent.grad is None
    gradient = policy.transformer.z_proj.weight.grad
    assert gradient is not None and gradient.any()


def test_the_trained_part_is_found_by_name() -> None:
    policy = tiny.mar_policy()
    named = trained_parameters(policy, "trunk")
    assert len(named) == len(policy.trunk_parameters()) and not any("diffloss" in name for name in named)
    assert list(trained_parameters(policy, "condition")) == ["fake_latent", "class_emb.weight"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InputError, match="the checkpoint's condition is frozen"):
        patch.setattr(MarPolicy, "condition_parameters", Policy.condition_parameters)
        trained_parameters(policy, "condition")


def test_weights_of_16_bits_meet_float32_arithmetic() -> None:
    policy = made()
    policy.transformer.to(torch.bfloat16)
    rollout = rolled_out(policy, SAMPLING, recorded=[0, 3])
    assert rollout.tokens.dtype == rollout.steps[0].path.dtype == torch.float32
    assert rollout.steps[0].z.dtype == torch.bfloat16
    config = AlgorithmConfig.model_validate({"trajectories": {"count": 0}, "selection": {"mode": "none"}})
    live = Guided.of(policy, policy.encode_prompts(PROMPTS), SAMPLING)
    backward(live, None, INDEX, rollout, None, ADVANTAGE, schedule_of(policy, SAMPLING), [0, 2], config, 1.0)
    gradient = policy.transformer.mask_token.grad
    assert gradient is not None and gradient.dtype == torch.bfloat16 and gradient.isfinite().all() and gradient.any()


def test_kl_of_two_deviations() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, reference = torch.randn(2, 5, generator=generator)
    std, other = torch.rand(2, 5, generator=generator) + 0.1
    expected = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, std), torch.distributions.Normal(reference, other)
    )
    torch.testing.assert_close(gaussian_kl(mean, reference, std, other), expected)


def test_guidance_leaves_the_variance_alone_and_may_differ_between_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    cond, uncond = torch.randn(2, 3, 4, 6, generator=generator)
    guided = guide(cond, uncond, 2.0, channels=3)
    assert torch.equal(guided[..., 3:], cond[..., 3:])
    torch.testing.assert_close(guided[..., :3], 2 * cond[..., :3] - uncond[..., :3])
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None]
    each = guide(cond, uncond, scale, channels=3)
    torch.testing.assert_close(each[:, 0], cond[:, 0])
    torch.testing.assert_close(each[:, 1], guided[:, 1])
    narrow = guide(cond, uncond, 4.0, 0.5, channels=3)
    assert torch.equal(narrow[..., 3:], cond[..., 3:])
    torch.testing.assert_close(narrow[..., :3], guide(cond[..., :3], uncond[..., :3], 4.0, 0.5))


def test_renormed_guidance_of_a_learned_variance() -> None:
    """Norms are per image over the tokens of one trajectory, whatever axes stand before."""
    policy = made()
    sampling = SAMPLING.model_copy(update={"guidance_renorm": 0.6})
    guided = Guided.of(policy, policy.encode_prompts(PROMPTS), sampling).rows(INDEX)
    generator = torch.Generator().manual_seed(0)
    z, z_uncond = torch.randn(2, 3, 5, 24, generator=generator)
    scale = torch.rand(3, 5, 1, generator=generator) * 3
    predict = guided.predictor(guided.head_conditions(z, z_uncond), scale)
    x, t = torch.randn(2, 3, 5, 4, generator=generator), torch.tensor(400.0)
    with torch.no_grad():
        both = predict(x, t)
        assert both.shape == (2, 3, 5, 8)
        for s in range(2):
            torch.testing.assert_close(predict(x[s], t), both[s])
