"""What the planner says a recipe takes is what it takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.plan import CASES, compare
from tests.unit.test_cli import call


@pytest.mark.parametrize("family", CASES)
def test_an_estimate_is_what_is_measured(family: str) -> None:
    row = compare(CASES[family][0])
    assert abs(row.error) < 0.15 and abs(row.error_above) < 0.15
    assert all(abs(ours / real - 1) < 0.15 for ours, real in row.phases.values())


def test_a_recipe_that_does_not_fit_is_told_what_to_change(tmp_path: Path) -> None:
    """Through all layouts that are tried, to the smallest: exit code 0 with advice, or 2."""
    options = ["plan", "emoji", "--gpus", "2", "--set", "training.micro_batch=4", "--json", str(tmp_path / "plan.json")]
    assert call(*options, "--gpu-memory-gib", "1") == 0
    whole = json.loads((tmp_path / "plan.json").read_text())
    assert whole["fits"] and whole["advice"] == ""
    assert call(*options, "--gpu-memory-gib", str((whole["bytes"] - 1) / 2**30)) == 0
    less = json.loads((tmp_path / "plan.json").read_text())
    assert less["bytes"] < whole["bytes"] and less["advice"].startswith("It fits with training.")
    assert call(*options, "--gpu-memory-gib", "0.001") == 2
    least = json.loads((tmp_path / "plan.json").read_text())
    assert (
        not least["fits"]
        and least["bytes"] < less["bytes"]
        and "training.activation_checkpointing=True" in least["advice"]
    )
