"""SIGTERM and Ctrl-C in training: what was done is saved, processes end in time, nothing is computed otherwise."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from mar_grpo.store import Store
from tests.faults.training import STUCK, Training
from tests.unit import toy_run

REWARD = "rewards.components={tests.faults.training:stuck: 1}"
LONG = [REWARD, "training.updates=12", "training.save_every=1000"]
"""Nothing is saved unless someone asks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("stopping")
    toy_run.prepare(made)
    return made


def whole(folder: Path, count: int) -> Training:
    """The run that nobody stopped."""
    training = Training(folder, Store(folder / "store"), f"whole{count}", *LONG, f"training.processes={count}")
    if not training.saved():
        training.start()
        assert training.finish() == (0, "")
    return training


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def same(one: Training, other: Training) -> None:
    (rows, weights), (others, other_weights) = one.result(), other.result()
    assert rows == others and [row["update"] for row in rows] == list(range(1, 13))
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("count", "number", "code"), [(1, signal.SIGTERM, 75), (2, signal.SIGTERM, 75), (2, signal.SIGINT, 130)]
)
def test_a_signal_to_the_launcher_saves_and_stops(folder: Path, count: int, number: signal.Signals, code: int) -> None:
    training = Training(
        folder, Store(folder / "store"), f"s{count}-{int(number)}", *LONG, f"training.processes={count}"
    )
    training.start()
    assert training.done.get(timeout=120) == 1
    assert training.launcher is not None
    training.launcher.send_signal(number)
    assert training.finish()[0] == code
    assert not training.workers()
    (saved,) = training.saved()
    assert 1 <= saved < 12
    training.start()
    assert training.finish() == (0, "")
    same(training, whole(folder, count))


def test_an_update_that_takes_too_long_is_abandoned(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STUCK, str(tmp_path / "stuck"))
    training = Training(folder, Store(folder / "store"), "abandoned", *LONG, "training.stop_grace_seconds=6")
    training.start()
    assert training.done.get(timeout=120) == 1
    (tmp_path / "stuck").touch()
    wait_for(tmp_path / "met")
    assert training.launcher is not None
    training.launcher.send_signal(signal.SIGTERM)
    assert training.finish()[0] == 75
    (saved,) = training.saved()
    assert 1 <= saved < 12, "what was done before the update that was abandoned"
    (tmp_path / "stuck").unlink()
    training.start()
    assert training.finish() == (0, "")
    same(training, whole(folder, 1))


def test_ctrl_c_twice_stops_at_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STUCK, str(tmp_path / "stuck"))
    overrides = [*LONG, "training.processes=2", "training.stop_grace_seconds=1000"]
    training = Training(folder, Store(folder / "store"), "twice", *overrides)
    (tmp_path / "stuck").touch()
    training.start()
    wait_for(tmp_path / "met")
    assert training.launcher is not None
    training.launcher.send_signal(signal.SIGINT)
    for _ in range(20):  # it waits for the update, which never ends
        assert training.launcher.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            training.launcher.wait(timeout=0.05)
    training.launcher.send_signal(signal.SIGINT)
    assert training.finish()[0] == 130
    assert training.saved() == []
