"""The update's gradient against a slow version of it, and against what probability theory says of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from mar_grpo.algorithms.loss import AlgorithmConfig, LossParts
from mar_grpo.algorithms.objective import gaussian_kl, policy_term
from mar_grpo.errors import UnhealthyError
from mar_grpo.models.policy import Policy
from mar_grpo.rollout import SamplingConfig
from tests.unit import toy

SAMPLING = SamplingConfig(ar_steps=4, diffusion_steps=4)
INDEX, KEYS = [0, 0, 1, 1], [21, 22, 23, 24]
ADVANTAGE = torch.tensor([1.0, -1.5, 0.25, 2.0])
OFF = {"trajectories": {"count": 0}, "selection": {"mode": "none"}, "kl": 0.0}


def configured(**changes: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({**OFF, **changes})


def moved(policy: Policy, size: float = 0.02) -> Policy:
    """Another policy: the same with every trunk parameter a little elsewhere."""
    other = toy.policy()
    other.load_state_dict(policy.state_dict())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in other.trunk_parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return other.requires_grad_(False)


# --- the slow version ---------------------------------------------------------------------------------------------


def slow_loss(u: toy.Update, advantage: Tensor, reference: Policy | None) -> Tensor:
    """The loss as it is described, token by token in one graph: no cut, no chunk, no shared condition of the head."""
    total = torch.zeros(())
    for b, prompt in enumerate(u.index.tolist()):
        for step in u.rollout.steps:
            after = step.path[-1]
            for m, place in enumerate(step.places[b].tolist()):
                committed = m < step.num_committed
                final = u.rollout.tokens[b, place]
                before = None if step.before is None else step.before[b, m]
                weight = 0.0 if drops(u.config, after[b, m], before, final, committed) else advantage[b].item()
                paths = [step.path[:, b, m]]
                shares = [1.0]
                if u.trajectories is not None and u.trajectories.uncertain[b, place]:
                    extra = [path[:, b, place] for path in u.trajectories.paths]
                    with_rollout = u.config.trajectories.include_rollout
                    share = 1.0 / (len(extra) + with_rollout)
                    paths, shares = paths + extra, [share * with_rollout] + [share] * len(extra)
                for j in u.diffusion_steps:
                    for path, share in zip(paths, shares, strict=True):
                        law = slow_law(u.policy, u, b, prompt, step, m, place, path[j], j)
                        total = total - weight * share * law.log_prob(path[j + 1]).sum()
                    if reference is not None:
                        law = slow_law(u.policy, u, b, prompt, step, m, place, paths[0][j], j)
                        other = slow_law(reference, u, b, prompt, step, m, place, paths[0][j], j)
                        total = total + u.config.kl * kl_divergence(law, other).sum()
    return total * u.scale


def drops(config: AlgorithmConfig, now: Tensor, before: Tensor | None, final: Tensor, committed: bool) -> bool:
    def cosine(token: Tensor) -> float:
        return (torch.dot(token, final) / (token.norm() * final.norm())).item()

    mode = config.selection.mode
    if committed or mode == "none" or (mode == "delta" and before is None):
        return False
    earlier = cosine(before) if mode == "delta" and before is not None else 0.0
    return cosine(now) - earlier <= config.selection.threshold


CACHE: dict[tuple[int, int, int, int], Tensor] = {}
"""z of one policy, image, AR step and prompt (or none)."""


def slow_law(
    policy: Policy, u: toy.Update, b: int, prompt: int, step: Any, m: int, place: int, x: Tensor, j: int
) -> Normal:
    """N(mean, std) of one transition of one token, from the prompt on."""
    t, scale = u.schedule.timestep(j), u.sampling.guidance_scale
    prediction = torch.zeros(0)
    for text in ["", toy.PROMPTS[prompt]]:
        key = (id(policy), b, step.index, len(text))
        if key not in CACHE:
            cond = policy.condition(policy.encode_prompts([text]))
            CACHE[key] = policy.ar_latents(step.tokens[b : b + 1], step.known[b : b + 1], cond)[0]
        out = policy.head(x, t, CACHE[key][place])
        prediction = out if not text else prediction + scale * (out - prediction)
    mean, std = u.schedule.transition(j, x, prediction)
    return Normal(mean, std)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "committed": ({}, {}),
    "committed, guided, MTE": ({"guidance_scale": 3.0}, {"trajectories": {"count": 2, "share": 0.4}}),
    "committed, MTE without the rollout": ({}, {"trajectories": {"count": 2, "share": 0.4, "include_rollout": False}}),
    "unknown, delta": ({}, {"scope": "unknown", "selection": {"mode": "delta"}}),
    "unknown, delta, threshold": ({}, {"scope": "unknown", "selection": {"mode": "delta", "threshold": 0.1}}),
    "unknown, absolute, guided, MTE": (
        {"guidance_scale": 0.5},
        {"scope": "unknown", "selection": {"mode": "absolute"}, "trajectories": {"count": 2, "share": 0.4}},
    ),
}


@pytest.mark.parametrize("kl", [0.0, 0.3], ids=["", "kl"])
@pytest.mark.parametrize("case", CASES)
def test_gradient_equals_that_of_the_slow_version(case: str, kl: float) -> None:
    sampling, algorithm = CASES[case]
    policy = toy.policy(transformer=toy.few_tokens(6))
    u = toy.update(
        policy, INDEX[1:3], KEYS[1:3], SamplingConfig(ar_steps=3, diffusion_steps=3, **sampling),
        configured(**algorithm, kl=kl),
    )  # fmt: skip
    reference = None
    if kl:
        reference = toy.policy(transformer=toy.few_tokens(6))
        with torch.no_grad():
            for parameter in reference.trunk_parameters():
                parameter.mul_(1.05)
        reference.requires_grad_(False)
    found, parts = u.gradient(ADVANTAGE[1:3], reference)
    for parameter in policy.trunk_parameters():
        parameter.grad = None
    CACHE.clear()
    slow_loss(u, ADVANTAGE[1:3], reference).backward()
    CACHE.clear()
    expected = toy.flat(policy.trunk_parameters())
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * expected.abs().max().item())
    assert ("delta" in case or "absolute" in case) == (parts.kept < parts.tokens)


def test_the_guided_and_the_plain_gradient_differ() -> None:
    """So the cases above would notice a score that forgets guidance."""
    policy = toy.policy()
    plain, _ = toy.update(policy, INDEX, KEYS, SAMPLING, configured()).gradient(ADVANTAGE)
    sampling = SAMPLING.model_copy(update={"guidance_scale": 3.0})
    guided, _ = toy.update(policy, INDEX, KEYS, sampling, configured()).gradient(ADVANTAGE)
    assert torch.nn.functional.cosine_similarity(plain, guided, dim=0) < 0.9


@pytest.mark.parametrize("scope", ["committed", "unknown"])
def test_micro_batches_and_steps_add_up(scope: str) -> None:
    policy = toy.policy()
    config = configured(scope=scope, trajectories={"count": 2}, selection={"mode": "delta"}, kl=0.1)
    reference = moved(policy)
    whole, parts = toy.update(policy, INDEX, KEYS, SAMPLING, config).gradient(ADVANTAGE, reference)
    total, sums = torch.zeros_like(whole), LossParts()
    for rows in (slice(0, 1), slice(1, 4)):
        u = toy.update(policy, INDEX[rows], KEYS[rows], SAMPLING, config)
        u.scale = 1.0 / len(KEYS)
        gradient, some = u.gradient(ADVANTAGE[rows], reference)
        total += gradient
        sums.merge(some)
    close = 2e-4 * whole.abs().max().item()
    torch.testing.assert_close(total, whole, rtol=0, atol=close)
    assert vars(sums) == pytest.approx(vars(parts), rel=1e-4, abs=1e-3)
    total = torch.zeros_like(whole)
    for ar_step in range(4):
        for j in range(3):
            one = toy.update(policy, INDEX, KEYS, SAMPLING, config, ar_steps=[ar_step], diffusion_steps=[j])
            total += one.gradient(ADVANTAGE, reference)[0]
    torch.testing.assert_close(total, whole, rtol=0, atol=close)


def test_renormalised_guidance_is_scored_as_it_was_sampled() -> None:
    """The transitions of the tokens of one AR step are tied by the norm: all of its log-densities in one graph."""
    policy = toy.policy()
    sampling = SAMPLING.model_copy(update={"guidance_scale": 4.0, "guidance_renorm": 0.3})
    u = toy.update(policy, INDEX, KEYS, sampling, configured())
    found, _ = u.gradient(ADVANTAGE)
    for parameter in policy.trunk_parameters():
        parameter.grad = None
    conditioning = policy.encode_prompts(toy.PROMPTS)
    loss = torch.zeros(())
    for b, prompt in enumerate(INDEX):
        for step in u.rollout.steps:
            z = [
                policy.ar_latents(step.tokens[b : b + 1], step.known[b : b + 1], cond)[0, step.places[b]]
                for cond in (
                    policy.condition(conditioning)[prompt : prompt + 1],
                    policy.condition(conditioning.unconditional(1)),
                )
            ]
            for j in u.diffusion_steps:
                x = step.path[j, b]
                cond, uncond = (policy.head(x, u.schedule.timestep(j), part) for part in z)
                guided = uncond + 4.0 * (cond - uncond)
                guided = guided * (cond.norm() / guided.norm()).clamp(0.3, 1.0)
                mean, std = u.schedule.transition(j, x, guided)
                residual = (step.path[j + 1, b] - mean) / std
                torch.testing.assert_close(residual.square().mean().item(), 1.0, rtol=0, atol=1.0)
                loss = loss + 0.5 * ADVANTAGE[b] * residual.square().sum()
    (loss * u.scale).backward()
    expected = toy.flat(policy.trunk_parameters())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


# --- what theory says ---------------------------------------------------------------------------------------------


def projections(gradients: Tensor) -> Tensor:
    """Gradients [N, P] along 12 fixed directions, [N, 12]."""
    directions = torch.randn(gradients.shape[1], 12, generator=torch.Generator().manual_seed(9))
    return gradients @ directions / gradients.shape[1] ** 0.5


def t_values(rows: Tensor) -> Tensor:
    """Mean over rows in standard errors."""
    return rows.mean(dim=0) / (rows.std(dim=0) / len(rows) ** 0.5)


def batches_of_scores(policy: Policy, config: AlgorithmConfig, count: int, images: int = 16) -> Tensor:
    """Gradients of -log p, summed over transitions: [count, P]."""
    sampling = SamplingConfig(ar_steps=2, diffusion_steps=3, guidance_scale=2.0)
    rows = []
    for number in range(count):
        keys = range(number * images, (number + 1) * images)
        rows.append(toy.update(policy, [0] * images, list(keys), sampling, config).gradient(torch.ones(images))[0])
    return torch.stack(rows)


@pytest.mark.parametrize(
    "changes",
    [{}, {"scope": "unknown"}, {"trajectories": {"count": 2, "share": 1.0}}],
    ids=["committed", "unknown", "MTE"],
)
def test_the_score_has_mean_zero_under_the_policy_that_was_sampled(changes: dict[str, Any]) -> None:
    policy = toy.policy(transformer=toy.few_tokens(4))
    rows = projections(batches_of_scores(policy, configured(**changes), 50))
    assert t_values(rows).abs().max() < 3.5


def test_the_score_of_another_policy_has_not() -> None:
    """The same test sees a policy that differs in the unconditional half of its guidance only."""
    policy = toy.policy(transformer=toy.few_tokens(4))
    sampling = SamplingConfig(ar_steps=2, diffusion_steps=3, guidance_scale=2.0)
    rows = []
    for number in range(50):
        u = toy.update(policy, [0] * 16, list(range(number * 16, number * 16 + 16)), sampling, configured())
        u.sampling = SamplingConfig(ar_steps=2, diffusion_steps=3, guidance_scale=1.0)
        rows.append(u.gradient(torch.ones(16))[0])
    assert t_values(projections(torch.stack(rows))).abs().max() > 10


def test_extra_trajectories_average_to_zero_and_their_variance_falls_as_one_over_s() -> None:
    """On tokens scored under the latent that made them, MTE without the rollout carries no credit, only less noise."""
    policy = toy.policy(transformer=toy.few_tokens(4))
    sampling = SamplingConfig(ar_steps=1, diffusion_steps=3)
    variances = {}
    for count in (1, 4):
        config = configured(trajectories={"count": count, "share": 1.0, "include_rollout": False})
        rows = []
        for number in range(100):
            keys = [1000 + 2 * number, 1001 + 2 * number]
            u = toy.update(policy, [0, 1], [1, 2], sampling, config, trajectory_keys=keys)
            rows.append(u.gradient(torch.tensor([1.0, -1.0]))[0])
        gradients = projections(torch.stack(rows))
        assert t_values(gradients).abs().max() < 3.5
        variances[count] = gradients.var(dim=0).mean().item()
    assert variances[1] / variances[4] == pytest.approx(4.0, rel=0.25)


def test_the_rollout_keeps_its_share_of_the_credit() -> None:
    """With S trajectories beside it, the rollout's own term is weighed 1 / (S + 1): the mean over many draws."""
    policy = toy.policy(transformer=toy.few_tokens(4))
    sampling, advantage = SamplingConfig(ar_steps=1, diffusion_steps=3), torch.tensor([1.0, -1.0])
    alone, _ = toy.update(policy, [0, 1], [1, 2], sampling, configured()).gradient(advantage)
    config = configured(trajectories={"count": 3, "share": 1.0})
    rows = [
        toy.update(policy, [0, 1], [1, 2], sampling, config, trajectory_keys=[2 * n, 2 * n + 1]).gradient(advantage)[0]
        for n in range(100)
    ]
    expected = projections(alone[None] / 4)[0]
    found = projections(torch.stack(rows))
    assert t_values(found - expected).abs().max() < 3.5
    assert t_values(found).abs().max() > 5


