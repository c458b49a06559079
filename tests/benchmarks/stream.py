"""Streaming from S3 (a SeaweedFS of its own): our reader, webdataset over s3fs, raw fs.cat; our reader on local files.

    python -m tests.benchmarks.stream [--repeats 3] [--json FILE]

Ours checks sha256, structure and records; webdataset decodes JSON; fs.cat only moves bytes. Server and reader share
this machine's cores. Medians of the repeats, which take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import s3fs
import webdataset

from mar_grpo.data.prompts import parse_row
from mar_grpo.data.shards import Sample, write_shards
from mar_grpo.data.stream import PromptStream
from mar_grpo.documents import PromptSet, Shard
from mar_grpo.launch.object_store import serve
from mar_grpo.store import Store


def samples(count: int, picture_bytes: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    text = " and ".join(["a photo of a cat"] * 12)
    pictures = (rng.bytes(picture_bytes) if picture_bytes else None for _ in range(count))
    return [
        Sample(f"{i:08d}", parse_row(f"{i} {text}", where="benchmark"), picture) for i, picture in enumerate(pictures)
    ]


def stream(made: PromptSet, store: Store, cache_bytes: int, epochs: int = 1) -> float:
    """Seconds of the last epoch."""
    source, take = PromptStream(made, store, seed=0, cache_bytes=cache_bytes), 32
    for _ in range(epochs):
        began = time.perf_counter()
        for _ in range(len(source) // take):
            source.take(take)
    return time.perf_counter() - began


def web(made: PromptSet, files: s3fs.S3FileSystem) -> float:
    began = time.perf_counter()
    urls = [{"url": shard.uri, "stream": files.open(shard.uri)} for shard in made.shards]
    pipe = webdataset.tariterators.group_by_keys(webdataset.tariterators.tar_file_expander(urls))
    count = sum(1 for sample in pipe if json.loads(sample["json"]))
    assert count == made.samples
    return time.perf_counter() - began


def cat(made: PromptSet, files: s3fs.S3FileSystem) -> float:
    began = time.perf_counter()
    files.cat([shard.uri for shard in made.shards])
    return time.perf_counter() - began


def opening() -> float:
    """Seconds from the document's bytes to a stream, 1,000 shards of 10,000 records."""
    shard = Shard(uri="s3://bucket/x.tar", bytes=10**7, samples=10**4, sha256="0" * 64, etag="e")
    fields: dict[str, Any] = {"kind": "prompts", "record_schema": "mar-grpo/prompt-record/1", "source": {}}
    text = PromptSet(shards=(shard,) * 1000, samples=10**7, **fields).canonical()
    began = time.perf_counter()
    PromptStream(PromptSet.model_validate_json(text), seed=0)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: dict[str, Any] = {"opening_seconds": opening()}
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder) / "store") as remote:
        files, local = s3fs.S3FileSystem(use_listings_cache=False), Store(Path(folder) / "local")
        for name, count, size in (("1 MiB samples", 128, 2**20), ("prompts", 16000, 0)):
            kind: Any = "scenes" if size else "prompts"
            how = {"samples_per_shard": count // 4, "kind": kind, "source": {}}
            made, near = (
                write_shards(store, name[:3].strip(), samples(count, size), **how) for store in (remote, local)
            )
            total = sum(shard.bytes for shard in made.shards)
            ways: dict[str, Callable[[], float]] = {
                "fs.cat": lambda made=made: cat(made, files),
                "webdataset, s3fs": lambda made=made: web(made, files),
                "ours, first epoch": lambda made=made, total=total: stream(made, remote, 2 * total),
                "ours, first epoch, small cache": lambda made=made, total=total: stream(made, remote, total // 2),
                "ours, later epochs, small cache": lambda made=made, total=total: stream(made, remote, total // 2, 2),
                "ours, local files": lambda near=near, total=total: stream(near, local, 2 * total),
            }
            if not size:  # one ranged read per prompt is not how prompts are read: they fit the cache
                ways = {way: call for way, call in ways.items() if "small" not in way}
            rounds = [[call() for call in ways.values()] for _ in range(options.repeats)]
            seconds = dict(zip(ways, map(statistics.median, zip(*rounds, strict=True)), strict=True))
            for way, took in seconds.items():
                rows[f"{name}: {way}"] = {"samples_per_second": count / took, "mib_per_second": total / took / 2**20}
    for name, row in rows.items():
        print(name, row if isinstance(row, float) else {key: round(value, 1) for key, value in row.items()})
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
