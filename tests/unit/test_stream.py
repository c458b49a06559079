"""The stream: every sample once an epoch, the same for any number of processes, resumable anywhere."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mar_grpo.data.prompts import parse_row
from mar_grpo.data.shards import Sample, write_shards
from mar_grpo.data.stream import DataConfig, PromptStream, permutation
from mar_grpo.documents import PromptSet
from mar_grpo.errors import InputError
from mar_grpo.store import Store

SIZE = 13


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mar-grpo-stream-")


@functools.cache
def prompt_set(name: str = "set", samples_per_shard: int = 4) -> PromptSet:
    samples = [Sample(f"{name}-{i}", parse_row(f"{name} {i}", where="test")) for i in range(SIZE)]
    store = Store(_folder().name)
    return write_shards(store, name, samples, samples_per_shard=samples_per_shard, kind="prompts", source={})


def stream(rank: int = 0, world: int = 1, seed: int = 1, cache_bytes: int = 2**20) -> PromptStream:
    return PromptStream(prompt_set(), seed=seed, rank=rank, world=world, cache_bytes=cache_bytes)


def keys(samples: list[Sample]) -> list[str]:
    return [sample.key for sample in samples]


worlds = st.sampled_from([1, 2, 3, 4])


@given(seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6), size=st.integers(0, 300))
def test_an_epoch_is_a_permutation(seed: int, epoch: int, size: int) -> None:
    order = permutation(seed, epoch, size)
    assert np.array_equal(np.sort(order), np.arange(size))
    assert np.array_equal(order, permutation(seed, epoch, size))


def test_the_order_is_the_recorded_one() -> None:
    """A resumed run must meet the order it began with, whatever the release, numpy or machine."""
    assert permutation(7, 0, 10).tolist() == [7, 5, 6, 3, 9, 4, 8, 1, 2, 0]
    assert permutation(7, 1, 10).tolist() == [6, 0, 4, 2, 9, 5, 1, 8, 3, 7]


def test_all_places_are_about_equally_likely() -> None:
    """Chi squared over 6 x 6 (sample, place) counts of 3,000 epochs: 25 degrees of freedom, 99.99 % below 61."""
    counts = np.zeros((6, 6))
    for epoch in range(3000):
        counts[np.arange(6), permutation(0, epoch, 6)] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 61


@settings(max_examples=40, deadline=None)
@given(takes=st.lists(st.integers(1, 9), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_every_epoch_shows_every_sample_once(takes: list[int], seed: int) -> None:
    source = stream(seed=seed)
    seen = [key for n in [*takes, SIZE] for key in keys(source.take(n))]
    everything = sorted(f"set-{i}" for i in range(SIZE))
    for first in range(0, len(seen) - SIZE + 1, SIZE):
        assert sorted(seen[first : first + SIZE]) == everything
    assert source.epoch * SIZE + source.position == sum(takes) + SIZE


@settings(max_examples=40, deadline=None)
@given(world=worlds, shares=st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_processes_share_a_take_evenly_without_overlap(world: int, shares: list[int]) -> None:
    alone, ranks = stream(), [stream(rank, world) for rank in range(world)]
    for share in shares:
        expected = keys(alone.take(share * world))
        parts = [keys(rank.take(share * world)) for rank in ranks]
        assert {len(part) for part in parts} == {share}
        assert [key for together in zip(*parts, strict=True) for key in together] == expected
    assert all(rank.state() == alone.state() for rank in ranks)


@settings(max_examples=40, deadline=None)
@given(before=st.lists(st.integers(1, 9), max_size=6), world=worlds, later_world=worlds, share=st.integers(1, 5))
def test_a_resumed_stream_goes_on_with_any_number_of_processes(
    before: list[int], world: int, later_world: int, share: int
) -> None:
    whole, first = stream(), stream(world - 1, world)
    for n in before:
        whole.take(n * world)
        first.take(n * world)
    expected = keys(whole.take(share * later_world))
    for rank in range(later_world):
        resumed = stream(rank, later_world)
        resumed.restore(first.state())
        assert keys(resumed.take(share * later_world)) == expected[rank::later_world]


@settings(max_examples=20, deadline=None)
@given(cache_bytes=st.sampled_from([0, 1, 11_000, 25_000, 2**20]), n=st.integers(1, 30))
def test_the_cache_changes_nothing_and_stays_within_its_bound(cache_bytes: int, n: int) -> None:
    small = stream(cache_bytes=cache_bytes)
    assert keys(small.take(n)) == keys(stream().take(n))
    ahead = sum(ahead.bytes for ahead in small._ahead.values())
    assert small.reader.held_bytes + ahead <= cache_bytes


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 30), places=st.data())
def test_a_process_may_take_any_places(n: int, places: st.DataObject) -> None:
    alone, some = stream(), stream(1, 3)
    mine = places.draw(st.lists(st.integers(0, n - 1)))
    everyone = keys(alone.take(n))
    assert keys(some.take(n, mine)) == [everyone[place] for place in mine] and some.state() == alone.state()
    with pytest.raises(InputError, match=f"a place is 0 to {n - 1}"):
        some.take(n, [n])
    assert some.state() == alone.state()


def test_seeds_give_different_orders() -> None:
    assert keys(stream(seed=1).take(SIZE)) != keys(stream(seed=2).take(SIZE))


def test_a_failed_read_leaves_the_stream_where_it_was(tmp_path: Path) -> None:
    store = Store(tmp_path)
    samples = [Sample(str(i), parse_row(f"prompt {i}", where="test")) for i in range(6)]
    made = write_shards(store, "p", samples, samples_per_shard=3, kind="prompts", source={})
    lost = Path(made.shards[1].uri.removeprefix("file://"))
    content = lost.read_bytes()
    source = PromptStream(made, store, seed=0)
    lost.unlink()
    with pytest.raises(InputError, match=lost.name):
        source.take(6)
    assert (source.epoch, source.position) == (0, 0)
    lost.write_bytes(content)
    assert sorted(keys(source.take(6))) == sorted(keys(samples))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": 2}, "seed 2"),
        ({"prompt_set": "0" * 64}, "prompt_set 000"),
        ({"position": SIZE}, "no place in 13 samples"),
        ({"epoch": -1}, "no place in 13 samples"),
        ({"position": 1.5}, "no place in 13 samples"),
        ({"cursor": 1}, "must hold epoch, position, prompt_set, seed"),
    ],
)
def test_a_state_of_another_stream_is_refused(change: dict[str, object], text: str) -> None:
    source = stream()
    source.take(4)
    with pytest.raises(InputError, match=text):
        source.restore(source.state() | change)
    assert (source.epoch, source.position) == (0, 4)


@pytest.mark.parametrize(("n", "world"), [(0, 1), (-2, 1), (3, 2), (1, 4)])
def test_a_take_that_cannot_be_shared_is_refused(n: int, world: int) -> None:
    with pytest.raises(InputError, match="cannot be shared evenly"):
        stream(world=world).take(n)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"trian": "x.jsonl"}, "trian"),
        ({"train_prompts": 0}, "train_prompts"),
        ({"tag_weights": {"colours": 1.0}}, "tag_weights.colours"),
        ({"tag_weights": {"colors": -1.0}}, "tag_weights.colors"),
        ({"tag_weights": {"colors": 0.0}}, "at least one tag"),
    ],
)
def test_a_wrong_data_configuration_is_refused_by_name(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        DataConfig.model_validate(options)
