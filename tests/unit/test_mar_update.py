"""MAR through rollout, extra trajectories and update: what is sampled is scored, and the gradient is the loss's own."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mar_grpo.algorithms import likelihood
from mar_grpo.algorithms.loss import AlgorithmConfig, Batch, LossParts, Scales, backward, record
from mar_grpo.algorithms.objective import gaussian_kl
from mar_grpo.algorithms.trajectories import TrajectoryConfig, draw_trajectories
from mar_grpo.diffusion.guidance import guide
from mar_grpo.diffusion.respaced import RespacedSchedule
from mar_grpo.errors import InputError
from mar_grpo.models.mar import MarPolicy
from mar_grpo.models.policy import Policy
from mar_grpo.noise import draw_noise
from mar_grpo.rollout import Guided, Rollout, SamplingConfig, roll_out, schedule_of
from mar_grpo.training.parts import trained_parameters
from tests.unit import tiny
from tests.unit.toy import flat

PROMPTS, INDEX, KEYS = ["3", "goldfish"], torch.tensor([0, 0, 1]), [11, 12, 13]
ADVANTAGE = torch.tensor([1.0, -0.5, 2.0])
SAMPLING = SamplingConfig(
    ar_steps=4, diffusion_steps="ddim5", guidance_scale=3.0, guidance_schedule="linear", temperature=0.8
)


EVERY = dict.fromkeys(range(4), range(4))
PLAIN: dict[str, Any] = {"selection": {"mode": "off"}, "trajectories": {"mode": "off"}, "kl": {"kind": "off"}}


def made(seed: int = 0, trained: str = "trunk") -> MarPolicy:
    """Only the trained part wants gradients, as in training; deviations are of the size that the schedule knows."""
    policy = tiny.mar_policy(seed).requires_grad_(False)
    policy.transformer.diffloss.net.final_layer.linear.weight[4:] *= 0.1
    for parameter in trained_parameters(policy, trained).values():  # type: ignore[arg-type]
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
    rollout = rolled_out(policy, sampling, recorded=EVERY)
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
            before, after = step.path.pair(j)
            mean, std = diffusion.transition(j, before, predict(before, diffusion.timestep(j)))
            again = transition(policy, sampling, before, 4 - j, (z, z_uncond), scale)
            torch.testing.assert_close(mean, again[0])
            torch.testing.assert_close(std, again[1])
            own = noise[j + 1].gather(1, step.places[..., None].expand(-1, -1, 4))
            torch.testing.assert_close((after - mean) / std, own, atol=1e-3, rtol=1e-3)
        last = step.path.states[4]
        mean, std = diffusion.transition(4, last, predict(last, diffusion.timestep(4)))
        assert std == 0.0
        torch.testing.assert_close(step.path.final, mean)


def test_trajectories_are_guided_as_each_token_was() -> None:
    policy = made()
    rollout = rolled_out(policy, SAMPLING, recorded=EVERY, keep=["z"])
    assert rollout.scale is not None and rollout.z is not None and rollout.z.shape == (3, 16, 24)
    for step in rollout.steps:
        done = min(step.num_known + step.num_committed, 15)
        assert torch.equal(
            rollout.scale.gather(1, step.places[..., None]).unique(), torch.tensor([1 + 2.0 * done / 16])
        )
        torch.testing.assert_close(rollout.z.gather(1, step.places[..., None].expand(-1, -1, 24)), step.z)
    guided = Guided.of(policy, policy.encode_prompts(PROMPTS), SAMPLING).rows(INDEX)
    extra = draw_trajectories(guided, rollout, KEYS, {0: range(5)}, TrajectoryConfig(share=1.0)).whole
    assert extra is not None and rollout.z_unconditional is not None
    before, after = (state.unflatten(1, (3, 16)) for state in extra.path.pair(4))
    z = (rollout.z, rollout.z_unconditional)
    mean, _ = transition(policy, SAMPLING, before, 0, z, rollout.scale)
    torch.testing.assert_close(after, mean)
    constant = SAMPLING.model_copy(update={"guidance_schedule": "constant"})
    assert rolled_out(policy, constant, keep=["z"]).scale is None


def recorded(policy: MarPolicy, config: AlgorithmConfig) -> tuple[Batch, dict[int, list[int]]]:
    """Three images; other transitions of each of two AR steps are scored."""
    steps = {0: [0, 1, 3], 2: [0, 2, 3]}
    guided = Guided.of(policy, policy.encode_prompts(PROMPTS), SAMPLING).rows(INDEX)
    return record(guided, INDEX, KEYS, steps, config), steps


def updated(
    policy: MarPolicy, reference: MarPolicy | None, batch: Batch, steps: dict[int, list[int]], config: AlgorithmConfig
) -> tuple[Tensor, LossParts]:
    """Gradient of all of the transformer as one vector, by `backward`; sums are multiplied by 1 / 100."""
    conditioning = policy.encode_prompts(PROMPTS)
    scales = Scales(dict.fromkeys(steps, 0.01), dict.fromkeys(steps, 0.01 * config.kl.coefficient))
    for parameter in policy.parameters():
        parameter.grad = None
    live = Guided.of(policy, conditioning, SAMPLING)
    anchor = None if reference is None else Guided.of(reference, conditioning, SAMPLING)
    parts = backward(live, anchor, batch, ADVANTAGE, steps, scales, config)
    return flat(list(policy.transformer.parameters())), parts


def moved(policy: MarPolicy, size: float, seed: int = 5) -> MarPolicy:
    """Every parameter of the transformer a little elsewhere, the head's as well."""
    other, generator = copy.deepcopy(policy), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.transformer.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return other


