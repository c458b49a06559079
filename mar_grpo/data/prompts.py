"""The prompt record, in GenEval's field names, and the files it is read from.

One record says what is asked for, so that a judge can say whether a picture shows it: `include` lists the objects with
their count, colour and position relative to an earlier entry, `exclude` what must not be there. Read are GenEval's and
Flow-GRPO's files (the same schema), records of the T2I-CompBench type (prompt, nouns, task_type, spatial_info,
numeracy_info, attr_nouns) and plain prompts. What has no field here is kept in `metadata`.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from mar_grpo.errors import InputError
from mar_grpo.store import canonical_json, parse_json, read_uri

RECORD_SCHEMA = "mar-grpo/prompt-record/1"
MAX_PROMPT_CHARACTERS = 2000
GENEVAL_TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
TEXT_TAG = "text"  # a prompt that comes without objects to check

Relation = Literal["left of", "right of", "above", "below"]
Text = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS)]
Count = Annotated[int, Field(strict=True, ge=1)]

# Localities of T2I-CompBench-type records that are one of GenEval's relations. Of the others (next to, near, on side
# of) both objects are asked for and the locality stays in the metadata.
_LOCALITIES = {
    "left of": "left of",
    "on the left of": "left of",
    "right of": "right of",
    "on the right of": "right of",
    "above": "above",
    "on the top of": "above",
    "below": "below",
    "on the bottom of": "below",
}
_MIRRORED = {"right of": "left of", "below": "above"}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ExcludeEntry(_Part):
    """At least `count` objects of this class make a picture wrong."""

    class_name: Text = Field(alias="class")
    count: Count


class IncludeEntry(ExcludeEntry):
    """`count` objects of this class, optionally of one colour, optionally in a relation to an earlier entry."""

    color: Text | None = None
    position: tuple[Relation, Annotated[int, Field(strict=True, ge=0)]] | None = None


class PromptRecord(_Part):
    """One prompt and what a picture of it must show.

    `id` is the name a file gives a record, if any. A record with one of GenEval's tags has at least one entry to check:
    a misspelt field must not turn into a prompt that every picture satisfies.
    """

    prompt: str
    tag: Text
    include: tuple[IncludeEntry, ...] = ()
    exclude: tuple[ExcludeEntry, ...] = ()
    id: Text | None = None
    metadata: dict[str, JsonValue] = {}

    @field_validator("prompt")
    @classmethod
    def _has_text(cls, prompt: str) -> str:
        if not any(letter.isprintable() and not letter.isspace() for letter in prompt):
            raise ValueError("the prompt has no text")
        if len(prompt) > MAX_PROMPT_CHARACTERS:
            raise ValueError(f"the prompt has {len(prompt):,} characters, at most {MAX_PROMPT_CHARACTERS:,} are read")
        return prompt

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> PromptRecord:
        if self.tag in GENEVAL_TAGS and not self.include:
            raise ValueError(f"a record tagged {self.tag} needs at least one entry in include")
        for place, entry in enumerate(self.include):
            if entry.position and entry.position[1] >= place:
                raise ValueError(f"include[{place}].position refers to entry {entry.position[1]}, which is not earlier")
        if info.mode == "json" and not self.metadata:
            return self  # texts that come out of JSON are whole
        try:
            canonical_json(self.as_dict())
        except InputError as error:  # half a surrogate pair, an overflowing number
            raise ValueError(error.what) from error
        return self

    def as_dict(self) -> dict[str, Any]:
        """GenEval's field names, JSON types, nothing for what is absent."""
        full = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return {name: value for name, value in full.items() if value or name == "include"}

    @property
    def prompt_id(self) -> str:
        """First 16 hex digits of the sha256 of the canonical record."""
        return hashlib.sha256(canonical_json(self.as_dict())).hexdigest()[:16]

    def asked(self, by: Literal["composition", "request"]) -> frozenset[str]:
        """What is asked for, whatever the wording and the order; the words of the prompt if it lists no objects.

        Args:
            by: "composition" is the multiset of (class, colour, count); "request" also tells relations apart
                ("a left of b" equals "b right of a").
        """
        if not self.include:
            return frozenset(["words: " + " ".join(re.findall(r"\w+", self.prompt.casefold()))])
        names = [f"{entry.color or '-'} {entry.class_name}" for entry in self.include]
        totals: Counter[str] = Counter()
        for name, entry in zip(names, self.include, strict=True):
            totals[name] += entry.count
        facts = {f"{name} x{count}" for name, count in totals.items()}
        if by == "request":
            for name, entry in zip(names, self.include, strict=True):
                if entry.position:
                    relation, other = entry.position[0], names[entry.position[1]]
                    first, second = (other, name) if relation in _MIRRORED else (name, other)
                    facts.add(f"{first} {_MIRRORED.get(relation, relation)} {second}")
        return frozenset(facts)

    @classmethod
    def from_geneval(cls, row: dict[str, Any], *, where: str) -> PromptRecord:
        """A row of a GenEval or Flow-GRPO file. Fields this record does not have go to `metadata`.

        Errors: InputError with `where` and the field.
        """
        known = {name: value for name, value in row.items() if name in cls.model_fields and value is not None}
        extra = {name: value for name, value in row.items() if name not in cls.model_fields}
        if extra and isinstance(known.get("metadata", {}), dict):
            known["metadata"] = known.get("metadata", {}) | extra
        if "tag" not in known and not known.get("include"):
            known["tag"] = TEXT_TAG
        return validated(known, where=where)

    @classmethod
    def from_t2i(cls, row: dict[str, Any], *, where: str) -> PromptRecord:
        """A T2I-CompBench-type row (algorithm reference, section 8); `tag` is its task_type, the rest is `metadata`.

        Numeracy rows ask for their counts, rows with spatial_info for both objects and their relation, and every other
        noun once. Attributes (attr_nouns) stay words: only a scorer that reads them can check them.

        Errors: InputError with `where` and the field.
        """
        numeracy = _parts(row, "numeracy_info", ("obj_name", "num"), where)
        include = [{"class": item["obj_name"], "count": item["num"]} for item in numeracy]
        spatial = row.get("spatial_info") or {}
        if spatial:
            [spatial] = _parts({"spatial_info": [spatial]}, "spatial_info", ("obj1", "obj2", "locality"), where)
            include.append({"class": spatial["obj2"], "count": 1})
            subject = {"class": spatial["obj1"], "count": 1}
            if relation := _LOCALITIES.get(str(spatial["locality"])):
                subject["position"] = [relation, len(include) - 1]
            include.append(subject)
        nouns = row.get("nouns") or []
        if not isinstance(nouns, list) or not all(isinstance(noun, str) for noun in nouns):
            raise InputError("nouns must be a list of words", where=f"{where}, field nouns")
        present = {entry["class"] for entry in include if isinstance(entry["class"], str)}
        include += [{"class": noun, "count": 1} for noun in dict.fromkeys(nouns) if noun not in present]
        fields: dict[str, Any] = {"include": include, "tag": row.get("task_type")}
        fields |= {name: row[name] for name in ("prompt", "id") if row.get(name) is not None}
        fields["metadata"] = {name: value for name, value in row.items() if name not in ("prompt", "id")}
        return validated(fields, where=where)


