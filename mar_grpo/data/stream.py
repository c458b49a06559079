"""Deterministic reading of a prompt set for training: the same order for any number of processes, resumable anywhere.

The order of an epoch is a permutation of all samples made from (seed, epoch). A process takes every world-th of the
samples that an update takes, so all get equally many, and where the stream stands is two integers, valid for any number
of processes. What the next updates need is read meanwhile, in threads; that changes no sample and no state.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from mar_grpo.data.prompts import GENEVAL_TAGS
from mar_grpo.data.reader import ShardReader, submit
from mar_grpo.data.scenes import MORE_CAPTIONS
from mar_grpo.data.shards import Sample, check_schema, samples_in
from mar_grpo.documents import PromptSet
from mar_grpo.errors import InputError
from mar_grpo.store import Store

AHEAD_TAKES = 4


class DataConfig(BaseModel):
    """Where prompts come from and how many are used."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    train: str = Field(default="emoji", description="'emoji' for the scenes that ship, or path or URI of a prompt file")
    evaluation: str = Field(default="emoji", description="the same for held-out prompts")
    train_prompts: int | None = Field(default=None, ge=1, description="distinct training prompts; all if absent")
    evaluation_prompts: int | None = Field(default=300, ge=1, description="distinct held-out prompts; all if absent")
    tag_weights: dict[str, float] = Field(
        default={},
        description="share of each tag in an epoch; absent: even over the six kinds for emoji, as they are for a file",
    )
    separate_by: Literal["composition", "request"] = Field(
        default="composition",
        description="what training and evaluation must not share; 'request' tells relations apart",
    )
    seed: int = Field(default=0, ge=0, description="chooses the prompts; not the seed of training")
    samples_per_shard: int = Field(default=1000, ge=1)
    cache_bytes: int = Field(
        default=256 * 2**20, ge=0, description="shards and samples read ahead that a process keeps"
    )

    @model_validator(mode="after")
    def _weights(self) -> DataConfig:
        for tag, weight in self.tag_weights.items():
            if weight < 0:
                raise ValueError(f"tag_weights.{tag} is {weight}; a share cannot be negative")
            known = (*GENEVAL_TAGS, *MORE_CAPTIONS)
            if self.train == "emoji" and tag not in known:
                raise ValueError(f"tag_weights.{tag}: the emoji prompts have the tags {', '.join(known)}")
        if self.tag_weights and not any(self.tag_weights.values()):
            raise ValueError("tag_weights: at least one tag needs a positive share")
        return self


def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """Order of `size` samples in one epoch, int64 [size].

    Sorts the raw output of a Philox counter keyed by (seed, epoch): unlike numpy's `permutation`, that output is
    promised to stay the same over versions and platforms.
    """
    key = hashlib.sha256(f"prompt order {seed} {epoch}".encode()).digest()[:16]
    words = np.random.Philox(key=np.frombuffer(key, dtype="<u8").astype(np.uint64)).random_raw(size)
    return np.argsort(words, kind="stable").astype(np.int64)


_Read = Future[dict[int, bytes]]


class _Ahead(NamedTuple):
    """A sample that is being read before it is asked for, and how many bytes that is about."""

    future: _Read
    bytes: int


