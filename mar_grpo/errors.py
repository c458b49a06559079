"""Errors a user can meet. Each knows its exit code and says what is wrong, where, and what to do."""

from __future__ import annotations


class MarGrpoError(Exception):
    """An error with one clear message.

    Args:
        what: what is wrong, one sentence without a full stop.
        where: file, shard, sample or field.
        hint: what to do about it.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__(what, where, hint)

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        advice = f": {self.hint}" if self.hint else ""
        return f"{self.what}{place}{advice}"


class InputError(MarGrpoError):
    """The input or the recipe is wrong. The same command will fail again (exit code 2)."""

    exit_code = 2


class UnhealthyError(MarGrpoError):
    """Training went wrong: not finite, collapsed, ranks differ. Do not retry unchanged (exit code 3)."""

    exit_code = 3


class RetryableError(MarGrpoError):
    """Something outside failed (store, network, a taken port). Try again later (exit code 75)."""

    exit_code = 75


class StoppedError(MarGrpoError):
    """Someone pressed Ctrl-C; what was done is saved (exit code 130)."""

    exit_code = 130
