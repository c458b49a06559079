"""Training on this machine: torchrun with loopback only, no restart in place, relaunch from the last saved state.

torchrun reports one exit code for all, so each process leaves its own failure in a file (failures.py), read here.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mar_grpo.errors import RetryableError
from mar_grpo.launch import failures, processes
from mar_grpo.progress import emit

GRACE_SECONDS = 10.0


def run_workers(
    arguments: Sequence[str], *, count: int, threads: int | None, folder: Path, max_relaunches: int
) -> None:
    """Run `mar-grpo ARGUMENTS` in `count` processes to its end.

    Args:
        arguments: of the CLI, the same for every process.
        threads: CPU threads of each process; None leaves it to torch.
        folder: local folder for logs and failure files.
        max_relaunches: how often to go on from the last saved state after an error that may pass.

    Raises:
        MarGrpoError: what stopped the processes, with the class (so the exit code) it had there.
    """
    for attempt in range(max_relaunches + 1):
        try:
            return _run_once(arguments, count, threads, folder)
        except RetryableError as error:
            if attempt == max_relaunches:
                raise
            emit("note", text=f"{error}; going on from the last saved state ({attempt + 1} of {max_relaunches})")
            time.sleep(2.0**attempt)


def _run_once(arguments: Sequence[str], count: int, threads: int | None, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    failures.clear(folder)
    environment = os.environ | {failures.FOLDER: str(folder), "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--max-restarts=0",
        f"--nproc-per-node={count}", "-m", "mar_grpo", *arguments,
    ]  # fmt: skip
    if count == 1:
        command = [sys.executable, "-m", "mar_grpo", *arguments]
    with open(folder / "errors.log", "ab") as log:
        workers = processes.start(command, environment=environment, errors=log)
    try:
        processes.wait(workers)
    finally:
        code = processes.stop(workers, grace_seconds=GRACE_SECONDS)
    if code:
        raise failures.cause(folder) or RetryableError(
            f"the training processes were killed (exit code {code})",
            where=str(folder / "errors.log"),
            hint="out of memory or stopped from outside; the same command goes on from the last saved state",
        )
