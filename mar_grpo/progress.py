"""What long work says while it runs: JSON lines for programs and log collectors, a live view on a terminal.

An event is a dict with `event` (step, progress, failure, note) and finite numbers and texts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

Event = Mapping[str, Any]


def emit(event: str, **fields: Any) -> None:
    """Say it on stdout, as one JSON line; numbers that are not finite are left out."""
    kept = {
        name: value for name, value in fields.items() if not (isinstance(value, float) and not math.isfinite(value))
    }
    print(json.dumps({"event": event} | kept, ensure_ascii=False), flush=True)


def parse(line: str) -> dict[str, Any] | None:
    """The event in a line of output, None when the line is something else."""
    if not line.lstrip().startswith('{"event":'):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


class View:
    """Shows events: a bar per piece of work on a terminal, the JSON lines themselves anywhere else."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        whole, rest = Column(no_wrap=True), Column(no_wrap=True, overflow="ellipsis", ratio=1)
        self._live = Progress(
            TextColumn(" … {task.description:<22}", table_column=whole),
            BarColumn(bar_width=16, table_column=whole),
            MofNCompleteColumn(table_column=whole),
            TimeElapsedColumn(table_column=whole),
            TextColumn("[dim]{task.fields[text]}", table_column=rest),
            console=self.console,
            transient=True,
            expand=True,
        )
        self._latest: dict[str, Any] = {}
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def show(self, event: Event) -> None:
        """One event. Failures are for whoever handles the exit code and are not shown here."""
        if not self.console.is_terminal:
            print(json.dumps(dict(event), ensure_ascii=False), file=self.console.file, flush=True)
        elif event["event"] == "progress":
            self._advance(str(event.get("step", "")), int(event["done"]), int(event["total"]), event)
        elif event["event"] == "step":
            self._step(str(event["step"]), str(event["state"]), event)
        elif event["event"] == "note":
            self.console.print(f"  {event['text']}", highlight=False, markup=False)

    def _advance(self, step: str, done: int, total: int, event: Event) -> None:
        if self._task is None:
            self._task = self._live.add_task(step, total=total, text="")
        self._latest |= event
        text = numbers(self._latest)
        self._live.update(self._task, description=step, completed=done, total=total, text=text)

    def _step(self, step: str, state: str, event: Event) -> None:
        if self._task is not None:
            self._live.remove_task(self._task)
            self._task = None
        self._latest = {}
        if state == "started":
            self._task = self._live.add_task(step, total=None, text="")
            return
        mark, style = {"done": ("✓", "green"), "reused": ("↺", "cyan")}.get(state, ("✗", "red"))
        took = f"{event['seconds']:7.1f} s" if state == "done" else "  earlier"
        line = Text.assemble((f" {mark} ", style), f"{step:<22}", (took if state != "failed" else " " * 9, "dim"))
        line.append(f"  {event.get('text', '')}")
        self.console.print(line)


def numbers(event: Event) -> str:
    """The numbers of a progress event in one short line."""
    shown = {name: value for name, value in event.items() if name not in ("event", "step", "done", "total")}
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in shown.items()
    )
