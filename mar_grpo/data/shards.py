"""WebDataset shards of prompt records and scenes: a reproducible writer, and a reader that believes nothing.

A sample is KEY.json (the record) and, in a set of scenes, KEY.png. The PromptSet document lists the shards with their
bytes, samples and sha256. Common readers end silently where a tar was cut between two members; this one does not.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mar_grpo.data.prompts import RECORD_SCHEMA, PromptRecord, validated
from mar_grpo.documents import PromptSet, Shard
from mar_grpo.errors import InputError
from mar_grpo.store import Store, canonical_json, parse_json, read_uri

Kind = Literal["prompts", "scenes"]
_MEMBERS: dict[str, set[str]] = {"prompts": {"json"}, "scenes": {"json", "png"}}
_END_BYTES = 2 * tarfile.BLOCKSIZE  # a tar ends with at least two blocks of zeros
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
    """Every sample of the set in order, each shard checked as in `read_shard` before its first sample is given.

    Errors: as `read_shard`; a key that two shards use.
    """
    owner: dict[str, str] = {}
    for shard in prompt_set.shards:
        for sample in read_shard(prompt_set, shard, store):
            if sample.key in owner:
                where = f"{shard.uri}, sample {sample.key}"
                raise InputError("the key is used twice", where=where, hint=f"the other one is in {owner[sample.key]}")
            owner[sample.key] = shard.uri
            yield sample
    if len(owner) != prompt_set.samples:
        first = prompt_set.shards[0].uri
        raise InputError(f"the set holds {len(owner)} samples, its document says {prompt_set.samples}", where=first)


def read_shard(prompt_set: PromptSet, shard: Shard, store: Store | None = None) -> list[Sample]:
    """Samples of one shard, after its bytes, digest, tar structure, sample count and records were checked.

    Args:
        store: used for shards that lie in it; any other is read by its full URI.

    Errors: InputError that names the shard and, where there is one, the sample and the field.
    """
    if prompt_set.record_schema != RECORD_SCHEMA:
        found = prompt_set.record_schema
        raise InputError(f"the records have schema {found!r}, this release reads {RECORD_SCHEMA!r}", where=shard.uri)
    inside = store is not None and shard.uri.startswith(store.uri("x")[:-1])
    data = store.read_bytes(store.key(shard.uri)) if store is not None and inside else read_uri(shard.uri)
    hint = "copy the shard again, or build the prompt set anew"
    if len(data) != shard.bytes:
        cut = "is cut" if len(data) < shard.bytes else "is too long"
        text = f"the shard {cut}: {len(data):,} bytes, the prompt set says {shard.bytes:,}"
        raise InputError(text, where=_place(shard.uri, _last_key(data)), hint=hint)
    digest = hashlib.sha256(data).hexdigest()
    if digest != shard.sha256:
        text = f"the shard is not the one the prompt set lists: sha256 {digest}, expected {shard.sha256}"
        raise InputError(text, where=shard.uri, hint=hint)
    samples = [_sample(key, parts, prompt_set.kind, shard.uri) for key, parts in parse_tar(data, name=shard.uri)]
    if len(samples) != shard.samples:
        text = f"the shard holds {len(samples)} samples, the prompt set says {shard.samples}"
        raise InputError(text, where=shard.uri, hint=hint)
    return samples


def parse_tar(data: bytes, *, name: str) -> list[tuple[str, dict[str, bytes]]]:
    """Members of a complete WebDataset tar by sample: [(key, {extension: bytes})].

    Errors: InputError that names the tar and the sample when it was cut in a member or between two, when a sample
    occurs twice, when its members do not follow each other, or when a member is no plain file.
    """
    samples: dict[str, dict[str, bytes]] = {}
    last = ""
    for key, extension, content in _members_of(data, name):
        parts = samples.setdefault(key, {})
        if extension in parts:
            raise InputError(f"the sample is there twice (a second {key}.{extension})", where=_place(name, key))
        if parts and key != last:
            text = f"the members of the sample do not follow each other ({key}.{extension})"
            raise InputError(text, where=_place(name, key))
        parts[extension] = content
        last = key
    return list(samples.items())


def _members_of(data: bytes, name: str) -> Iterator[tuple[str, str, bytes]]:
    """(key, extension, content) of every member in order, then the proof that the archive ends where its writer did."""
    key = ""
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            while (member := tar.next()) is not None:
                named = re.fullmatch(r"((?:.*/)?[^./]+)\.([^/]+)", member.name)
                if named is None or not member.isreg() or member.issparse() or member.size < 0:
                    text = f"the member {member.name!r} is no plain file called KEY.EXTENSION"
                    raise InputError(text, where=_place(name, key, "after "))
                key, extension = named.groups()
                yield key, extension, data[member.offset_data : member.offset_data + member.size]
            end = data[tar.offset :]  # type: ignore[attr-defined, unused-ignore]
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise InputError(f"the shard is cut or damaged: {error}", where=_place(name, key)) from error
    if end.strip(b"\0"):
        raise InputError("the shard is cut or damaged: no member follows", where=_place(name, key, "after "))
    if len(end) < _END_BYTES:
        raise InputError("the shard is cut: its end mark is missing", where=_place(name, key, "after "))


def _last_key(data: bytes) -> str:
    """Key of the last member whose header is whole, for a message about a cut shard."""
    last = ""
    try:
        for key, _, _ in _members_of(data, ""):
            last = key
    except InputError:
        pass  # what was found before the damage is the answer
    return last


def _sample(key: str, parts: dict[str, bytes], kind: str, shard: str) -> Sample:
    where = _place(shard, key)
    if set(parts) != _MEMBERS[kind]:
        found = ", ".join(f"KEY.{name}" for name in sorted(parts))
        raise InputError(f"a set of {kind} holds {_members(kind)} a sample, found {found}", where=where)
    record = validated(parse_json(parts["json"], where=f"{where}, member {key}.json"), where=where)
    return Sample(key=key, record=record, png=parts.get("png"), shard=shard)


def _place(shard: str, key: str, word: str = "") -> str:
    return f"{shard}, {word}sample {key}" if key else shard
