"""The steps of the pipeline, in order. Each takes and returns references to documents and is done once (runs.py).

Imports of torch wait until a step needs it: gate, promotion and exit run in seconds.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mar_grpo.documents import (
    DocumentRef,
    GateDecision,
    PromptSet,
    ScoreTable,
    TrainingRun,
    read_document,
    read_rows,
    write_document,
)
from mar_grpo.errors import InputError, MarGrpoError
from mar_grpo.progress import emit
from mar_grpo.runs import Outputs, Run
from mar_grpo.store import FileEntry, Store, read_uri

if TYPE_CHECKING:
    from mar_grpo.config import Recipe
    from mar_grpo.data.prompts import PromptRecord
    from mar_grpo.evaluation.benchmarks import Evaluation

REWARD_PROMPTS = 120
"""Training prompts whose pictures are scored before and after with the training reward."""
CHAMPION = "champion.json"
RUN_URI = re.compile(r"(file|s3)://\S+/runs/[a-z0-9-]+/?")


def validate_inputs(recipe: str, store: str, *, overrides: Sequence[str] = (), fresh: bool = False) -> Run:
    """Check all that can be wrong before anything is made, and open the run.

    Args:
        recipe: name, path, URI or JSON text; or the URI of a run, which then goes on with the overrides.
        store: root URI; a bucket must exist, a folder is made.
        fresh: delete what an earlier run of the same recipe left.

    Raises:
        InputError: what is wrong, and where.
    """
    from mar_grpo.models.checkpoint import fetch_checkpoint, load_policy
    from mar_grpo.rewards.mix import RewardMix
    from mar_grpo.rollout import schedule_of
    from mar_grpo.training.resume import refuse_changes

    run, loaded = locate_run(recipe, store, overrides)
    if run.store.scheme == "file":
        run.store.make_root()
    run.store.preflight()
    if fresh:
        run.delete()
    emit("step", step="validate_inputs", state="started")
    started = time.monotonic()
    if run.store.exists(f"{run.prefix}/training/state/LATEST"):
        refuse_changes(json.loads(run.recipe_text()), loaded.model_dump(mode="json"), where=run.uri)
    RewardMix(loaded.rewards)
    policy = load_policy(
        fetch_checkpoint(loaded.checkpoint.uri, run.work() / "checkpoints", sha256=loaded.checkpoint.sha256)
    )
    for field in ("sampling", "evaluation_sampling"):
        sampling = getattr(loaded, field)
        if sampling.ar_steps > policy.num_tokens:
            what = f"{sampling.ar_steps} AR steps for the checkpoint's {policy.num_tokens} tokens"
            raise InputError(what, where=f"{field}.ar_steps", hint=f"use at most {policy.num_tokens}")
        schedule_of(policy, sampling)
    run.store.write_bytes(f"{run.prefix}/recipe.json", loaded.model_dump_json().encode())
    run.store.delete(f"{run.prefix}/failure.json")
    emit("step", step="validate_inputs", state="done", seconds=time.monotonic() - started, text=run.uri)
    return run


def locate_run(recipe: str, store: str, overrides: Sequence[str] = ()) -> tuple[Run, Recipe]:
    """The run of a recipe in a store: equal recipes (seed included) are one run.

    The URI of a run as the recipe is that run, with its own recipe and the overrides.
    """
    from mar_grpo.config import load_recipe

    if RUN_URI.fullmatch(recipe):
        run = Run.open(recipe)
        return run, load_recipe(run.recipe_text(), overrides)
    loaded = load_recipe(recipe, overrides)
    return Run(Store(store), f"{loaded.name}-seed{loaded.seed}-{loaded.digest[:8]}"), loaded


def prompt_data(run: Run) -> Outputs:
    """Training and held-out prompts as two prompt sets: `train`, `evaluation`."""
    from mar_grpo.data.build import EMOJI_SOURCE, build_prompt_set

    config = recipe_of(run).data
    files = [source for source in (config.train, config.evaluation) if source != EMOJI_SOURCE]
    contents = [hashlib.sha256(read_uri(source)).hexdigest() for source in files]

    def make() -> tuple[Outputs, str]:
        train = build_prompt_set(run.store, f"{run.prefix}/prompts/train", config, "train")
        held_out = build_prompt_set(run.store, f"{run.prefix}/prompts/evaluation", config, "evaluation")
        outputs = {
            "train": write_document(run.store, f"{run.prefix}/prompts/train.json", train),
            "evaluation": write_document(run.store, f"{run.prefix}/prompts/evaluation.json", held_out),
        }
        return outputs, f"{train.samples} training prompts, {held_out.samples} held out"

    return run.step("prompt_data", {"data": config.model_dump(mode="json"), "files": contents}, make)


def sft_checkpoint(run: Run) -> Outputs:
    """The checkpoint training starts from, in the store: `checkpoint`."""
    from mar_grpo.models.checkpoint import fetch_checkpoint, folder_digest, publish_checkpoint

    config = recipe_of(run).checkpoint
    folder = fetch_checkpoint(config.uri, run.work() / "checkpoints", sha256=config.sha256)

    def make() -> tuple[Outputs, str]:
        published = publish_checkpoint(folder, run.store, f"{run.prefix}/sft_checkpoint", step=0)
        return {"checkpoint": published}, f"{config.uri}, {published.sha256[:12]}"

    return run.step("sft_checkpoint", {"folder": folder_digest(folder)}, make)


def benchmark_evaluation(run: Run, label: str, checkpoint: DocumentRef, prompts: DocumentRef) -> Outputs:
    """Held-out prompts drawn and judged: `score_table`. `label` is before or after; both see the same noise."""
    from mar_grpo.evaluation.benchmarks import accuracy_table, judged_by, publish_evaluation
    from mar_grpo.rewards.heatmap import HeatmapJudge
    from mar_grpo.rewards.templates import TemplateJudge

    recipe, name = recipe_of(run), f"benchmark_{label}"

    def make() -> tuple[Outputs, str]:
        judges = judged_by([TemplateJudge(), HeatmapJudge()])
        evaluation = _drawn(run, name, checkpoint, _distinct(prompts), judges)
        reference, table = publish_evaluation(
            run.store,
            f"{run.prefix}/evaluation/{label}",
            evaluation,
            checkpoint=checkpoint.sha256,
            prompt_set=prompts.sha256,
            sampling=recipe.evaluation_sampling,
            config=recipe.evaluation,
        )
        score = accuracy_table(table.summary, recipe.gate.score)[-1][1]
        return {"score_table": reference}, f"{recipe.gate.score} {describe(score)}"

    return run.step(name, _drawing(recipe) | {"checkpoint": checkpoint.sha256, "prompts": prompts.sha256}, make)


def grpo_training(run: Run, checkpoint: DocumentRef, prompts: DocumentRef, evaluation: DocumentRef) -> Outputs:
    """MAR-GRPO on this machine: `run` (TrainingRun) and `checkpoint`. Goes on from the last saved state."""
    from mar_grpo.launch.local import run_workers

    recipe = recipe_of(run)
    given = {"checkpoint": checkpoint, "prompts": prompts, "evaluation": evaluation}

    def make() -> tuple[Outputs, str]:
        arguments = ["train", run.uri, "--folder", str(run.work() / "training")]
        for name, reference in given.items():
            arguments += [f"--{name}", f"{reference.uri}#{reference.sha256}"]
        run_workers(
            arguments,
            count=recipe.training.processes,
            threads=recipe.training.threads,
            folder=run.work() / "launch",
            max_relaunches=recipe.training.max_relaunches,
            grace_seconds=recipe.training.stop_grace_seconds,
        )
        return finished_training(run)

    inputs = {"recipe": recipe.digest} | {name: reference.sha256 for name, reference in given.items()}
    return run.step("grpo_training", inputs, make)


def finished_training(run: Run) -> tuple[Outputs, str]:
    """What a completed training left in the store, and a line about it."""
    uri = run.store.uri(f"{run.prefix}/training/run.json")
    reference = DocumentRef(uri=uri, sha256=hashlib.sha256(read_uri(uri)).hexdigest())
    document = read_document(reference, TrainingRun)
    if document.checkpoint is None or document.outcome != "completed":
        raise MarGrpoError(f"training ended as {document.outcome}", where=uri, hint=str(document.failure or ""))
    pace = f", {document.seconds_per_step:.1f} s each" if document.seconds_per_step else ""
    return {"run": reference, "checkpoint": document.checkpoint}, f"{document.steps} updates{pace}"


def reward_scoring(run: Run, before: DocumentRef, after: DocumentRef, prompts: DocumentRef) -> Outputs:
    """The training reward of both checkpoints on training prompts: `before`, `after` (score tables).

    Says whether training did what it was told. The gate never looks at it.
    """
    from mar_grpo.evaluation.benchmarks import publish_evaluation
    from mar_grpo.rewards.mix import RewardMix

    recipe = recipe_of(run)

    def make() -> tuple[Outputs, str]:
        outputs: Outputs = {}
        lines: dict[str, list[float]] = {name: [] for name in recipe.rewards.components}
        scorer, records = RewardMix(recipe.rewards).compute, _distinct(prompts)[:REWARD_PROMPTS]
        for label, checkpoint in (("before", before), ("after", after)):
            outputs[label], table = publish_evaluation(
                run.store,
                f"{run.prefix}/rewards/{label}",
                _drawn(run, "reward_scoring", checkpoint, records, scorer),
                checkpoint=checkpoint.sha256,
                prompt_set=prompts.sha256,
                sampling=recipe.evaluation_sampling,
                config=recipe.evaluation,
            )
            for name, means in lines.items():
                means.append(table.summary[name].overall.mean)
        return outputs, ", ".join(f"{name} {was:.3f} -> {now:.3f}" for name, (was, now) in lines.items())

    inputs = {"rewards": recipe.rewards.model_dump(mode="json"), "prompts": prompts.sha256, "count": REWARD_PROMPTS}
    digests = {"before": before.sha256, "after": after.sha256}
    return run.step("reward_scoring", _drawing(recipe) | inputs | digests, make)


def promotion_gate(run: Run, before: DocumentRef, after: DocumentRef) -> tuple[DocumentRef, GateDecision]:
    """Whether the trained checkpoint may replace the one before, by the held-out judge."""
    from mar_grpo.evaluation.gate import decide

    config = recipe_of(run).gate

    def make() -> tuple[Outputs, str]:
        tables = [read_document(reference, ScoreTable) for reference in (before, after)]
        first, second = (read_rows(table) for table in tables)
        made = decide(first, second, config, candidate=tables[1].checkpoint, incumbent=tables[0].checkpoint)
        failed = [rule.name for rule in made.rules if not rule.passed]
        text = "promote" if made.promote else f"refused by {', '.join(failed)}"
        return {"decision": write_document(run.store, f"{run.prefix}/gate.json", made)}, text

    inputs = {"gate": config.model_dump(mode="json"), "before": before.sha256, "after": after.sha256}
    reference = run.step("promotion_gate", inputs, make)["decision"]
    return reference, read_document(reference, GateDecision)


def promote(run: Run, decision: DocumentRef, checkpoint: DocumentRef) -> FileEntry:
    """Point `champion.json` at the trained checkpoint, after writing down who was champion before.

    Raises:
        InputError: the gate refused, or decided about another checkpoint.
    """
    verdict = read_document(decision, GateDecision)
    if not verdict.promote or verdict.candidate != checkpoint.sha256:
        raise InputError("the gate did not promote this checkpoint", where=decision.uri)

    def make() -> tuple[Outputs, str]:
        store = run.store
        target = store.entry(store.key(checkpoint.uri))
        last = store.read_json(CHAMPION) if store.exists(CHAMPION) else None
        entry = {"checkpoint": checkpoint.model_dump(), "decision": decision.model_dump(), "run": run.uri}
        if last is None or last["sha256"] != target.sha256:
            store.write_json(f"champions/{checkpoint.sha256}.json", entry | {"replaces": last})
        store.write_pointer(CHAMPION, target)
        return {"checkpoint": checkpoint, "decision": decision}, store.uri(CHAMPION)

    run.step("promote", {"decision": decision.sha256, "checkpoint": checkpoint.sha256}, make)
    return run.store.read_pointer(CHAMPION)


def report(
    run: Run, decision: DocumentRef, training: DocumentRef, tables: tuple[DocumentRef, DocumentRef],
    rewards: tuple[DocumentRef, DocumentRef], *, command: str = "",
) -> FileEntry:  # fmt: skip
    """The page: `runs/RUN/report.html` in the store.

    Args:
        tables, rewards: score tables before and after, on held-out and on training prompts.
        command: what to type to get the same run.
    """
    from mar_grpo.evaluation.benchmarks import load_images
    from mar_grpo.evaluation.report import ReportInputs, StepTime, build_report, shown_prompts

    emit("step", step="report", state="started")
    started = time.monotonic()
    recipe, trained = recipe_of(run), read_document(training, TrainingRun)
    before, after = (read_document(reference, ScoreTable) for reference in tables)
    rows = [read_rows(table) for table in (before, after)]
    shown = {prompt for prompts in shown_prompts(rows[0]).values() for prompt in prompts}
    images = [
        load_images(table, [row for row in some if row.prompt_id in shown])
        for table, some in zip((before, after), rows, strict=True)
    ]
    metrics = [json.loads(line) for line in read_uri(trained.metrics_uri).splitlines()]
    first, second = (read_rows(read_document(reference, ScoreTable)) for reference in rewards)
    page = build_report(
        ReportInputs(
            name=run.name,
            decision=read_document(decision, GateDecision),
            before=before,
            after=after,
            before_rows=rows[0],
            after_rows=rows[1],
            before_images=images[0],
            after_images=images[1],
            run=trained,
            metrics=metrics,
            score=recipe.gate.score,
            reward_rows=(first, second),
            steps=[StepTime(name, record["seconds"]) for name, record in run.records()],
            places={"after": trained.checkpoint.uri if trained.checkpoint else "", "run": run.uri},
            command=command,
            finished=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        )
    )
    entry = run.store.write_bytes(f"{run.prefix}/report.html", page.encode())
    emit("step", step="report", state="done", seconds=time.monotonic() - started, text=entry.uri)
    return entry


def finish(recipe: str, store: str, overrides: Sequence[str], state: str, message: str) -> dict[str, Any]:
    """Runs at the end of every pipeline, whatever happened: writes `runs/RUN/outcome.json`.

    Local files of a run that succeeded are removed; the logs of one that failed stay.
    """
    run, _ = locate_run(recipe, store, overrides)
    failure = f"{run.prefix}/failure.json"
    outcome: dict[str, Any] = {"state": state, "message": message, "finished": time.time()}
    if run.store.exists(failure):
        outcome["failure"] = run.store.read_json(failure)
    run.store.write_json(f"{run.prefix}/outcome.json", outcome)
    if state == "SUCCEEDED":
        shutil.rmtree(run.work(), ignore_errors=True)
    return outcome


# --- shared ------------------------------------------------------------------------------------------------------


def recipe_of(run: Run) -> Recipe:
    """The recipe the run was opened with."""
    from mar_grpo.config import load_recipe

    return load_recipe(run.recipe_text())


def means_of(table: DocumentRef) -> dict[str, float]:
    """Mean of every score of a score table, over all and per tag ("score/tag")."""
    means = {}
    for name, summary in read_document(table, ScoreTable).summary.items():
        means[name] = summary.overall.mean
        means |= {f"{name}/{tag}": score.mean for tag, score in summary.by_tag.items()}
    return means


def last_update(training: DocumentRef) -> dict[str, float]:
    """Numbers of the last update of a training run."""
    lines = read_uri(read_document(training, TrainingRun).metrics_uri).splitlines()
    return json.loads(lines[-1]) if lines else {}


def describe(score: Any) -> str:
    """A mean with its standard error and n, as text."""
    error = "" if score.standard_error is None else f" ± {score.standard_error:.3f}"
    return f"{score.mean:.3f}{error} (n = {score.n})"


def _distinct(prompts: DocumentRef) -> list[PromptRecord]:
    from mar_grpo.data.shards import read_shards

    samples = read_shards(read_document(prompts, PromptSet))
    return list({sample.record.prompt_id: sample.record for sample in samples}.values())


def _drawing(recipe: Recipe) -> dict[str, Any]:
    parts = (recipe.evaluation, recipe.evaluation_sampling)
    return {"evaluation": parts[0].model_dump(mode="json"), "sampling": parts[1].model_dump(mode="json")}


def _drawn(
    run: Run, step: str, checkpoint: DocumentRef, records: list[PromptRecord], scorer: Callable[..., Any]
) -> Evaluation:
    from mar_grpo.evaluation.benchmarks import evaluate
    from mar_grpo.models.checkpoint import fetch_checkpoint, load_policy

    recipe = recipe_of(run)
    policy = load_policy(fetch_checkpoint(checkpoint, run.work() / "checkpoints"))
    policy.keep_features(run.store)
    return evaluate(
        policy,
        records,
        sampling=recipe.evaluation_sampling,
        config=recipe.evaluation,
        scorer=scorer,
        progress=lambda done, total: emit("progress", step=step, done=done, total=total),
    )
