"""Captions for SFT beyond the six kinds: they show what they say, and never ask for what evaluation asks for."""

import itertools

import numpy as np
import pytest

from mar_grpo.data.prompts import validated
from mar_grpo.data.scenes import (
    GLYPHS,
    MORE_CAPTIONS,
    Record,
    Scene,
    compositions,
    holds,
    placed_pair_record,
    placed_record,
    scene_for,
    vocabulary,
)

WORDS = {"left": "left of", "right": "right of", "above": "above", "below": "below"}


def records_of(kind: str, count: int = 400) -> list[tuple[Record, Scene]]:
    rng = np.random.default_rng(3)
    records = [MORE_CAPTIONS[kind](rng) for _ in range(count)]
    return [(record, scene_for(record, rng)) for record in records]


@pytest.mark.parametrize("kind", sorted(MORE_CAPTIONS))
def test_no_part_of_a_caption_is_asked_in_evaluation(kind: str) -> None:
    asked = {validated(record, where="here").asked("composition") for record in compositions("held_out")}
    words = set(vocabulary())
    for record, scene in records_of(kind):
        include = [
            {key: entry[key] for key in ("class", "count", "color") if key in entry} for entry in record["include"]
        ]
        plain = [{"class": entry["class"], "count": entry["count"]} for entry in include]
        for entries in (include, plain):
            for part in itertools.combinations(entries, 2):
                fields = {"tag": "two_object", "prompt": "two", "include": list(part)}
                if all(entry["count"] == 1 for entry in part):
                    assert validated(fields, where="here").asked("composition") not in asked
        assert validated(record, where="here").asked("composition") not in asked
        assert set(record["prompt"].split()) <= words
        assert len(scene) == sum(entry["count"] for entry in include)


def test_a_placed_thing_is_where_the_caption_says() -> None:
    sides = set()
    for record, scene in records_of("placed"):
        ((_, cell),) = scene
        word = record["prompt"].split()[-1]
        sides.add((word, cell))
        assert holds(WORDS[word], cell, 3 - cell)
    assert len(sides) == 8  # each of the four words, each of the two cells that fit it


def test_a_placed_pair_says_where_each_is() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        record = placed_pair_record(rng)
        first, second = record["prompt"].removeprefix("a photo of ").split(" and ")
        cells = {GLYPHS[glyph][0]: cell for glyph, cell in scene_for(record, rng)}
        for phrase in (first, second):
            *_, name, word = phrase.split()
            other = next(cell for thing, cell in cells.items() if thing != name)
            assert holds(WORDS[word], cells[name], other)


def test_placed_things_come_from_a_generator_alone() -> None:
    assert placed_record(np.random.default_rng(1)) == placed_record(np.random.default_rng(1))
