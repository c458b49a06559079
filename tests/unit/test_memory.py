"""What the planner says a recipe takes is what it takes."""

from __future__ import annotations

import pytest

from mar_grpo.training.memory import Layout, Planner
from tests.benchmarks.plan import CASES, compare


@pytest.mark.parametrize("family", CASES)
def test_an_estimate_is_what_is_measured(family: str) -> None:
    row = compare(CASES[family][0])
    assert abs(row.error) < 0.15 and abs(row.error_above) < 0.15
    assert all(abs(ours / real - 1) < 0.15 for ours, real in row.phases.values())


@pytest.mark.parametrize("family", CASES)
def test_blocks_that_make_their_activations_again_take_no_more(family: str) -> None:
    case = CASES[family][0]
    planner = Planner(case.recipe, case.make())
    usual, again = (planner.estimate(Layout(micro_batch=4, checkpointing=how)) for how in (False, True))
    assert again.phases["update"].bytes <= usual.phases["update"].bytes
