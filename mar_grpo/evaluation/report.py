"""One page that says what was run, what came of it, and whether it was promoted. It needs nothing but itself."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray

from mar_grpo.documents import GateDecision, GateRule, ScoreRow, ScoreTable, TrainingRun
from mar_grpo.evaluation.charts import Chart, Series
from mar_grpo.evaluation.pictures import data_uri
from mar_grpo.evaluation.statistics import Estimate, clustered_mean, paired_difference
from mar_grpo.evaluation.words import (
    MINUS,
    NARROW,
    duration,
    kind_title,
    number,
    percent,
    points,
    signed,
    step_title,
    tag_order,
)

PACKAGES = ("mar-grpo", "torch", "transformers", "diffusers", "numpy", "webdataset", "kfp")
TONES = ("first", "second", "third")


@dataclass(frozen=True)
class StepTime:
    """How long one step of the pipeline took."""

    name: str
    seconds: float


@dataclass(frozen=True)
class ReportInputs:
    """Everything the page shows. Rows of both tables hold the same images (the gate has checked it)."""

    name: str
    """Name of the run."""
    decision: GateDecision
    before: ScoreTable
    after: ScoreTable
    before_rows: Sequence[ScoreRow]
    after_rows: Sequence[ScoreRow]
    before_images: Mapping[tuple[str, int], NDArray[np.uint8]]
    """(prompt id, sample) -> uint8 [H, W, 3]; at least those of `shown_prompts`."""
    after_images: Mapping[tuple[str, int], NDArray[np.uint8]]
    run: TrainingRun
    metrics: Sequence[Mapping[str, Any]]
    """Lines of metrics.jsonl, one an update."""
    score: str = "templates/strict"
    """The score the gate decided on."""
    reward_rows: tuple[Sequence[ScoreRow], Sequence[ScoreRow]] | None = None
    """The training reward of pictures of training prompts, before and after."""
    steps: Sequence[StepTime] = ()
    places: Mapping[str, str] = field(default_factory=dict)
    """Where things are: label -> URI."""
    command: str = ""
    """What to type to get the same run."""
    finished: str = ""
    """Date and time, as text."""


# --- parts of the page -------------------------------------------------------------------------------------------


def shown_prompts(rows: Sequence[ScoreRow], per_tag: int = 2) -> dict[str, list[str]]:
    """Prompt ids the page shows, by tag: the first by a hash of the id, so that no result had a say in the choice."""
    chosen: dict[str, list[str]] = {}
    for prompt_id, tag in sorted(
        {(row.prompt_id, row.tag) for row in rows}, key=lambda p: hashlib.sha256(p[0].encode()).digest()
    ):
        if len(chosen.setdefault(tag, [])) < per_tag:
            chosen[tag].append(prompt_id)
    return {tag: chosen[tag] for tag in sorted(chosen, key=tag_order)}


def _pictures(inputs: ReportInputs) -> list[dict[str, Any]]:
    before = {(row.prompt_id, row.sample): row for row in inputs.before_rows}
    after = {(row.prompt_id, row.sample): row for row in inputs.after_rows}

    def shot(row: ScoreRow, images: Mapping[tuple[str, int], NDArray[np.uint8]]) -> dict[str, Any]:
        image = images[row.prompt_id, row.sample]
        return {
            "uri": data_uri(image),
            "right": row.scores[inputs.score] > 0.5,
            "size": (image.shape[1], image.shape[0]),
        }

    groups = []
    for tag, prompt_ids in shown_prompts(inputs.before_rows).items():
        cards = []
        for prompt_id in prompt_ids:
            keys = sorted(key for key in before if key[0] == prompt_id)[:2]
            pairs = [(shot(before[key], inputs.before_images), shot(after[key], inputs.after_images)) for key in keys]
            cards.append({"prompt": before[keys[0]].prompt, "pairs": pairs})
        groups.append({"kind": kind_title(tag), "cards": cards})
    return groups


def _compare(
    before: Sequence[ScoreRow], after: Sequence[ScoreRow], score: str, tag: str | None = None
) -> dict[str, Estimate]:
    """Before, after and paired change of one score, over all images or those of one tag."""
    was = {(row.prompt_id, row.sample): row.scores[score] for row in before if tag in (None, row.tag)}
    now = {(row.prompt_id, row.sample): row.scores[score] for row in after if tag in (None, row.tag)}
    prompts, first, second = [key[0] for key in was], list(was.values()), [now[key] for key in was]
    return {
        "before": clustered_mean(first, prompts),
        "after": clustered_mean(second, prompts),
        "change": paired_difference(first, second, prompts),
    }


def _scores(inputs: ReportInputs) -> list[dict[str, Any]]:
    """Every score of the held-out pictures, then the training reward on training prompts."""
    trained_on = set(inputs.run.recipe.get("rewards", {}).get("components", {}))
    tables = [("held-out prompts", inputs.before_rows, inputs.after_rows)]
    if inputs.reward_rows:
        tables.append(("training prompts", *inputs.reward_rows))
    lines = []
    for where, before, after in tables:
        for name in sorted(n for n in before[0].scores if n in after[0].scores and not n.startswith("picture/")):
            role = "decides" if name == inputs.score else "trained on" if name in trained_on else "watched"
            line = {"name": name, "where": where, "role": role, "percent": name.endswith("/strict")}
            lines.append(line | _compare(before, after, name))
    return lines


RULES = {
    "enough_prompts": ("Number of prompts", "count", "at least {}"),
    "accuracy_rose": ("Rise in accuracy", "points", "more than {}"),
    "tag_held": ("Change in {}", "points", "at least {}"),
    "diversity_kept": ("Diversity kept", "percent", "at least {}"),
    "not_degenerate": ("Blank or burnt pictures", "percent", "at most {}"),
    "ordinary": ("Unusual {}", "percent", "at most {}"),
}
"""Title, how numbers are written, and how the threshold reads, by the first part of a rule's name."""


