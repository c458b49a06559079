"""A command of ours as a child process whose events are shown live on this terminal."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

from mar_grpo.launch import processes
from mar_grpo.progress import View, parse

GRACE_SECONDS = 60.0  # training saves first


def run_shown(arguments: Sequence[str]) -> int:
    """Run `mar-grpo ARGUMENTS`; what it prints beside events is printed at its end. Returns its exit code."""
    command = [sys.executable, "-m", "mar_grpo", *arguments]
    child = processes.start(command, output=subprocess.PIPE, errors=sys.stderr.fileno())
    rest = []
    try:
        assert child.stdout is not None
        with View() as view:
            for line in child.stdout:
                text = line.decode(errors="replace")
                if event := parse(text):
                    view.show(event)
                else:
                    rest.append(text)
        processes.wait(child)
    finally:
        code = processes.stop(child, grace_seconds=GRACE_SECONDS, first=signal.SIGINT)
    print("".join(rest), end="")
    return code
