"""The whole chain from noise to gradient: REINFORCE against the reparameterised gradient, and learning one prompt.

A reward that is differentiable gives the true gradient of its expectation twice: by the score function, as training
does, and by differentiating through the sampled path, which knows nothing of densities, groups, masks or places.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from mar_grpo.algorithms.advantage import advantages
from mar_grpo.algorithms.loss import AlgorithmConfig
from mar_grpo.models.policy import Policy
from mar_grpo.noise import draw_noise
from mar_grpo.rollout import SamplingConfig
from tests.unit import toy

PLAIN = AlgorithmConfig.model_validate(
    {"scope": "committed", "trajectories": {"mode": "off"}, "selection": {"mode": "off"}, "kl": {"kind": "off"}}
)

DDPM = {
    "_class_name": "DDPMScheduler",
    "prediction_type": "v_prediction",
    "variance_type": "fixed_large",
    "beta_schedule": "squaredcos_cap_v2",
}


def reward(tokens: Tensor) -> Tensor:
    """Smooth, and about both tokens together: [B, L, C] -> [B]."""
    return torch.tanh(tokens.mean(dim=2)).prod(dim=1) - 0.3 * (tokens - 0.5).square().mean(dim=(1, 2))


def sampled_path(policy: Policy, index: Tensor, keys: list[int], sampling: SamplingConfig) -> Tensor:
    """Tokens [B, L, C] with the graph of the path that made them; the rollout, written out for one order of thoughts.

    Parameters enter through the transitions that have a density. A step without noise is part of the environment, so
    it runs on a frozen copy: gradient passes through its states, not to its parameters (as in training).
    """
    frozen = copy.deepcopy(policy).requires_grad_(False)
    order, noise = draw_noise(keys, policy.num_tokens, policy.token_dim, sampling.diffusion_steps + 1)
    schedule = policy.schedule(sampling.diffusion_steps, eta=sampling.noise_level)
    conditioning = policy.encode_prompts(toy.PROMPTS)
    tokens = torch.zeros(len(keys), policy.num_tokens, policy.token_dim)
    known = torch.zeros(len(keys), policy.num_tokens, dtype=torch.bool)
    done = 0
    for count in policy.mask_schedule(sampling.ar_steps):
        now = order[:, done : done + count]
        spread = now[..., None].expand(-1, -1, policy.token_dim)
        z: dict[Policy, list[Tensor]] = {}
        for model in (policy, frozen):
            cond = model.condition(conditioning)[index]
            uncond = model.condition(conditioning.unconditional(len(keys)))
            both = [model.ar_latents(tokens, known, part) for part in (cond, uncond)]
            z[model] = [part.gather(1, now[..., None].expand(-1, -1, part.shape[-1])) for part in both]
        x = noise[0].gather(1, spread)
        for j in range(schedule.num_steps):
            model = policy if schedule.stochastic(j) else frozen
            with_prompt, without = (model.head(x, schedule.timestep(j), part) for part in z[model])
            velocity = without + sampling.guidance_scale * (with_prompt - without)
            mean, std = schedule.transition(j, x, velocity)
            x = mean + std * noise[j + 1].gather(1, spread)
        tokens = tokens.scatter(1, spread, x)
        known = known.scatter(1, now, True)
        done += count
    return tokens


@pytest.mark.parametrize(
    ("scheduler", "guidance"),
    [(toy.tiny.FLOW, 1.0), (toy.tiny.FLOW, 2.0), (DDPM, 1.0)],
    ids=["flow", "flow, guided", "ddpm"],
)
def test_score_function_and_path_give_the_same_gradient(scheduler: dict[str, object], guidance: float) -> None:
    policy = toy.policy(transformer=toy.few_tokens(2), scheduler=scheduler)
    sampling = SamplingConfig(ar_steps=2, diffusion_steps=3, guidance_scale=guidance)
    parameters = policy.trunk_parameters()
    batches, images = 12, 192
    index = torch.arange(images) % 2
    scores, paths = [], []
    for number in range(batches + 1):
        keys = list(range(number * images, (number + 1) * images))
        u = toy.update(policy, index.tolist(), keys, sampling, PLAIN)
        values = reward(u.rollout.tokens)
        baseline = (values.sum() - values) / (images - 1)  # of the other images: leaves the mean as it is
        scores.append(-u.gradient(values - baseline)[0])  # the loss goes down where the reward goes up
        for parameter in parameters:
            parameter.grad = None
        tokens = sampled_path(policy, index, keys, sampling)
        torch.testing.assert_close(tokens.detach(), u.rollout.tokens, rtol=2e-5, atol=1e-4)
        reward(tokens).mean().backward()
        paths.append(toy.flat(parameters))
    # compared along the gradient itself, as a batch that is not used again knows it, and in five other directions
    others = torch.randn(len(paths[0]), 5, generator=torch.Generator().manual_seed(2))
    directions = torch.nn.functional.normalize(torch.cat([paths.pop()[:, None], others], dim=1), dim=0)
    score, path = torch.stack(scores[:-1]) @ directions, torch.stack(paths) @ directions
    difference = score - path
    error = difference.std(dim=0) / batches**0.5
    assert (difference.mean(dim=0).abs() / error).max() < 4  # of 12 batches: Student's t, 0.2 % each
    assert path.mean(dim=0)[0] / error[0] > 4  # and the score function alone sees the gradient well


def test_one_prompt_is_learnable() -> None:
    """Forty updates with group-relative advantages, as the trainer makes them, raise a smooth reward clearly."""
    policy = toy.policy(transformer=toy.few_tokens(2))
    sampling = SamplingConfig(ar_steps=2, diffusion_steps=3)
    optimizer = torch.optim.Adam(policy.trunk_parameters(), lr=1e-2)
    means, deviation = [], 0.0
    for number in range(40):
        u = toy.update(policy, [0] * 64, list(range(number * 64, (number + 1) * 64)), sampling, PLAIN)
        values = u.rollout.tokens.mean(dim=(1, 2))
        means.append(values.mean().item())
        deviation = deviation or values.std().item()
        u.gradient(advantages({"mean": values.view(-1, 16)}, {"mean": 1.0}, PLAIN.advantage).flatten())
        optimizer.step()
    first, last = (sum(part) / 3 for part in (means[:3], means[-3:]))
    assert last - first > 1.5 * deviation, means