def _rule(rule: GateRule) -> dict[str, Any]:
    kind, _, detail = rule.name.partition("/")
    title, style, needed = RULES[kind]
    write = {"points": lambda v: f"{points(v)} points", "percent": percent}.get(style, "{:.0f}".format)
    measured, threshold = ("unknown" if v is None else write(v) for v in (rule.measured, rule.threshold))
    what = kind_title(detail).lower() if kind == "tag_held" else detail.replace("_", " ")
    return {
        "title": title.format(what),
        "measured": measured,
        "threshold": needed.format(threshold),
        "detail": rule.detail,
        "passed": rule.passed,
    }


def software_versions() -> dict[str, str]:
    """Python and the packages that can change a number."""
    found = {"python": platform.python_version()}
    installed = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
    return found | {name: importlib.metadata.version(name) for name in PACKAGES if name in installed}


def flatten(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as (dotted key, text)."""
    rows: list[tuple[str, str]] = []
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            rows += flatten(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", "none" if value is None else str(value)))
    return rows


CURVES = (
    ("Training reward", "Mean over the images of an update", "reward", "reward/", False),
    ("Reward spread", "Standard deviation within a group: what there is to learn from", "spread", "reward_std/", False),
    ("Live groups", "Prompts whose images did not all get the same reward", "share of prompts", "live_groups", True),
    ("Distance from the start", "Gaussian KL to the checkpoint it started from", "nats an element", "kl", False),
    ("Gradient norm", "Before clipping", "norm", "gradient_norm", False),
)
"""Title, note, unit, metric and whether in per cent; a metric that ends with / stands for all that start so."""


def _curves(inputs: ReportInputs, metric: str) -> list[tuple[str, tuple[tuple[float, float], ...]]]:
    """(name, points) of each metric that is `metric` or, if that ends with /, starts so."""
    lines = [line for line in inputs.metrics if "update" in line]
    keys = {k for line in lines for k in line if k == metric or (metric[-1] == "/" and k.startswith(metric))}
    return [
        (key.removeprefix(metric), tuple((line["update"], line[key]) for line in lines if key in line))
        for key in sorted(keys)
    ]


def _charts(inputs: ReportInputs, accuracy: dict[str, Estimate]) -> list[Chart]:
    """Held-out accuracy, then every curve of CURVES that the metrics hold at least two points of."""
    ends = accuracy["before"], accuracy["after"]
    full = ((0, ends[0].mean), (max(inputs.run.steps, 1), ends[1].mean))
    tracks = [Series("full evaluation", full, "first", tuple(end.standard_error or 0.0 for end in ends))]
    tracks += [Series("fewer prompts", looks, "second") for _, looks in _curves(inputs, f"held_out/{inputs.score}")]
    note = "By the judge it never trains on; bars: one standard error"
    charts = [Chart("Held-out accuracy", note, "update", "pictures exactly right", tuple(tracks), percent=True)]
    for title, note, unit, metric, in_percent in CURVES:
        found = [(name, points) for name, points in _curves(inputs, metric) if len(points) > 1]
        drawn = tuple(Series(name, points, tone) for (name, points), tone in zip(found, TONES, strict=False))
        if drawn:
            charts.append(Chart(title, note, "update", unit, drawn, in_percent))
    return charts


def _hacked(inputs: ReportInputs, change: Estimate) -> str:
    """A sentence for the case that the training reward rose (last third over first third) and accuracy did not."""
    if change.above(0, 2):
        return ""
    for _, curve in _curves(inputs, "reward/"):
        third = len(curve) // 3
        if third < 2:
            continue
        first, last = [y for _, y in curve[:third]], [y for _, y in curve[-third:]]
        error = ((np.var(first, ddof=1) + np.var(last, ddof=1)) / third) ** 0.5
        if np.mean(last) - np.mean(first) > 2 * error:
            rise = f"from {np.mean(first):.2f} to {np.mean(last):.2f}"
            return f" The training reward rose {rise} meanwhile, a gain the held-out judge does not see."
    return ""


# --- the page ----------------------------------------------------------------------------------------------------


def _lede(inputs: ReportInputs, accuracy: dict[str, Estimate], rules: list[dict[str, Any]]) -> str:
    """The result in two sentences."""
    before, after, change = accuracy["before"], accuracy["after"], accuracy["change"]
    sentence = f"After training, {percent(after.mean)} of the held-out pictures show exactly what was asked"
    if change.mean:
        way = "up" if change.mean > 0 else "down"
        sentence += f", {way} from {percent(before.mean)}: a change of {points(change.mean)} points"
        if change.standard_error:
            sentence += f", {abs(change.mean) / change.standard_error:.1f} times its standard error"
    else:
        sentence += ", as many as before"
    sentence += "." + _hacked(inputs, change)
    failed = sum(not rule["passed"] for rule in rules)
    if inputs.decision.promote:
        return f"{sentence} All {len(rules)} rules of the gate passed, and the trained checkpoint is the new champion."
    return f"{sentence} {failed} of the gate’s {len(rules)} rules did not pass, so the checkpoint from before stays."


def _figures(inputs: ReportInputs, accuracy: dict[str, Estimate]) -> list[dict[str, str]]:
    """The four numbers under the verdict."""
    change = accuracy["change"]
    now = {(r.prompt_id, r.sample): r.scores[inputs.score] > 0.5 for r in inputs.after_rows}
    was = {(r.prompt_id, r.sample): r.scores[inputs.score] > 0.5 for r in inputs.before_rows}
    gained, lost = sum(now[k] and not was[k] for k in was), sum(was[k] and not now[k] for k in was)
    kept = next(rule for rule in inputs.decision.rules if rule.name == "diversity_kept")
    errors = [f"± {points(e.standard_error or 0, sign=False)}" for e in (accuracy["before"], accuracy["after"])]
    return [
        {
            "label": "Strict accuracy, held-out judge",
            "was": percent(accuracy["before"].mean),
            "value": percent(accuracy["after"].mean),
            "note": f"{errors[0]} before, {errors[1]} after; {change.n} images each",
        },
        {
            "label": "Change, same noise",
            "value": f"{points(change.mean)} points",
            "note": f"standard error {points(change.standard_error or 0, sign=False)}, clustered by prompt",
        },
        {
            "label": "Verdicts that turned",
            "value": f"+{gained} / {MINUS}{lost}",
            "note": f"{gained} wrong to right, {lost} right to wrong, of {change.n}",
        },
        {
            "label": "Diversity within a prompt",
            "value": "unknown" if kept.measured is None else percent(kept.measured),
            "note": f"of what it was before; {percent(kept.threshold or 0)} must be left",
        },
    ]


def _kicker(inputs: ReportInputs) -> list[str]:
    seed, seconds = inputs.run.recipe.get("seed"), sum(step.seconds for step in inputs.steps)
    parts = [f"seed {seed}" if seed is not None else "", duration(seconds) if seconds else "", inputs.finished]
    return [part for part in parts if part]


def _facts(inputs: ReportInputs) -> list[tuple[str, str, str]]:
    """(label, value, digest) of what went in and came out."""
    run, places = inputs.run, dict(inputs.places)
    prompts = len({row.prompt_id for row in inputs.before_rows})
    pace = f", {run.seconds_per_step:.1f}{NARROW}s each" if run.seconds_per_step else ""
    return [
        ("Recipe", inputs.name, run.recipe_digest),
        ("Code", run.code_version, ""),
        ("Checkpoint before", places.pop("before", ""), inputs.before.checkpoint),
        ("Checkpoint after", places.pop("after", ""), inputs.after.checkpoint),
        ("Held-out prompts", places.pop("prompts", ""), inputs.before.prompt_set),
        ("Training", f"{run.steps} updates in {duration(run.seconds)}{pace}; {run.outcome}", ""),
        ("Evaluation", f"{len(inputs.before_rows)} pictures of {prompts} prompts, each before and after", ""),
        ("Metrics", run.metrics_uri, ""),
        *((label[:1].upper() + label[1:], uri, "") for label, uri in places.items()),
    ]


def build_report(inputs: ReportInputs) -> str:
    """The page as HTML: one file, no script, nothing loaded from elsewhere, light and dark, desktop and phone.

    Raises:
        InputError: a picture of `shown_prompts` is missing.
    """
    compare = functools.partial(_compare, inputs.before_rows, inputs.after_rows, inputs.score)
    accuracy = compare()
    rules = [_rule(rule) for rule in inputs.decision.rules]
    tags = sorted({row.tag for row in inputs.before_rows}, key=tag_order)
    longest = max((step.seconds for step in inputs.steps), default=0.0) or 1.0
    page = {
        "name": inputs.name,
        "promoted": inputs.decision.promote,
        "headline": "Promoted" if inputs.decision.promote else "Refused",
        "kicker": _kicker(inputs),
        "lede": _lede(inputs, accuracy, rules),
        "failed": [rule for rule in rules if not rule["passed"]],
        "rules": rules,
        "figures": _figures(inputs, accuracy),
        "pictures": _pictures(inputs),
        "kinds": [{"kind": kind_title(tag), **compare(tag=tag)} for tag in tags]
        + [{"kind": "All", "all": True, **accuracy}],
        "scores": _scores(inputs),
        "charts": _charts(inputs, accuracy),
        "steps": [
            {"title": step_title(step.name), "seconds": step.seconds, "share": step.seconds / longest}
            for step in inputs.steps
        ],
        "update_seconds": inputs.run.seconds_per_step,
        "total_seconds": sum(step.seconds for step in inputs.steps),
        "facts": _facts(inputs),
        "command": inputs.command,
        "settings": flatten(inputs.run.recipe),
        "versions": sorted(software_versions().items()),
    }
    return page_templates().get_template("report.html.j2").render(page=page)


def page_templates() -> jinja2.Environment:
    """The pages' templates, with words.py as filters."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mar_grpo.evaluation"),
        autoescape=jinja2.select_autoescape(["html", "html.j2"]),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "percent": percent,
        "points": points,
        "signed": signed,
        "number": number,
        "duration": duration,
    }
    return environment
