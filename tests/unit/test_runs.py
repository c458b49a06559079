"""Steps are done once, anew when anything they depend on has changed, and say what stopped them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mar_grpo import artifacts, runs
from mar_grpo.documents import DocumentRef, GateDecision, GateRule, write_document
from mar_grpo.errors import InputError, RetryableError, UnhealthyError
from mar_grpo.progress import parse
from mar_grpo.runs import Run
from mar_grpo.store import Store


@pytest.fixture
def run(file_store: Store) -> Run:
    file_store.make_root()
    return Run(file_store, "name-seed0-12345678")


def decision(run: Run, key: str = "gate.json") -> DocumentRef:
    rule = GateRule(name="accuracy_rose", passed=True, measured=0.1, threshold=0.05, detail="")
    made = GateDecision(candidate="a" * 64, incumbent="b" * 64, rules=(rule,), promote=True)
    return write_document(run.store, f"{run.prefix}/{key}", made)


class Counter:
    """A step that counts how often it was done."""

    def __init__(self, run: Run) -> None:
        self.run, self.times = run, 0

    def __call__(self) -> tuple[runs.Outputs, str]:
        self.times += 1
        return {"decision": decision(self.run)}, "made"


def test_a_step_is_done_once(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    make = Counter(run)
    first = run.step("gate", {"x": 1}, make)
    again = Run.open(run.uri).step("gate", {"x": 1}, make)
    assert first == again
    assert make.times == 1
    events = [event for event in map(parse, capsys.readouterr().out.splitlines()) if event]
    assert [event["state"] for event in events] == ["started", "done", "reused"]
    assert events[2]["text"] == "made"


def test_a_step_is_done_anew_when_inputs_code_or_outputs_differ(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Counter(run)
    run.step("gate", {"x": 1}, make)
    run.step("gate", {"x": 2}, make)
    assert make.times == 2
    monkeypatch.setattr(runs, "__version__", "9.9.9")
    run.step("gate", {"x": 2}, make)
    assert make.times == 3
    run.store.write_bytes(f"{run.prefix}/gate.json", b"{}")
    run.step("gate", {"x": 2}, make)
    assert make.times == 4
    run.store.delete(f"{run.prefix}/gate.json")
    run.step("gate", {"x": 2}, make)
    assert make.times == 5
    run.step("gate", {"x": 2}, make)
    assert make.times == 5


def test_a_step_that_fails_leaves_no_record(run: Run) -> None:
    def fail() -> tuple[runs.Outputs, str]:
        raise InputError("wrong")

    with pytest.raises(InputError):
        run.step("gate", {}, fail)
    assert run.records() == []


@pytest.mark.parametrize(("error", "code"), [(InputError, 2), (UnhealthyError, 3), (RetryableError, 75)])
def test_a_failure_is_told_in_three_ways(
    run: Run, error: type[InputError], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped, runs.surfaced("grpo_training", run.uri):
        raise error("what is wrong", where="shard 3", hint="do this")
    assert stopped.value.code == code
    expected = {"step": "grpo_training", "error": "what is wrong (shard 3): do this", "exit_code": code}
    assert run.store.read_json(f"{run.prefix}/failure.json") == expected
    last = capsys.readouterr().out.splitlines()[-1]
    assert parse(last) == {"event": "failure"} | expected


def test_a_bug_is_told_too_and_keeps_its_traceback(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), runs.surfaced("report", run.uri):
        _ = 1 / 0
    assert run.store.read_json(f"{run.prefix}/failure.json")["exit_code"] == 1
    assert "ZeroDivisionError: division by zero" in capsys.readouterr().out


def test_what_is_no_run_is_refused() -> None:
    for uri in ("file:///tmp/x", "file:///tmp/runs/a/b", "s3://bucket"):
        with pytest.raises(InputError, match="not a run"):
            Run.open(uri)


def test_deleting_a_run_leaves_the_others(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runs.WORK, str(tmp_path / "work"))
    other = Run(run.store, "other")
    for one in (run, other):
        one.store.write_bytes(f"{one.prefix}/a/b", b"x")
    run.delete()
    assert run.store.list() == [f"{other.prefix}/a/b"]


class KfpArtifact:
    """What the functions use of kfp's artifact and metrics."""

    def __init__(self) -> None:
        self.uri, self.metadata, self.logged = "", {}, {}  # type: ignore[var-annotated]

    def log_metric(self, metric: str, value: float) -> None:
        self.logged[metric] = value


def test_artifacts_name_documents_and_metrics_are_finite() -> None:
    artifact, reference = KfpArtifact(), DocumentRef(uri="s3://bucket/a.json", sha256="0" * 64)
    with pytest.raises(InputError, match="sha256"):
        artifacts.document_of(artifact)
    artifacts.name_document(artifact, reference, label="before")
    assert artifacts.document_of(artifact) == reference
    artifacts.log_finite(artifact, {"a": 1.0, "b": float("nan"), "c": float("inf"), "d": None, "e": 0})
    assert artifact.logged == {"a": 1.0, "e": 0.0}
    assert json.dumps(artifact.logged, allow_nan=False)
