"""SIGTERM and Ctrl-C while training: the update is finished or abandoned, the state saved, the process left in time."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import torch

from mar_grpo.errors import MarGrpoError, RetryableError, StoppedError


class Abandoned(BaseException):
    """The update takes too long for the grace period; nothing of it has reached the learner."""


class Stopping:
    """Context manager in which SIGTERM asks to stop with exit code 75, Ctrl-C with 130, and Ctrl-C again stops at once.

    From the first signal on, half of the grace period is for the update under way, which is then abandoned, and the
    rest for saving; at its end the process is left whatever it does. Use it in the main thread.

    Args:
        grace_seconds: from the signal to the end of the process.

    Attributes:
        code: the exit code that was asked for, 0 while nobody has.
        clean: whether an update is under way that has not changed the learner yet.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.grace_seconds, self.code, self.clean = grace_seconds, 0, False
        self._end: threading.Timer | None = None

    def __enter__(self) -> Stopping:
        handlers = {signal.SIGTERM: self._ask, signal.SIGINT: self._ask, signal.SIGALRM: self._abandon}
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self._end:
            self._end.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """An update that has begun to change parameters is not abandoned any more."""
        optimizer.register_step_pre_hook(self._dirty)

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """Around an update: until its first optimiser step it may be abandoned (Abandoned, also when a peer has left).

        A process that waits for another one learns of that one's end by an error of the connection.
        """
        self.clean = True
        try:
            yield
        except RuntimeError as error:
            if self.code and self.clean:
                raise Abandoned from error
            raise
        finally:
            self.clean = False

    def error(self, code: int, update: int) -> MarGrpoError:
        """What ends the run."""
        hint = "the state is saved; the same command goes on from it"
        if code == StoppedError.exit_code:
            return StoppedError("stopped by Ctrl-C", where=f"after update {update}", hint=hint)
        return RetryableError("stopped by SIGTERM", where=f"after update {update}", hint=hint)

    def _dirty(self, *_: object) -> None:
        self.clean = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.code:
            if number == signal.SIGINT:
                os._exit(StoppedError.exit_code)
            return
        self.code = StoppedError.exit_code if number == signal.SIGINT else RetryableError.exit_code
        signal.setitimer(signal.ITIMER_REAL, self.grace_seconds / 2)
        self._end = threading.Timer(self.grace_seconds, os._exit, [self.code])
        self._end.daemon = True
        self._end.start()

    def _abandon(self, number: int, frame: FrameType | None) -> None:
        if self.clean:
            raise Abandoned
