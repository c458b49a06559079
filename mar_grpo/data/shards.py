"""WebDataset shards of prompt records and scenes: a reproducible writer, and a reader that believes nothing.

A sample is KEY.json (the record) and, in a set of scenes, KEY.png. The PromptSet document lists the shards with their
bytes, samples and sha256. Common readers end silently where a tar was cut between two members; this one does not.
"""

from __future__ import annotations

import hashlib
import io
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mar_grpo.data.prompts import RECORD_SCHEMA, PromptRecord, record_from_json
from mar_grpo.data.reader import ShardReader
from mar_grpo.data.tar import parse_tar, place
from mar_grpo.documents import PromptSet, Shard
from mar_grpo.errors import InputError
from mar_grpo.store import BLOCK_BYTES, Store, canonical_json

Kind = Literal["prompts", "scenes"]
_MEMBERS: dict[str, set[str]] = {"prompts": {"json"}, "scenes": {"json", "png"}}
PASS_BYTES = 256 * 2**20  # what a pass over a whole set may hold
_OWNER = "mar-grpo"


@dataclass(frozen=True)
class Sample:
    """One sample: key, record, picture (PNG bytes, scenes only) and, for messages, the shard it was read from."""

    key: str
    record: PromptRecord
    png: bytes | None = None
    shard: str = field(default="", compare=False)

    def image(self) -> np.ndarray:
        """The picture, uint8 [H, W, 3]. InputError that names shard and sample if there is none or it is damaged."""
        from PIL import Image

        try:
            return np.asarray(Image.open(io.BytesIO(self.png or b""), formats=["PNG"]).convert("RGB"))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise InputError(f"not a readable PNG: {error}", where=f"{self.shard}, sample {self.key}") from error


# --- writing -----------------------------------------------------------------------------------------------------


def write_shards(
    store: Store, prefix: str, samples: Iterable[Sample], *, samples_per_shard: int, kind: Kind, source: dict[str, Any]
) -> PromptSet:
    """Write samples as shards `prefix/NNNNN-DIGEST.tar` and return the document that lists them.

    Equal samples give equal bytes. Every shard is complete on local disk before the first goes to the store, and their
    names hold their digests, so bad input leaves nothing behind and an earlier set under the prefix stays readable. The
    caller publishes the document (`write_document`) where readers shall find it.

    Errors: InputError for an empty set, an unfit or repeated key, a missing or unexpected picture.
    """
    keys: set[str] = set()
    remaining = iter(samples)
    with tempfile.TemporaryDirectory(prefix="mar-grpo-shards-") as folder:
        local: list[tuple[Path, str, int]] = []
        while part := list(islice(remaining, samples_per_shard)):
            path = Path(folder) / f"{len(local):05d}.tar"
            _write_tar(path, part, keys, kind)
            local.append((path, f"{path.stem}-{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}.tar", len(part)))
        if not local:
            raise InputError("a prompt set needs at least one sample", where=store.uri(prefix))
        entries = [(store.put_file(path, f"{prefix}/{name}"), count) for path, name, count in local]
    return PromptSet(
        kind=kind,
        shards=tuple(Shard(**entry.model_dump(), samples=count) for entry, count in entries),
        samples=len(keys),
        record_schema=RECORD_SCHEMA,
        source=source,
    )


def _write_tar(path: Path, samples: list[Sample], keys: set[str], kind: Kind) -> None:
    from webdataset.writer import TarWriter  # type: ignore[import-untyped, unused-ignore]

    with open(path, "wb") as file, TarWriter(file, user=_OWNER, group=_OWNER, mtime=0, encoder=False) as tar:
        for sample in samples:
            if not re.fullmatch(r"[\w-]{1,80}", sample.key, re.ASCII):
                raise InputError("a key is 1 to 80 letters, digits, '_' or '-'", where=f"sample {sample.key!r}")
            if sample.key in keys:
                raise InputError("the key is used twice", where=f"sample {sample.key}")
            if (sample.png is not None) != (kind == "scenes"):
                raise InputError(f"a set of {kind} holds {_members(kind)} a sample", where=f"sample {sample.key}")
            keys.add(sample.key)
            members = {"__key__": sample.key, "json": canonical_json(sample.record.as_dict())}
            tar.write(members if sample.png is None else members | {"png": sample.png})


def _members(kind: str) -> str:
    return " and ".join(f"KEY.{name}" for name in sorted(_MEMBERS[kind]))


# --- reading -----------------------------------------------------------------------------------------------------


def read_shards(prompt_set: PromptSet, store: Store | None = None) -> Iterator[Sample]:
    """Every sample of the set in order, each shard checked (ShardReader) before its first sample is given.

    Args:
        store: used for shards that lie in it; any other is read by its full URI.

    Errors: as `ShardReader.read` and `decode`; a key that two shards use.
    """
    check_schema(prompt_set)
    reader = ShardReader(prompt_set, store, cache_bytes=PASS_BYTES)
    owner: dict[str, str] = {}
    for number, shard in enumerate(prompt_set.shards):
        for stretch in reader.runs(number, BLOCK_BYTES):
            for sample in samples_in(stretch, prompt_set, shard.uri):
                if sample.key in owner:
                    where = place(shard.uri, sample.key)
                    hint = f"the other one is in {owner[sample.key]}"
                    raise InputError("the key is used twice", where=where, hint=hint)
                owner[sample.key] = shard.uri
                yield sample
        reader.drop(number)
    if len(owner) != prompt_set.samples:
        first = prompt_set.shards[0].uri
        raise InputError(f"the set holds {len(owner)} samples, its document says {prompt_set.samples}", where=first)


def check_schema(prompt_set: PromptSet) -> None:
    """InputError if this release does not read the set's records."""
    if prompt_set.record_schema != RECORD_SCHEMA:
        text = f"the records have schema {prompt_set.record_schema!r}, this release reads {RECORD_SCHEMA!r}"
        raise InputError(text, where=prompt_set.shards[0].uri)


def samples_in(stretch: bytes, prompt_set: PromptSet, shard: str) -> Iterator[Sample]:
    """The samples of a stretch that a ShardReader gave."""
    for key, parts in parse_tar(stretch, name=shard, whole=False):
        yield decode(key, parts, prompt_set.kind, shard)


def decode(key: str, parts: dict[str, bytes], kind: str, shard: str) -> Sample:
    """A sample from the content of its members. InputError that names shard, sample and field."""
    where = place(shard, key)
    if set(parts) != _MEMBERS[kind]:
        found = ", ".join(f"KEY.{name}" for name in sorted(parts))
        raise InputError(f"a set of {kind} holds {_members(kind)} a sample, found {found}", where=where)
    record = record_from_json(parts["json"], where=where, member=f"{key}.json")
    return Sample(key=key, record=record, png=parts.get("png"), shard=shard)
