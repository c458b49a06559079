"""The stream under kills, other numbers of processes, changed shards and a store that goes away."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mar_grpo.data.prompts import parse_row
from mar_grpo.data.shards import Sample, write_shards
from mar_grpo.data.stream import PromptStream
from mar_grpo.documents import PromptSet
from mar_grpo.errors import InputError, RetryableError
from mar_grpo.store import Store

SIZE = 24
ALL = sorted(f"{i:04d}" for i in range(SIZE))


def written(store: Store) -> PromptSet:
    samples = [Sample(f"{i:04d}", parse_row(f"prompt {i}", where="test")) for i in range(SIZE)]
    return write_shards(store, "p", samples, samples_per_shard=5, kind="prompts", source={})


@pytest.fixture(scope="module")
def prompt_set(tmp_path_factory: pytest.TempPathFactory) -> PromptSet:
    return written(Store(tmp_path_factory.mktemp("ledger")))


@settings(max_examples=40)
@given(
    lives=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=8),
    cache_bytes=st.sampled_from([0, 20_000, 2**20]),
)
def test_each_prompt_is_used_once_an_epoch_across_kills_and_worlds(
    prompt_set: PromptSet, lives: list[tuple[int, int, int]], cache_bytes: int
) -> None:
    """A life is (processes, saved updates, updates that the kill undoes); the ledger holds what was saved."""
    ledger: list[str] = []
    state = None
    for world, saved, lost in [*lives, (1, SIZE, 0)]:
        ranks = [PromptStream(prompt_set, seed=3, rank=r, world=world, cache_bytes=cache_bytes) for r in range(world)]
        for rank in ranks:
            if state is not None:
                rank.restore(state)
        for update in range(saved + lost):
            taken = [[sample.key for sample in rank.take(world)] for rank in ranks]
            if update < saved:
                ledger += [key for part in taken for key in part]
                state = ranks[0].state()
    for first in range(0, len(ledger) - SIZE + 1, SIZE):
        assert sorted(ledger[first : first + SIZE]) == ALL
    assert set(Counter(ledger).values()) <= {len(ledger) // SIZE, len(ledger) // SIZE + 1}


@pytest.mark.parametrize("cache_bytes", [0, 2**20])
@pytest.mark.parametrize("change", ["cut in a member", "cut at a boundary", "replaced", "re-ordered"])
def test_a_changed_shard_stops_the_stream_with_its_name(change: str, cache_bytes: int, store: Store) -> None:
    made = written(store)
    key = store.key(made.shards[1].uri)
    data = store.read_bytes(key)
    changed = {
        "cut in a member": data[:700],
        "cut at a boundary": data[:2048],
        "replaced": store.read_bytes(store.key(made.shards[2].uri)),
        "re-ordered": data[1024:2048] + data[:1024] + data[2048:],
    }[change]
    store.write_bytes(key, changed)
    with pytest.raises(InputError, match=Path(key).name) as caught:
        PromptStream(made, store, seed=0, cache_bytes=cache_bytes).take(SIZE)
    assert caught.value.exit_code == 2


def test_a_shard_replaced_after_it_was_verified_is_an_error(store: Store) -> None:
    made = written(store)
    source = PromptStream(made, store, seed=0, cache_bytes=0)
    source.take(SIZE)
    for shard in made.shards:
        store.write_bytes(store.key(shard.uri), bytes(shard.bytes))
    with pytest.raises(InputError, match="replaced while it was read"):
        source.take(SIZE)


def test_a_store_that_is_gone_is_worth_another_try(
    s3_store: Store, s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = written(s3_store)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    source = PromptStream(made, Store(s3_store.uri(), retry_seconds=1), seed=0)
    with pytest.raises(RetryableError, match="could not read for 1 s") as caught:
        source.take(4)
    assert caught.value.exit_code == 75 and source.state()["position"] == 0
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_environment["AWS_ENDPOINT_URL"])
    assert len(PromptStream(made, s3_store, seed=0).take(4)) == 4
