"""Features of prompts are made once, kept in a store, and never taken from another model or a damaged entry."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mar_grpo.models.policy import Policy
from mar_grpo.models.text import TextEncoder
from mar_grpo.store import Store
from tests.unit import test_harmon, tiny

PROMPTS = ["a dog", "two red apples"]


class Made:
    """Counts the forward passes of a text model."""

    def __init__(self, policy: Policy) -> None:
        self.count = 0
        model = policy.text.model if isinstance(policy.text, TextEncoder) else policy.text.llm
        name = "forward" if isinstance(policy.text, TextEncoder) else "prefill"
        before = getattr(model, name)

        def counted(*arguments: object, **named: object) -> object:
            self.count += 1
            return before(*arguments, **named)

        setattr(model, name, counted)


def kept(policy: Policy, store: Store) -> Made:
    policy.text.cache.keep(store, "features", at_least=1)
    return Made(policy)


@pytest.fixture(params=["nova", "harmon"])
def policies(request: pytest.FixtureRequest) -> list[Policy]:
    """Two equal ones, as two processes have them, and one of other weights."""
    make = {"nova": tiny.policy, "harmon": test_harmon.make}[request.param]
    return [make(0), make(0), make(1)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def test_what_one_process_made_another_reads(policies: list[Policy], store: Store) -> None:
    first, second, other = policies
    plain = [features.clone() for features in first.text.encode(PROMPTS)]
    made = [kept(policy, store) for policy in (second, other)]
    assert all(torch.equal(*pair) for pair in zip(second.text.encode(PROMPTS), plain, strict=True))
    assert not torch.allclose(other.text.encode(PROMPTS)[0], plain[0])
    assert [one.count for one in made] == [2, 2]
    assert len(store.list("features")) == 4
    first.text.cache._features.clear()
    made.append(kept(first, store))
    assert all(torch.equal(*pair) for pair in zip(first.text.encode(PROMPTS), plain, strict=True))
    assert made[-1].count == 0


@pytest.mark.parametrize("damage", [b"", b"x" * 100, None])
def test_a_damaged_entry_is_replaced(damage: bytes | None, policies: list[Policy], store: Store) -> None:
    first, second, _ = policies
    kept(first, store)
    plain = first.text.encode(PROMPTS[:1])[0]
    (key,) = store.list("features")
    whole = store.read_bytes(key)
    store.write_bytes(key, whole[:-3] if damage is None else damage)
    made = kept(second, store)
    assert torch.equal(second.text.encode(PROMPTS[:1])[0], plain)
    assert made.count == 1
    assert store.read_bytes(key) == whole


def test_changed_weights_have_a_place_of_their_own(store: Store) -> None:
    policy = tiny.policy()
    kept(policy, store)
    before = policy.text.encode(PROMPTS)[0].clone()
    with torch.no_grad():
        policy.text.model.get_parameter("layers.0.mlp.fc1.weight").mul_(2)
    assert not torch.allclose(policy.text.encode(PROMPTS)[0], before)
    assert len(store.list("features")) == 4


def test_a_small_encoder_keeps_nothing(store: Store) -> None:
    policy = tiny.policy()
    policy.keep_features(store)
    policy.text.encode(PROMPTS)
    assert not store.list()


def test_a_class_label_has_no_features(store: Store) -> None:
    tiny.mar_policy().keep_features(store)
