"""A short training run through the real launcher, as processes that can be killed.

python -m tests.faults.training RUN_URI FOLDER is the launcher; FOLDER has the references that toy_run.prepare writes.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mar_grpo.documents import TrainingRun, read_document
from mar_grpo.errors import MarGrpoError
from mar_grpo.launch.local import run_workers
from mar_grpo.models.checkpoint import fetch_checkpoint, load_policy
from mar_grpo.progress import parse
from mar_grpo.runs import Run
from mar_grpo.steps import recipe_of
from mar_grpo.store import Store, read_uri
from tests.unit import toy_run

STUCK = "TEST_STUCK"


def stuck(images: np.ndarray, records: Sequence[Any]) -> np.ndarray:
    """The toy reward, from a scorer that gives no answer while the file STUCK names is there, and says `met` beside."""
    while os.environ.get(STUCK) and Path(os.environ[STUCK]).exists():
        Path(os.environ[STUCK]).with_name("met").touch()
        time.sleep(0.02)
    return toy_run.brightness(images, records)


class Training:
    """One run and its launcher, in a process of its own."""

    def __init__(self, folder: Path, store: Store, name: str, *overrides: str) -> None:
        self.folder, self.run = folder, Run(store, name)
        self.recipe = toy_run.recipe(*overrides)
        store.write_bytes(f"{self.run.prefix}/recipe.json", self.recipe.model_dump_json().encode())
        self.launcher: subprocess.Popen[str] | None = None
        self.done: queue.Queue[int | None] = queue.Queue()

    def start(self) -> None:
        """Start the launcher; `done` gets the number of every update, and None when it has ended."""
        command = [sys.executable, "-m", "tests.faults.training", self.run.uri, str(self.folder)]
        root = Path(__file__).parents[2]
        self.launcher = subprocess.Popen(
            command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        threading.Thread(target=self._follow, args=[self.launcher], daemon=True).start()

    def _follow(self, launcher: subprocess.Popen[str]) -> None:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            event = parse(line)
            if event and event["event"] == "progress":
                self.done.put(int(event["done"]))
        self.done.put(None)

    def finish(self) -> tuple[int, str]:
        """Wait for the launcher's end: exit code and what it said last."""
        assert self.launcher is not None and self.launcher.stderr is not None
        errors = self.launcher.stderr.read()
        return self.launcher.wait(timeout=120), errors

    def workers(self) -> dict[int, int]:
        """Rank -> process id."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_bytes().split(b"\0")
                variables = dict(one.partition(b"=")[::2] for one in (process / "environ").read_bytes().split(b"\0"))
            except OSError:
                continue
            if b"train" in command and self.run.uri.encode() in command and b"torch.distributed.run" not in command:
                found[int(variables.get(b"RANK", b"0"))] = int(process.name)
        return found

    def kill(self, *ranks: int) -> None:
        for rank, process in self.workers().items():
            if rank in ranks:
                os.kill(process, signal.SIGKILL)

    def saved(self) -> list[int]:
        """Updates with a whole state."""
        keys = self.run.store.list(f"{self.run.prefix}/training/state")
        return [int(key.split("/")[-2].removeprefix("update-")) for key in keys if key.endswith("state.json")]

    def result(self) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        """The rows of metrics.jsonl without times, and the trained network."""
        document = read_document(self.run.store.uri(f"{self.run.prefix}/training/run.json"), TrainingRun)
        assert document.outcome == "completed" and document.checkpoint is not None
        rows = [json.loads(line) for line in read_uri(document.metrics_uri).splitlines()]
        policy = load_policy(fetch_checkpoint(document.checkpoint, self.folder / "cache"))
        return toy_run.without_time(rows), dict(policy.transformer.named_parameters())


def launch(uri: str, folder: Path) -> None:
    run = Run.open(uri)
    references = json.loads((folder / "references.json").read_text())
    arguments = ["train", uri, "--folder", str(folder / run.name / "files")]
    for option, name in (("checkpoint", "checkpoint"), ("prompts", "prompts"), ("evaluation", "prompts")):
        arguments += [f"--{option}", f"{references[name]['uri']}#{references[name]['sha256']}"]
    config = recipe_of(run).training
    run_workers(
        arguments, count=config.processes, threads=1, folder=folder / run.name / "launch",
        max_relaunches=config.max_relaunches, grace_seconds=config.stop_grace_seconds,
    )  # fmt: skip


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        launch(sys.argv[1], Path(sys.argv[2]))
    except MarGrpoError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