@pytest.mark.parametrize("scope", ["committed", "unknown"])
def test_without_advantage_there_is_exactly_no_gradient(scope: str) -> None:
    policy = toy.policy()
    config = configured(scope=scope, trajectories={"count": 2})
    u = toy.update(policy, INDEX, KEYS, SAMPLING, config)
    gradient, parts = u.gradient(torch.zeros(4))
    assert torch.equal(gradient, torch.zeros_like(gradient)) and parts.policy == 0.0
    assert u.gradient(torch.tensor([0.0, 0.0, 1.0, -1.0]))[0].any()


def test_the_head_gets_no_gradient_and_all_of_the_trunk_does() -> None:
    policy = toy.policy()
    policy.transformer.requires_grad_(True)
    policy.transformer.image_decoder.requires_grad_(False)
    toy.update(policy, INDEX, KEYS, SAMPLING, configured(kl=0.1)).gradient(ADVANTAGE, moved(policy))
    assert all(parameter.grad is None for parameter in policy.head_parameters())
    assert all(p.grad is not None and p.grad.any() for p in policy.trunk_parameters())
    assert all(parameter.grad is None for parameter in [*policy.vae.parameters(), *policy.text.parameters()])


def test_another_policy_than_the_sampled_one_is_refused() -> None:
    policy = toy.policy()
    u = toy.update(policy, INDEX, KEYS, SAMPLING, configured())
    u.gradient(ADVANTAGE)
    with torch.no_grad():
        policy.transformer.get_parameter("image_encoder.blocks.1.mlp.fc1.weight")[0, 0] += 0.5
    with pytest.raises(UnhealthyError, match=r"z differs from the rollout's by .* \(AR step 0\)") as error:
        u.gradient(ADVANTAGE)
    assert error.value.exit_code == 3
    with torch.no_grad():
        policy.transformer.get_parameter("image_encoder.norm.weight")[0] = float("nan")
    with pytest.raises(UnhealthyError, match="not finite"):
        u.gradient(ADVANTAGE)


