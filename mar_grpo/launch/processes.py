"""Child processes that never outlive the process that started them. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def start(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
    death_signal: signal.Signals = signal.SIGTERM,
) -> subprocess.Popen[bytes]:
    """Start a command as the leader of its own session and process group.

    The terminal's Ctrl-C reaches only the caller, who ends the child with `stop`; when the caller dies in any way, the
    kernel sends the child `death_signal`. Call it from the main thread: the kernel watches the calling thread.

    Args:
        environment: the child's whole environment; the caller's by default.
        output: file that takes stdout and stderr; the caller's by default.
    """
    parent = os.getpid()

    def tie_to_parent() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, death_signal)
        if os.getppid() != parent:  # it died before prctl
            os._exit(1)

    return subprocess.Popen(
        list(command),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output is not None else None,
        start_new_session=True,
        preexec_fn=tie_to_parent,
    )


def stop(process: subprocess.Popen[bytes], *, grace_seconds: float) -> int:
    """End a process of `start` and its group: SIGTERM, and SIGKILL after the grace time. Returns its exit code."""
    if grace_seconds > 0 and process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_seconds)
    _signal_group(process, signal.SIGKILL)  # also what a dead leader left behind
    return process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
