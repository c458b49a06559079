"""`mar-grpo plan`: whether a recipe fits in a GPU's memory, and what to change where it does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mar_grpo.config import Recipe
from mar_grpo.models.policy import Policy
from mar_grpo.training.memory import GIB, Estimate, Layout, Planner


def choose(recipe: Recipe, policy: Policy, *, gpus: int, memory_bytes: int) -> tuple[Estimate, str]:
    """The first layout that fits, tried from the recipe's own on, and a sentence that says what to change.

    The sentence is empty where the recipe fits as it is; where nothing fits the estimate is the smallest found.
    """
    planner = Planner(recipe, policy)
    training = recipe.training
    own = Layout(
        processes=gpus, micro_batch=training.micro_batch, parallel=training.parallel, precision=training.precision,
        checkpointing=training.activation_checkpointing,
    )  # fmt: skip
    tried: list[Estimate] = []
    for layout in _layouts(own):
        tried.append(planner.estimate(layout))
        if tried[-1].bytes <= memory_bytes:
            return tried[-1], "" if layout == own else f"It fits with {_changes(own, layout)}."
    least = min(tried, key=lambda each: each.bytes)
    largest = max(least.always, key=lambda name: least.always[name])
    return least, (
        f"Nothing fits: with {_changes(own, least.layout)} it still takes {least.bytes / GIB:.1f} GiB, the largest "
        f"part that always lives is {largest} ({least.always[largest] / GIB:.1f} GiB), the peak is in {least.phase}; "
        "use more GPUs, training.lora, or fewer scored AR steps."
    )


def _layouts(own: Layout) -> Iterator[Layout]:
    """From the least change to the largest: smaller micro-batches, then activations made again, then sharding."""
    for parallel in dict.fromkeys([own.parallel, "fsdp" if own.processes > 1 else own.parallel]):
        for checkpointing in dict.fromkeys([own.checkpointing, True]):
            size = own.micro_batch
            while size:
                yield replace(own, micro_batch=size, parallel=parallel, checkpointing=checkpointing)
                size //= 2


def _changes(own: Layout, layout: Layout) -> str:
    """Words for what differs."""
    names = {
        "micro_batch": "training.micro_batch",
        "parallel": "training.parallel",
        "checkpointing": "training.activation_checkpointing",
    }
    found = [
        f"{word}={getattr(layout, key)}" for key, word in names.items() if getattr(own, key) != getattr(layout, key)
    ]
    return ", ".join(found) or "the recipe's own settings"


def show(estimate: Estimate, advice: str, memory_bytes: int, console: Console, file: Path | None) -> None:
    """A table on a terminal; elsewhere one line of JSON, which also goes to `file`."""
    phases = {name: {"bytes": each.bytes, **each.parts} for name, each in estimate.phases.items()}
    content = json.dumps({
        "fits": estimate.bytes <= memory_bytes, "bytes": estimate.bytes, "memory_bytes": memory_bytes,
        "phase": estimate.phase, "layout": asdict(estimate.layout), "always": dict(estimate.always), "phases": phases,
        "advice": advice,
    }, sort_keys=True)  # fmt: skip
    if file:
        file.write_text(content + "\n", encoding="utf-8")
    if not console.is_terminal:
        print(content)
        return
    table = Table("part", "GiB")
    for name, size in estimate.always.items():
        table.add_row(name, f"{size / GIB:.2f}")
    table.add_section()
    for name, peak in estimate.phases.items():
        table.add_row(f"{name}{' (the peak)' if name == estimate.phase else ''}", f"{peak.bytes / GIB:.2f}")
    table.add_section()
    table.add_row("at the peak", f"{estimate.bytes / GIB:.2f} of {memory_bytes / GIB:.2f}")
    console.print(table)
    console.print(advice or "It fits as it is.")
