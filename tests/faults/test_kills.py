"""Kill -9 at random moments: the run that goes on after it is the run that was never killed, and its log is whole."""

from __future__ import annotations

import queue
import random
import time
from pathlib import Path

import pytest
import torch

from mar_grpo.store import Store
from tests.faults.training import Training
from tests.unit import toy_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kills")
    toy_run.prepare(made)
    return made


def disturb(training: Training, victims: list[str], seed: int) -> None:
    """Kill one victim after the other, each some updates and a moment after the last; start the launcher again."""
    draw = random.Random(seed)
    training.start()
    for victim in victims:
        for _ in range(draw.randint(0, 3)):  # none: while it loads
            if training.done.get(timeout=200) is None:
                break
        time.sleep(draw.uniform(0.0, 1.0))
        workers = list(training.workers())
        assert training.launcher is not None
        if victim == "launcher":
            training.launcher.kill()
        elif workers:
            training.kill(*(workers if victim == "all" else [draw.choice(workers)]))
        if victim == "launcher" or training.launcher.poll() is not None:
            training.launcher.wait()
            training.done = queue.Queue()
            training.start()


def check(folder: Path, count: int, updates: int, victims: list[str], seed: int) -> None:
    given = [f"training.updates={updates}", f"training.processes={count}", "training.save_every=1"]
    given += ["training.max_relaunches=20"]
    whole = Training(folder, Store(folder / "store"), f"whole{count}-{updates}", *given)
    whole.start()
    assert whole.finish() == (0, "")
    killed = Training(folder, Store(folder / "store"), f"killed{count}-{updates}", *given)
    disturb(killed, victims, seed)
    assert killed.finish() == (0, "")
    (rows, weights), (others, other_weights) = whole.result(), killed.result()
    assert [row["update"] for row in others] == list(range(1, updates + 1)), "nothing lost, nothing doubled"
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        assert other == (row if count == 1 else pytest.approx(row, rel=0, abs=1e-6))
    for name, value in weights.items():
        assert torch.allclose(value, other_weights[name], rtol=0, atol=0 if count == 1 else 1e-6)


@pytest.mark.parametrize(("count", "victims"), [(1, ["rank", "launcher", "rank"]), (2, ["rank", "all", "launcher"])])
def test_six_kills(folder: Path, count: int, victims: list[str]) -> None:
    check(folder, count, 12, victims, seed=count)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_fifty_kills(folder: Path, count: int) -> None:
    draw = random.Random(count)
    check(folder, count, 120, [draw.choice(["rank", "all", "launcher"]) for _ in range(25)], seed=10 + count)
