"""The page of an ablation: tables and figures, no words about what they mean. It needs nothing but itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mar_grpo.evaluation.ablation_tables import (
    COLUMNS,
    PARTS,
    REFERENCE,
    TABLES,
    Ablation,
    SweepPoint,
    Table,
    difference,
    over_seeds,
    single,
    summary,
    values,
)
from mar_grpo.evaluation.charts import Chart, Dot, DotChart, Dots, Series
from mar_grpo.evaluation.report import flatten, page_templates
from mar_grpo.evaluation.words import duration


def _dots(found: Ablation, field: str, scale: float = 1.0, minus: float = 0.0, tone: str = "first") -> Dots | None:
    """One row an arm: mean over seeds, and each seed."""
    dots = []
    for arm in found.arms:
        numbers = {seed: scale * (value - minus) for seed, value in values(found, arm, field).items()}
        estimate = over_seeds(numbers)
        dots.append(Dot(estimate.mean, estimate.standard_error, tuple(numbers.values())) if estimate else None)
    return Dots(COLUMNS[field][0], tuple(dots), tone) if any(dots) else None


def _against(found: Ablation) -> Dots | None:
    dots = []
    for arm in found.arms:
        change, base = difference(found, arm, REFERENCE), values(found, REFERENCE, "accuracy")
        pairs = [100 * (v - base[seed]) for seed, v in values(found, arm, "accuracy").items() if seed in base]
        error = change.standard_error if change else None
        dots.append(Dot(100 * change.mean, error and 100 * error, tuple(pairs)) if change else None)
    return Dots("difference", tuple(dots), "first") if any(dots) else None


def figures(found: Ablation) -> list[DotChart]:
    """One drawing a measure, a row an arm."""
    rows = tuple(title for title, _ in found.arms.values())
    charts = []
    for title, note, label, series, in_percent, reference in (
        ("Change in accuracy", "Held-out judge, after minus before; faint: single seeds", "points",
         [_dots(found, "accuracy", 100, found.accuracy_before)], False, 0.0),
        (f"Against {REFERENCE}", "Difference of accuracy, paired by seed", "points", [_against(found)], False, 0.0),
        ("Training reward", "Mean of the first and of the last fifth of the updates", "reward",
         [_dots(found, "reward_first", tone="before"), _dots(found, "reward_last")], False, None),
        ("Diversity", "Within a prompt, share of before", "left of it", [_dots(found, "diversity")], True, 1.0),
        ("Distance from the start", "Gaussian KL, nats an element", "KL", [_dots(found, "kl")], False, 0.0),
        ("Gradient norm", "Before clipping, mean of the updates", "norm", [_dots(found, "gradient_norm")], False, 0.0),
        ("Time", "Median of the updates", "seconds an update", [_dots(found, "seconds_per_update")], False, 0.0),
    ):  # fmt: skip
        if there := tuple(one for one in series if one):
            charts.append(DotChart(title, note, label, rows, there, in_percent, reference))
    return charts


def noise_figure(found: Ablation) -> list[DotChart]:
    """Cosine of gradients, a row an arm, a tone a part."""
    series = []
    for part, tone in zip(PARTS, ("first", "second", "third"), strict=True):
        noises = [one.parts.get(part) for one in found.gradients]
        dots = tuple(Dot(noise.cosine, noise.standard_error) if noise else None for noise in noises)
        if any(dots):
            series.append(Dots(PARTS[part], dots, tone))
    if not series:
        return []
    rows = tuple(found.arms[one.arm][0] for one in found.gradients)
    note = f"Between gradients of independent batches of {found.gradients[0].images} images; bars: one standard error"
    return [DotChart("Signal in the gradient", note, "cosine", rows, tuple(series), reference=0.0)]


def sweep_figures(found: Ablation) -> list[Chart]:
    """Variances over 1/S, relative to S = 1, and the cosine over S; a line a share."""
    shares = sorted({point.share for point in found.sweep})
    kinds: tuple[tuple[str, str, str, Callable[[SweepPoint, SweepPoint], tuple[float, float, float]]], ...] = (
        ("Fresh trajectories", "Variance over redraws for the same rollouts, relative to S = 1; a straight line to the "
         "origin is 1/S", "1 / S", lambda p, one: (1 / p.count, p.redraw_variance / one.redraw_variance,
                                                  p.redraw_error / one.redraw_variance)),
        ("Whole gradient", "Variance over independent batches, relative to S = 1", "1 / S",
         lambda p, one: (1 / p.count, p.total_variance / one.total_variance, 0.0)),
        ("Signal", f"Cosine between batches of {found.sweep[0].images if found.sweep else 0} images", "S",
         lambda p, one: (p.count, p.noise.cosine, p.noise.standard_error)),
    )  # fmt: skip
    charts = []
    for title, note, label, place in kinds:
        series = []
        for share, tone in zip(shares, ("first", "second", "third"), strict=False):
            marks = sorted(place(p, single(found, p)) for p in found.sweep if p.share == share)
            line, errors = tuple((x, y) for x, y, _ in marks), tuple(error for *_, error in marks)
            series.append(Series(f"share {share:g}", line, tone, errors))
        if series:
            charts.append(Chart(title, note, label, "cosine" if title == "Signal" else "variance", tuple(series)))
    return charts


def build_page(found: Ablation) -> str:
    """The page as HTML: one file, no script, nothing loaded from elsewhere, light and dark, desktop and phone."""
    seconds = sum((run.seconds_per_update or 0.0) * found.recipe["training"]["updates"] for run in found.runs)
    page = {
        "name": found.name,
        "kicker": [part for part in (f"{duration(seconds)} of training" if seconds else "", found.finished) if part],
        "lede": summary(found),
        "charts": figures(found),
        "noise_charts": noise_figure(found),
        "sweep_charts": sweep_figures(found),
        "tables": {name: _page_table(make(found)) for name, (_, make) in TABLES.items()},
        "arms": list(found.arms.values()),
        "command": found.command,
        "settings": flatten(found.recipe),
        "versions": sorted(found.versions.items()),
    }
    return page_templates().get_template("ablation.html.j2").render(page=page)


def _page_table(table: Table) -> dict[str, Sequence[Any]]:
    """Header, and cells as (value, error)."""
    header, rows = table
    return {"header": header, "rows": [[cell.partition(" ± ")[::2] for cell in row] for row in rows]}
