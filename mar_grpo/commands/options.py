"""Options that several commands share, and how a command is left when someone interrupts it."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import typer

RecipeOption = Annotated[str, typer.Option("--recipe", help="Name, path or URI of a recipe.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override, key.sub=value; may be repeated.")]
CheckpointOption = Annotated[str, typer.Option(help="package://NAME, path or URI of a folder or Checkpoint document.")]
WorkOption = Annotated[Path, typer.Option(help="Local folder for the store, runs, caches and logs.")]


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP unwind the stack, so that children and servers end; exit codes 130, 143 and 129."""

    def leave(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from what is finished", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
