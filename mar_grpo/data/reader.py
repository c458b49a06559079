"""Bytes of samples out of shards: every shard verified once, then held in memory or read by ranges of one version.

The first touch of a shard reads it through, block by block: bytes, sha256, tar structure and sample count are checked,
and where its samples lie is kept (4 bytes a sample). While the cache has room the shard stays in memory. Of others a
sample is one ranged read, pinned to the ETag that was verified: a shard that is replaced later is an error.
"""

from __future__ import annotations

import functools
import hashlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from mar_grpo.data.tar import UNIT, DamagedTar, last_key, place, sample_starts
from mar_grpo.documents import PromptSet, Shard
from mar_grpo.errors import InputError
from mar_grpo.store import Store, store_for

READ_THREADS = 4
_HINT = "copy the shard again, or build the prompt set anew"
T = TypeVar("T")


@dataclass(frozen=True)
class _Verified:
    """A shard whose content is the listed one. `starts`: uint32 [samples + 1], in units of 512 bytes."""

    store: Store
    key: str
    etag: str
    starts: np.ndarray
    held: bytearray | None


class ShardReader:
    """Stretches of the shards of a prompt set, by number of shard and sample. Safe for several threads.

    Args:
        prompt_set: the document.
        store: used for shards that lie in it; any other is read by its full URI.
        cache_bytes: at most three quarters of it are shards held in memory; the rest is for who reads ahead. Shards
            that came while there was room stay.
    """

    def __init__(self, prompt_set: PromptSet, store: Store | None = None, *, cache_bytes: int) -> None:
        self._shards, self._store = prompt_set.shards, store
        self._room = cache_bytes * 3 // 4
        self._lock = threading.Lock()
        self._opening = [threading.Lock() for _ in self._shards]
        self._verified: dict[int, _Verified] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of the shards that are in memory."""
        return sum(len(shard.held) for shard in list(self._verified.values()) if shard.held is not None)

    def holds(self, number: int) -> bool:
        """Whether samples of this shard come from memory."""
        return number in self._verified and self._verified[number].held is not None

    def mean_bytes(self, number: int) -> int:
        """Bytes of a sample of this shard, on average."""
        return -(-self._shards[number].bytes // max(1, self._shards[number].samples))

    def read(self, number: int, first: int, last: int) -> bytes:
        """Samples `first` to `last` (not included) of a shard: whole tar members one after the other.

        Errors: InputError that names the shard, and where it can the sample, if it is not the listed one, was damaged
        when it was listed, or is replaced while the run goes on; RetryableError while the store cannot be reached.
        """
        shard = self._open(number)
        start, end = int(shard.starts[first]) * UNIT, int(shard.starts[last]) * UNIT
        if shard.held is not None:
            return bytes(memoryview(shard.held)[start:end])
        return shard.store.read_range(shard.key, start, end - start, shard.etag)

    def runs(self, number: int, most_bytes: int) -> Iterator[bytes]:
        """The whole shard in stretches of about `most_bytes`, in order."""
        starts = self._open(number).starts
        first = 0
        while first < len(starts) - 1:
            fitting = int(np.searchsorted(starts, int(starts[first]) + most_bytes // UNIT, side="right")) - 1
            last = max(first + 1, fitting)
            yield self.read(number, first, last)
            first = last

    def drop(self, number: int) -> None:
        """Forget a shard and give its room to others."""
        with self._lock:
            shard = self._verified.pop(number, None)
            self._room += len(shard.held) if shard is not None and shard.held is not None else 0

    def _open(self, number: int) -> _Verified:
        if number not in self._verified:
            with self._opening[number]:
                if number not in self._verified:
                    self._verified[number] = self._verify(self._shards[number])
        return self._verified[number]

    def _verify(self, shard: Shard) -> _Verified:
        inside = self._store is not None and shard.uri.startswith(self._store.uri("x")[:-1])
        store, key = (self._store, self._store.key(shard.uri)) if self._store and inside else store_for(shard.uri)
        version = size, etag = store.stat(key)
        if size != shard.bytes:
            cut = "is cut" if size < shard.bytes else "is too long"
            text = f"the shard {cut}: {size:,} bytes, the prompt set says {shard.bytes:,}"
            raise InputError(text, where=place(shard.uri, last_key(store.blocks(key, version))), hint=_HINT)
        held = self._reserved(size)
        digest, problem = hashlib.sha256(), None

        def once() -> Iterator[bytes]:
            at = 0
            for block in store.blocks(key, version):
                digest.update(block)
                if held is not None:
                    held[at : at + len(block)] = block
                at += len(block)
                yield block

        stream = once()
        passes = iter([stream, store.blocks(key, version)])
        try:
            try:
                starts = sample_starts(lambda: next(passes), name=shard.uri)
            except DamagedTar as error:
                problem = error
            for _ in stream:  # the digest is of all bytes
                pass
            if digest.hexdigest() != shard.sha256:
                found = f"sha256 {digest.hexdigest()}, expected {shard.sha256}"
                text = f"the shard is not the one the prompt set lists: {found}"
                raise InputError(text, where=shard.uri, hint=_HINT)
            if problem is not None:
                raise problem
            if len(starts) - 1 != shard.samples:
                text = f"the shard holds {len(starts) - 1} samples, the prompt set says {shard.samples}"
                raise InputError(text, where=shard.uri, hint=_HINT)
        except Exception:
            with self._lock:
                self._room += size if held is not None else 0
            raise
        return _Verified(store, key, etag, starts, held)

    def _reserved(self, size: int) -> bytearray | None:
        with self._lock:
            if size > self._room:
                return None
            self._room -= size
        return bytearray(size)


def submit(call: Callable[[], T]) -> Future[T]:
    """Do it in one of READ_THREADS threads of this process, which never keep the process from ending."""
    future: Future[T] = Future()
    _tasks(os.getpid()).put((future, call))
    return future


@functools.lru_cache(maxsize=1)
def _tasks(process: int) -> queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]:
    """The queue of this process's threads; a forked child makes its own."""
    tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
    for _ in range(READ_THREADS):
        threading.Thread(target=_work, args=(tasks,), name="mar-grpo-read", daemon=True).start()
    return tasks


def _work(tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]) -> None:
    while True:
        future, call = tasks.get()
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del future, call  # what was read is whoever's asked for it
