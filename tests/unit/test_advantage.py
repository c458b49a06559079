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

from mar_grpo.algorithms.advantage import EPSILON, AdvantageConfig, advantages, counted_share

GROUP, BATCH, PLAIN = (AdvantageConfig(scale=scale, clip=None) for scale in ("group", "batch", "none"))
RLOO = AdvantageConfig(baseline="leave_one_out", scale="none", clip=None)
SUMMED = AdvantageConfig(combine="summed", clip=None)
EVERY = (GROUP, BATCH, PLAIN, RLOO, SUMMED, BATCH.model_copy(update={"equal_groups": "leave_out"}))


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
    for config in (GROUP, BATCH, SUMMED, GROUP.model_copy(update={"baseline": "leave_one_out"})):
        found = advantages({"a": rewards}, {"a": 1.0}, config)
        moved = advantages({"a": rewards * factor + shift}, {"a": 1.0}, config)
        torch.testing.assert_close(moved, found, rtol=0, atol=1e-2)  # EPSILON is absolute
        torch.testing.assert_close(advantages({"a": -rewards}, {"a": 1.0}, config), -found, rtol=0, atol=1e-5)
    for config in (PLAIN, RLOO):  # unscaled: the reward's own unit
        found = advantages({"a": rewards}, {"a": 1.0}, config)
        moved = advantages({"a": rewards * factor + shift}, {"a": 1.0}, config)
        torch.testing.assert_close(moved, found * factor, rtol=1e-4, atol=1e-3)


@given(rewards=tables(), shifts=st.lists(st.integers(-50, 50), min_size=5, max_size=5))
def test_each_group_has_its_own_zero(rewards: Tensor, shifts: list[int]) -> None:
    for config in EVERY:
        moved = advantages({"a": rewards + torch.tensor(shifts[: len(rewards)])[:, None]}, {"a": 1.0}, config)
        torch.testing.assert_close(moved, advantages({"a": rewards}, {"a": 1.0}, config), rtol=1e-4, atol=1e-3)


@given(rewards=tables())
def test_the_baseline_of_rloo_is_the_mean_of_the_others(rewards: Tensor) -> None:
    found = advantages({"a": rewards}, {"a": 1.0}, RLOO)
    for row, group in zip(found, rewards, strict=True):
        others = [torch.cat([group[:g], group[g + 1 :]]).mean() for g in range(len(group))]
        torch.testing.assert_close(row, group - torch.stack(others), rtol=1e-5, atol=1e-3)


def test_components_are_summed_before_they_are_scaled() -> None:
    """As released: the component with the larger range then has almost all of the say."""
    rewards = {"a": torch.tensor([[0.0, 100.0, 0.0]]), "b": torch.tensor([[1.0, 0.0, 2.0]])}
    weights = {"a": 1.0, "b": 3.0}
    total = rewards["a"] + 3 * rewards["b"]
    found = advantages(rewards, weights, SUMMED)
    torch.testing.assert_close(found, advantages({"sum": total}, {"sum": 1.0}, GROUP))
    assert found.argmax() == 1 and advantages(rewards, weights, GROUP).argmax() == 2
    cancelling = {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([[2.0, 1.0]])}
    assert not advantages(cancelling, {"a": 1.0, "b": 1.0}, SUMMED).any()  # a sum that is equal says nothing


def test_groups_of_equal_rewards_can_be_left_out() -> None:
    """Then neither the batch's deviation nor the averages of the loss know of them."""
    rewards = torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.25, 0.5], [7.0, 7.0]])
    mixed = rewards[[0, 2]]
    leave = AdvantageConfig(scale="batch", equal_groups="leave_out", clip=None)
    found, kept = advantages({"a": rewards}, {"a": 1.0}, leave), advantages({"a": rewards}, {"a": 1.0}, BATCH)
    torch.testing.assert_close(found[[0, 2]], advantages({"a": mixed}, {"a": 1.0}, BATCH))
    assert torch.equal(found[[1, 3]], torch.zeros(2, 2)) and torch.equal(kept[[1, 3]], torch.zeros(2, 2))
    torch.testing.assert_close(kept[[0, 2]], found[[0, 2]] * 2**0.5, rtol=1e-3, atol=0)  # half of the groups
    assert counted_share(found, leave) == 0.5 and counted_share(kept, BATCH) == 1.0
    assert counted_share(torch.zeros(3, 2), leave) == 0.0
    assert not advantages({"a": rewards[[1, 3]]}, {"a": 1.0}, leave).any()


@given(rewards=tables(), data=st.data())
def test_members_are_treated_alike(rewards: Tensor, data: st.DataObject) -> None:
    order = torch.tensor(data.draw(st.permutations(range(rewards.shape[1]))))
    for config in EVERY:
        found = advantages({"a": rewards}, {"a": 1.0}, config)
        torch.testing.assert_close(
            advantages({"a": rewards[:, order]}, {"a": 1.0}, config), found[:, order], rtol=1e-5, atol=1e-4
        )


@given(value=st.floats(-1e6, 1e6, width=32), size=st.integers(1, 9))
def test_equal_rewards_give_exactly_nothing(value: float, size: int) -> None:
    rewards = torch.tensor([[value] * size, [*range(size - 1), 100.0]])
    for config in EVERY if size > 1 else (GROUP, BATCH, PLAIN):
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
