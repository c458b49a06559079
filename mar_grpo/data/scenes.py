"""Emoji scenes: what can be asked (records in GenEval's field names), and pictures that show it.

A canvas has 2 x 2 cells and at most one object a cell. Six kinds of prompts, as in GenEval. Compositions are split once
and for all: a composition is the multiset of (class, colour, count) a prompt asks for, whatever the wording, the order
or the relation, so a pair that evaluation asks about is never asked about in SFT or RL.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from mar_grpo.data.emoji import CLASSES, COLORS, GLYPH_PX, GLYPHS, SHAPES, glyph_rgba, glyphs_of

CANVAS_PX = 64
CELL_PX = 32
CELLS = 4
BACKGROUND = (214, 226, 236)
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
MAX_WORDS = 12  # what the text encoder of the small model reads
RELATIONS = ("left of", "right of", "above", "below")
_OPPOSITES = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
HELD_OUT_SHARE = {"scarce": 0.4, "plain pair": 0.25}  # compositions of one entry or with colours are few

Record = dict[str, Any]
Scene = tuple[tuple[int, int], ...]  # (glyph index, cell 0..3 in row-major order), sorted by cell
Split = Literal["train", "held_out"]

_PLURALS = {name: name + "s" for name in CLASSES} | {"fish": "fish"}
_NUMBERS = {2: "two", 3: "three", 4: "four"}


# --- what can be asked -------------------------------------------------------------------------------------------


def split_of(record: Record) -> Split:
    """Which side of the split a record's composition is on: a hash of what is asked for, not of the wording."""
    entries = sorted(f"{e.get('color') or '-'} {e['class']} x{e['count']}" for e in record["include"])
    digest = hashlib.sha256("; ".join(entries).encode()).digest()
    plain_pair = len(entries) == 2 and not any(e.get("color") for e in record["include"])
    share = HELD_OUT_SHARE["plain pair" if plain_pair else "scarce"]
    return "held_out" if digest[0] < 256 * share else "train"


@functools.cache
def _all_records() -> tuple[Record, ...]:
    records: list[Record] = []
    for name in CLASSES:
        records.append(_record("single_object", [_entry(name)]))
        for count in (2, 3, 4):
            record = _record("counting", [_entry(name, count)])
            records.append(record | {"exclude": [{"class": name, "count": count + 1}]})
    for color, shape in itertools.product(COLORS, SHAPES):
        records.append(_record("colors", [_entry(shape, color=color)]))
    for first, second in itertools.permutations(CLASSES, 2):
        records.append(_record("two_object", [_entry(first), _entry(second)]))
        for relation in RELATIONS:
            records.append(_record("position", [_entry(second), _entry(first) | {"position": [relation, 0]}]))
    for one, other in itertools.permutations(itertools.product(COLORS, SHAPES), 2):
        if one[0] != other[0] and one[1] != other[1]:
            entries = [_entry(shape, color=color) for color, shape in (one, other)]
            records.append(_record("color_attr", entries))
    return tuple(records)


def compositions(split: Split) -> list[Record]:
    """Every record of one side of the split, in a fixed order."""
    return [record for record in _all_records() if split_of(record) == split]


def mixed_record(rng: np.random.Generator) -> Record:
    """A caption beyond the six kinds, for SFT: two or three different things, some coloured, some twice.

    Many different captions are what makes a model follow words it has not seen together. None holds a pair, or a number
    of one thing, that evaluation asks about.
    """
    while True:
        names = [str(name) for name in rng.permutation(CLASSES)[: rng.integers(2, 4)]]
        include = []
        for name in names:
            color = str(rng.choice(COLORS)) if name in SHAPES and rng.random() < 0.7 else None
            count = 2 if color is None and rng.random() < 0.25 else 1
            include.append(_entry(name, count, color))
        record = _record("mixed", include)
        fits = sum(entry["count"] for entry in include) <= CELLS and len(record["prompt"].split()) <= MAX_WORDS
        if fits and _never_asked_together(include):
            return record


