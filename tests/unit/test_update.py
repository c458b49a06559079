"""What holds of every update: whose policy is scored, what elements weigh, what costs nothing, what is stored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from mar_grpo.algorithms import likelihood
from mar_grpo.algorithms.advantage import advantages
from mar_grpo.algorithms.loss import AlgorithmConfig, Batch, Scales, backward, kept, record, scales
from mar_grpo.algorithms.objective import policy_term
from mar_grpo.diffusion.guidance import guide
from mar_grpo.models.policy import Policy
from mar_grpo.rollout import Guided, SamplingConfig, roll_out
from mar_grpo.training.parts import trained_parameters
from tests.unit import tiny, tiny_mar, toy

PROMPTS = {"nova": toy.PROMPTS, "mar": ("3", "goldfish"), "harmon": ("a red apple", "a dog")}
INDEX, KEYS = torch.tensor([0, 0, 1, 1]), [21, 22, 23, 24]
ADVANTAGE = torch.tensor([1.0, -1.5, 0.25, 2.0])
MTE: dict[str, Any] = {"trajectories": {"count": 2, "share": 0.4}, "kl": {"kind": "off"}}


def configured(**changes: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(changes)


def sampling(family: str, **changes: Any) -> SamplingConfig:
    steps = 4 if family == "nova" else "ddim5"
    return SamplingConfig(**{"ar_steps": 4, "diffusion_steps": steps, "guidance_scale": 3.0} | changes)


def made(family: str) -> Policy:
    """Only the trunk wants gradients; the head says something."""
    if family == "nova":
        return toy.policy()
    policy: Policy = tiny.mar_policy() if family == "mar" else tiny_mar.harmon()
    return toy.trainable(policy, policy.image_network, 1, 0.1)


def guided(policy: Policy, family: str, **changes: Any) -> Guided:
    return Guided.of(policy, policy.encode_prompts(PROMPTS[family]), sampling(family, **changes))


def steps_of(policy: Policy, transitions: int = 3) -> dict[int, list[int]]:
    return {i: list(range(transitions)) for i in range(len(policy.mask_schedule(4)))}


def recorded(policy: Policy, family: str, config: AlgorithmConfig, rows: Any = slice(None)) -> Batch:
    index, keys = INDEX[rows], torch.tensor(KEYS)[rows].tolist()
    with torch.no_grad():
        live = guided(policy, family).rows(index)
    return record(live, index, keys, steps_of(policy), config)


def gradient(
    policy: Policy, family: str, batch: Batch, advantage: Tensor, config: AlgorithmConfig, anchor: Policy | None = None
) -> Tensor:
    """Of all parameters of the transformer; sums are multiplied by 1 / 100."""
    steps = steps_of(policy)
    weights = Scales(dict.fromkeys(steps, 0.01), dict.fromkeys(steps, 0.01 * config.kl.coefficient))
    for parameter in policy.parameters():
        parameter.grad = None
    reference = None
    if anchor is not None:
        with torch.no_grad():
            reference = guided(anchor, family)
    backward(guided(policy, family), reference, batch, advantage, steps, weights, config)
    return toy.flat(list(policy.transformer.parameters()))


# --- whose policy is scored ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["nova", "mar", "harmon"])
def test_z_of_the_update_is_that_of_the_rollout_in_train_mode_too(family: str) -> None:
    """Published configurations have dropout; none of it may come on between sampling and scoring, or in sampling."""
    policy = made(family)
    batch = recorded(policy, family, configured(**MTE))
    policy.train()
    assert policy.transformer.training
    again = recorded(policy, family, configured(**MTE))
    assert torch.equal(again.rollout.tokens, batch.rollout.tokens)
    live = guided(policy, family).rows(INDEX)
    schedule = batch.schedule
    for step in batch.rollout.steps:
        latents = live.latents(step.tokens, step.known, step.num_known, step.places)
        torch.testing.assert_close(latents[0], step.z, rtol=0, atol=1e-5)
        whole = policy.ar_latents(step.tokens, step.known, live.cond)
        wide = step.places[..., None].expand(-1, -1, whole.shape[-1])
        torch.testing.assert_close(whole.gather(1, wide), step.z, rtol=2e-5, atol=1e-4)
        predict = live.predictor(live.head_conditions(*latents))
        for j in (0, 1, 2):
            before, after = step.path.pair(j)
            mean, std = schedule.transition(j, before, predict(before, schedule.timestep(j)))
            noise = (after - mean) / std
            assert abs(noise.square().mean().item() - 1) < 5 * (2 / noise.numel()) ** 0.5
    assert gradient(policy, family, batch, ADVANTAGE, configured(**MTE)).any()  # z is checked there once more


def test_the_score_without_guidance_is_that_of_another_policy() -> None:
    """Its mean is not zero where the sampler was guided; with the sampler's own guidance the same test sees nothing."""
    policy = toy.policy(transformer=toy.few_tokens(4))
    plain = SamplingConfig(ar_steps=2, diffusion_steps=3, guidance_scale=2.0)
    largest = {}
    directions = torch.randn(
        sum(p.numel() for p in policy.trunk_parameters()), 12, generator=torch.Generator().manual_seed(9)
    )
    for guidance in ("sampler", "none"):
        config = configured(**toy.OFF, likelihood_guidance=guidance)
        rows = []
        for number in range(24):
            keys = list(range(number * 48, number * 48 + 48))
            rows.append(toy.update(policy, [0] * 48, keys, plain, config).gradient(torch.ones(48))[0] @ directions)
        scores = torch.stack(rows)
        largest[guidance] = (scores.mean(0) / (scores.std(0) / len(rows) ** 0.5)).abs().max().item()
    assert largest["sampler"] < 4 and largest["none"] > 10


