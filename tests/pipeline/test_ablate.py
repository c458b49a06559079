"""`mar-grpo ablate` killed in the middle of a run: the same command does the rest, and nothing twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mar_grpo.evaluation.ablation_tables import Ablation
from mar_grpo.progress import parse
from mar_grpo.store import Store


def start(recipe: str, work: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mar_grpo", "ablate", recipe, "--seeds", "0", "--arms", "frozen,mte_topk",
               "--gradient-batches", "0", "--work", str(work)]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def trained(events: list[dict[str, Any]]) -> list[int]:
    """Updates that were reported."""
    return [event["done"] for event in events if event["event"] == "progress" and event["step"] == "grpo_training"]


def test_a_killed_ablation_goes_on_and_does_nothing_twice(short_recipe: str, tmp_path: Path) -> None:
    recipe = json.dumps(json.loads(short_recipe) | {"rewards": {"components": {"tests.unit.toy_run:brightness": 1.0}}})
    process = start(recipe, tmp_path)
    before: list[dict[str, Any]] = []
    assert process.stdout is not None
    for line in process.stdout:
        if event := parse(line):
            before.append(event)
        if len(trained(before)) == 6 + 2:  # all of the first run; of the second one update is saved
            break
    process.kill()
    process.communicate(timeout=60)
    store = Store(f"file://{tmp_path}/ablation-store")
    rows = [key for key in store.list("ablations") if "/runs/" in key]
    assert [Path(key).name for key in rows] == ["frozen-seed0.json"]
    written = [store.stat(key) for key in rows]

    process = start(recipe, tmp_path)
    text, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    after = [event for event in map(parse, text.splitlines()) if event]
    assert trained(after)[0] > 1, "training began anew"
    assert trained(after)[-1] == 6
    assert len(trained(after)) < 6
    assert [store.stat(key) for key in rows] == written
    reused = [event["step"] for event in after if event["event"] == "step" and event["state"] == "reused"]
    assert reused == ["prompt_data", "sft_checkpoint", "benchmark_before", "runs/frozen-seed0"]

    out = tmp_path / "ablations" / "short"
    found = Ablation.model_validate_json((out / "results.json").read_bytes())
    assert [(run.arm, run.stopped) for run in found.runs] == [("frozen", ""), ("mte_topk", "")]
    for run in found.runs:
        assert None not in (run.accuracy, run.reward_last, run.gradient_norm, run.kl, run.seconds_per_update)
    assert (out / "page.html").exists()
    assert "| MTE, top-k | 1 |" in text
    assert not [key for key in store.list("runs") if "/state/" in key], "states of finished runs stay"
    assert os.listdir(tmp_path / "steps")[0].startswith("short-seed0-")
