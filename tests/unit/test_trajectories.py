"""Extra trajectories: whose noise they have, what law they follow, which tokens they call uncertain."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from mar_grpo.algorithms.selection import most_uncertain, uncertainty, units
from mar_grpo.algorithms.trajectories import Extra, Trajectories, TrajectoryConfig, draw_trajectories
from mar_grpo.models.policy import Policy
from mar_grpo.noise import draw_noise
from mar_grpo.rollout import Guided, RecordedStep, Rollout, SamplingConfig, roll_out
from tests.unit import toy

SAMPLING = SamplingConfig(ar_steps=4, diffusion_steps=4)
GUIDED = SAMPLING.model_copy(update={"guidance_scale": 3.0})
ALL = TrajectoryConfig(share=1.0)
PROMPTS = ["a dog", "a red circle", "two apples"]
KEYS = [1, 2, 3]
EVERY = dict.fromkeys(range(4), range(4))


@pytest.fixture(scope="module")
def policy() -> Policy:
    return toy.policy()


def guided(policy: Policy, sampling: SamplingConfig, rows: slice = slice(None)) -> Guided:
    return Guided.of(policy, policy.encode_prompts(PROMPTS[rows]), sampling)


def rolled(policy: Policy, sampling: SamplingConfig, rows: slice = slice(None), **options: Any) -> Rollout:
    keep = ["z", "unconditional"]
    return roll_out(guided(policy, sampling, rows), KEYS[rows], recorded=EVERY, keep=keep, **options)  # type: ignore[arg-type]


def drawn(
    policy: Policy, sampling: SamplingConfig, config: TrajectoryConfig, rows: slice = slice(None)
) -> Trajectories:
    rollout = rolled(policy, sampling, rows, scope="unknown")
    return draw_trajectories(guided(policy, sampling, rows), rollout, KEYS[rows], EVERY, config)


def whole(policy: Policy, sampling: SamplingConfig, config: TrajectoryConfig, rows: slice = slice(None)) -> Extra:
    extra = drawn(policy, sampling, config, rows).whole
    assert extra is not None
    return extra


def follow(policy: Policy, extra: Extra, z: list[Tensor], scale: float, places: int) -> None:
    """All trajectories of the tokens are sampled under z: the noise between their states and means is unit normal."""
    schedule = policy.schedule(4)
    paths = torch.stack([extra.path.states[j] for j in range(5)], dim=1).unflatten(2, (3, places))
    assert torch.equal(extra.path.final, extra.path.states[4])
    noise = []
    for j in range(4):
        x, t = paths[:, j], schedule.timestep(j)
        prediction = policy.head(x, t, z[0])
        if len(z) == 2:
            without = policy.head(x, t, z[1])
            prediction = without + scale * (prediction - without)
        mean, std = schedule.transition(j, x, prediction)
        if schedule.stochastic(j):
            noise.append((paths[:, j + 1] - mean) / std)
        else:
            torch.testing.assert_close(paths[:, j + 1], mean, rtol=2e-5, atol=1e-4)
    every = torch.stack([paths[:, 0], *noise]).flatten()
    assert abs(every.mean().item()) < 4 / len(every) ** 0.5
    assert abs(every.square().mean().item() - 1) < 4 * (2 / len(every)) ** 0.5
    assert not torch.equal(paths[0, 0], paths[1, 0])


@pytest.mark.parametrize("guidance", ["sampler", "none"])
@pytest.mark.parametrize("sampling", [SAMPLING, GUIDED], ids=["plain", "guided"])
def test_they_are_paths_under_the_latent_that_made_each_token(
    policy: Policy, sampling: SamplingConfig, guidance: str
) -> None:
    rollout = rolled(policy, sampling)
    extra = whole(policy, sampling, TrajectoryConfig.model_validate({"share": 1.0, "guidance": guidance}))
    assert rollout.z is not None and (rollout.z_unconditional is None) == (sampling is SAMPLING)
    both = [rollout.z]
    if guidance == "sampler" and rollout.z_unconditional is not None:
        both.append(rollout.z_unconditional)
    follow(policy, extra, both, sampling.guidance_scale, 16)


@pytest.mark.parametrize("guidance", ["sampler", "none"])
def test_those_of_each_step_are_paths_under_its_own_latent(policy: Policy, guidance: str) -> None:
    config = TrajectoryConfig.model_validate({"mode": "per_step", "share": 1.0, "guidance": guidance})
    found = drawn(policy, GUIDED, config)
    assert found.whole is None and sorted(found.steps) == [0, 1, 2, 3]
    for step in rolled(policy, GUIDED, scope="unknown").steps:
        assert step.z_unconditional is not None
        both = [step.z, step.z_unconditional][: 1 if guidance == "none" else 2]
        follow(policy, found.at(step), both, 3.0, step.places.shape[1])


@pytest.mark.parametrize("mode", ["composite", "per_step"])
def test_they_depend_on_the_image_alone(policy: Policy, mode: str) -> None:
    config = TrajectoryConfig.model_validate({"mode": mode, "share": 1.0})

    def pieces(found: Trajectories) -> list[Extra]:
        return list(found.steps.values()) if found.whole is None else [found.whole]

    together = pieces(drawn(policy, GUIDED, config))
    for row in range(3):
        alone = pieces(drawn(policy, GUIDED, config, slice(row, row + 1)))
        for one, all_rows in zip(alone, together, strict=True):
            mine = all_rows.row[row]
            torch.testing.assert_close(one.path.final, all_rows.path.final[:, mine], rtol=0, atol=1e-3)
            torch.testing.assert_close(one.spread[0], all_rows.spread[row], rtol=0, atol=1e-3)


@pytest.mark.parametrize("mode", ["composite", "per_step"])
def test_their_noise_is_not_that_of_the_image(policy: Policy, mode: str) -> None:
    """Streams that overlap share a thousand numbers."""
    config = TrajectoryConfig.model_validate({"mode": mode, "share": 1.0})
    found = drawn(policy, SAMPLING, config)
    rollout = rolled(policy, SAMPLING, scope="unknown")
    _, noise = draw_noise(KEYS, policy.num_tokens, policy.token_dim, 5)
    streams = [noise.flatten().tolist()]
    streams += [step.path.states[0][:, step.num_committed :].flatten().tolist() for step in rollout.steps]
    for extra in found.steps.values() if found.whole is None else [found.whole]:
        streams += [path.flatten().tolist() for path in extra.path.states[0]]
    for first, second in combinations(streams, 2):
        assert len(set(first) & set(second)) < 10


@pytest.mark.parametrize("unit", ["token", "pixel"])
def test_uncertain_are_those_that_spread_and_only_they_are_stored(policy: Policy, unit: str) -> None:
    everything = whole(policy, SAMPLING, ALL)
    config = TrajectoryConfig.model_validate({"unit": unit, "share": 0.3})
    some = whole(policy, SAMPLING, config)
    count = {"token": 1, "pixel": 4}[unit]
    final = everything.path.final.unflatten(1, (3, 16))
    assert torch.equal(some.spread, uncertainty(units(final, count)))
    assert some.spread.shape == (3, 16, count)
    assert torch.equal(some.uncertain.flatten(1), most_uncertain(some.spread.flatten(1), 0.3))
    assert (some.uncertain.sum(dim=(1, 2)) == int(16 * count * 0.3)).all()
    tokens = some.uncertain.any(-1)
    assert torch.equal(some.row >= 0, tokens) and torch.equal(some.row[tokens], torch.arange(int(tokens.sum())))
    assert sorted(some.path.states) == [0, 1, 2, 3, 4]
    for j, state in some.path.states.items():
        assert torch.equal(state, everything.path.states[j].unflatten(1, (3, 16))[:, tokens])


def test_states_of_transitions_that_are_not_scored_are_not_stored(policy: Policy) -> None:
    rollout = roll_out(guided(policy, SAMPLING), KEYS, recorded={0: [0], 2: [2]}, keep=["z"])
    for mode, kept in (("composite", [[0, 1, 2, 3]]), ("per_step", [[0, 1], [2, 3]]), ("drop_topk", [[]])):
        config = TrajectoryConfig.model_validate({"mode": mode})
        found = draw_trajectories(guided(policy, SAMPLING), rollout, KEYS, {0: [0], 2: [2]}, config)
        extras = list(found.steps.values()) if found.whole is None else [found.whole]
        assert [sorted(extra.path.states) for extra in extras] == kept
    assert not extras[0].path.final.numel() and (extras[0].row == -1).all()  # drop_topk only needs to know which


def test_those_of_a_step_are_found_at_its_places(policy: Policy) -> None:
    found = drawn(policy, GUIDED, TrajectoryConfig(share=0.4))
    assert found.whole is not None
    for step in rolled(policy, GUIDED).steps:
        there = found.at(step)
        for b in range(3):
            places = step.places[b]
            assert torch.equal(there.uncertain[b], found.whole.uncertain[b, places])
            assert torch.equal(there.row[b], found.whole.row[b, places])
            assert torch.equal(there.spread[b], found.whole.spread[b, places])
        assert there.path is found.whole.path


def test_a_random_pick_has_the_same_size_and_asks_nobody(policy: Policy) -> None:
    uncertain = whole(policy, SAMPLING, TrajectoryConfig(share=0.3))
    pick = TrajectoryConfig(share=0.3, pick="random")
    found = whole(policy, SAMPLING, pick)
    assert (found.uncertain.sum(dim=(1, 2)) == int(16 * 0.3)).all()
    assert not torch.equal(found.uncertain, uncertain.uncertain)
    other = whole(policy, GUIDED, pick)  # other trajectories, the same places
    assert torch.equal(other.uncertain, found.uncertain) and not torch.equal(other.spread, found.spread)
    assert not torch.equal(found.uncertain[0], found.uncertain[1])  # each image its own
    steps = drawn(policy, SAMPLING, pick.model_copy(update={"mode": "per_step"})).steps
    assert not torch.equal(steps[0].uncertain[:, :14], steps[1].uncertain[:, :14])  # and each AR step


def test_a_step_of_few_tokens_has_one_uncertain_at_least(policy: Policy) -> None:
    steps: list[RecordedStep] = rolled(policy, SAMPLING).steps
    config = TrajectoryConfig(mode="per_step", share=0.3)
    found = draw_trajectories(guided(policy, SAMPLING), rolled(policy, SAMPLING), KEYS, EVERY, config)
    for step in steps:
        count = max(1, int(step.places.shape[1] * 0.3))
        assert (found.at(step).uncertain.sum(dim=(1, 2)) == count).all()


@pytest.mark.parametrize(
    "wrong", [{"share": 0.0}, {"share": 1.5}, {"count": 0}, {"share": float("nan")}, {"s": 3}, {"mode": "none"}]
)
def test_values_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TrajectoryConfig.model_validate(wrong)
