"""Child processes that never outlive the process that started them. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from mar_grpo.errors import RetryableError

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for this process alone; the kernel lets go of it when the process ends in any way.

    Raises:
        RetryableError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            raise RetryableError(
                f"another run (process {lock.read().strip() or 'unknown'}) uses this folder",
                where=str(folder),
                hint="wait until it has ended, or give this one a folder of its own",
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def start(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | int | None = None,
    errors: IO[bytes] | int | None = None,
    death_signal: signal.Signals = signal.SIGTERM,
) -> subprocess.Popen[bytes]:
    """Start a command as the leader of its own session and process group.

    The terminal's Ctrl-C reaches only the caller, who ends the child with `stop`; when the caller dies in any way, the
    kernel sends the child `death_signal`. Call it from the main thread: the kernel watches the calling thread.

    Args:
        environment: the child's whole environment; the caller's by default.
        output, errors: files that take stdout and stderr; the caller's stdout by default, and stderr goes with stdout.
    """
    parent = os.getpid()
    return subprocess.Popen(
        list(command),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors if errors is not None else subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: end_with_parent(parent, death_signal),
    )


def end_with_parent(parent: int, death_signal: signal.Signals = signal.SIGTERM) -> None:
    """From now on the kernel sends this process the signal when its parent (process id `parent`) dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != parent:  # it died before prctl
        os._exit(1)


def wait(process: subprocess.Popen[bytes], timeout_seconds: float | None = None) -> bool:
    """Wait for the end of a process of `start`; False when the time ran out. It stays a zombie until `stop`.

    So long as nobody has collected its exit code, no other process group can get its number.
    """
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    pause = 0.005
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | (0 if deadline is None else os.WNOHANG)) is None:
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(0.1, 2 * pause)
    return True


def stop(process: subprocess.Popen[bytes], *, grace_seconds: float, first: signal.Signals = signal.SIGTERM) -> int:
    """End a process of `start` and its group: `first`, then SIGKILL after the grace time, or at once on Ctrl-C.

    Returns its exit code.
    """
    if process.returncode is None:
        try:
            if grace_seconds > 0 and not wait(process, 0.0):
                _signal_group(process, first)
                wait(process, grace_seconds)
        finally:
            _signal_group(process, signal.SIGKILL)  # also what a dead leader left behind
    return process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