def slow_loss(
    policy: MarPolicy,
    old: MarPolicy,
    reference: MarPolicy | None,
    batch: Batch,
    steps: dict[int, list[int]],
    config: AlgorithmConfig,
) -> tuple[Tensor, Tensor]:
    """The loss in one graph for autograd, and the ratios to the policy that made the images."""
    total, ratios = torch.zeros(()), [torch.zeros(0)]
    for step in batch.rollout.steps:
        latents: dict[MarPolicy, tuple[Tensor, ...]] = {}
        for model in filter(None, (policy, old, reference)):
            conditioning = model.encode_prompts(PROMPTS)
            conditions = model.condition(conditioning)[INDEX], model.condition(conditioning.unconditional(3))
            latents[model] = tuple(
                model.ar_latents(step.tokens, step.known, row).gather(1, step.places[..., None].expand(-1, -1, 24))
                for row in conditions
            )
        scale = 1 + 2.0 * min(step.num_known + step.num_committed, 15) / 16
        scale = scale if config.likelihood_guidance == "sampler" else 1.0
        extra = None
        if batch.trajectories is not None and config.trajectories.mode != "drop_topk":
            extra = batch.trajectories.at(step)
        signal = 0.01 * ADVANTAGE[:, None, None] * batch.keep[step.index]
        for j in steps[step.index]:

            def law(model: MarPolicy, x: Tensor, j: int = j, scale: Any = scale, latents: Any = latents) -> Any:
                return transition(model, SAMPLING, x, 4 - j, latents[model], scale)

            own, own_after = step.path.pair(j)
            paths = [(own, own_after, torch.ones_like(own[..., :1]))]
            if extra is not None:
                shares = config.trajectories.count + config.trajectories.include_rollout
                uncertain = extra.uncertain.float()
                paths = [(own, own_after, 1 - uncertain * (1 - config.trajectories.include_rollout / shares))]
                paths += [
                    (*(state[s][extra.row] for state in extra.path.pair(j)), uncertain / shares)
                    for s in range(config.trajectories.count)
                ]
            for x, after, share in paths:
                densities = []
                for model in (policy, old):
                    mean, std = law(model, x)
                    if config.deviation == "recorded":
                        std = law(old, own)[1].detach()
                    variance = torch.maximum(std**2, torch.tensor(config.variance_floor))
                    densities.append(-0.5 * (after - mean) ** 2 / variance - std.log())
                ratio = (densities[0] - densities[1].detach()).exp()
                value = signal * share * ratio
                if config.clip is not None:
                    value = torch.minimum(value, signal * share * ratio.clamp(1 - config.clip, 1 + config.clip))
                total = total - value.sum()
                ratios.append(ratio[(signal * share).expand_as(ratio) != 0])
            if reference is not None:
                (mean, std), (start, start_std) = law(policy, own), law(reference, own)
                if config.deviation == "recorded":
                    std = start_std = law(old, own)[1].detach()
                ours, theirs = torch.distributions.Normal(mean, std), torch.distributions.Normal(start, start_std)
                value = torch.distributions.kl_divergence(ours, theirs)
                if config.kl.kind == "mean_k3":
                    value = (start - mean).exp() - (start - mean) - 1
                elif config.kl.kind == "k3":
                    shift = theirs.log_prob(own_after) - ours.log_prob(own_after)
                    value = shift.exp() - shift - 1
                total = total + 0.01 * config.kl.coefficient * value.sum()
    return total, torch.cat(ratios).detach()