def related_record(rng: np.random.Generator) -> Record:
    """A caption beyond the six kinds, for SFT: two different things in a relation, most shapes of them coloured.

    Of pairs that evaluation never asks about.
    """
    while True:
        second, first = _two_things(rng)
        if _never_asked_together([second, first]):
            return _record("related", [second, first | {"position": [str(rng.choice(RELATIONS)), 0]}])


def placed_record(rng: np.random.Generator) -> Record:
    """A caption beyond the six kinds, for SFT: where one thing is ("a cat left").

    "X left of Y" alone is not learnt from captions of all kinds: both things, word and place only matter together. A
    word that says where one thing is has an effect of its own, and what it means carries over.
    """
    while True:
        _, thing = _two_things(rng)
        if split_of({"include": [thing]}) == "train":
            record, relation = _record("placed", [thing]), str(rng.choice(RELATIONS))
            return record | {"prompt": f"{record['prompt']} {relation.split()[0]}", "metadata": {"place": relation}}


def placed_pair_record(rng: np.random.Generator) -> Record:
    """A caption beyond the six kinds, for SFT: where each of two things is ("a cat left and a dog right")."""
    record = related_record(rng)
    second, first = record["include"]
    relation = first["position"][0]
    words = relation.split()[0], _OPPOSITES[relation].split()[0]
    prompt = f"a photo of {_phrase(first)} {words[0]} and {_phrase(second)} {words[1]}"
    return record | {"tag": "placed_pair", "prompt": prompt}


MORE_CAPTIONS = {  # kinds beyond the six of evaluation
    "mixed": mixed_record,
    "related": related_record,
    "placed": placed_record,
    "placed_pair": placed_pair_record,
}


def _two_things(rng: np.random.Generator) -> list[Record]:
    names = [str(name) for name in rng.permutation(CLASSES)[:2]]
    return [
        _entry(name, color=str(rng.choice(COLORS)) if name in SHAPES and rng.random() < 0.8 else None) for name in names
    ]


def _never_asked_together(include: list[Record]) -> bool:
    plain = [_entry(entry["class"]) for entry in include]
    pairs = [*itertools.combinations(plain, 2), *itertools.combinations(include, 2)]
    parts = [list(pair) for pair in pairs] + [[entry] for entry in include if entry["count"] > 1]
    return all(split_of({"include": part}) == "train" for part in parts)


def _entry(name: str, count: int = 1, color: str | None = None) -> Record:
    return {"class": name, "count": count} | ({"color": color} if color else {})


def _record(tag: str, include: list[Record]) -> Record:
    return {"tag": tag, "include": include, "prompt": "a photo of " + _caption(include)}


def _caption(include: list[Record]) -> str:
    if include[-1].get("position"):
        relation, _ = include[-1]["position"]
        return f"{_phrase(include[1])} {relation} {_phrase(include[0])}"
    return " and ".join(_phrase(entry) for entry in include)


def _phrase(entry: Record) -> str:
    if entry["count"] > 1:
        return f"{_NUMBERS[entry['count']]} {_PLURALS[entry['class']]}"
    words = f"{entry['color']} {entry['class']}" if entry.get("color") else entry["class"]
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def vocabulary() -> list[str]:
    """Every word a prompt can hold, sorted."""
    return sorted({word for record in _all_records() for word in record["prompt"].split()})


# --- pictures ----------------------------------------------------------------------------------------------------


def scene_for(record: Record, rng: np.random.Generator) -> Scene:
    """A scene that shows exactly what the record asks for, drawn evenly over places and free colours."""
    glyphs = [
        int(rng.choice(glyphs_of(entry["class"], entry.get("color"))))
        for entry in record["include"]
        for _ in range(entry["count"])
    ]
    position = record["include"][-1].get("position")
    place = record.get("metadata", {}).get("place")
    while True:
        cells = rng.permutation(CELLS)[: len(glyphs)]
        related = position is None or holds(position[0], int(cells[1]), int(cells[0]))
        if related and (place is None or holds(place, int(cells[0]), CELLS - 1 - int(cells[0]))):
            return _scene(zip(glyphs, cells, strict=True))


