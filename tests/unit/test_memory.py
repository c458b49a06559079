"""What the planner says a recipe takes is what it takes."""

from __future__ import annotations

import pytest

from tests.benchmarks.plan import CASES, compare


@pytest.mark.parametrize("family", CASES)
def test_an_estimate_is_what_is_measured(family: str) -> None:
    row = compare(CASES[family][0])
    assert abs(row.error) < 0.15 and abs(row.error_above) < 0.15
    assert all(abs(ours / real - 1) < 0.15 for ours, real in row.phases.values())