# --- inner updates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["nova", "mar"])
@pytest.mark.parametrize("changes", [toy.OFF, MTE], ids=["plain", "MTE"])
def test_the_first_inner_update_is_reinforce_s(family: str, changes: dict[str, Any]) -> None:
    policy = made(family)
    once, twice = configured(**changes), configured(**changes, inner_updates=2, clip=0.2)
    plain = gradient(policy, family, recorded(policy, family, once), ADVANTAGE, once)
    batch = recorded(policy, family, twice)
    first = gradient(policy, family, batch, ADVANTAGE, twice)
    assert first.any() and torch.equal(first, plain)
    again = gradient(policy, family, batch, ADVANTAGE, twice)  # the policy has not moved: ratios are 1, nothing is cut
    torch.testing.assert_close(again, plain, rtol=0, atol=1e-5 * plain.abs().max().item())


@pytest.mark.parametrize("trained", ["trunk", "head", "both"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_second_inner_update_is_that_of_the_surrogate(clip: float | None, trained: str) -> None:
    """Ratio and clip written out for autograd, element by element, after a step of the optimiser."""
    policy = made("nova").requires_grad_(False)
    parameters = list(trained_parameters(policy, trained).values())  # type: ignore[arg-type]
    for parameter in parameters:
        parameter.requires_grad_(True)
    config = configured(**toy.OFF, inner_updates=2, clip=clip)
    batch = recorded(policy, "nova", config)
    gradient(policy, "nova", batch, ADVANTAGE, config)
    old = policy.frozen_copy()
    torch.optim.Adam(parameters, lr=2e-3).step()
    steps = steps_of(policy)
    weights = Scales(dict.fromkeys(steps, 0.01), dict.fromkeys(steps, 0.0))
    for parameter in parameters:
        parameter.grad = None
    parts = backward(guided(policy, "nova"), None, batch, ADVANTAGE, steps, weights, config)
    found = toy.flat(parameters)
    assert all(parameter.grad is not None for parameter in parameters)

    loss, shaped = torch.zeros(()), []
    for step in batch.rollout.steps:
        for j in steps[step.index]:
            before, after = step.path.pair(j)
            densities = []
            for model in (policy, old):
                live = guided(model, "nova").rows(INDEX)
                z = live.latents(step.tokens, step.known, step.num_known, step.places)
                cond, uncond = (model.head(before, batch.schedule.timestep(j), part) for part in z if part is not None)
                mean, std = batch.schedule.transition(j, before, guide(cond, uncond, 3.0))
                densities.append(Normal(mean, std).log_prob(after))
            ratio = (densities[0] - densities[1].detach()).exp()
            value = ADVANTAGE[:, None, None] * ratio
            if clip is not None:
                value = torch.minimum(value, ADVANTAGE[:, None, None] * ratio.clamp(1 - clip, 1 + clip))
            loss = loss - 0.01 * value.sum()
            shaped.append(ratio.detach())
    for parameter in parameters:
        parameter.grad = None
    loss.backward()
    expected = toy.flat(parameters)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4 * expected.abs().max().item())
    together = torch.cat([ratio.flatten() for ratio in shaped])
    assert parts.means()["policy_loss"] == pytest.approx(loss.item(), rel=1e-3)
    assert parts.means()["ratio"] == pytest.approx(together.mean().item(), rel=1e-4)
    assert together.std() > 0.05
    if clip is not None:
        signs = torch.cat([ADVANTAGE.sign()[:, None, None].expand_as(r).flatten() for r in shaped])
        cut = ((together - 1) * signs > clip).float().mean().item()
        assert parts.means()["clip_share"] == pytest.approx(cut, abs=1e-3) and cut > 0.05


def test_elements_that_weigh_nothing_may_have_any_ratio() -> None:
    """A dropped token far from where the policy is now: infinity times nothing is nothing."""
    log_prob, score = torch.tensor([500.0, 0.1]), torch.tensor([3.0, 2.0])
    for clip in (None, 0.2):
        value, slope, ratio = policy_term(log_prob, score, torch.tensor([0.0, 1.0]), torch.zeros(2), clip)
        assert ratio[0] == float("inf") and value[0] == slope[0] == 0.0
        assert value[1] == ratio[1] and slope[1] == 2 * ratio[1]


# --- what elements weigh ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["committed", "unknown"])
@pytest.mark.parametrize("per", ["element", "token"])
@pytest.mark.parametrize("reduction", ["elements", "steps", "sum"])
def test_weights_of_what_is_kept_have_mean_one(reduction: str, per: str, scope: str) -> None:
    """What selection drops is made up for within the AR step; all weights of an update add up as `reduction` says."""
    config = configured(reduction=reduction, per=per, scope=scope, selection={"mode": "off"}, kl={"coefficient": 0.25})
    counts, images, channels = [1, 2, 5], 6, 4
    tokens = [8, 7, 5] if scope == "unknown" else counts
    steps = {i: [0, 2] for i in range(3)}
    whole = torch.tensor([[4.0 * images * n, 4.0 * images * n] for n in tokens])  # four units a token
    some = torch.stack([whole[:, 0] * torch.tensor([0.25, 1.0, 0.5]), whole[:, 1]], dim=1)

    def given(kept: Tensor, **changes: Any) -> Scales:
        return scales(config, steps, kept, counts=counts, images=images, token_dim=channels, **changes)

    everything, selected = given(whole), given(some)
    for i in range(3):
        assert selected.policy[i] * some[i, 0].item() == pytest.approx(everything.policy[i] * whole[i, 0].item())
        assert selected.kl[i] == everything.kl[i] == pytest.approx(0.25 * everything.policy[i])  # selection spares it
    total = {"elements": 1.0, "steps": 1.0, "sum": 3.0}[reduction] * (channels if per == "token" else 1)
    elements = [images * n * channels * 2 for n in tokens]
    shares = [everything.policy[i] * elements[i] for i in range(3)]
    assert sum(shares) == pytest.approx(total)
    expected = [n / sum(tokens) for n in tokens] if reduction == "elements" else [1 / 3] * 3
    assert [share / total for share in shares] == pytest.approx(expected)

    part = scales(config, {1: [0, 2]}, some[1:2], counts=counts, images=images, token_dim=channels)
    grown = {"elements": 3, "steps": 3, "sum": 1}[reduction]  # an AR step alone stands for all of them
    assert part.policy[1] == pytest.approx(selected.policy[1] * grown)
    assert part.kl[1] == pytest.approx(selected.kl[1] * grown)
    fewer = given(some, counted_share=0.5)
    assert fewer.policy == {i: 2 * value for i, value in selected.policy.items()} and fewer.kl == selected.kl
    assert set(given(some, counted_share=0.0).policy.values()) == {0.0}
    nothing = given(torch.stack([torch.zeros(3), whole[:, 1]], dim=1))
    assert set(nothing.policy.values()) == {0.0} and nothing.kl == everything.kl


def test_what_is_kept_is_counted_over_batches() -> None:
    policy, config = made("nova"), configured(**MTE, selection={"threshold": 0.02, "unit": "pixel"})
    steps = steps_of(policy)
    whole, *parts = (recorded(policy, "nova", config, rows) for rows in (slice(None), slice(0, 1), slice(1, 4)))
    found = kept([whole], steps)
    assert torch.equal(kept(parts, steps), found)
    assert torch.equal(kept(parts[:1], steps) + kept(parts[1:], steps), found)
    tokens = [sum(policy.mask_schedule(4)[i:]) for i in steps]
    assert found[:, 1].tolist() == [4 * 4 * n for n in tokens]
    assert found[:, 0].tolist() == [whole.keep[i].sum().item() for i in steps] and (found[1:3, 0] < found[1:3, 1]).all()


def test_the_loss_of_equal_advantages_is_their_negative() -> None:
    """Ratios are 1, so the policy term is the weights' sum: 1 with selection, MTE and all."""
    for reduction, total in (("elements", 1.0), ("steps", 1.0), ("sum", 4.0)):
        for trajectories in ({"mode": "off"}, {"count": 2}, {"count": 2, "include_rollout": False, "unit": "pixel"}):
            config = configured(
                reduction=reduction, trajectories=trajectories, selection={"threshold": 0.02}, kl={"kind": "off"}
            )
            policy = made("nova")
            batch, steps = recorded(policy, "nova", config), steps_of(policy)
            weights = scales(
                config, steps, kept([batch], steps), counts=policy.mask_schedule(4), images=4, token_dim=16
            )
            parts = backward(guided(policy, "nova"), None, batch, torch.full((4,), 2.0), steps, weights, config)
            assert parts.means()["policy_loss"] == pytest.approx(-2.0 * total, rel=1e-5)
            assert parts.means()["kept_share"] < 1


# --- what costs nothing -------------------------------------------------------------------------------------------


def watched(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Rows that pass through trunk and head from now on."""
    rows = {"trunk": 0, "head": 0}
    latents, head = policy.ar_latents, policy.head_conditioned

    def trunk(tokens: Tensor, *rest: Any, **options: Any) -> Tensor:
        rows["trunk"] += len(tokens)
        return latents(tokens, *rest, **options)

    def conditioned(x: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        rows["head"] += torch.broadcast_shapes(x.shape[:-1], condition.shape[:-1]).numel()
        return head(x, time, condition)

    monkeypatch.setattr(policy, "ar_latents", trunk)
    monkeypatch.setattr(policy, "head_conditioned", conditioned)
    return rows


@pytest.mark.parametrize("family", ["nova", "mar"])
def test_images_without_advantage_cost_nothing_and_change_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, config = made(family), configured(trajectories={"mode": "off"}, kl={"kind": "off"})
    batch = recorded(policy, family, config)
    some = torch.tensor([1.0, 0.0, 0.0, -2.0])
    alone = recorded(policy, family, config, [0, 3])
    with monkeypatch.context() as patch:
        rows = watched(policy, patch)
        found = gradient(policy, family, batch, some, config)
        used = dict(rows)
        expected = gradient(policy, family, alone, some[[0, 3]], config)
        assert rows == {name: 2 * count for name, count in used.items()} and used["head"] > 0
        assert torch.equal(gradient(policy, family, batch, torch.zeros(4), config), torch.zeros_like(found))
        assert rows == {name: 2 * count for name, count in used.items()}
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


def test_tokens_that_weigh_nothing_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the head, in an update without KL: what selection drops, and uncertain tokens' own paths where they are not
    averaged in."""
    policy = made("nova")
    for trajectories, threshold in (
        ({"mode": "off"}, 0.02),
        ({"count": 2, "share": 0.4, "include_rollout": False}, 0.02),
    ):
        config = configured(trajectories=trajectories, selection={"threshold": threshold}, kl={"kind": "off"})
        batch = recorded(policy, "nova", config)
        wanted = 0
        for step in batch.rollout.steps:
            keep, uncertain = batch.keep[step.index][..., 0], torch.zeros(1, dtype=torch.bool)
            if batch.trajectories is not None:
                uncertain = batch.trajectories.at(step).uncertain[..., 0]
            wanted += int((keep & ~uncertain).sum() + 2 * (keep & uncertain).sum())
        with monkeypatch.context() as patch:
            rows = watched(policy, patch)
            gradient(policy, "nova", batch, ADVANTAGE, config)
        assert rows["head"] == wanted * 3 * 2  # three transitions, with and without the prompt


def test_equal_rewards_give_exactly_the_gradient_of_the_kl() -> None:
    policy = made("nova")
    rewards = {"a": torch.tensor([[0.5, 0.5], [0.25, 0.25]])}
    config = configured(trajectories={"count": 2})
    equal = advantages(rewards, {"a": 1.0}, config.advantage).flatten()
    batch = recorded(policy, "nova", config)
    assert not gradient(policy, "nova", batch, equal, config).any()
    assert not gradient(policy, "nova", batch, equal, config, policy.frozen_copy()).any()  # the KL is zero, too
    other = policy.frozen_copy()
    with torch.no_grad():
        for parameter in other.trunk_parameters():
            parameter.mul_(1.05)
    found = gradient(policy, "nova", batch, equal, config, other)
    without = replace(batch, trajectories=None)
    assert found.any() and torch.equal(found, gradient(policy, "nova", without, torch.zeros(4), config, other))


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["nova", "mar", "harmon"])
def test_chunks_change_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, config = made(family), configured(**MTE | {"kl": {"coefficient": 0.3}})
    anchor = policy.frozen_copy()
    with torch.no_grad():
        for parameter in anchor.trunk_parameters():
            parameter.mul_(1.02)
    batch, found = recorded(policy, family, config), []
    for rows in (1, 5, 2048):
        monkeypatch.setattr(likelihood, "ROWS", rows)
        found.append(gradient(policy, family, batch, ADVANTAGE, config, anchor))
    for other in found[:2]:
        torch.testing.assert_close(other, found[2], rtol=0, atol=2e-5 * found[2].abs().max().item())


@pytest.mark.parametrize(
    ("changes", "kept_parts"),
    [
        (toy.OFF, set()),
        ({"trajectories": {"mode": "per_step"}}, {"before", "z_unconditional"}),
        ({"trajectories": {"mode": "composite"}}, {"before"}),
        ({"deviation": "recorded", "trajectories": {"mode": "off"}}, {"before", "std"}),
    ],
)
def test_a_batch_holds_what_was_asked_for(changes: dict[str, Any], kept_parts: set[str]) -> None:
    policy = made("mar")
    steps = {1: [0, 2], 2: [1]}
    with torch.no_grad():
        live = guided(policy, "mar").rows(INDEX)
    batch = record(live, INDEX, KEYS, steps, configured(**changes))
    assert batch.rollout.z is None and batch.rollout.z_unconditional is None and batch.rollout.scale is None
    assert [sorted(step.path.states) for step in batch.rollout.steps] == [[0, 1, 2, 3], [1, 2]]
    for step in batch.rollout.steps:
        held = {name for name in ("before", "z_unconditional") if getattr(step, name) is not None}
        held |= {"std"} if sorted(step.path.std) == steps[step.index] else set()
        assert held <= kept_parts and ("std" in held) == ("std" in kept_parts)
    torch.testing.assert_close(batch.rollout.tokens, roll_out(live, KEYS).tokens, rtol=2e-5, atol=1e-4)
