"""Documents: canonical bytes, digest as identity, schema checks, score rows."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mar_grpo.documents import (
    Checkpoint,
    Document,
    DocumentRef,
    GateDecision,
    PromptSet,
    ScoreRow,
    ScoreTable,
    TrainingRun,
    read_document,
    read_rows,
    write_document,
    write_rows,
)
from mar_grpo.errors import InputError
from mar_grpo.store import Store

SHA = hashlib.sha256(b"x").hexdigest()
FIELDS: dict[type[Document], dict[str, Any]] = {
    PromptSet: {
        "kind": "prompts",
        "shards": [{"uri": "s3://b/0.tar", "bytes": 10240, "samples": 3, "sha256": SHA, "etag": "e"}],
        "samples": 3,
        "record_schema": "geneval",
        "source": {"split": "train", "seed": 1},
    },
    Checkpoint: {
        "family": "nova",
        "config": {"transformer": {"depth": [2, 2]}},
        "files": [{"path": "model_index.json", "uri": "s3://b/m/model_index.json", "bytes": 3, "sha256": SHA}],
        "step": 12,
        "parent": SHA,
    },
    TrainingRun: {
        "recipe": {"name": "emoji"},
        "recipe_digest": SHA,
        "code_version": "0.1.0",
        "state_uri": "s3://b/state",
        "metrics_uri": "s3://b/metrics.jsonl",
        "checkpoint": {"uri": "s3://b/c.json", "sha256": SHA},
        "outcome": "completed",
        "steps": 40,
        "seconds": 80.5,
        "seconds_per_step": 2.0,
    },
    ScoreTable: {
        "checkpoint": SHA,
        "prompt_set": SHA,
        "sampling": {"guidance_scale": 2.0},
        "rows_uri": "s3://b/rows.jsonl",
        "rows_sha256": SHA,
        "summary": {
            "templates/strict": {
                "overall": {"n": 4, "mean": 0.5, "standard_error": 0.25},
                "by_tag": {"colors": {"n": 4, "mean": 0.5, "standard_error": 0.25}},
            }
        },
        "seconds": 3.0,
    },
    GateDecision: {
        "candidate": SHA,
        "incumbent": SHA,
        "rules": [{"name": "accuracy rose", "passed": True, "measured": 0.1, "threshold": 0.05, "detail": "n = 400"}],
        "promote": True,
    },
}
ALL = pytest.mark.parametrize("cls", list(FIELDS), ids=lambda cls: cls.__name__)


@ALL
def test_a_document_comes_back_equal_and_its_file_is_its_digest(store: Store, cls: type[Document]) -> None:
    document = cls.model_validate(FIELDS[cls])
    reference = write_document(store, "documents/d.json", document)
    assert reference.sha256 == document.digest
    assert reference.sha256 == hashlib.sha256(store.read_bytes("documents/d.json")).hexdigest()
    back = read_document(reference, cls)
    assert back == document
    assert back.digest == document.digest
    assert read_document(reference.uri, cls, sha256=document.digest) == document
    assert read_document(reference.uri, cls) == document


@ALL
def test_unknown_and_missing_fields_are_named(file_store: Store, cls: type[Document]) -> None:
    stored = cls.model_validate(FIELDS[cls]).model_dump(mode="json")
    file_store.write_json("d.json", stored | {"surprise": 1})
    with pytest.raises(InputError, match=r"surprise.*d\.json"):
        read_document(file_store.uri("d.json"), cls)
    required = next(iter(FIELDS[cls]))
    file_store.write_json("d.json", {name: value for name, value in stored.items() if name != required})
    with pytest.raises(InputError, match=rf"{required}.*d\.json"):
        read_document(file_store.uri("d.json"), cls)


@ALL
def test_a_newer_schema_is_refused(file_store: Store, cls: type[Document]) -> None:
    stored = cls.model_validate(FIELDS[cls]).model_dump(mode="json")
    file_store.write_json("d.json", stored | {"schema_version": 2})
    with pytest.raises(InputError, match="schema version 2"):
        read_document(file_store.uri("d.json"), cls)


@ALL
def test_one_document_is_not_another(file_store: Store, cls: type[Document]) -> None:
    reference = write_document(file_store, "d.json", cls.model_validate(FIELDS[cls]))
    for other in FIELDS:
        if other is not cls:
            with pytest.raises(InputError, match=f"not a {other.title}.*d.json"):
                read_document(reference, other)


@pytest.mark.parametrize("data", [b"[]", b"3", b'{"a": 1}', b"null"])
def test_other_json_is_not_a_document(file_store: Store, data: bytes) -> None:
    file_store.write_bytes("d.json", data)
    with pytest.raises(InputError, match="not a checkpoint"):
        read_document(file_store.uri("d.json"), Checkpoint)


def test_a_changed_document_is_refused(file_store: Store) -> None:
    document = Checkpoint.model_validate(FIELDS[Checkpoint])
    reference = write_document(file_store, "d.json", document)
    write_document(file_store, "d.json", document.model_copy(update={"step": 13}))
    with pytest.raises(InputError, match="content is not the expected one"):
        read_document(reference, Checkpoint)


def test_the_digest_does_not_depend_on_the_order_of_fields() -> None:
    fields = FIELDS[PromptSet]
    turned = dict(reversed(list(fields.items()))) | {"source": {"seed": 1, "split": "train"}}
    assert PromptSet.model_validate(fields).digest == PromptSet.model_validate(turned).digest
    assert PromptSet.model_validate(fields | {"samples": 4}).digest != PromptSet.model_validate(fields).digest


def test_not_a_number_never_gets_into_a_document() -> None:
    with pytest.raises(ValidationError, match="finite"):
        TrainingRun.model_validate(FIELDS[TrainingRun] | {"seconds": math.inf})
    run = TrainingRun.model_validate(FIELDS[TrainingRun] | {"failure": {"loss": math.nan}})
    with pytest.raises(InputError, match="training run"):
        _ = run.digest


@pytest.mark.parametrize("sha256", ["", "abc", SHA.upper(), SHA + "0"])
def test_a_reference_needs_a_whole_digest(sha256: str) -> None:
    with pytest.raises(ValidationError, match="sha256"):
        DocumentRef(uri="s3://b/c.json", sha256=sha256)


def test_documents_do_not_change() -> None:
    document = Checkpoint.model_validate(FIELDS[Checkpoint])
    with pytest.raises(ValidationError, match="frozen"):
        setattr(document, "step", 3)  # noqa: B010


def _row(**changes: Any) -> ScoreRow:
    fields = {"prompt_id": "p", "prompt": "a photo of a ü\u2028heart", "tag": "colors", "sample": 0, "seed": 2**62 + 1}
    return ScoreRow.model_validate({**fields, "image_sha256": SHA, "scores": {"heatmap": 0.25}, **changes})


def _table(uri: str, sha256: str) -> ScoreTable:
    return ScoreTable.model_validate(FIELDS[ScoreTable] | {"rows_uri": uri, "rows_sha256": sha256})


def test_score_rows_come_back_equal(store: Store) -> None:
    rows = [_row(), _row(sample=1, features=[0.5, 0.25]), _row(sample=2, scores={})]
    entry = write_rows(store, "rows.jsonl", rows)
    assert read_rows(_table(entry.uri, entry.sha256)) == rows


def test_a_bad_row_is_named_by_its_line(file_store: Store) -> None:
    good = _row().model_dump(mode="json")
    lines = [json.dumps(good), json.dumps(good | {"scores": {"a": "high"}})]
    entry = file_store.write_bytes("rows.jsonl", "\n".join(lines).encode())
    with pytest.raises(InputError, match=r"scores\.a.*rows\.jsonl, line 2"):
        read_rows(_table(entry.uri, entry.sha256))


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=5))
def test_floats_keep_every_bit(values: list[float]) -> None:
    row = _row(features=values)
    assert ScoreRow.model_validate_json(json.dumps(row.model_dump(mode="json"))).features == tuple(values)
