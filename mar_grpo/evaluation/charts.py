"""Line and dot charts as small SVG drawings that take their colours and fonts from the page around them.

A drawing is 360 units wide, which is a third of a desktop page and the whole of a phone's, so its text keeps its size.
matplotlib is not used here because its SVG brings fixed colours (no dark page) and outlines instead of text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 360, 236
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 28, 38


@dataclass(frozen=True)
class Series:
    """Points (x, y) under one name. `tone` is the page's CSS class: before, after, first, second or third."""

    name: str
    points: tuple[tuple[float, float], ...]
    tone: str
    errors: tuple[float, ...] = ()
    """Standard errors of y, one a point, drawn as bars of one standard error up and down; may be empty."""

    @property
    def half_bars(self) -> tuple[float, ...]:
        """The standard errors, or zeros."""
        return self.errors or (0.0,) * len(self.points)


@dataclass(frozen=True)
class Chart:
    """What one drawing shows; `note` is the line under its title."""

    title: str
    note: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    percent: bool = False

    @property
    def svg(self) -> str:
        """The drawing."""
        return line_chart(self)


@dataclass(frozen=True)
class Dot:
    """One estimate: its value, standard error (None: unknown) and what it is the mean of, drawn faintly."""

    value: float
    error: float | None = None
    each: tuple[float, ...] = ()


@dataclass(frozen=True)
class Dots:
    """One estimate a row under one name; None where a row has none. `tone` as in Series."""

    name: str
    dots: tuple[Dot | None, ...]
    tone: str