def holds(relation: str, cell: int, other: int) -> bool:
    """Whether an object in `cell` is left of / right of / above / below one in `other`; a diagonal is both."""
    (y, x), (other_y, other_x) = divmod(cell, 2), divmod(other, 2)
    return {"left of": x < other_x, "right of": x > other_x, "above": y < other_y, "below": y > other_y}[relation]


def noisy_scene_for(record: Record, rng: np.random.Generator, noise: float) -> tuple[Scene, str]:
    """A scene as web captions have it: with probability `noise` one fact of the caption is wrong.

    Returns:
        The scene, and which fact is wrong: "" (none), "extra", "missing", "replaced" or "mirrored".
    """
    scene = scene_for(record, rng)
    if rng.random() >= noise:
        return scene, ""
    position = record["include"][-1].get("position")
    kinds = ["replaced"]
    kinds += ["extra"] if len(scene) < CELLS else []
    kinds += ["missing"] if len(scene) > 1 else []
    kinds += ["mirrored"] if position else []
    kind = str(rng.choice(kinds))
    place = int(rng.integers(len(scene)))
    asked = {g for e in record["include"] for g in glyphs_of(e["class"], e.get("color"))}
    other = int(rng.choice([g for g in range(len(GLYPHS)) if g not in asked]))
    if kind == "missing":
        return scene[:place] + scene[place + 1 :], kind
    if kind == "extra":
        empty = [cell for cell in range(CELLS) if cell not in {c for _, c in scene}]
        return _scene([*scene, (other, int(rng.choice(empty)))]), kind
    if kind == "replaced":
        return _scene([(other, c) if i == place else (g, c) for i, (g, c) in enumerate(scene)]), kind
    flip = 1 if position[0] in ("left of", "right of") else 2
    return _scene((g, c ^ flip) for g, c in scene), kind


def _scene(objects: Iterable[tuple[int, int]]) -> Scene:
    return tuple(sorted(((int(g), int(c)) for g, c in objects), key=lambda item: item[1]))


def render(scene: Scene) -> np.ndarray:
    """Picture of a scene, uint8 [64, 64, 3]."""
    return render_batch([scene])[0]


def render_batch(scenes: list[Scene]) -> np.ndarray:
    """Pictures of scenes, uint8 [B, 64, 64, 3]."""
    cells = _cell_pictures()
    images = np.empty((len(scenes), CANVAS_PX, CANVAS_PX, 3), dtype=np.uint8)
    images[:] = BACKGROUND
    for image, scene in zip(images, scenes, strict=True):
        for glyph, cell in scene:
            y, x = (part * CELL_PX for part in divmod(cell, 2))
            image[y : y + CELL_PX, x : x + CELL_PX] = cells[glyph]
    return images


@functools.cache
def _cell_pictures() -> np.ndarray:
    """Every glyph centred on the background, uint8 [glyphs, 32, 32, 3]."""
    margin = (CELL_PX - GLYPH_PX) // 2
    canvas = np.zeros((len(GLYPHS), CELL_PX, CELL_PX, 4), dtype=np.float32)
    for index in range(len(GLYPHS)):
        canvas[index, margin:-margin, margin:-margin] = glyph_rgba(index)
    background = np.array(BACKGROUND, dtype=np.float32)
    return np.round(canvas[..., :3] * 255.0 + (1.0 - canvas[..., 3:]) * background).astype(np.uint8)


def scene_objects(scene: Scene) -> list[dict[str, Any]]:
    """Ground truth of a scene: one dict(class, color, box) an object; box is (x0, y0, x1, y1) in pixels."""
    margin = (CELL_PX - GLYPH_PX) // 2
    objects = []
    for glyph, cell in scene:
        y, x = (part * CELL_PX + margin for part in divmod(cell, 2))
        name, color = GLYPHS[glyph]
        objects.append({"class": name, "color": color, "box": (x, y, x + GLYPH_PX, y + GLYPH_PX)})
    return objects
