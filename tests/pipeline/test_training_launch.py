"""Training processes end with their launcher, go on after a kill, and tell what stopped them."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mar_grpo import steps
from mar_grpo.documents import TrainingRun, read_document
from mar_grpo.errors import InputError, MarGrpoError, RetryableError, UnhealthyError
from mar_grpo.launch import failures
from mar_grpo.launch.local import run_workers
from mar_grpo.runs import WORK, Run
from mar_grpo.store import read_uri


def train(recipe: str, store: Path, disturb: Callable[[Run], None] | None = None) -> list[dict[str, Any]]:
    """Train a recipe in a store of its own; the metrics without what depends on the clock."""
    run = steps.validate_inputs(recipe, f"file://{store}")
    data = steps.prompt_data(run)
    given = [steps.sft_checkpoint(run)["checkpoint"], data["train"], data["evaluation"]]
    other = threading.Thread(target=disturb or (lambda run: None), args=[run])
    other.start()
    made = steps.grpo_training(run, *given)
    other.join()
    lines = read_uri(read_document(made["run"], TrainingRun).metrics_uri).splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("seconds")} for line in lines]


def kill_a_worker_after_its_first_save(run: Run) -> None:
    deadline = time.monotonic() + 120
    while not run.store.exists(f"{run.prefix}/training/state/LATEST") and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            rank = b"RANK=1" in (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if rank and run.uri.encode() in command:
            os.kill(int(process.name), signal.SIGKILL)
            return


def test_a_killed_worker_changes_no_number(
    short_recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(WORK, str(tmp_path / "work"))
    whole = train(short_recipe, tmp_path / "whole")
    assert "going on" not in capfd.readouterr().out
    interrupted = train(short_recipe, tmp_path / "interrupted", kill_a_worker_after_its_first_save)
    assert "going on from the last saved state (1 of 2)" in capfd.readouterr().out
    assert [row["update"] for row in whole] == list(range(7))
    assert interrupted == whole


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([75, 2], InputError),
        ([75, 3], UnhealthyError),
        ([75, 75], RetryableError),
        ([1, 75], MarGrpoError),
    ],
)
def test_the_cause_is_told_apart_from_its_consequences(
    codes: list[int], expected: type[MarGrpoError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(failures.FOLDER, str(tmp_path))
    for rank, code in enumerate(codes):
        monkeypatch.setenv("RANK", str(rank))
        failures.leave(failures.CLASSES.get(code, MarGrpoError)(f"code {code}", where=f"rank {rank}", hint="h"))
    error = failures.cause(tmp_path)
    assert type(error) is expected
    failures.clear(tmp_path)
    assert failures.cause(tmp_path) is None


def test_wrong_input_in_a_worker_is_not_tried_again(tmp_path: Path) -> None:
    arguments = ["train", f"file://{tmp_path}/runs/none", "--folder", str(tmp_path)]
    arguments += [f"--{name}=file:///nothing#{'0' * 64}" for name in ("checkpoint", "prompts", "evaluation")]
    with pytest.raises(InputError, match=r"recipe\.json"):
        run_workers(arguments, count=2, threads=1, folder=tmp_path / "launch", max_relaunches=3)
