"""What a command prints at its end, and the small jobs behind it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from mar_grpo import steps
from mar_grpo.config import load_recipe
from mar_grpo.documents import DocumentRef, GateDecision, ScoreTable, TrainingRun, read_document
from mar_grpo.errors import InputError
from mar_grpo.progress import View
from mar_grpo.runs import Run
from mar_grpo.store import Store


def collect(run: Run, work: Path, *, with_checkpoint: bool) -> str:
    """Copy the page (and the trained checkpoint) of a finished run to `work/runs/RUN` and say what came of it."""
    from mar_grpo.models.checkpoint import fetch_checkpoint

    records = _records(run)
    recipe, folder = steps.recipe_of(run), work / "runs" / run.name
    page = run.store.get_file(f"{run.prefix}/report.html", folder / "report.html")
    tables = [read_document(records[f"benchmark_{label}"]["score_table"], ScoreTable) for label in ("before", "after")]
    was, now = (table.summary[recipe.gate.score].overall for table in tables)
    decision = read_document(records["promotion_gate"]["decision"], GateDecision)
    training = read_document(records["grpo_training"]["run"], TrainingRun)
    refused = [f"{rule.name} ({rule.detail})" for rule in decision.rules if not rule.passed]
    lines = {
        "Held-out accuracy": f"{steps.describe(was)} before, {steps.describe(now)} after, judge {recipe.gate.score}",
        "Training": f"{training.steps} updates in {training.seconds:.0f} s",
        "Gate": "promote" if decision.promote else f"do not promote: {'; '.join(refused)}",
        "Page": str(page),
        "Checkpoint": records["grpo_training"]["checkpoint"].uri,
    }
    if with_checkpoint:
        lines["Checkpoint"] = str(fetch_checkpoint(records["grpo_training"]["checkpoint"], folder / "checkpoint"))
    return "\n".join(f"{name + ':':<19}{value}" for name, value in lines.items())


def rebuild_report(run: Run, out: Path) -> Path:
    """Make the page of a finished run from what it left in the store."""
    records = _records(run)
    steps.report(
        run,
        records["promotion_gate"]["decision"],
        records["grpo_training"]["run"],
        (records["benchmark_before"]["score_table"], records["benchmark_after"]["score_table"]),
        (records["reward_scoring"]["before"], records["reward_scoring"]["after"]),
    )
    return run.store.get_file(f"{run.prefix}/report.html", out)


def evaluation_table(checkpoint: str, recipe: str, overrides: Sequence[str], work: Path) -> str:
    """Accuracy of a checkpoint on the recipe's held-out prompts: a line per judge and tag."""
    from mar_grpo.data.build import prompt_records
    from mar_grpo.evaluation.benchmarks import Judge, accuracy_table, evaluate, judged_by, summarise
    from mar_grpo.rewards.heatmap import HeatmapJudge
    from mar_grpo.rewards.templates import TemplateJudge

    loaded = load_recipe(recipe, overrides)
    judges: list[Judge] = [TemplateJudge(), HeatmapJudge()]
    with View(Console(stderr=True)) as view:
        evaluation = evaluate(
            _policy(checkpoint, work),
            prompt_records(loaded.data, "evaluation"),
            sampling=loaded.evaluation_sampling,
            config=loaded.evaluation,
            scorer=judged_by(judges),
            progress=lambda done, total: view.show(
                {"event": "progress", "step": "evaluate", "done": done, "total": total}
            ),
        )
    summary = summarise(evaluation.rows)
    lines = [f"{'judge':<20}{'tag':<16}{'n':>6}{'mean':>8}{'se':>8}"]
    for name in (f"{judge.name}/strict" for judge in judges):
        for tag, score in accuracy_table(summary, name):
            error = "" if score.standard_error is None else f"{score.standard_error:.3f}"
            lines.append(f"{name:<20}{tag:<16}{score.n:>6}{score.mean:>8.3f}{error:>8}")
    return "\n".join([*lines, f"{evaluation.images_per_second:.1f} pictures a second"])


def _policy(checkpoint: str, work: Path) -> Any:
    from mar_grpo.models.checkpoint import fetch_checkpoint, load_policy

    policy = load_policy(fetch_checkpoint(checkpoint, work / "checkpoints"))
    policy.keep_features(Store(str(work.resolve())))
    return policy


def _records(run: Run) -> dict[str, dict[str, DocumentRef]]:
    records = {
        name: {key: DocumentRef.model_validate(reference) for key, reference in record["outputs"].items()}
        for name, record in run.records()
    }
    needed = ("benchmark_before", "grpo_training", "reward_scoring", "benchmark_after", "promotion_gate")
    missing = [name for name in needed if name not in records]
    if missing:
        raise InputError(f"the run has not finished {missing[0]}", where=run.uri, hint="run it to its end first")
    return records