class PromptStream:
    """Endless samples of a prompt set for one of `world` processes.

    Args:
        prompt_set: the document; its digest is part of the state.
        store: where shards are read; others by full URI.
        seed: together with the epoch it gives the order.
        cache_bytes: shards and samples read ahead that are kept in memory. Beside them are READ_THREADS blocks of
            8 MiB on their way, 4 bytes a sample for the order and 4 where it lies, and the samples of a take.
    """

    def __init__(
        self,
        prompt_set: PromptSet,
        store: Store | None = None,
        *,
        seed: int,
        rank: int = 0,
        world: int = 1,
        cache_bytes: int = 256 * 2**20,
    ) -> None:
        if not 0 <= rank < world:
            raise InputError(f"rank {rank} is not one of {world} processes", where="prompt stream")
        self.prompt_set, self.store, self.seed = prompt_set, store, seed
        self.rank, self.world, self.cache_bytes = rank, world, cache_bytes
        self.epoch, self.position = 0, 0
        self._ends = np.cumsum([shard.samples for shard in prompt_set.shards], dtype=np.int64)
        if self._ends[-1] != prompt_set.samples:
            text = f"the shards list {self._ends[-1]} samples, the prompt set says {prompt_set.samples}"
            raise InputError(text, where=prompt_set.shards[0].uri)
        check_schema(prompt_set)
        self._digest = prompt_set.digest
        self.reader = ShardReader(prompt_set, store, cache_bytes=cache_bytes)
        self._order: tuple[int, np.ndarray] | None = None
        self._ahead: dict[int, _Ahead] = {}  # by sample number
        self._planned = 0
        self._pattern: tuple[int, tuple[int, ...]] = 0, ()

    def __len__(self) -> int:
        """Samples of one epoch, over all processes."""
        return self.prompt_set.samples

    def take(self, n: int, places: Sequence[int] | None = None) -> list[Sample]:
        """This process's part of the next `n` samples of the common order.

        A take that passes the end of an epoch goes on in the next one. Every process must take the same `n`. If a read
        fails the stream stays where it was.

        Args:
            places: which of the `n` (from 0), as often as wanted; by default every world-th from the rank on.

        Errors: InputError if `n` is not positive, or without `places` no multiple of the number of processes, or from
        reading a shard.
        """
        if n < 1 or (places is None and n % self.world):
            text = f"{n} samples cannot be shared evenly by {self.world} processes"
            raise InputError(text, where="prompt stream", hint="choose a multiple of the number of processes")
        if places is None:
            places = range(self.rank, n, self.world)
        if not all(0 <= place < n for place in places):
            raise InputError(f"a place is 0 to {n - 1}, not {list(places)}", where="prompt stream")
        samples = self._read(self._numbers(self._start, n, places))
        self.epoch, self.position = divmod(self._start + n, len(self))
        self._look_ahead(n, places)
        return samples

    def state(self) -> dict[str, Any]:
        """Where the stream stands, as JSON; the same in every process."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "prompt_set": self._digest,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state, whatever the number of processes was. InputError if it is another stream's."""
        mine = self.state()
        if set(state) != set(mine):
            raise InputError(f"the state must hold {', '.join(sorted(mine))}", where="prompt stream")
        for name in ("seed", "prompt_set"):
            if state[name] != mine[name]:
                text = f"the state belongs to another stream: {name} {state[name]}, this one has {mine[name]}"
                raise InputError(text, where="prompt stream", hint="resume with the recipe and prompts it began with")
        epoch, position = state["epoch"], state["position"]
        if not (isinstance(epoch, int) and isinstance(position, int) and epoch >= 0 and 0 <= position < len(self)):
            raise InputError(
                f"epoch {epoch}, position {position} is no place in {len(self)} samples", where="prompt stream"
            )
        self.epoch, self.position = epoch, position
        self._forget()

    @property
    def _start(self) -> int:
        """Samples of the common order before the next one."""
        return self.epoch * len(self) + self.position

    def _numbers(self, start: int, n: int, places: Sequence[int]) -> np.ndarray:
        """Sample numbers of these places of the `n` from `start` on, int64 [places]."""
        found = start + np.asarray(places, dtype=np.int64)
        numbers = np.empty(len(found), dtype=np.int64)
        for epoch in range(start // len(self), (start + n - 1) // len(self) + 1):
            inside = found // len(self) == epoch
            if inside.any():
                numbers[inside] = self._order_of(epoch)[found[inside] % len(self)]
        return numbers

    def _order_of(self, epoch: int) -> np.ndarray:
        """The order of an epoch, made when it is first asked for."""
        if self._order is None or self._order[0] != epoch:
            self._order = None  # not two at once: 4 bytes a sample
            self._order = (epoch, permutation(self.seed, epoch, len(self)).astype(np.uint32))
        return self._order[1]

    def _read(self, numbers: np.ndarray) -> list[Sample]:
        """Samples by number: from memory, from what was read ahead, or now, shard by shard in threads."""
        shards = dict(zip(numbers.tolist(), self._shards_of(numbers), strict=True))
        early = {number: self._ahead.pop(number).future for number in shards if number in self._ahead}
        missing: dict[int, list[int]] = defaultdict(list)
        for number, shard in shards.items():
            if number not in early and not self.reader.holds(shard):
                missing[shard].append(number)
        now = {number: future for shard, some in missing.items() for number, future in self._submit(shard, some)}
        found: dict[int, Sample] = {}
        for number, shard in shards.items():
            if number in now:
                data = now[number].result()
            elif number in early and early[number].exception() is None:
                data = early[number].result()
            else:  # held, or reading ahead failed: what counts is what a read says now
                data = self._fetch(shard, [number])
            [found[number]] = samples_in(data[number], self.prompt_set, self.prompt_set.shards[shard].uri)
        return [found[number] for number in numbers.tolist()]

    def _shards_of(self, numbers: np.ndarray) -> list[int]:
        return np.searchsorted(self._ends, numbers, side="right").tolist()

    def _submit(self, shard: int, numbers: list[int]) -> list[tuple[int, _Read]]:
        future = submit(partial(self._fetch, shard, numbers))
        return [(number, future) for number in numbers]

    def _fetch(self, shard: int, numbers: list[int]) -> dict[int, bytes]:
        first = int(self._ends[shard]) - self.prompt_set.shards[shard].samples
        return {number: self.reader.read(shard, number - first, number - first + 1) for number in numbers}

    def _look_ahead(self, n: int, places: Sequence[int]) -> None:
        """Begin to read what the next AHEAD_TAKES takes need if they are like the last, while the cache has room.

        It ends with the epoch: the next order is not made before it is needed.
        """
        if self._pattern != (n, tuple(places)):
            self._forget()
            self._pattern = n, tuple(places)
        self._planned = max(self._planned, self._start)
        end = min(self._start + AHEAD_TAKES * n, (self.epoch + 1) * len(self))
        room = self.cache_bytes // 4 - sum(ahead.bytes for ahead in self._ahead.values())
        while self._planned + n <= end:
            numbers = self._numbers(self._planned, n, places)
            missing: dict[int, list[int]] = defaultdict(list)
            for number, shard in zip(numbers.tolist(), self._shards_of(numbers), strict=True):
                if not self.reader.holds(shard) and number not in missing[shard]:
                    missing[shard].append(number)
            sizes = {shard: self.reader.mean_bytes(shard) for shard in missing}
            room -= sum(sizes[shard] * len(some) for shard, some in missing.items())
            if room < 0:
                return
            for shard, some in missing.items():
                self._ahead |= {number: _Ahead(read, sizes[shard]) for number, read in self._submit(shard, some)}
            self._planned += n

    def _forget(self) -> None:
        for ahead in self._ahead.values():
            ahead.future.cancel()
        self._ahead.clear()
        self._planned = 0
