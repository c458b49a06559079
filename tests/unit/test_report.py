"""The page: stands alone, is well formed, says what the decision says, and shows the pictures it was given."""

from __future__ import annotations

import base64
import dataclasses
import io
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mar_grpo.documents import ScoreRow, ScoreTable, TrainingRun
from mar_grpo.evaluation.benchmarks import summarise
from mar_grpo.evaluation.charts import Chart, Series, line_chart, nice_ticks, running_mean, tick_text
from mar_grpo.evaluation.gate import GateConfig, decide
from mar_grpo.evaluation.pictures import contact_sheet, data_uri
from mar_grpo.evaluation.report import ReportInputs, StepTime, build_report, flatten, shown_prompts
from mar_grpo.evaluation.words import duration, kind_title, percent, points, signed, step_title

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
VOID = {"meta", "img", "br", "path", "line", "circle"}
BEFORE, AFTER, PROMPTS = "b" * 64, "a" * 64, "d" * 64


class Page(HTMLParser):
    """Collects tags and texts, and fails where a tag is closed that is not open."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style" and data.strip():
            self.texts.append(re.sub(r"[ \n]+", " ", data).strip())

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def rows(right: np.ndarray, reward: float) -> list[ScoreRow]:
    numbers = {"diversity": 0.2, "deviation": 0.1, "saturated_share": 0.0, "foreground_share": 0.2, "roughness": 0.03}
    return [
        ScoreRow(
            prompt_id=f"{prompt:016x}",
            prompt=f"a photo of <b>{prompt}</b> & co",
            tag=TAGS[prompt % 6],
            sample=sample,
            seed=10 * prompt + sample,
            image_sha256="0" * 64,
            scores={"templates/strict": float(right[prompt, sample]), "heatmap/graded": reward}
            | {f"picture/{name}": value for name, value in numbers.items()},
        )
        for prompt, sample in np.ndindex(right.shape)
    ]


def table(checkpoint: str, score_rows: list[ScoreRow]) -> ScoreTable:
    return ScoreTable(
        checkpoint=checkpoint,
        prompt_set=PROMPTS,
        sampling={},
        rows_uri="file:///rows",
        rows_sha256="0" * 64,
        summary=summarise(score_rows),
        seconds=1.0,
    )


def inputs(gain: float = 0.3, metrics: Any = None, **changes: Any) -> ReportInputs:
    """A run of 120 prompts x 2; `gain` is the share of wrong pictures that become right."""
    rng = np.random.default_rng(0)
    base = rng.random((120, 2)) < 0.4
    before, after = rows(base, 0.4), rows(base | (rng.random((120, 2)) < gain), 0.6)
    keys = [(row.prompt_id, row.sample) for row in before]
    recipe = {"seed": 3, "rewards": {"components": {"heatmap/graded": 1.0}}, "optimizer": {"learning_rate": 1e-4}}
    run = TrainingRun(
        recipe=recipe,
        recipe_digest="e" * 64,
        code_version="0.1.0",
        state_uri="s3://bucket/run/state",
        metrics_uri="s3://bucket/run/metrics.jsonl",
        outcome="completed",
        steps=40,
        seconds=160.0,
        seconds_per_step=4.0,
    )
    if metrics is None:
        metrics = [{"update": 0, "held_out/templates/strict": 0.4}]
        metrics += [{"update": u, "reward/heatmap/graded": 0.4 + u / 100, "kl": u * 1e-4} for u in range(1, 41)]
    made = ReportInputs(
        name="emoji-test",
        decision=decide(before, after, GateConfig(), candidate=AFTER, incumbent=BEFORE),
        before=table(BEFORE, before),
        after=table(AFTER, after),
        before_rows=before,
        after_rows=after,
        before_images={key: np.full((8, 8, 3), 10, np.uint8) for key in keys},
        after_images={key: np.full((8, 8, 3), 200, np.uint8) for key in keys},
        run=run,
        metrics=metrics,
        steps=[StepTime("grpo_training", 165.0), StepTime("promotion_gate", 1.5)],
        places={
            "before": "package://emoji-nova",
            "after": "s3://bucket/run/checkpoint",
            "Champion": "s3://bucket/c.json",
        },
        command="make run RECIPE=emoji-test",
        finished="today",
    )
    return dataclasses.replace(made, **changes)


@pytest.fixture(scope="module")
def promoted() -> tuple[ReportInputs, str]:
    given_inputs = inputs()
    return given_inputs, build_report(given_inputs)


def test_the_page_needs_nothing_but_itself(promoted: tuple[ReportInputs, str]) -> None:
    html = promoted[1]
    page = Page(html)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "base"}
    sources = [value for _, attrs in page.tags for key, value in attrs.items() if key in ("src", "href", "srcset")]
    assert sources
    assert all(value and value.startswith("data:image/png;base64,") for value in sources)
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags


def test_verdict_and_every_rule_are_those_of_the_decision(promoted: tuple[ReportInputs, str]) -> None:
    given_inputs, html = promoted
    page = Page(html)
    assert given_inputs.decision.promote
    assert html.count("<h1>") == 1
    assert "<h1>Promoted</h1>" in html
    assert len(re.findall(r'class="verdict yes"', html)) == len(given_inputs.decision.rules)
    assert 'class="verdict no"' not in html
    for rule in given_inputs.decision.rules:
        assert rule.detail in page.texts
    strict = given_inputs.before.summary["templates/strict"], given_inputs.after.summary["templates/strict"]
    for summary in strict:
        assert percent(summary.overall.mean) in page.text
        for score in summary.by_tag.values():
            assert f"{percent(score.mean)} ± {points(score.standard_error or 0, sign=False)}" in page.text


def test_a_refusal_says_why_and_names_a_reward_that_rose_alone() -> None:
    html = build_report(inputs(gain=0.0))
    text = Page(html).text
    assert "<h1>Refused</h1>" in html
    assert "Rise in accuracy: 0.0 points, needed more than 0.0 points" in text
    assert "1 of the gate’s 12 rules did not pass" in text
    assert "The training reward rose from 0.47 to 0.74 meanwhile" in text
    assert html.count('class="verdict no"') == 1


def test_no_such_sentence_where_accuracy_rose_or_the_reward_did_not(promoted: tuple[ReportInputs, str]) -> None:
    assert "The training reward rose" not in promoted[1]
    flat = [{"update": u, "reward/heatmap/graded": 0.4 + 0.01 * (u % 2)} for u in range(1, 41)]
    assert "The training reward rose" not in build_report(inputs(gain=0.0, metrics=flat))


def test_pictures_are_the_ones_given_in_pairs_with_their_marks(promoted: tuple[ReportInputs, str]) -> None:
    given_inputs, html = promoted
    shots = [attrs for tag, attrs in Page(html).tags if tag == "img"]
    assert len(shots) == 6 * 2 * 2 * 2  # kinds, prompts, samples, before and after
    colours = []
    for attrs in shots:
        data = base64.b64decode(str(attrs["src"]).split(",")[1])
        colours.append(np.asarray(Image.open(io.BytesIO(data)))[0, 0, 0])
    assert colours == [10, 200] * 24
    verdicts = {(r.prompt_id, r.sample): r.scores["templates/strict"] for r in given_inputs.after_rows}
    chosen = [p for prompts in shown_prompts(given_inputs.after_rows).values() for p in prompts]
    expected = ["right" if verdicts[p, s] else "wrong" for p in chosen for s in (0, 1)]
    assert [str(attrs["alt"]) for attrs in shots[1::2]] == [f"after: {word}" for word in expected]


def test_the_choice_of_pictures_ignores_results_and_order() -> None:
    good, bad = rows(np.ones((60, 2), bool), 1.0), rows(np.zeros((60, 2), bool), 0.0)
    assert shown_prompts(good) == shown_prompts(bad[::-1])
    assert list(shown_prompts(good)) == list(TAGS)
    assert all(len(prompts) == 2 for prompts in shown_prompts(good).values())


def test_prompts_are_text_not_markup(promoted: tuple[ReportInputs, str]) -> None:
    assert "photo of <b>" not in promoted[1]
    assert re.search(r"a photo of &lt;b&gt;\d+&lt;/b&gt; &amp; co", promoted[1])


def test_what_was_run_is_there_in_full(promoted: tuple[ReportInputs, str]) -> None:
    text = Page(promoted[1]).text
    for fact in (BEFORE, AFTER, PROMPTS, "e" * 64, "package://emoji-nova", "s3://bucket/run/checkpoint", "0.1.0"):
        assert fact in text
    for fact in (
        "optimizer.learning_rate 0.0001",
        "s3://bucket/c.json",
        "make run RECIPE=emoji-test",
        "seed 3",
        "torch",
    ):
        assert fact in text
    for fact in ("GRPO training", "2\u202fmin 45\u202fs", "40 updates in 2\u202fmin 40\u202fs", "today"):
        assert fact in text


def test_training_reward_on_training_prompts_is_listed_apart() -> None:
    lower, higher = rows(np.zeros((10, 2), bool), 0.25), rows(np.zeros((10, 2), bool), 0.75)
    text = Page(build_report(inputs(reward_rows=(lower, higher)))).text
    assert "heatmap/graded trained on training prompts 20 0.250 ± 0.000 0.750 ± 0.000 +0.500 ± 0.000" in text
    assert "templates/strict decides held-out prompts 240" in text


def test_a_page_without_metrics_or_times_is_still_a_page() -> None:
    bare = inputs(metrics=[], steps=(), places={}, command="", finished="")
    html = build_report(bare)
    assert html.count("<svg viewBox") - html.count('<svg viewBox="0 0 12 12"') == 1  # held-out accuracy alone
    Page(html)


# --- charts ------------------------------------------------------------------------------------------------------


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_even_and_enclose(low: float, width: float) -> None:
    ticks = nice_ticks(low, low + width)
    steps = np.diff(ticks)
    assert 2 <= len(ticks) <= 7
    assert ticks[0] <= low + 1e-6 * width
    assert ticks[-1] >= low + width - 1e-6 * width
    assert steps == pytest.approx([steps[0]] * len(steps), rel=1e-3)


def test_ticks_of_a_constant_and_round_steps() -> None:
    assert nice_ticks(0.12, 0.58) == [0, 0.2, 0.4, 0.6]
    assert nice_ticks(1, 80) == [0, 20, 40, 60, 80]
    assert nice_ticks(0.5, 0.5)[0] < 0.5 < nice_ticks(0.5, 0.5)[-1]
    assert nice_ticks(0, 0)[0] < 0 < nice_ticks(0, 0)[-1]


@pytest.mark.parametrize(
    ("value", "in_percent", "text"),
    [(0.4, True, "40\u202f%"), (0.25, False, "0.25"), (2, False, "2"), (15000, False, "15k"), (2e-4, False, "2e-4")],
)
def test_tick_texts(value: float, in_percent: bool, text: str) -> None:
    assert tick_text(value, in_percent) == text


def test_places_in_a_chart_are_those_of_the_numbers() -> None:
    series = Series("accuracy", ((0, 0.2), (10, 0.6)), "first", (0.0, 0.1))
    svg = line_chart(Chart("Title", "note", "update", "share <of> all", (series,), percent=True))
    dots = [list(map(float, found)) for found in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', svg)]
    labels = dict(re.findall(r'y="([\d.]+)" text-anchor="end">([^<]+)<', svg))
    heights = {text: float(y) - 3.5 for y, text in labels.items()}
    assert dots[0] == pytest.approx([44, heights["20\u202f%"]], abs=0.1)
    assert dots[1] == pytest.approx([350, heights["60\u202f%"]], abs=0.1)
    assert svg.count('class="error first"') == 1
    assert "share &lt;of&gt; all" in svg


def test_long_curves_are_smoothed_and_short_ones_are_not() -> None:
    long = Chart("t", "n", "x", "y", (Series("s", tuple((i, float(i % 2)) for i in range(100)), "first"),))
    short = Chart("t", "n", "x", "y", (Series("s", ((0, 1.0), (1, 2.0)), "first"),))
    assert 'class="raw first"' in long.svg
    assert 'class="raw first"' not in short.svg
    assert running_mean([0, 3, 6, 3], 3) == [1.5, 3, 4, 4.5]


# --- words and pictures ------------------------------------------------------------------------------------------


def test_numbers_as_words() -> None:
    assert (signed(0.0004), signed(-0.0004), signed(-0.25), signed(0.25)) == ("0.000", "0.000", "−0.250", "+0.250")
    assert (points(0.0861), points(-0.0861), points(0.0861, sign=False)) == ("+8.6", "−8.6", "8.6")
    assert [duration(s) for s in (0.26, 59.6, 75.3, 3725)] == [
        "0.3\u202fs", "1\u202fmin 00\u202fs", "1\u202fmin 15\u202fs", "1\u202fh 02\u202fmin",
    ]  # fmt: skip
    assert (kind_title("color_attr"), kind_title("my_kind")) == ("Colour attribution", "My kind")
    assert step_title("sft_checkpoint") == "SFT checkpoint"
    assert flatten({"a": {"b": 1, "c": {}}, "d": None}) == [("a.b", "1"), ("a.c", "{}"), ("d", "none")]


def test_large_pictures_are_made_smaller_and_small_ones_are_kept() -> None:
    for size, expected in ((64, 64), (1024, 256)):
        data = base64.b64decode(data_uri(np.zeros((size, size, 3), np.uint8)).split(",")[1])
        assert Image.open(io.BytesIO(data)).size == (expected, expected)


def test_contact_sheet_holds_every_picture() -> None:
    images = np.stack([np.full((8, 6, 3), value, np.uint8) for value in range(5)])
    sheet = contact_sheet(images, columns=3, gap=2)
    assert sheet.shape == (2 * 10 + 2, 3 * 8 + 2, 3)
    assert [int(sheet[2 + 10 * row, 2 + 8 * column, 0]) for row, column in np.ndindex(2, 3)] == [0, 1, 2, 3, 4, 255]
