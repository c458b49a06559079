"""What passes between steps: JSON documents whose sha256 digest is their identity.

A document is stored as canonical JSON (sorted keys, finite numbers), so the sha256 of the stored bytes is the digest
of the content. Every document carries its type and a schema version; unknown or missing fields are refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mar_grpo.errors import InputError
from mar_grpo.store import FileEntry, Store, canonical_json, parse_json, read_uri

SHA256 = Field(pattern=r"^[0-9a-f]{64}$")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")


class DocumentRef(_Record):
    """Where a stored document is, and which one it is."""

    uri: str
    sha256: str = SHA256


class Document(_Record):
    """Base of all documents. `schema_version` grows when old readers would misread new documents."""

    title: ClassVar[str]
    schema_version: Literal[1] = 1

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON, 64 hex digits."""
        return hashlib.sha256(self.canonical()).hexdigest()

    def canonical(self) -> bytes:
        """The bytes that are stored. InputError if a number is not finite."""
        return canonical_json(self.model_dump(mode="json"), where=self.title)


class Shard(_Record):
    """One WebDataset tar. `etag` names the version that was written; elsewhere only the sha256 counts."""

    uri: str
    bytes: int = Field(ge=0)
    samples: int = Field(ge=0)
    sha256: str = SHA256
    etag: str


class PromptSet(Document):
    """Prompts (JSON) or scenes (JSON and picture) in shards, in order."""

    title: ClassVar[str] = "prompt set"
    document: Literal["prompt_set"] = "prompt_set"
    kind: Literal["prompts", "scenes"]
    shards: tuple[Shard, ...] = Field(min_length=1)
    samples: int = Field(ge=1)
    record_schema: str
    source: dict[str, Any]


class CheckpointFile(_Record):
    """One file of a checkpoint folder; `path` is relative to the folder."""

    path: str
    uri: str
    bytes: int = Field(ge=0)
    sha256: str = SHA256


class Checkpoint(Document):
    """A model folder. `parent` is the digest of the checkpoint it was trained from."""

    title: ClassVar[str] = "checkpoint"
    document: Literal["checkpoint"] = "checkpoint"
    family: str
    config: dict[str, Any]
    files: tuple[CheckpointFile, ...] = Field(min_length=1)
    step: int = Field(ge=0)
    parent: str | None = None
    recipe_digest: str | None = None


class TrainingRun(Document):
    """How a training run went. `failure` holds what an exit task or a person needs to act on."""

    title: ClassVar[str] = "training run"
    document: Literal["training_run"] = "training_run"
    recipe: dict[str, Any]
    recipe_digest: str
    code_version: str
    state_uri: str
    metrics_uri: str
    checkpoint: DocumentRef | None = None
    outcome: Literal["completed", "failed", "unhealthy"]
    failure: dict[str, Any] | None = None
    steps: int = Field(ge=0)
    seconds: float = Field(ge=0)
    seconds_per_step: float | None = Field(default=None, ge=0)


class Score(_Record):
    """Mean of one score. `standard_error` is absent when one prompt cannot give one."""

    n: int = Field(ge=1)
    mean: float
    standard_error: float | None = Field(default=None, ge=0)


class ScoreSummary(_Record):
    """One score over all images and per prompt tag."""

    overall: Score
    by_tag: dict[str, Score]


class ScoreTable(Document):
    """Scores of one checkpoint on one prompt set (both by digest); the rows are JSON lines beside it."""

    title: ClassVar[str] = "score table"
    document: Literal["score_table"] = "score_table"
    checkpoint: str
    prompt_set: str
    sampling: dict[str, Any]
    rows_uri: str
    rows_sha256: str = SHA256
    images_uri: str | None = None
    summary: dict[str, ScoreSummary]
    seconds: float = Field(ge=0)


class ScoreRow(_Record):
    """One image: which prompt, which sample of it, which noise, every score."""

    prompt_id: str
    prompt: str
    tag: str
    sample: int = Field(ge=0)
    seed: int
    image_sha256: str = SHA256
    scores: dict[str, float]
    features: tuple[float, ...] | None = None


class GateRule(_Record):
    """One rule of the gate with its numbers."""

    name: str
    passed: bool
    measured: float | None
    threshold: float | None
    detail: str


class GateDecision(Document):
    """Whether the candidate checkpoint replaces the incumbent (both by digest), and why."""

    title: ClassVar[str] = "gate decision"
    document: Literal["gate_decision"] = "gate_decision"
    candidate: str
    incumbent: str
    rules: tuple[GateRule, ...] = Field(min_length=1)
    promote: bool


D = TypeVar("D", bound=Document)


def write_document(store: Store, key: str, document: Document) -> DocumentRef:
    """Publish a document under a key and return the reference by which others read it."""
    entry = store.write_bytes(key, document.canonical())
    return DocumentRef(uri=entry.uri, sha256=entry.sha256)


def read_document(source: DocumentRef | str, cls: type[D], *, sha256: str | None = None) -> D:
    """Read a document and check type, schema version, fields and (if known) digest.

    Args:
        source: a reference, or a full URI (or plain path) with an optional `sha256`.

    Errors: InputError that names the URI and the first wrong field.
    """
    uri, digest = (source.uri, source.sha256) if isinstance(source, DocumentRef) else (source, sha256)
    data = parse_json(read_uri(uri, sha256=digest), where=uri)
    name = cls.model_fields["document"].default
    if not isinstance(data, dict) or data.get("document") != name:
        found = data.get("document", "no document of ours") if isinstance(data, dict) else type(data).__name__
        raise InputError(f"not a {cls.title}: document is {found!r}, expected {name!r}", where=uri)
    version = cls.model_fields["schema_version"].default
    if data.get("schema_version") != version:
        raise InputError(
            f"{cls.title} has schema version {data.get('schema_version')!r}, this release reads {version}",
            where=uri,
            hint="use the release that wrote it, or make it again",
        )
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise InputError(f"not a valid {cls.title}: {_first(error)}", where=uri) from error


def write_rows(store: Store, key: str, rows: Iterable[ScoreRow]) -> FileEntry:
    """Publish score rows as JSON lines (one canonical JSON object per line)."""
    return store.write_bytes(key, b"".join(canonical_json(row.model_dump(mode="json")) + b"\n" for row in rows))


def read_rows(table: ScoreTable) -> list[ScoreRow]:
    """The rows of a score table, checked against its digest. InputError names the line."""
    rows = []
    for number, line in enumerate(read_uri(table.rows_uri, sha256=table.rows_sha256).splitlines(), 1):
        where = f"{table.rows_uri}, line {number}"
        try:
            rows.append(ScoreRow.model_validate(parse_json(line, where=where)))
        except ValidationError as error:
            raise InputError(f"not a score row: {_first(error)}", where=where) from error
    return rows


def _first(error: ValidationError) -> str:
    """Field and reason of the first of pydantic's errors."""
    problem = error.errors()[0]
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{'.'.join(map(str, problem['loc'])) or 'the document'}: {problem['msg']}{more}"
