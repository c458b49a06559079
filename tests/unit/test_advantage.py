"""Advantages: centred in each group, of one size per component, exactly zero where a group has nothing to say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load_file
from torch import Tensor

from mar_grpo.algorithms.advantage import EPSILON, AdvantageConfig, advantages

GROUP, BATCH, PLAIN = (AdvantageConfig(scale=scale, clip=1e6) for scale in ("group", "batch", "none"))


@st.composite
def tables(draw: st.DrawFn, low: float = -100.0, high: float = 100.0) -> Tensor:
    shape = draw(st.tuples(st.integers(1, 5), st.integers(2, 8)))
    grid = st.integers(int(low * 8), int(high * 8)).map(lambda value: value / 8)  # exact in float32
    return torch.from_numpy(draw(arrays("float32", shape, elements=grid.map(float))))


def test_the_public_implementation_is_reproduced_for_one_component() -> None:
    recorded = load_file(Path(__file__).parents[1] / "golden/nova/a/grpo.safetensors")
    rewards = recorded["rewards_per_func"].sum(dim=1).view(2, 2)
    found = advantages({"sum": rewards}, {"sum": 1.0}, GROUP)
    torch.testing.assert_close(found.flatten(), recorded["advantages"], rtol=0, atol=1e-5)


@given(rewards=tables())
def test_groups_are_centred_and_of_unit_deviation(rewards: Tensor) -> None:
    found = advantages({"a": rewards}, {"a": 1.0}, GROUP)
    assert found.shape == rewards.shape and found.dtype == torch.float32
    spread = rewards.double().std(dim=1)
    torch.testing.assert_close(found.double().mean(dim=1), torch.zeros(len(rewards)).double(), rtol=0, atol=1e-4)
    torch.testing.assert_close(found.double().std(dim=1), spread / (spread + EPSILON), rtol=1e-3, atol=1e-4)


@given(rewards=tables(), shift=st.integers(-50, 50), factor=st.sampled_from([0.5, 2.0, 16.0]))
def test_shift_and_scale_of_the_reward_do_not_matter(rewards: Tensor, shift: int, factor: float) -> None:
    found = advantages({"a": rewards}, {"a": 1.0}, GROUP)
    moved = advantages({"a": rewards * factor + shift}, {"a": 1.0}, GROUP)
    torch.testing.assert_close(moved, found, rtol=0, atol=5e-3)  # EPSILON is absolute
    torch.testing.assert_close(advantages({"a": -rewards}, {"a": 1.0}, GROUP), -found, rtol=0, atol=1e-5)


@given(rewards=tables(), data=st.data())
def test_members_are_treated_alike(rewards: Tensor, data: st.DataObject) -> None:
    order = torch.tensor(data.draw(st.permutations(range(rewards.shape[1]))))
    for config in (GROUP, BATCH, PLAIN):
        found = advantages({"a": rewards}, {"a": 1.0}, config)
        torch.testing.assert_close(
            advantages({"a": rewards[:, order]}, {"a": 1.0}, config), found[:, order], rtol=1e-5, atol=1e-4
        )


@given(value=st.floats(-1e6, 1e6, width=32), size=st.integers(1, 9))
def test_equal_rewards_give_exactly_nothing(value: float, size: int) -> None:
    rewards = torch.tensor([[value] * size, [*range(size - 1), 100.0]])
    for config in (GROUP, BATCH, PLAIN):
        found = advantages({"a": rewards, "b": rewards}, {"a": 1.0, "b": -3.0}, config)
        assert torch.equal(found[0], torch.zeros(size))
        if size > 1:
            assert found[1].any()


@given(rewards=tables(), weights=st.tuples(st.floats(0.1, 10), st.floats(-10, -0.1)))
@settings(max_examples=50)
def test_each_component_has_its_own_deviation(rewards: Tensor, weights: tuple[float, float]) -> None:
    """A component of a thousandth of the size counts as much as its weight says."""
    other = rewards.flip(1) ** 2
    small = other / 1024
    for config in (GROUP, BATCH):
        whole = advantages({"a": rewards, "b": other}, {"a": weights[0], "b": weights[1]}, config)
        first = advantages({"a": rewards}, {"a": 1.0}, config)
        second = advantages({"b": other}, {"b": 1.0}, config)
        torch.testing.assert_close(whole, weights[0] * first + weights[1] * second, rtol=1e-4, atol=1e-4)
        shrunk = advantages({"b": small}, {"b": 1.0}, config)
        large_enough = small.std(dim=1) > 1000 * EPSILON
        torch.testing.assert_close(shrunk[large_enough], second[large_enough], rtol=0.01, atol=0.01)


def test_a_batch_scale_lets_groups_that_differ_little_weigh_little() -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.5, 0.51], [0.3, 0.3]])
    grouped, batched, plain = (advantages({"a": rewards}, {"a": 1.0}, c) for c in (GROUP, BATCH, PLAIN))
    torch.testing.assert_close(plain, torch.tensor([[-0.5, 0.5], [-0.005, 0.005], [0.0, 0.0]]))
    assert grouped[1, 1] / grouped[0, 1] == pytest.approx(1.0, abs=0.02)
    assert batched[1, 1] / batched[0, 1] == pytest.approx(0.01, rel=1e-3)
    deviation = plain.square().mean().sqrt()
    torch.testing.assert_close(batched, plain / (deviation + EPSILON))


@given(rewards=tables(), clip=st.floats(0.1, 3.0))
def test_advantages_are_clipped(rewards: Tensor, clip: float) -> None:
    free = advantages({"a": rewards}, {"a": 4.0}, GROUP)
    found = advantages({"a": rewards}, {"a": 4.0}, AdvantageConfig(clip=clip))
    assert torch.equal(found, free.clamp(-clip, clip))


def test_what_is_not_finite_stays_visible() -> None:
    found = advantages({"a": torch.tensor([[1.0, float("nan")], [0.0, 1.0]])}, {"a": 1.0}, GROUP)
    assert found[0].isnan().all() and found[1].isfinite().all()
