"""Extra trajectories: whose noise they have, what law they follow, which tokens they call uncertain."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from pydantic import ValidationError

from mar_grpo.algorithms.selection import most_uncertain, uncertainty
from mar_grpo.algorithms.trajectories import TrajectoryConfig, draw_trajectories
from mar_grpo.models.policy import Policy
from mar_grpo.rollout import Guided, SamplingConfig, draw_noise, roll_out
from tests.unit import toy

SAMPLING = SamplingConfig(ar_steps=4, diffusion_steps=4)
GUIDED = SAMPLING.model_copy(update={"guidance_scale": 3.0})
CONFIG = TrajectoryConfig(count=3, share=0.3)
PROMPTS = ["a dog", "a red circle", "two apples"]
KEYS = [1, 2, 3]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return toy.policy()


def guided(policy: Policy, sampling: SamplingConfig, rows: slice = slice(None)) -> Guided:
    return Guided.of(policy, policy.encode_prompts(PROMPTS[rows]), sampling)


@pytest.mark.parametrize("sampling", [SAMPLING, GUIDED], ids=["plain", "guided"])
def test_they_are_paths_under_the_latent_that_made_each_token(policy: Policy, sampling: SamplingConfig) -> None:
    rollout = roll_out(guided(policy, sampling), KEYS)
    schedule = policy.schedule(4)
    drawn = draw_trajectories(guided(policy, sampling), rollout, schedule, KEYS, CONFIG)
    assert drawn.paths.shape == (3, 5, 3, 16, 16)
    noise = []
    for j in range(4):
        x, t = drawn.paths[:, j], schedule.timestep(j)
        prediction = policy.head(x, t, rollout.z)
        if rollout.z_unconditional is not None:
            without = policy.head(x, t, rollout.z_unconditional)
            prediction = without + sampling.guidance_scale * (prediction - without)
        mean, std = schedule.transition(j, x, prediction)
        if schedule.stochastic(j):
            noise.append((drawn.paths[:, j + 1] - mean) / std)
        else:
            torch.testing.assert_close(drawn.paths[:, j + 1], mean, rtol=0, atol=1e-4)
    every = torch.stack([drawn.paths[:, 0], *noise]).flatten()  # 4 * 3 * 3 * 16 * 16 unit normals
    assert abs(every.mean().item()) < 4 / len(every) ** 0.5
    assert abs(every.square().mean().item() - 1) < 4 * (2 / len(every)) ** 0.5
    assert not torch.equal(drawn.paths[0, 0], drawn.paths[1, 0])


def test_they_depend_on_the_image_alone(policy: Policy) -> None:
    schedule = policy.schedule(4)
    whole = draw_trajectories(guided(policy, GUIDED), roll_out(guided(policy, GUIDED), KEYS), schedule, KEYS, CONFIG)
    for row in range(3):
        some = guided(policy, GUIDED, slice(row, row + 1))
        alone = draw_trajectories(some, roll_out(some, KEYS[row : row + 1]), schedule, KEYS[row : row + 1], CONFIG)
        torch.testing.assert_close(alone.paths[:, :, 0], whole.paths[:, :, row], rtol=0, atol=1e-3)
        assert torch.equal(alone.uncertain[0], whole.uncertain[row])


def test_their_noise_is_not_that_of_the_image(policy: Policy) -> None:
    """Streams that overlap share a thousand numbers."""
    rollout = roll_out(guided(policy, SAMPLING), KEYS)
    drawn = draw_trajectories(guided(policy, SAMPLING), rollout, policy.schedule(4), KEYS, CONFIG)
    _, noise = draw_noise(KEYS, policy.num_tokens, policy.token_dim, 5)
    streams = [noise.flatten().tolist(), *(path.flatten().tolist() for path in drawn.paths[:, 0])]
    for first, second in combinations(streams, 2):
        assert len(set(first) & set(second)) < 10


def test_uncertain_tokens_are_those_that_spread(policy: Policy) -> None:
    rollout = roll_out(guided(policy, SAMPLING), KEYS)
    drawn = draw_trajectories(guided(policy, SAMPLING), rollout, policy.schedule(4), KEYS, CONFIG)
    assert torch.equal(drawn.spread, uncertainty(drawn.paths[:, -1]))
    assert torch.equal(drawn.uncertain, most_uncertain(drawn.spread, 0.3))
    assert (drawn.uncertain.sum(dim=1) == int(16 * 0.3)).all()


@pytest.mark.parametrize("wrong", [{"share": 0.0}, {"share": 1.5}, {"count": -1}, {"share": float("nan")}, {"s": 3}])
def test_values_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        TrajectoryConfig.model_validate(wrong)
