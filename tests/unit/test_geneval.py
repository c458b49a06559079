"""GenEval's rules against recorded verdicts of the public implementations, and the properties of our own two rules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mar_grpo.errors import InputError
from mar_grpo.rewards import geneval
from mar_grpo.rewards.geneval import MALFORMED, Detection

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "rewards" / "geneval.json").read_text(encoding="utf-8"))
CASES = {case["id"]: case for case in GOLDEN["cases"]}
ASSERTED = [name for name, case in CASES.items() if not case.get("note", "").startswith("TIE")]


def detections_of(case: dict) -> list[Detection]:
    return [Detection(d["class"], tuple(d["box"]), d["score"], d.get("color")) for d in case["detections"]]


def test_golden_set_is_whole() -> None:
    assert len(CASES) == 107 and len(ASSERTED) == 106 and len(GOLDEN["pairs"]) == 60


@pytest.mark.parametrize("name", ASSERTED)
def test_recorded_verdicts(name: str) -> None:
    case = CASES[name]
    record, found, expected = case["metadata"], detections_of(case), case["expected"]
    verdict = geneval.official(record, found)
    assert verdict.correct is expected["correct"]
    assert list(verdict.reasons) == expected["reason"]
    kept = geneval.keep_detections(found, record["tag"])
    assert {cls: len(items) for cls, items in kept.items()} == expected["kept_counts"]
    strict = geneval.server(record, found)
    assert strict.correct is expected["server"]["strict_correct"]
    assert strict.score == pytest.approx(expected["server"]["partial_score"], abs=1e-9)
    assert list(strict.reasons) == expected["server"]["reason"]
    assert geneval.partial_fixed(record, found) == pytest.approx(expected["partial_fixed"], abs=1e-9)
    with_nms = geneval.official(record, found, max_overlap=0.5)
    assert with_nms.correct is expected["official_correct_if_max_overlap_0.5"]


def test_recorded_summary() -> None:
    by_tag: dict[str, list[bool]] = {}
    for name, case in CASES.items():
        right = geneval.official(case["metadata"], detections_of(case)).correct if name in ASSERTED else False
        by_tag.setdefault(case["metadata"]["tag"], []).append(right)
    means = {tag: sum(values) / len(values) for tag, values in by_tag.items()}
    assert means == pytest.approx(GOLDEN["summary"]["per_tag"])
    assert sum(means.values()) / len(means) == pytest.approx(GOLDEN["summary"]["overall"])


def test_recorded_relations_and_overlaps() -> None:
    for pair in GOLDEN["pairs"]:
        assert sorted(geneval.relations(pair["a"], pair["b"])) == sorted(pair["relations_of_a_to_b"])
        assert geneval.iou(pair["a"], pair["b"]) == pytest.approx(pair["iou_plus1"], abs=1e-9)


# --- our own rules -----------------------------------------------------------------------------------------------

CELLS = [(3 + 32 * x, 3 + 32 * y, 29 + 32 * x, 29 + 32 * y) for y in (0, 1) for x in (0, 1)]
RECORD = {
    "tag": "position",
    "include": [
        {"class": "cat", "count": 1},
        {"class": "heart", "count": 1, "color": "red", "position": ["left of", 0]},
    ],
    "prompt": "a photo of a red heart left of a cat",
}
HEART = Detection("heart", CELLS[0], 0.95, "red")
CAT = Detection("cat", CELLS[1], 0.9)


@pytest.mark.parametrize(
    ("found", "right"),
    [
        ([HEART, CAT], True),
        ([CAT, HEART], True),
        ([CAT, Detection("heart", CELLS[2], 0.9, "red")], True),  # a diagonal is also left of
        ([CAT], False),
        ([Detection("heart", CELLS[0], 0.95, "blue"), CAT], False),
        ([Detection("heart", CELLS[3], 0.95, "red"), CAT], False),
        ([HEART, CAT, Detection("cat", CELLS[2], 0.9)], False),
        ([HEART, CAT, Detection("dog", CELLS[2], 0.9)], False),
        ([HEART, CAT, Detection(MALFORMED, CELLS[2], 0.9)], False),
        ([HEART, CAT, Detection("dog", CELLS[2], 0.2)], True),  # too weak to be an object
        ([Detection("heart", CELLS[0], 0.4, "red"), CAT], False),
        ([], False),
    ],
)
def test_strict_exact(found: list[Detection], right: bool) -> None:
    assert geneval.strict_exact(RECORD, found) is right


def test_entries_of_one_class_are_told_apart_by_colour() -> None:
    record = {
        "tag": "color_attr",
        "include": [{"class": "heart", "count": 1}, {"class": "heart", "count": 1, "color": "red"}],
    }
    blue = Detection("heart", CELLS[1], 0.99, "blue")
    assert geneval.strict_exact(record, [HEART, blue])
    assert not geneval.strict_exact(record, [blue, Detection("heart", CELLS[0], 0.9, "green")])
    assert [[d.color for d in group] for group in geneval.claim(record, [HEART, blue])] == [["blue"], ["red"]]


def test_nothing_asked_for_needs_an_empty_picture() -> None:
    assert geneval.strict_exact({"tag": "single_object"}, [])
    assert not geneval.strict_exact({"tag": "single_object"}, [CAT])


def test_graded_by_hand() -> None:
    single = {"tag": "single_object", "include": [{"class": "cat", "count": 1}]}
    assert geneval.graded(single, [CAT]) == pytest.approx(0.9)
    assert geneval.graded(single, [CAT, HEART]) == pytest.approx(0.9 / (1 + 0.5 * 0.95))
    assert geneval.graded(single, []) == 0.0
    both = geneval.graded(RECORD, [HEART, CAT])
    assert both == pytest.approx(0.6 * 0.925 + 0.4 * 0.9, abs=1e-4)  # far apart: the relation is certain
    mirrored = [Detection("heart", CELLS[1], 0.95, "red"), Detection("cat", CELLS[0], 0.9)]
    assert geneval.graded(RECORD, mirrored) == pytest.approx(0.6 * 0.925, abs=1e-4)
    assert geneval.graded(RECORD, [CAT]) == pytest.approx(0.6 * 0.45)


_objects = st.builds(
    Detection,
    st.sampled_from(["cat", "dog", MALFORMED]),
    st.sampled_from(CELLS),
    st.floats(0.0, 1.0),
) | st.builds(
    Detection, st.just("heart"), st.sampled_from(CELLS), st.floats(0.0, 1.0), st.sampled_from(["red", "blue"])
)


@given(st.lists(_objects, max_size=5), _objects)
def test_graded_stays_in_range_and_extras_never_help(found: list[Detection], extra: Detection) -> None:
    value = geneval.graded(RECORD, found)
    assert 0.0 <= value <= 1.0
    unasked = Detection("dog", extra.box, extra.score)
    assert geneval.graded(RECORD, [*found, unasked]) <= value
    if geneval.strict_exact(RECORD, found):
        assert not geneval.strict_exact(RECORD, [*found, Detection("dog", extra.box, 0.9)])


def test_unknown_objects_are_refused_by_name() -> None:
    known = {("cat", None), ("heart", "red"), ("heart", "blue")}
    geneval.check_records([RECORD], known, "templates")
    geneval.check_records([{"include": [{"class": "heart", "count": 2}]}], known, "templates")
    for entry, name in [
        ({"class": "bench", "count": 1}, "bench"),
        ({"class": "cat", "count": 1, "color": "red"}, "red cat"),
    ]:
        with pytest.raises(InputError, match=f"'templates' does not know '{name}'"):
            geneval.check_records([{"include": [entry], "prompt": "a photo"}], known, "templates")
