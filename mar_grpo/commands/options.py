"""Options that several commands share, and how a command is left when someone interrupts it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

RecipeOption = Annotated[str, typer.Option("--recipe", help="Name, path or URI of a recipe.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override, key.sub=value; may be repeated.")]
CheckpointOption = Annotated[str, typer.Option(help="package://NAME, path or URI of a folder or Checkpoint document.")]
WorkOption = Annotated[Path, typer.Option(help="Local folder for the store, runs, caches and logs.")]


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP unwind the stack, so that children save and end; exit codes 130, 75 and 129.

    Ctrl-C again ends them at once.
    """

    def leave(number: int, _: object) -> NoReturn:
        raise SystemExit(75 if number == signal.SIGTERM else 128 + number)

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        os.write(sys.stderr.fileno(), b"stopping; Ctrl-C again stops at once\n")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise KeyboardInterrupt

    handlers: dict[signal.Signals, Any] = {signal.SIGTERM: leave, signal.SIGHUP: leave, signal.SIGINT: interrupt}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from what is finished", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
