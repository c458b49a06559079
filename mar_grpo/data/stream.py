"""Deterministic reading of a prompt set for training: the same order for any number of processes, resumable anywhere.

The order of an epoch is a permutation of all samples made from (seed, epoch). A process takes every world-th of the
samples that an update takes, so all get equally many, and where the stream stands is two integers, valid for any number
of processes.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from mar_grpo.data.prompts import GENEVAL_TAGS
from mar_grpo.data.scenes import MORE_CAPTIONS
from mar_grpo.data.shards import Sample, read_shard
from mar_grpo.documents import PromptSet
from mar_grpo.errors import InputError
from mar_grpo.store import Store


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
    cache_bytes: int = Field(default=256 * 2**20, ge=0, description="decoded shards each process keeps in memory")

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


class PromptStream:
    """Endless samples of a prompt set for one of `world` processes.

    Args:
        prompt_set: the document; its digest is part of the state.
        store: where shards are read; others by full URI.
        seed: together with the epoch it gives the order.
        cache_bytes: shards kept in memory; the one in use is always kept.
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
        self._ends = list(accumulate(shard.samples for shard in prompt_set.shards))
        if self._ends[-1] != prompt_set.samples:
            text = f"the shards list {self._ends[-1]} samples, the prompt set says {prompt_set.samples}"
            raise InputError(text, where=prompt_set.shards[0].uri)
        self._cache: OrderedDict[int, list[Sample]] = OrderedDict()
        self._order: tuple[int, np.ndarray] | None = None

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
        start = self.epoch * len(self) + self.position
        samples = self._read([self._index(start + place) for place in places])
        self.epoch, self.position = divmod(start + n, len(self))
        return samples

    def state(self) -> dict[str, Any]:
        """Where the stream stands, as JSON; the same in every process."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "prompt_set": self.prompt_set.digest,
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

    def _index(self, place: int) -> int:
        epoch, position = divmod(place, len(self))
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, permutation(self.seed, epoch, len(self)))
        return int(self._order[1][position])

    def _read(self, indices: list[int]) -> list[Sample]:
        """Samples by index; each shard that they need is opened once."""
        found: dict[int, Sample] = {}
        for index in sorted(set(indices)):
            shard = bisect_right(self._ends, index)
            first = self._ends[shard - 1] if shard else 0
            found[index] = self._shard(shard)[index - first]
        return [found[index] for index in indices]

    def _shard(self, number: int) -> list[Sample]:
        shards = self.prompt_set.shards
        if number not in self._cache:
            self._cache[number] = read_shard(self.prompt_set, shards[number], self.store)
        self._cache.move_to_end(number)
        while len(self._cache) > 1 and sum(shards[kept].bytes for kept in self._cache) > self.cache_bytes:
            self._cache.popitem(last=False)
        return self._cache[number]