# --- KL -----------------------------------------------------------------------------------------------------------


def test_kl_is_zero_at_the_start_and_so_is_its_gradient() -> None:
    policy = toy.policy()
    u = toy.update(policy, INDEX, KEYS, SAMPLING, configured(kl=1.0))
    gradient, parts = u.gradient(torch.zeros(4), moved(policy, size=0.0))
    assert parts.kl == 0.0 and not gradient.any()
    _, parts = u.gradient(torch.zeros(4), moved(policy))
    assert parts.means()["kl"] > 1e-5


def test_gradient_of_the_kl_against_finite_differences() -> None:
    """On fixed states: the value that is reported is the one whose gradient is taken."""
    policy = toy.policy(transformer=toy.few_tokens(4))
    reference = toy.policy(seed=1, transformer=toy.few_tokens(4)).requires_grad_(False)
    reference.transformer.image_decoder.load_state_dict(policy.transformer.image_decoder.state_dict())
    sampling = SamplingConfig(ar_steps=2, diffusion_steps=3, guidance_scale=2.0)
    u = toy.update(policy, INDEX, KEYS, sampling, configured(kl=0.7))
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
        u.rollout = rescored(u)
        values.append(0.7 * u.gradient(torch.zeros(4), reference)[1].kl * u.scale)
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


