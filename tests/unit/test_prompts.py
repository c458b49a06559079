"""The prompt record and the files it is read from."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mar_grpo.data.prompts import PromptRecord, parse_prompt_file, parse_row, read_prompt_file, validated
from mar_grpo.data.scenes import RELATIONS, compositions, split_of
from mar_grpo.errors import InputError
from mar_grpo.store import canonical_json, parse_json

GOLDEN = Path(__file__).parents[1] / "golden" / "rewards" / "geneval.json"

# One row per kind, in the form of GenEval's evaluation_metadata.jsonl.
GENEVAL_ROWS: list[dict[str, Any]] = [
    {"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a photo of a bench"},
    {
        "tag": "two_object",
        "include": [{"class": "toothbrush", "count": 1}, {"class": "snowboard", "count": 1}],
        "prompt": "a photo of a toothbrush and a snowboard",
    },
    {
        "tag": "counting",
        "include": [{"class": "clock", "count": 2}],
        "exclude": [{"class": "clock", "count": 3}],
        "prompt": "a photo of two clocks",
    },
    {"tag": "colors", "include": [{"class": "car", "count": 1, "color": "pink"}], "prompt": "a photo of a pink car"},
    {
        "tag": "position",
        "include": [{"class": "teddy bear", "count": 1}, {"class": "dog", "count": 1, "position": ["right of", 0]}],
        "prompt": "a photo of a dog right of a teddy bear",
    },
    {
        "tag": "color_attr",
        "include": [
            {"class": "cow", "count": 1, "color": "purple"},
            {"class": "bicycle", "count": 1, "color": "black"},
        ],
        "prompt": "a photo of a purple cow and a black bicycle",
    },
]


def json_lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def test_geneval_rows_are_read_and_given_back_unchanged() -> None:
    records = parse_prompt_file(json_lines(GENEVAL_ROWS), name="evaluation_metadata.jsonl")
    assert [record.as_dict() for record in records] == GENEVAL_ROWS


def test_recorded_geneval_cases_are_records() -> None:
    rows = [case["metadata"] for case in json.loads(GOLDEN.read_text())["cases"]]
    readable = [row for row in rows if row.get("include")]
    assert len(readable) > 90
    assert [parse_row(row, where="golden").as_dict()["include"] for row in readable] == [r["include"] for r in readable]


@pytest.mark.parametrize("encoded", ["array", "lines", "lines with byte order mark", "csv"])
def test_every_format_gives_the_same_records(encoded: str, tmp_path: Path) -> None:
    if encoded == "csv":
        text = io.StringIO()
        table = csv.DictWriter(text, ["prompt", "tag", "include", "exclude"], restval="")
        table.writeheader()
        table.writerows({k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in GENEVAL_ROWS)
        path, data = tmp_path / "prompts.csv", text.getvalue().encode()
    else:
        path = tmp_path / "prompts.json"
        data = json.dumps(GENEVAL_ROWS, indent=1).encode() if encoded == "array" else json_lines(GENEVAL_ROWS)
        data = b"\xef\xbb\xbf" + data if "mark" in encoded else data
    path.write_bytes(data)
    assert [record.as_dict() for record in read_prompt_file(str(path))] == GENEVAL_ROWS


def test_fields_without_a_place_are_kept_as_metadata() -> None:
    record = parse_row(GENEVAL_ROWS[0] | {"dense_prompt": "a weathered bench"}, where="here")
    assert record.metadata == {"dense_prompt": "a weathered bench"}
    assert validated(record.as_dict(), where="here") == record


def test_plain_prompts_have_no_objects() -> None:
    records = parse_prompt_file(json.dumps(["a quiet lake", {"prompt": "an old door"}]).encode(), name="p.json")
    assert [(r.prompt, r.tag, r.include) for r in records] == [
        ("a quiet lake", "text", ()),
        ("an old door", "text", ()),
    ]


T2I_BASE = {"prompt": "p", "nouns": ["cat", "sofa"]}


@pytest.mark.parametrize(
    ("row", "include"),
    [
        (
            {"task_type": "spatial", "spatial_info": {"obj1": "cat", "obj2": "sofa", "locality": "on the top of"}},
            [{"class": "sofa", "count": 1}, {"class": "cat", "count": 1, "position": ["above", 0]}],
        ),
        (
            {"task_type": "spatial", "spatial_info": {"obj1": "cat", "obj2": "sofa", "locality": "left of"}},
            [{"class": "sofa", "count": 1}, {"class": "cat", "count": 1, "position": ["left of", 0]}],
        ),
        (
            {"task_type": "spatial", "spatial_info": {"obj1": "cat", "obj2": "sofa", "locality": "next to"}},
            [{"class": "sofa", "count": 1}, {"class": "cat", "count": 1}],
        ),
        (
            {"task_type": "numeracy", "numeracy_info": [{"obj_name": "cat", "num": 3}]},
            [{"class": "cat", "count": 3}, {"class": "sofa", "count": 1}],
        ),
        (
            {"task_type": "color", "attr_nouns": ["black cat", "red sofa"]},
            [{"class": "cat", "count": 1}, {"class": "sofa", "count": 1}],
        ),
    ],
)
def test_t2i_rows_ask_for_the_same_and_keep_the_original(row: dict[str, Any], include: list[dict[str, Any]]) -> None:
    record = parse_row(T2I_BASE | row, where="here")
    assert record.as_dict()["include"] == include
    assert record.tag == row["task_type"]
    assert record.metadata == {"nouns": ["cat", "sofa"]} | row
    assert validated(record.as_dict(), where="here") == record


def test_the_identity_of_a_prompt_does_not_change() -> None:
    """Score tables, noise and shards of earlier releases are found by this number."""
    record = parse_row(GENEVAL_ROWS[4], where="here")
    assert record.prompt_id == "422de3ca750a4140"
    assert parse_row(dict(reversed(GENEVAL_ROWS[4].items())), where="here").prompt_id == record.prompt_id
    assert parse_row(GENEVAL_ROWS[4] | {"id": "7"}, where="here").prompt_id != record.prompt_id


def test_what_is_asked_does_not_depend_on_wording_or_order() -> None:
    def position(first: str, second: str, relation: str) -> PromptRecord:
        include = [{"class": second, "count": 1}, {"class": first, "count": 1, "position": [relation, 0]}]
        return parse_row({"tag": "position", "prompt": f"{first} {relation} {second}", "include": include}, where="")

    left, mirrored, swapped = (
        position("a", "b", "left of"),
        position("b", "a", "right of"),
        position("b", "a", "left of"),
    )
    assert left.asked("request") == mirrored.asked("request") != swapped.asked("request")
    assert left.asked("composition") == swapped.asked("composition")
    plain = [parse_row(text, where="") for text in ("A quiet lake!", "a quiet  Lake", "a lake")]
    assert plain[0].asked("composition") == plain[1].asked("composition") != plain[2].asked("composition")


def test_equal_compositions_are_on_one_side_of_the_emoji_split() -> None:
    sides: dict[frozenset[str], set[str]] = {}
    for split in ("train", "held_out"):
        for row in compositions(split):
            sides.setdefault(validated(row, where="emoji").asked("composition"), set()).add(split_of(row))
    assert len(sides) > 300
    assert all(len(side) == 1 for side in sides.values())


names = st.text(min_size=1, max_size=12)
counts = st.integers(1, 9)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def record_rows(draw: st.DrawFn) -> dict[str, Any]:
    include = []
    for place in range(draw(st.integers(1, 4))):
        entry: dict[str, Any] = {"class": draw(names), "count": draw(counts)}
        if draw(st.booleans()):
            entry["color"] = draw(names)
        if place and draw(st.booleans()):
            entry["position"] = [draw(st.sampled_from(RELATIONS)), draw(st.integers(0, place - 1))]
        include.append(entry)
    row: dict[str, Any] = {"prompt": "x" + draw(st.text(max_size=40)), "tag": draw(names), "include": include}
    if draw(st.booleans()):
        row["exclude"] = [{"class": draw(names), "count": draw(counts)}]
    if metadata := draw(st.dictionaries(st.text(max_size=5), json_values, max_size=3)):
        row["metadata"] = metadata
    return row


@given(record_rows())
def test_a_record_survives_storage_unchanged(row: dict[str, Any]) -> None:
    record = validated(row, where="row")
    assert record.as_dict() == row
    stored = canonical_json(record.as_dict())
    again = validated(parse_json(stored, where="stored"), where="stored")
    assert again == record
    assert again.prompt_id == record.prompt_id


@given(json_values | st.dictionaries(st.sampled_from(["prompt", "tag", "include", "nouns", "metadata"]), json_values))
def test_any_json_gives_a_record_or_one_clear_error(row: Any) -> None:
    try:
        record = parse_row(row, where="set.jsonl, line 9")
    except InputError as error:
        assert str(error).count("set.jsonl, line 9") == 1
        assert "\n" not in str(error)
    else:
        assert validated(record.as_dict(), where="again") == record


def test_parquet_holds_the_same_records_as_json_lines(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    include = [{"class": "cat", "count": 2, "color": None}]
    rows = [
        {"prompt": "two cats", "tag": "counting", "include": include},
        {"prompt": "rain", "tag": None, "include": None},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert read_prompt_file(str(tmp_path / "p.parquet")) == read_prompt_file(str(tmp_path / "p.jsonl"))
