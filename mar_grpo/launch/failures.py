"""What workers tell their launcher: what stopped each, since torchrun passes on no exit code, and how far they got."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from mar_grpo.errors import InputError, MarGrpoError, RetryableError, StoppedError, UnhealthyError

FOLDER = "MAR_GRPO_FAILURES"
"""Environment variable with the folder; without it nothing is left."""
CLASSES: Mapping[int, type[MarGrpoError]] = {
    cls.exit_code: cls for cls in (InputError, UnhealthyError, RetryableError, StoppedError)
}
_PRECEDENCE = (2, 3, 1, 130, 75)
"""Which of several processes' failures is the cause: one whose peer vanished only says 75."""


def leave(error: BaseException) -> None:
    """Write down what stopped this process."""
    if FOLDER not in os.environ:
        return
    if not isinstance(error, MarGrpoError):
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        error = MarGrpoError(text, where="errors.log of the training processes", hint="this is a bug, please report it")
    failure = {"what": error.what, "where": error.where, "hint": error.hint, "exit_code": error.exit_code}
    _write(f"failure-{os.environ.get('RANK', '0')}.json", failure)


def reach(update: int) -> None:
    """Write down that an update is done."""
    if FOLDER in os.environ:
        _write("reached.json", update)


def reached(folder: Path) -> int:
    """The last update that was done, 0 when there is none."""
    path = folder / "reached.json"
    return int(json.loads(path.read_text())) if path.exists() else 0


def clear(folder: Path) -> None:
    """Remove what earlier processes left."""
    for old in folder.glob("failure-*.json"):
        old.unlink()


def cause(folder: Path) -> MarGrpoError | None:
    """The error that stopped the processes, None when none of them could say."""
    failures = [json.loads(path.read_text()) for path in sorted(folder.glob("failure-*.json"))]
    for kind in _PRECEDENCE:
        for failure in failures:
            if failure["exit_code"] == kind:
                error = CLASSES.get(kind, MarGrpoError)
                return error(failure["what"], where=failure["where"], hint=failure["hint"])
    return None


def _write(name: str, content: object) -> None:
    path = Path(os.environ[FOLDER]) / name
    path.with_suffix(".part").write_text(json.dumps(content))
    os.replace(path.with_suffix(".part"), path)