def validated(fields: Any, *, where: str) -> PromptRecord:
    """A record from exactly its own fields. InputError that names `where` and the first wrong field."""
    try:
        return PromptRecord.model_validate(fields)
    except ValidationError as error:
        problem = error.errors()[0]
        path = re.sub(r"\.(\d+)", r"[\1]", ".".join(map(str, problem["loc"])))
        text = problem["msg"].removeprefix("Value error, ")
        raise InputError(text[0].lower() + text[1:], where=f"{where}, field {path}" if path else where) from error


def record_from_json(data: bytes, *, where: str, member: str) -> PromptRecord:
    """As `validated`, from JSON; `member` is the file it is in."""
    try:
        return PromptRecord.model_validate_json(data)
    except ValidationError:  # read again for the message
        return validated(parse_json(data, where=f"{where}, member {member}"), where=where)


def parse_row(row: Any, *, where: str) -> PromptRecord:
    """A record from one row of a prompt file, in any of the known forms; a string is a plain prompt."""
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise InputError(f"a record must be an object with fields, not {type(row).__name__}", where=where)
    is_t2i = "task_type" in row or "nouns" in row
    return (PromptRecord.from_t2i if is_t2i else PromptRecord.from_geneval)(row, where=where)


def _parts(row: dict[str, Any], field: str, keys: tuple[str, ...], where: str) -> list[dict[str, Any]]:
    parts = row.get(field) or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) and set(keys) <= set(part) for part in parts):
        raise InputError(f"{field} must hold {', '.join(keys)}", where=f"{where}, field {field}")
    return cast(list[dict[str, Any]], parts)


