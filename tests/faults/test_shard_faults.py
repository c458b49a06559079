"""Damaged shards and prompt files: one clear error naming file, sample and field, exit code 2, nothing half-written."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from mar_grpo.data.build import build_prompt_set
from mar_grpo.data.prompts import RECORD_SCHEMA, parse_row
from mar_grpo.data.shards import Sample, read_shards, write_shards
from mar_grpo.data.stream import DataConfig, PromptStream
from mar_grpo.documents import PromptSet, Shard
from mar_grpo.errors import InputError
from mar_grpo.store import Store

GOOD = {"prompt": "a photo of a cat", "tag": "single_object", "include": [{"class": "cat", "count": 1}]}
EVALUATION = {"prompt": "a photo of a cup", "tag": "single_object", "include": [{"class": "cup", "count": 1}]}
BLOCK = tarfile.BLOCKSIZE
Members = list[tuple[str, bytes]]


def tar_of(members: Members) -> bytes:
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, BytesIO(content))
    return buffer.getvalue()


def record(**changes: Any) -> bytes:
    fields = {name: value for name, value in (GOOD | changes).items() if value is not None}
    return json.dumps(fields).encode()


def three() -> Members:
    """Three samples, two blocks (header and content) each."""
    return [(f"{name}.json", record(prompt=f"a photo of {name}")) for name in ("first", "second", "third")]


def listed(store: Store, shards: list[bytes], counts: list[int], **changes: Any) -> PromptSet:
    """A prompt set whose document agrees with the bytes of its shards, so that only their content can be wrong."""
    entries = [store.write_bytes(f"set/{number:05d}.tar", data) for number, data in enumerate(shards)]
    found = tuple(Shard(**e.model_dump(), samples=n) for e, n in zip(entries, counts, strict=True))
    fields: dict[str, Any] = {"kind": "prompts", "record_schema": RECORD_SCHEMA, "source": {}}
    return PromptSet(**{**fields, "shards": found, "samples": sum(counts), **changes})


def refused(action: Callable[[], Any], *parts: str) -> None:
    with pytest.raises(InputError) as caught:
        action()
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in message
    assert len(message) < 600
    for part in parts:
        assert part in message


def swap(change: Callable[[bytes], bytes], store: Store, made: PromptSet) -> None:
    """Damage the first shard where it lies, behind the back of the document that lists it."""
    key = store.key(made.shards[0].uri)
    store.write_bytes(key, change(store.read_bytes(key)))


# --- a shard that is not the one the document lists --------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda data: data[: 2 * BLOCK + BLOCK + 20], ["the shard is cut", "sample second"]),
        (lambda data: data[: 4 * BLOCK], ["the shard is cut", "sample second"]),
        (lambda data: data[: 2 * BLOCK + 100], ["the shard is cut", "sample first"]),
        (lambda data: b"", ["the shard is cut: 0 bytes"]),
        (lambda data: data + data, ["the shard is too long"]),
        (lambda data: data.replace(b"a photo of third", b"a photo of thirt"), ["sha256"]),
    ],
    ids=["in a member", "between members", "in a header", "empty", "twice", "one letter"],
)
def test_a_changed_shard(change: Callable[[bytes], bytes], parts: list[str], store: Store) -> None:
    made = listed(store, [tar_of(three())], [3])
    assert len(list(read_shards(made, store))) == 3
    swap(change, store, made)
    refused(lambda: list(read_shards(made, store)), made.shards[0].uri, *parts)
    refused(lambda: PromptStream(made, store, seed=0).take(1), made.shards[0].uri, *parts)


def test_a_lost_shard(store: Store) -> None:
    made = listed(store, [tar_of(three())], [3])
    store.delete(store.key(made.shards[0].uri))
    refused(lambda: list(read_shards(made, store)), made.shards[0].uri, "does not exist")


# --- a shard that was bad when it was listed: its digest is right ------------------------------------------------


def cut(length: int) -> bytes:
    return tar_of(three())[:length]


LINK = tarfile.TarInfo("linked.json")
LINK.type, LINK.linkname = tarfile.SYMTYPE, "/etc/hostname"
BAD_SHARDS: dict[str, tuple[bytes, int, list[str]]] = {
    "cut in a member": (cut(3 * BLOCK + 20), 2, ["cut", "sample second"]),
    "cut between members": (cut(4 * BLOCK), 2, ["cut", "end mark", "after sample second"]),
    "cut in a header": (cut(4 * BLOCK + 100), 2, ["cut", "after sample second"]),
    "cut in the end mark": (cut(6 * BLOCK + BLOCK), 3, ["cut", "end mark", "after sample third"]),
    "damaged header": (
        tar_of(three())[: 4 * BLOCK] + b"\xff" * BLOCK + tar_of(three())[5 * BLOCK :],
        2,
        ["damaged", "after sample second"],
    ),
    "no tar": (b"<html>504 Gateway Timeout</html>" * 40, 1, ["damaged"]),
    "samples missing": (tar_of(three()), 4, ["holds 3 samples", "says 4"]),
    "duplicate key": (tar_of([*three(), ("first.json", record())]), 4, ["there twice", "sample first"]),
    "duplicate key in a row": (tar_of([*three(), ("third.json", record())]), 4, ["there twice", "sample third"]),
    "members apart": (
        tar_of([three()[0], three()[1], ("first.png", b"x")]),
        2,
        ["do not follow each other", "sample first", "first.png"],
    ),
    "unexpected member": (tar_of([*three(), ("third.png", b"x")]), 3, ["KEY.json", "KEY.png", "sample third"]),
    "name without extension": (tar_of([*three(), ("README", b"x")]), 4, ["README", "after sample third"]),
    "symbolic link": (
        tar_of(three())[: 6 * BLOCK] + LINK.tobuf(tarfile.USTAR_FORMAT) + bytes(2 * BLOCK),
        4,
        ["linked.json", "no plain file"],
    ),
}


@pytest.mark.parametrize("name", BAD_SHARDS)
def test_a_bad_shard_with_the_right_digest(name: str, file_store: Store) -> None:
    data, samples, parts = BAD_SHARDS[name]
    made = listed(file_store, [data], [samples])
    refused(lambda: list(read_shards(made, file_store)), made.shards[0].uri, *parts)


def test_one_key_in_two_shards(file_store: Store) -> None:
    made = listed(file_store, [tar_of(three()), tar_of(three()[1:2])], [3, 1])
    refused(lambda: list(read_shards(made)), made.shards[1].uri, "sample second", "used twice", made.shards[0].uri)


def test_a_document_that_contradicts_itself(file_store: Store) -> None:
    made = listed(file_store, [tar_of(three())], [3], samples=5)
    refused(lambda: list(read_shards(made)), "holds 3 samples", "says 5")
    refused(lambda: PromptStream(made, seed=0), "list 3 samples", "says 5")


def test_records_of_another_schema(file_store: Store) -> None:
    made = listed(file_store, [tar_of(three())], [3], record_schema="mar-grpo/prompt-record/9")
    refused(lambda: list(read_shards(made)), "prompt-record/9", RECORD_SCHEMA)


def test_a_picture_that_is_none(file_store: Store) -> None:
    made = listed(file_store, [tar_of([("one.json", record()), ("one.png", b"GIF89a")])], [1], kind="scenes")
    [sample] = read_shards(made)
    refused(sample.image, made.shards[0].uri, "sample one", "not a readable PNG")


# --- records, in a shard and in a prompt file --------------------------------------------------------------------

BAD_RECORDS: dict[str, tuple[bytes, list[str]]] = {
    "prompt without text": (record(prompt=" \n\t"), ["no text", "field prompt"]),
    "empty prompt": (record(prompt=""), ["no text", "field prompt"]),
    "no prompt": (record(prompt=None), ["field prompt"]),
    "prompt is a number": (record(prompt=7), ["field prompt"]),
    "10,000 characters": (record(prompt="ab " * 3333 + "z"), ["10,000 characters", "2,000", "field prompt"]),
    "not UTF-8": (record(prompt="caf_").replace(b"caf_", b"caf\xe9"), ["utf-8", "0xe9"]),
    "half a surrogate pair": (record(prompt="cat \ud83d"), ["surrogates"]),
    "cut JSON": (record()[:-9], ["not valid JSON"]),
    "not a number": (record(metadata=None)[:-1] + b', "metadata": {"weight": NaN}}', ["NaN"]),
    "unknown relation": (
        record(include=[{"class": "a", "count": 1}, {"class": "b", "count": 1, "position": ["inside", 0]}]),
        ["left of", "field include[1].position"],
    ),
    "relation to itself": (
        record(include=[{"class": "a", "count": 1, "position": ["above", 0]}]),
        ["include[0].position", "not earlier"],
    ),
    "count of zero": (record(include=[{"class": "a", "count": 0}]), ["field include[0].count"]),
    "count is text": (record(include=[{"class": "a", "count": "2"}]), ["field include[0].count"]),
    "count is true": (record(include=[{"class": "a", "count": True}]), ["field include[0].count"]),
    "no class": (record(include=[{"count": 1}]), ["field include[0].class"]),
    "unknown entry field": (record(include=[{"class": "a", "count": 1, "colour": "red"}]), ["include[0].colour"]),
    "nothing to check": (record(include=[]), ["single_object", "include"]),
    "not an object": (b"[1, 2]", []),
    "nested without end": (b'{"prompt": ' + b"[" * 100_000, ["not valid JSON", "recursion"]),
}
# How often a prompt file holds a record is not its mistake; that a misspelt field asks for nothing is.
BAD_ROWS = BAD_RECORDS | {
    "misspelt field": (record(include=None)[:-1] + b', "includes": [{"class": "cat", "count": 1}]}', ["include"]),
    "numeracy without number": (
        json.dumps({"prompt": "p", "task_type": "numeracy", "numeracy_info": [{"obj_name": "cat"}]}).encode(),
        ["field numeracy_info", "num"],
    ),
    "nouns are no list": (b'{"prompt": "p", "task_type": "object", "nouns": "cat"}', ["field nouns"]),
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_a_bad_record_in_a_shard(name: str, file_store: Store) -> None:
    data, parts = BAD_RECORDS[name]
    made = listed(file_store, [tar_of([*three(), ("fourth.json", data)])], [4])
    refused(lambda: list(read_shards(made, file_store)), made.shards[0].uri, "sample fourth", *parts)


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_in_a_prompt_file(name: str, tmp_path: Path, file_store: Store) -> None:
    data, parts = BAD_ROWS[name]
    build_from(tmp_path, "train.jsonl", record() + b"\n\n" + data + b"\n", file_store, "line 3", *parts)


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("train.jsonl", b"", ["no prompt"]),
        ("train.json", b"[]", ["no prompt"]),
        ("train.csv", b"prompt,tag\n", ["no prompt"]),
        ("train.parquet", b"PAR1", ["not a readable Parquet file"]),
        ("train.xlsx", b"PK", [".xlsx", ".jsonl"]),
        ("train.json", b'[{"prompt": "a"}, {"prompt": ""}]', ["record 2", "field prompt"]),
        ("train.json", b'[{"prompt": "a"}, {"pro', ["not valid JSON"]),
        ("train.jsonl", record(id="7") + b"\n" + record(id="7"), ["line 2", "field id", "'7'", "line 1"]),
        ("train.csv", b"prompt,tag,include\na photo,colors\n", ["line 2", "cells"]),
        ("train.csv", b"prompt,tag,include\na photo,colors,[{]\n", ["line 2", "field include"]),
        ("train.csv", b"prompt,tag\ncaf\xe9,text\n", ["line 2", "not UTF-8"]),
        ("train.csv", b'prompt\n"open', ["not valid CSV"]),
        ("train.csv", b"text\na photo\n", ["line 2", "field prompt"]),
    ],
)
def test_a_bad_prompt_file(name: str, content: bytes, parts: list[str], tmp_path: Path, file_store: Store) -> None:
    build_from(tmp_path, name, content, file_store, *parts)


def build_from(folder: Path, name: str, content: bytes, store: Store, *parts: str) -> None:
    """Building a set from this training file is refused, names the file, and leaves the store as it was."""
    (folder / name).write_bytes(content)
    (folder / "evaluation.jsonl").write_text(json.dumps(EVALUATION))
    store.write_bytes("earlier", b"stays")
    config = DataConfig(train=str(folder / name), evaluation=str(folder / "evaluation.jsonl"), evaluation_prompts=None)
    refused(lambda: build_prompt_set(store, "prompts", config, "train"), name, *parts)
    assert store.list() == ["earlier"]


# --- writing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "parts"),
    [
        ([], ["at least one sample"]),
        (["a", "b", "a"], ["sample a", "used twice"]),
        (["a", "b/../c"], ["b/../c"]),
        (["a", "b.c"], ["b.c"]),
        (["a", ""], ["a key is"]),
    ],
)
def test_samples_that_cannot_be_written_leave_nothing(samples: list[str], parts: list[str], store: Store) -> None:
    store.write_bytes("earlier", b"stays")
    made = [Sample(key, parse_row(f"prompt {i}", where="test")) for i, key in enumerate(samples)]
    refused(lambda: write_shards(store, "p", made, samples_per_shard=1, kind="prompts", source={}), *parts)
    assert store.list() == ["earlier"]


def test_a_scene_needs_its_picture(file_store: Store) -> None:
    file_store.write_bytes("earlier", b"stays")
    sample = Sample("a", parse_row("prompt", where="test"))
    refused(
        lambda: write_shards(file_store, "p", [sample], samples_per_shard=1, kind="scenes", source={}),
        "sample a",
        "KEY.png",
    )
    assert file_store.list() == ["earlier"]


def test_digests_are_of_what_lies_in_the_store(store: Store) -> None:
    sample = Sample("a", parse_row("prompt", where="test"))
    made = write_shards(store, "p", [sample], samples_per_shard=1, kind="prompts", source={})
    data = store.read_bytes(store.key(made.shards[0].uri))
    assert hashlib.sha256(data).hexdigest() == made.shards[0].sha256