def test_objective_is_one_and_has_the_gradient_of_the_log_density() -> None:
    mean = torch.tensor([0.3, -2.0], requires_grad=True)
    x = torch.tensor([1.0, -2.5])
    value = policy_term(x, mean, 0.5)
    assert value.tolist() == [1.0, 1.0]
    value.sum().backward()
    assert mean.grad is not None
    torch.testing.assert_close(mean.grad, (x - mean.detach()) / 0.25)
    with pytest.raises(ValueError, match="zero variance"):
        policy_term(x, mean, 0.0)


def test_gaussian_kl_is_that_of_two_normals() -> None:
    first, second = torch.tensor([0.0, 1.0, -3.0]), torch.tensor([0.5, 1.0, 2.0])
    expected = kl_divergence(Normal(first, 0.2), Normal(second, 0.2))
    torch.testing.assert_close(gaussian_kl(first, second, 0.2), expected)
    assert math.isclose(gaussian_kl(first, second, 0.2)[0].item(), 0.5 * 2.5**2, rel_tol=1e-6)


def test_means_of_nothing_are_zero() -> None:
    assert LossParts().means() == {"policy_loss": 0.0, "kl": 0.0, "kept_share": 0.0}
    parts = LossParts(elements=4.0, policy=-2.0, kl=1.0, kept=3.0, tokens=6.0)
    assert parts.means() == {"policy_loss": 0.5, "kl": 0.25, "kept_share": 0.5}