MTE: dict[str, Any] = {"mode": "composite", "count": 2, "share": 0.4}
CASES: dict[str, dict[str, Any]] = {
    "committed": {"scope": "committed", "selection": {"mode": "off"}},
    "unknown": {},
    "per step": {"trajectories": MTE | {"mode": "per_step"}},
    "per step, unguided": {"trajectories": MTE | {"mode": "per_step", "guidance": "none", "include_rollout": False}},
    "dropped": {"trajectories": MTE | {"mode": "drop_topk"}},
    "recorded": {"deviation": "recorded"},
    "recorded, floor": {"deviation": "recorded", "variance_floor": 0.02, "trajectories": {"mode": "off"}},
    "floor, unguided": {"variance_floor": 0.02, "likelihood_guidance": "none"},
    "released": {
        "preset": "released_harmon", "scored_ar_steps": {"count": None}, "scored_diffusion_steps": {"count": None},
    },
}  # fmt: skip


SOME = [("unknown", "first", "head"), ("unknown", "second", "trunk"), ("recorded", "second", "head")]


@pytest.mark.parametrize(
    ("case", "inner", "trained"),
    [(case, *rest) for case in CASES for rest in (("first", "trunk"), ("second, clipped", "both"))] + SOME,
)
def test_the_gradient_is_that_of_the_loss(case: str, inner: str, trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every part, with a learned deviation; the second inner update's is that of the surrogate."""
    monkeypatch.setattr(likelihood, "ROWS", 7)
    changes: dict[str, Any] = {"trajectories": MTE, "kl": {"coefficient": 0.5}} | CASES[case]
    if inner != "first":
        changes |= {"inner_updates": 2, "clip": 0.1 if "clipped" in inner else None}
    config = AlgorithmConfig.model_validate(changes)
    old = made(trained=trained)
    batch, steps = recorded(old, config)
    policy, reference = old, moved(old, 0.02).requires_grad_(False)
    if inner != "first":
        first = updated(old, reference, batch, steps, config)[1].means()  # stores what the second one compares with
        assert "ratio" not in first
        policy = moved(old, 0.0003, seed=6)
    found, parts = updated(policy, reference, batch, steps, config)
    reached = {
        name for name, value in policy.transformer.named_parameters() if value.grad is not None and value.grad.any()
    }
    for parameter in policy.parameters():
        parameter.grad = None
    loss, ratios = slow_loss(policy, copy.deepcopy(old), reference, batch, steps, config)
    loss.backward()
    expected = flat(list(policy.transformer.parameters()))
    largest = expected.abs().max().item()
    assert largest > 1e-2
    torch.testing.assert_close(found, expected, atol=2e-4 * largest, rtol=2e-3)
    sums = parts.numbers()
    assert -sums["policy"] + 0.01 * config.kl.coefficient * sums["kl"] == pytest.approx(loss.item(), rel=1e-3, abs=1e-4)
    if inner != "first":
        assert parts.means()["ratio"] == pytest.approx(ratios.mean().item(), rel=1e-3) and ratios.std() > 0.03
    assert any("diffloss" in name for name in reached) == (trained != "trunk")
    assert ("class_emb.weight" in reached) == (trained != "head")
    assert ("fake_latent" in reached) == (trained != "head" and config.likelihood_guidance == "sampler")


def test_a_frozen_condition_gets_no_gradient_and_needs_none() -> None:
    policy = made()
    for parameter in policy.condition_parameters():
        parameter.requires_grad_(False)
    config = AlgorithmConfig.model_validate(PLAIN)
    batch, steps = recorded(policy, config)
    updated(policy, None, batch, steps, config)
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
    config = AlgorithmConfig.model_validate({"trajectories": MTE})
    batch, steps = recorded(policy, config)
    first = batch.rollout.steps[0]
    assert batch.rollout.tokens.dtype == first.path.final.dtype == first.path.states[0].dtype == torch.float32
    assert first.z.dtype == torch.bfloat16
    updated(policy, policy.frozen_copy(), batch, steps, config)
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
