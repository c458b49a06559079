"""`mar-grpo run` from end to end on its own S3 server: interrupted, taken up again, refused, then promoted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mar_grpo.documents import DocumentRef, GateDecision, TrainingRun, read_document, write_document
from mar_grpo.launch.object_store import serve
from mar_grpo.progress import parse
from mar_grpo.runs import Run, intact_document
from mar_grpo.store import Store, read_uri


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One working folder for all runs of this file, which go on from one another."""
    return tmp_path_factory.mktemp("work")


def start(recipe: str, work: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mar_grpo", "run", "--recipe", recipe, "--work", str(work)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(recipe: str, work: Path) -> tuple[list[dict[str, Any]], str]:
    """Run to the end; the events and what was printed after them."""
    process = start(recipe, work)
    try:
        out, errors = process.communicate(timeout=900)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    events = [event for event in map(parse, out.splitlines()) if event]
    return events, "\n".join(line for line in out.splitlines() if not parse(line))


def states(events: list[dict[str, Any]]) -> dict[str, str]:
    """Step -> how it ended."""
    return {event["step"]: event["state"] for event in events if event["event"] == "step"}


def left_running(work: Path) -> list[bytes]:
    """Command lines of processes that work in the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if str(work).encode() in command:
            found.append(command)
    return found


def only_run(store: Store) -> Run:
    names = {key.split("/")[1] for key in store.list("runs")}
    assert len(names) == 1
    return Run(store, names.pop())


def updates_as_they_come(process: subprocess.Popen[str]) -> Iterator[int]:
    assert process.stdout is not None
    for line in process.stdout:
        event = parse(line)
        if event and event["event"] == "progress" and event["step"] == "grpo_training":
            yield event["done"]


def test_ctrl_c_in_training_ends_everything(short_recipe: str, work: Path) -> None:
    process = start(short_recipe, work)
    updates = updates_as_they_come(process)
    assert [next(updates), next(updates)] == [1, 2]  # so the first is saved
    assert len(left_running(work)) >= 5  # the command, the server, the pipeline, its step, two workers
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    told = ["stopping; Ctrl-C again stops at once", "interrupted; the same command goes on from what is finished"]
    assert errors.splitlines() == told
    deadline = time.monotonic() + 10
    while left_running(work) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left_running(work)


def test_the_same_command_goes_on_and_ends_with_an_honest_no(short_recipe: str, work: Path) -> None:
    events, text = finish(short_recipe, work)
    assert states(events) == {
        "validate_inputs": "done",
        "prompt_data": "reused",
        "sft_checkpoint": "reused",
        "benchmark_before": "reused",
        "grpo_training": "done",
        "reward_scoring": "done",
        "benchmark_after": "done",
        "promotion_gate": "done",
        "report": "done",
    }
    trained = [event["done"] for event in events if event["event"] == "progress" and event["step"] == "grpo_training"]
    assert trained[0] > 1, "training began anew"
    assert trained[-1] == 6
    lines = dict(line.split(":", 1) for line in text.splitlines() if line.strip())
    assert " before, " in lines["Held-out accuracy"]
    assert "do not promote: enough_prompts (12 prompts, 24 images of each checkpoint)" in lines["Gate"]
    page = Path(lines["Page"].strip()).read_text()
    assert "Refused" in page
    assert (Path(lines["Checkpoint"].strip()) / "model_index.json").exists()
    assert not left_running(work)

    with serve(work / "store") as store:
        run = only_run(store)
        records = dict(run.records())
        metrics = read_document(DocumentRef(**records["grpo_training"]["outputs"]["run"]), TrainingRun).metrics_uri
        assert [json.loads(line)["update"] for line in read_uri(metrics).splitlines()] == list(range(7))
        assert all(
            intact_document(DocumentRef(**ref)) for record in records.values() for ref in record["outputs"].values()
        )
        assert store.read_json(f"{run.prefix}/outcome.json")["state"] == "SUCCEEDED"
        assert not store.exists("champion.json")


def test_promotion_happens_when_the_gate_says_so(short_recipe: str, work: Path) -> None:
    """The gate cannot be pleased in seconds, so its decision is turned round; all other steps are as they were."""
    with serve(work / "store") as store:
        run = only_run(store)
        key = f"{run.prefix}/steps/promotion_gate.json"
        record = store.read_json(key)
        said = read_document(DocumentRef(**record["outputs"]["decision"]), GateDecision)
        yes = said.model_copy(update={"promote": True})
        record["outputs"]["decision"] = write_document(store, f"{run.prefix}/gate.json", yes).model_dump()
        store.write_json(key, record)
    events, text = finish(short_recipe, work)
    assert {step for step, state in states(events).items() if state == "done"} == {
        "validate_inputs",
        "promote",
        "report",
    }
    assert "Gate:              promote" in text
    with serve(work / "store") as store:
        checkpoint = DocumentRef(**dict(only_run(store).records())["grpo_training"]["outputs"]["checkpoint"])
        assert store.read_pointer("champion.json").sha256 == checkpoint.sha256 == said.candidate
        history = store.read_json(f"champions/{checkpoint.sha256}.json")
        assert history["replaces"] is None
        assert history["checkpoint"]["sha256"] == checkpoint.sha256


def test_a_step_whose_output_is_damaged_is_done_again(short_recipe: str, work: Path) -> None:
    with serve(work / "store") as store:
        run = only_run(store)
        shard = next(key for key in store.list(f"{run.prefix}/prompts/train") if key.endswith(".tar"))
        before = dict(run.records())["prompt_data"]
        store.write_bytes(shard, store.read_bytes(shard)[:-512])
        reference = DocumentRef(**before["outputs"]["train"])
        assert not intact_document(reference)
        assert intact_document(DocumentRef(**before["outputs"]["evaluation"]))
