"""The update's gradient against a slow version of it, and against what probability theory says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from mar_grpo.algorithms import likelihood
from mar_grpo.algorithms.loss import AlgorithmConfig, LossParts
from mar_grpo.errors import UnhealthyError
from mar_grpo.models.policy import Policy
from mar_grpo.rollout import SamplingConfig
from tests.unit import toy

SAMPLING = SamplingConfig(ar_steps=4, diffusion_steps=4)
INDEX, KEYS = [0, 0, 1, 1], [21, 22, 23, 24]
ADVANTAGE = torch.tensor([1.0, -1.5, 0.25, 2.0])
# --- the slow version ---------------------------------------------------------------------------------------------


def slow_loss(u: toy.Update, advantage: Tensor, reference: Policy | None) -> Tensor:
    """The loss as it is described, unit by unit in one graph: no cut, no chunk, no shared condition of the head."""
    total = torch.zeros(())
    pixels = u.policy.pixels_per_token
    mte = u.config.trajectories
    for b, prompt in enumerate(u.index.tolist()):
        for step in u.rollout.steps:
            for m, place in enumerate(step.places[b].tolist()):
                final = u.rollout.tokens[b, place].view(pixels, -1)
                after = step.path.final[b, m].view(pixels, -1)
                earlier = u.before[step.index]
                before = None if earlier is None else earlier[b, m].view(pixels, -1)
                own, extra = step.path, None
                if u.batch.trajectories is not None:
                    extra = u.batch.trajectories.at(step)
                for p in range(pixels):
                    split = (pixels, -1) if u.config.selection.unit == "pixel" else (1, -1)
                    q = p if u.config.selection.unit == "pixel" else 0
                    parts = [None if part is None else part.reshape(split)[q] for part in (after, before, final)]
                    dropped = drops(u.config, step.index, *parts, m < step.num_committed)  # type: ignore[arg-type]
                    weight = 0.0 if dropped else advantage[b].item()
                    share, others = 1.0, 0.0
                    uncertain = extra is not None and extra.uncertain[b, m, p if mte.unit == "pixel" else 0].item()
                    if uncertain and mte.mode == "drop_topk":
                        share = 0.0
                    elif uncertain:
                        others = 1.0 / (mte.count + mte.include_rollout)
                        share = others * mte.include_rollout
                    for j in u.steps[step.index]:
                        x, following = own.states[j][b, m], own.states[j + 1][b, m]
                        law = slow_law(u.policy, u, b, prompt, step, m, place, x, j)
                        density = law.log_prob(following).view(pixels, -1)[p].sum()
                        for s in range(mte.count if others else 0):
                            assert extra is not None
                            row = extra.row[b, m]
                            x_s, next_s = (extra.path.states[k][s, row] for k in (j, j + 1))
                            other = slow_law(u.policy, u, b, prompt, step, m, place, x_s, j)
                            total = total - weight * others * other.log_prob(next_s).view(pixels, -1)[p].sum()
                        total = total - weight * share * density
                        if reference is not None:
                            anchor = slow_law(reference, u, b, prompt, step, m, place, x, j)
                            kl = slow_kl(u.config.kl.kind, law, anchor, following).view(pixels, -1)[p].sum()
                            total = total + u.config.kl.coefficient * kl
    return total * u.scale


def slow_kl(kind: str, law: Normal, anchor: Normal, x: Tensor) -> Tensor:
    if kind == "gaussian":
        return kl_divergence(law, anchor)
    shift = anchor.mean - law.mean if kind == "mean_k3" else anchor.log_prob(x) - law.log_prob(x)
    return shift.exp() - shift - 1


def drops(
    config: AlgorithmConfig, index: int, now: Tensor, before: Tensor | None, final: Tensor, committed: bool
) -> bool:
    def cosine(unit: Tensor) -> float:
        return (torch.dot(unit, final) / (unit.norm() * final.norm())).item()

    mode = config.selection.mode
    if committed or mode == "off" or index < config.selection.first_ar_step or (mode == "delta" and before is None):
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
    if u.config.likelihood_guidance == "none":
        scale = 1.0
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


MTE = {"mode": "composite", "count": 2, "share": 0.4}
UNKNOWN = {"scope": "unknown", "selection": {"mode": "delta"}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "committed": ({}, {}),
    "committed, guided, MTE": ({"guidance_scale": 3.0}, {"trajectories": MTE}),
    "committed, guided, unguided score": ({"guidance_scale": 3.0}, {"likelihood_guidance": "none"}),
    "committed, MTE without the rollout": ({}, {"trajectories": MTE | {"include_rollout": False}}),
    "unknown, delta": ({}, UNKNOWN),
    "unknown, delta, threshold": ({}, {"scope": "unknown", "selection": {"mode": "delta", "threshold": 0.1}}),
    "unknown, delta, pixels": ({}, {"scope": "unknown", "selection": {"mode": "delta", "unit": "pixel"}}),
    "unknown, absolute, late": ({}, {"scope": "unknown", "selection": {"mode": "absolute", "first_ar_step": 1}}),
    "unknown, absolute, guided, MTE": (
        {"guidance_scale": 0.5}, {"scope": "unknown", "selection": {"mode": "absolute"}, "trajectories": MTE},
    ),
    "unknown, MTE per step": ({"guidance_scale": 2.0}, UNKNOWN | {"trajectories": MTE | {"mode": "per_step"}}),
    "unknown, MTE per step, unguided": (
        {"guidance_scale": 2.0}, UNKNOWN | {"trajectories": MTE | {"mode": "per_step", "guidance": "none"}},
    ),
    "unknown, dropped": ({}, UNKNOWN | {"trajectories": MTE | {"mode": "drop_topk"}}),
    "unknown, random": ({}, UNKNOWN | {"trajectories": MTE | {"pick": "random"}}),
    "unknown, MTE in pixels": ({}, UNKNOWN | {"trajectories": MTE | {"unit": "pixel"}}),
    "released": (
        {"guidance_scale": 3.0},
        {"preset": "released", "scope": "unknown", "selection": {"mode": "delta", "first_ar_step": 1},
         "trajectories": {"mode": "composite", "count": 2},
         "scored_ar_steps": {"count": None}, "scored_diffusion_steps": {"count": None, "draw": "update"}},
    ),
}  # fmt: skip


SOME = ("committed, guided, MTE", "unknown, MTE in pixels")


@pytest.mark.parametrize(
    ("case", "kl", "rows"),
    [(case, kl, rows) for case in CASES for kl, rows in (("off", 3), ("gaussian", 2048))]
    + [(case, kl, 5) for case in SOME for kl in ("k3", "mean_k3")],
)
def test_gradient_equals_that_of_the_slow_version(
    case: str, kl: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(likelihood, "ROWS", rows)
    sampling, algorithm = CASES[case]
    policy = toy.policy(transformer=toy.few_tokens(6))
    u = toy.update(
        policy, INDEX[1:3], KEYS[1:3], SamplingConfig(ar_steps=3, diffusion_steps=3, **sampling),
        toy.configured(**algorithm | {"kl": {"kind": kl, "coefficient": 0.3}}),
    )  # fmt: skip
    reference = None
    if kl != "off":
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
    assert (u.config.scope == "unknown") == (parts.means()["kept_share"] < 1)


def test_the_guided_and_the_plain_gradient_differ() -> None:
    """So the cases above would notice a score that forgets guidance."""
    policy = toy.policy()
    plain, _ = toy.update(policy, INDEX, KEYS, SAMPLING, toy.configured()).gradient(ADVANTAGE)
    sampling = SAMPLING.model_copy(update={"guidance_scale": 3.0})
    guided, _ = toy.update(policy, INDEX, KEYS, sampling, toy.configured()).gradient(ADVANTAGE)
    assert torch.nn.functional.cosine_similarity(plain, guided, dim=0) < 0.9


@pytest.mark.parametrize("scope", ["committed", "unknown"])
def test_micro_batches_and_steps_add_up(scope: str) -> None:
    policy = toy.policy()
    selection = {"mode": "delta" if scope == "unknown" else "off"}
    config = toy.configured(
        scope=scope, trajectories={"mode": "composite", "count": 2}, selection=selection, kl={"coefficient": 0.1}
    )
    reference = toy.moved(policy)
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
    assert sums.numbers() == pytest.approx(parts.numbers(), rel=1e-4, abs=1e-3)
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
    u = toy.update(policy, INDEX, KEYS, sampling, toy.configured())
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
            for j in u.steps[step.index]:
                x = step.path.states[j][b]
                cond, uncond = (policy.head(x, u.schedule.timestep(j), part) for part in z)
                guided = uncond + 4.0 * (cond - uncond)
                guided = guided * (cond.norm() / guided.norm()).clamp(0.3, 1.0)
                mean, std = u.schedule.transition(j, x, guided)
                residual = (step.path.states[j + 1][b] - mean) / std
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
    [{}, {"scope": "unknown"}, {"trajectories": {"mode": "composite", "count": 2, "share": 1.0}}],
    ids=["committed", "unknown", "MTE"],
)
def test_the_score_has_mean_zero_under_the_policy_that_was_sampled(changes: dict[str, Any]) -> None:
    policy = toy.policy(transformer=toy.few_tokens(4))
    rows = projections(batches_of_scores(policy, toy.configured(**changes), 50))
    assert t_values(rows).abs().max() < 3.5


def test_the_score_of_another_policy_has_not() -> None:
    """The same test sees a policy that differs in the unconditional half of its guidance only."""
    policy = toy.policy(transformer=toy.few_tokens(4))
    sampling = SamplingConfig(ar_steps=2, diffusion_steps=3, guidance_scale=2.0)
    rows = []
    for number in range(50):
        u = toy.update(policy, [0] * 16, list(range(number * 16, number * 16 + 16)), sampling, toy.configured())
        u.sampling = SamplingConfig(ar_steps=2, diffusion_steps=3, guidance_scale=1.0)
        rows.append(u.gradient(torch.ones(16))[0])
    assert t_values(projections(torch.stack(rows))).abs().max() > 10


def test_extra_trajectories_average_to_zero_and_their_variance_falls_as_one_over_s() -> None:
    """On tokens scored under the latent that made them, MTE without the rollout carries no credit, only less noise."""
    policy = toy.policy(transformer=toy.few_tokens(4))
    sampling = SamplingConfig(ar_steps=1, diffusion_steps=3)
    variances = {}
    for count in (1, 4):
        config = toy.configured(
            trajectories={"mode": "composite", "count": count, "share": 1.0, "include_rollout": False}
        )
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
    alone, _ = toy.update(policy, [0, 1], [1, 2], sampling, toy.configured()).gradient(advantage)
    config = toy.configured(trajectories={"mode": "composite", "count": 3, "share": 1.0})
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
    config = toy.configured(scope=scope, trajectories={"mode": "composite", "count": 2})
    u = toy.update(policy, INDEX, KEYS, SAMPLING, config)
    gradient, parts = u.gradient(torch.zeros(4))
    assert torch.equal(gradient, torch.zeros_like(gradient)) and parts.means()["policy_loss"] == 0.0
    assert u.gradient(torch.tensor([0.0, 0.0, 1.0, -1.0]))[0].any()


def test_the_head_gets_no_gradient_and_all_of_the_trunk_does() -> None:
    policy = toy.policy()
    policy.transformer.requires_grad_(True)
    policy.transformer.image_decoder.requires_grad_(False)
    toy.update(policy, INDEX, KEYS, SAMPLING, toy.configured(kl={"kind": "gaussian"})).gradient(
        ADVANTAGE, toy.moved(policy)
    )
    assert all(parameter.grad is None for parameter in policy.head_parameters())
    assert all(p.grad is not None and p.grad.any() for p in policy.trunk_parameters())
    assert all(parameter.grad is None for parameter in [*policy.vae.parameters(), *policy.text.parameters()])


def test_another_policy_than_the_sampled_one_is_refused() -> None:
    policy = toy.policy()
    u = toy.update(policy, INDEX, KEYS, SAMPLING, toy.configured())
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
