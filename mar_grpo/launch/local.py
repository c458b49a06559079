"""Training on this machine: torchrun with loopback only, no restart in place, relaunch from the last saved state.

torchrun reports one exit code for all, so each process leaves its own failure in a file (failures.py), read here.
SIGTERM and Ctrl-C are passed on to the processes, which save and end; when this process dies, they do at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from mar_grpo.errors import InputError, MarGrpoError, RetryableError, StoppedError, UnhealthyError
from mar_grpo.launch import failures, processes
from mar_grpo.progress import emit

FINAL = (InputError, UnhealthyError, StoppedError)
"""Errors after which nothing is tried again."""
MORE_SECONDS = 5.0
"""What torchrun, and then this process, wait longer than the processes themselves."""
LONGEST_PAUSE_SECONDS = 60.0


def run_workers(
    arguments: Sequence[str],
    *,
    count: int,
    threads: int | None,
    folder: Path,
    max_relaunches: int,
    grace_seconds: float = 10.0,
) -> None:
    """Run `mar-grpo ARGUMENTS` in `count` processes to its end.

    Args:
        arguments: of the CLI, the same for every process.
        threads: CPU threads of each process; None leaves it to torch.
        folder: local folder for logs and failure files.
        max_relaunches: how often in a row to go on from the last saved state after an error that may pass; getting
            further than before begins a new row. The pauses double, up to a minute. An error of no class of ours may
            pass too, until it comes twice after the same update.
        grace_seconds: what the processes need at most to end after a signal.

    Raises:
        MarGrpoError: what stopped the processes, with the class (so the exit code) it had there.
        SystemExit: SIGTERM came (exit code 75).
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reached.json").unlink(missing_ok=True)
    before, furthest, row = "", 0, 0
    while True:
        try:
            return _run_once(arguments, count, threads, folder, grace_seconds)
        except FINAL:
            raise
        except MarGrpoError as error:
            reached = failures.reached(folder)
            row = 1 if reached > furthest else row + 1
            furthest = max(reached, furthest)
            here = f"{error} after update {reached}"
            if row > max_relaunches or (here == before and not isinstance(error, RetryableError)):
                raise
            before = here
            emit("note", text=f"{error}; going on from the last saved state ({row} of {max_relaunches})")
            time.sleep(min(2.0 ** (row - 1), LONGEST_PAUSE_SECONDS))


def _run_once(arguments: Sequence[str], count: int, threads: int | None, folder: Path, grace_seconds: float) -> None:
    failures.clear(folder)
    environment = os.environ | {failures.FOLDER: str(folder), "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(int(grace_seconds + MORE_SECONDS))
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--max-restarts=0",
        f"--nproc-per-node={count}", "-m", "mar_grpo", *arguments,
    ]  # fmt: skip
    if count == 1:
        command = [sys.executable, "-m", "mar_grpo", *arguments]
    with open(folder / "errors.log", "ab") as log:
        workers = processes.start(command, environment=environment, errors=log, death_signal=signal.SIGKILL)
    first = signal.SIGTERM
    try:
        with _sigterm_unwinds():
            processes.wait(workers)
    except KeyboardInterrupt:
        first = signal.SIGINT
        raise
    finally:
        code = processes.stop(workers, grace_seconds=grace_seconds + 2 * MORE_SECONDS, first=first)
    if code:
        raise failures.cause(folder) or RetryableError(
            f"the training processes were killed (exit code {code})",
            where=str(folder / "errors.log"),
            hint="out of memory or stopped from outside; the same command goes on from the last saved state",
        )


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """SIGTERM leaves the block with exit code 75, as Ctrl-C does with KeyboardInterrupt."""

    def leave(*_: object) -> NoReturn:
        raise SystemExit(RetryableError.exit_code)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
