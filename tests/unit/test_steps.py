"""Which steps an update scores: as many as asked for, from the end that is asked for, never one without a density."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mar_grpo.algorithms.steps import StepsConfig, choose_steps
from mar_grpo.diffusion.gaussian import Schedule
from mar_grpo.rollout import SamplingConfig, schedule_of
from tests.unit import tiny

PLAN: Schedule = schedule_of(tiny.policy(), SamplingConfig(diffusion_steps=6))  # the last of six has no noise
ALL = StepsConfig()


def chosen(
    ar: StepsConfig = ALL, diffusion: StepsConfig = ALL, *, update: int = 0, seed: int = 0
) -> dict[int, list[int]]:
    return choose_steps(ar, diffusion, seed=seed, update=update, num_ar_steps=7, schedule=PLAN)


def config(**values: Any) -> StepsConfig:
    return StepsConfig.model_validate(values)


def test_without_a_count_everything_that_has_a_density_is_scored() -> None:
    assert chosen() == {i: [0, 1, 2, 3, 4] for i in range(7)}
    assert chosen(config(count=7), config(count=6)) == chosen()  # more than there are


@given(
    few=st.integers(1, 9), some=st.integers(1, 9), which=st.sampled_from(["uniform", "early", "late", "window"]),
    draw=st.sampled_from(["update", "ar_step"]), update=st.integers(0, 50), seed=st.integers(0, 5),
)  # fmt: skip
def test_as_many_as_asked_for_in_order_and_the_same_anywhere(
    few: int, some: int, which: str, draw: str, update: int, seed: int
) -> None:
    ar, diffusion = config(count=few, which=which), config(count=some, draw=draw)
    found = chosen(ar, diffusion, update=update, seed=seed)
    assert list(found) == sorted(found) and len(found) == min(few, 7) and set(found) <= set(range(7))
    for scored in found.values():
        assert scored == sorted(set(scored)) and len(scored) == min(some, 5) and set(scored) <= set(range(5))
    assert found == chosen(ar, diffusion, update=update, seed=seed)


@pytest.mark.parametrize(("which", "steps"), [("early", [0, 1]), ("late", [5, 6])])
def test_early_and_late(which: str, steps: list[int]) -> None:
    for update in (0, 1, 17):
        assert list(chosen(config(count=2, which=which), update=update)) == steps
    transitions = {"early": [0, 1], "late": [3, 4]}[which]  # the last one that has a density
    assert set(map(tuple, chosen(ALL, config(count=2, which=which)).values())) == {tuple(transitions)}


def test_a_window_moves_on_by_one_and_starts_over() -> None:
    seen = [next(iter(chosen(config(count=5, which="window"), update=n))) for n in range(7)]
    assert seen == [0, 1, 2, 0, 1, 2, 0]
    assert [chosen(ALL, config(count=3, which="window"), update=n)[0] for n in (0, 2, 3)] == [
        [0, 1, 2],
        [2, 3, 4],
        [0, 1, 2],
    ]


def test_uniform_draws_give_every_step_its_turn() -> None:
    updates = [chosen(config(count=2), config(count=2), update=n) for n in range(700)]
    ar_steps = Counter(i for steps in updates for i in steps)
    transitions = Counter(j for steps in updates for j in next(iter(steps.values())))
    assert sorted(ar_steps) == list(range(7)) and max(abs(n - 200) for n in ar_steps.values()) < 60  # 5 deviations
    assert sorted(transitions) == list(range(5)) and max(abs(n - 280) for n in transitions.values()) < 65
    assert all(len(set(map(tuple, steps.values()))) == 1 for steps in updates)  # once an update
    assert chosen(config(count=2), seed=1) != chosen(config(count=2), seed=2)
    assert len({tuple(steps) for steps in updates[:20]}) > 5


def test_transitions_can_be_drawn_anew_for_each_ar_step() -> None:
    drawn = [chosen(ALL, config(count=2, draw="ar_step"), update=n) for n in range(100)]
    assert any(len(set(map(tuple, steps.values()))) > 3 for steps in drawn)
    counts = Counter(j for steps in drawn for scored in steps.values() for j in scored)
    assert sorted(counts) == list(range(5)) and max(abs(n - 280) for n in counts.values()) < 65
    for one, other in ((0, 1), (2, 6)):  # 100 pairs of 2 of 5: a tenth are equal by chance
        assert sum(steps[one] == steps[other] for steps in drawn) < 30


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"count": 0}, "greater than 0"),
        ({"count": 2, "which": "middle"}, "'uniform', 'early', 'late' or 'window'"),
        ({"which": "late"}, "which 'late' needs a count"),
        ({"draw": "ar_step"}, "draw 'ar_step' needs a count and which 'uniform'"),
        ({"draw": "ar_step", "count": 2, "which": "early"}, "draw 'ar_step' needs a count and which 'uniform'"),
        ({"number": 2}, "Extra inputs"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        StepsConfig.model_validate(wrong)