# --- files -------------------------------------------------------------------------------------------------------


def read_prompt_file(uri: str) -> list[PromptRecord]:
    """Records of a prompt file, in order. A row that occurs twice is two equal records (Flow-GRPO weighs so).

    Args:
        uri: path, file:// or s3:// URI of a .json (an array, or JSON Lines), .jsonl, .csv or .parquet file. In a
            CSV file (and in text columns of Parquet) `include` and `exclude` hold JSON, and an empty cell is an absent
            field.

    Errors: InputError that names the file, the line (in an array the record, from 1 on) and the field.
    """
    return parse_prompt_file(read_uri(uri), name=uri)


def parse_prompt_file(data: bytes, *, name: str) -> list[PromptRecord]:
    """As `read_prompt_file`, from the bytes of a file; `name` says what it is called and gives the format."""
    suffix = PurePosixPath(name).suffix.lower()
    if suffix not in _READERS:
        known = ", ".join(sorted(_READERS))
        raise InputError(f"prompt files are {known}, not {suffix or 'without suffix'}", where=name)
    records: list[PromptRecord] = []
    seen: dict[str, str] = {}
    for where, row in _READERS[suffix](data.removeprefix(b"\xef\xbb\xbf"), name):
        record = parse_row(row, where=where)
        if record.id is not None:
            if record.id in seen:
                raise InputError(
                    f"the id {record.id!r} was used before, at {seen[record.id]}", where=f"{where}, field id"
                )
            seen[record.id] = where
        records.append(record)
    if not records:
        raise InputError("the prompt file holds no prompt", where=name)
    return records


def _json_rows(data: bytes, name: str) -> Iterator[tuple[str, Any]]:
    if not data.lstrip().startswith(b"["):
        yield from _line_rows(data, name)
        return
    for number, row in enumerate(parse_json(data, where=name), 1):
        yield f"{name}, record {number}", row


def _line_rows(data: bytes, name: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            where = f"{name}, line {number}"
            yield where, parse_json(line, where=where)


def _csv_rows(data: bytes, name: str) -> Iterator[tuple[str, Any]]:
    text: list[str] = []
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        try:
            text.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InputError(f"not UTF-8: {error.reason}", where=f"{name}, line {number}") from error
    table = csv.DictReader(text, strict=True)
    try:
        for row in table:
            where = f"{name}, line {table.line_num}"
            if None in row or None in row.values():
                raise InputError("the row does not have as many cells as the header", where=where)
            filled: dict[str, Any] = {column: cell for column, cell in row.items() if cell}
            for column in ("include", "exclude"):
                if column in filled:
                    filled[column] = parse_json(filled[column].encode(), where=f"{where}, field {column}")
            yield where, filled
    except csv.Error as error:
        raise InputError(f"not valid CSV: {error}", where=f"{name}, line {table.line_num}") from error


def _parquet_rows(data: bytes, name: str) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError("Parquet needs pyarrow", where=name, hint="pip install 'mar-grpo[data]'") from error
    try:
        rows = pyarrow.parquet.read_table(pyarrow.BufferReader(data)).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"not a readable Parquet file: {' '.join(str(error).split())[:200]}", where=name) from error
    for number, row in enumerate(rows, 1):
        where = f"{name}, record {number}"
        filled = {column: cell for column, cell in row.items() if cell is not None}
        for column in ("include", "exclude"):
            if isinstance(filled.get(column), str):
                filled[column] = parse_json(filled[column].encode(), where=f"{where}, field {column}")
        yield where, filled


_READERS = {".json": _json_rows, ".jsonl": _line_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}
