"""What platform teams take by URL: the committed YAML is what the source compiles to, and KFP caches none of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mar_grpo.components.base import IMAGE
from mar_grpo.pipelines import compile as compiling

ASSETS = compiling.assets()
PIPELINE = compiling.ROOTS["pipelines"] / "mar_grpo_training" / "pipeline.yaml"


def specification() -> dict[str, Any]:
    return next(yaml.safe_load_all(PIPELINE.read_text()))


def tasks(spec: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, task) of the pipeline and of every group in it."""
    for dag in [spec["root"], *spec["components"].values()]:
        yield from dag.get("dag", {}).get("tasks", {}).items()


@pytest.mark.parametrize(("kind", "name"), ASSETS)
def test_committed_files_are_what_the_source_gives(kind: str, name: str, tmp_path: Path) -> None:
    for made in compiling.write(kind, name, tmp_path):
        committed = compiling.ROOTS[kind] / name / made.name
        assert committed.read_text() == made.read_text(), f"{committed} is out of date: run `make compile`"


def test_every_asset_has_its_folder_in_order() -> None:
    assert [name for kind, name in ASSETS if kind == "components"] == [
        "benchmark_evaluation", "finish", "grpo_training", "promote", "promotion_gate", "prompt_data", "report",
        "reward_scoring", "sft_checkpoint", "validate_inputs",
    ]  # fmt: skip
    for kind, name in ASSETS:
        metadata = yaml.safe_load((compiling.ROOTS[kind] / name / "metadata.yaml").read_text())
        assert list(metadata) == ["name", "stability", "dependencies", "tags", "lastVerified"]
        assert metadata["name"] == name


def test_steps_are_in_order_and_promotion_waits_for_the_gate() -> None:
    found = dict(tasks(specification()))
    upstream = {name: set(task.get("dependentTasks", [])) for name, task in found.items()}
    for earlier, later in (
        ("validate-inputs", "prompt-data"),
        ("validate-inputs", "sft-checkpoint"),
        ("sft-checkpoint", "benchmark-evaluation"),
        ("benchmark-evaluation", "grpo-training"),
        ("grpo-training", "reward-scoring"),
        ("grpo-training", "benchmark-evaluation-2"),
        ("benchmark-evaluation-2", "promotion-gate"),
        ("promotion-gate", "condition-2"),
        ("promotion-gate", "report"),
    ):
        assert earlier in upstream[later], f"{later} does not wait for {earlier}"
    assert "promote" in found
    condition = found["condition-2"]["triggerPolicy"]["condition"]
    assert condition == "inputs.parameter_values['pipelinechannel--promotion-gate-Output'] == true"
    assert found["finish"]["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"


def test_no_task_is_cached_by_kfp() -> None:
    """The same URIs may hold something else next week; steps know by digest what is done."""
    components = specification()["components"]
    leaves = [
        (name, task) for name, task in tasks(specification()) if "dag" not in components[task["componentRef"]["name"]]
    ]
    assert len(leaves) == 11
    for name, task in leaves:
        assert not task["cachingOptions"].get("enableCache", False), name


def test_steps_install_nothing_at_run_time_and_the_spec_is_small() -> None:
    assert PIPELINE.stat().st_size < 256 * 1024
    for name, executor in specification()["deploymentSpec"]["executors"].items():
        assert executor["container"]["image"] == IMAGE, name
        assert "pip install" not in " ".join(executor["container"]["command"]), name