@dataclass(frozen=True)
class DotChart:
    """Estimates as dots with bars of one standard error, a row for each of `rows`; dashed at `reference`."""

    title: str
    note: str
    label: str
    rows: tuple[str, ...]
    series: tuple[Dots, ...]
    percent: bool = False
    reference: float | None = None

    @property
    def svg(self) -> str:
        """The drawing."""
        return dot_chart(self)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers (steps of 1, 2 or 5 times a power of ten) that enclose [low, high]."""
    if high <= low:
        spread = abs(low) or 1.0
        low, high = low - spread / 2, high + spread / 2
    raw = (high - low) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def tick_text(value: float, percent: bool = False) -> str:
    """A tick's label: at most three decimals, thousands as k, per cent where asked for."""
    if percent:
        return f"{100 * value:g}\u202f%"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    if value and abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:.3f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Centred mean over at most `window` neighbours; shorter at both ends."""
    half = window // 2
    return [sum(part := values[max(0, i - half) : i + half + 1]) / len(part) for i in range(len(values))]


def line_chart(chart: Chart) -> str:
    """One SVG element. More than 30 points are drawn faintly with a running mean over a tenth of them on top."""
    xs = [x for series in chart.series for x, _ in series.points]
    bars = [(y, e) for series in chart.series for (_, y), e in zip(series.points, series.half_bars, strict=True)]
    y_ticks = nice_ticks(min(y - e for y, e in bars), max(y + e for y, e in bars))
    x_low, x_high = min(0.0, *xs), max(xs)
    if x_high == x_low:
        x_high = x_low + 1
    x_ticks = [x for x in nice_ticks(x_low, x_high) if x_low <= x <= x_high]

    def right(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text class="label" x="0" y="12">{escape(chart.y_label)}</text>']
    for y in y_ticks:
        parts.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down(y):.1f}" y2="{down(y):.1f}"/>')
        text = tick_text(y, chart.percent)
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{down(y) + 3.5:.1f}" text-anchor="end">{text}</text>')
    for x in x_ticks:
        text = tick_text(x)
        parts.append(f'<text class="tick" x="{right(x):.1f}" y="{HEIGHT - 22}" text-anchor="middle">{text}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="label" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(chart.x_label)}</text>'
    )
    for series in chart.series:
        parts += _draw(series, right, down)
    words = "; ".join(f"{s.name}: {tick_text(s.points[0][1])} to {tick_text(s.points[-1][1])}" for s in chart.series)
    label = escape(f"{chart.title}, {chart.y_label} over {chart.x_label}. {words}", quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _draw(series: Series, right: Callable[[float], float], down: Callable[[float], float]) -> list[str]:
    """The marks of one series."""
    places = [(right(x), down(y)) for x, y in series.points]
    if len(places) > 30:
        smooth = running_mean([y for _, y in places], max(3, len(places) // 10))
        curve = list(zip([x for x, _ in places], smooth, strict=True))
        return [_path(places, f"raw {series.tone}"), _path(curve, f"line {series.tone}")]
    marks = [_path(places, f"line {series.tone}")]
    for (x, _), (_, y), error in zip(places, series.points, series.half_bars, strict=True):
        if error:
            ends = f'y1="{down(y - error):.1f}" y2="{down(y + error):.1f}"'
            marks.append(f'<line class="error {series.tone}" x1="{x:.1f}" x2="{x:.1f}" {ends}/>')
        marks.append(f'<circle class="dot {series.tone}" cx="{x:.1f}" cy="{down(y):.1f}" r="3"/>')
    return marks


def _path(places: Sequence[tuple[float, float]], css: str) -> str:
    steps = " ".join(f"L{x:.1f} {y:.1f}" for _, (x, y) in pairwise(places))
    return f'<path class="{css}" d="M{places[0][0]:.1f} {places[0][1]:.1f} {steps}"/>'


NAMES, ROW, STEP = 104, 16, 7
"""Width of the names at the left; height of a row, and what each further series of it adds."""


def dot_chart(chart: DotChart) -> str:
    """One SVG element, as high as its rows need."""
    reach = [] if chart.reference is None else [chart.reference]
    for dot in (dot for series in chart.series for dot in series.dots if dot):
        reach += [dot.value - (dot.error or 0.0), dot.value + (dot.error or 0.0), *dot.each]
    ticks = nice_ticks(min(reach), max(reach), 4)
    row = ROW + STEP * (len(chart.series) - 1)
    bottom = 10 + row * len(chart.rows)
    height = bottom + 36

    def right(x: float) -> float:
        return NAMES + 8 + (x - ticks[0]) / (ticks[-1] - ticks[0]) * (WIDTH - NAMES - 8 - RIGHT)

    parts, words = [], []
    for x in ticks:
        parts.append(f'<line class="rule" x1="{right(x):.1f}" x2="{right(x):.1f}" y1="4" y2="{bottom}"/>')
        text = tick_text(x, chart.percent)
        parts.append(f'<text class="tick" x="{right(x):.1f}" y="{bottom + 15}" text-anchor="middle">{text}</text>')
    if chart.reference is not None:
        x = right(chart.reference)
        parts.append(f'<line class="reference" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{bottom}"/>')
    middle = (NAMES + 8 + WIDTH - RIGHT) / 2
    parts.append(f'<text class="label" x="{middle}" y="{height - 4}" text-anchor="middle">{escape(chart.label)}</text>')
    for number, name in enumerate(chart.rows):
        centre = 10 + row * (number + 0.5)
        parts.append(f'<text class="label" x="{NAMES}" y="{centre + 4:.1f}" text-anchor="end">{escape(name)}</text>')
        for place, series in enumerate(chart.series):
            if found := series.dots[number]:
                y = centre + STEP * (place - (len(chart.series) - 1) / 2)
                parts += _dot(found, series.tone, right, y)
                words.append(f"{name}, {series.name}: {tick_text(found.value, chart.percent)}")
    label = escape(f"{chart.title}, {chart.label}. {'; '.join(words)}", quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _dot(dot: Dot, tone: str, right: Callable[[float], float], y: float) -> list[str]:
    marks = [f'<circle class="each {tone}" cx="{right(x):.1f}" cy="{y:.1f}" r="2"/>' for x in dot.each]
    if dot.error:
        ends = f'x1="{right(dot.value - dot.error):.1f}" x2="{right(dot.value + dot.error):.1f}"'
        marks.append(f'<line class="error {tone}" {ends} y1="{y:.1f}" y2="{y:.1f}"/>')
    return [*marks, f'<circle class="dot {tone}" cx="{right(dot.value):.1f}" cy="{y:.1f}" r="3.5"/>']
