"""Prompt sets and scene sets: from the emoji scenes that ship or from prompt files of the user's.

What evaluation asks is never asked in training: emoji compositions are split once and for all (`scenes.split_of`), and
for any pair of sources the two sides are compared before a set is written.
"""

from __future__ import annotations

import io
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from mar_grpo.data.prompts import PromptRecord, read_prompt_file, validated
from mar_grpo.data.scenes import (
    MORE_CAPTIONS,
    TAGS,
    Split,
    compositions,
    noisy_scene_for,
    render,
)
from mar_grpo.data.shards import Sample, write_shards
from mar_grpo.data.stream import DataConfig, permutation
from mar_grpo.documents import PromptSet
from mar_grpo.errors import InputError
from mar_grpo.store import Store

EMOJI_SOURCE = "emoji"
MORE_DRAWS = 1000  # captions of each further kind among training prompts, before those drawn twice are taken out
Part = Literal["train", "evaluation"]


def build_prompt_set(store: Store, prefix: str, config: DataConfig, part: Part) -> PromptSet:
    """Write the training or the evaluation prompts as shards under `prefix`; the caller publishes the document.

    Errors: InputError from reading a file, or as `prompt_records`; then nothing is written.
    """
    records = prompt_records(config, part)
    times: Counter[str] = Counter()
    samples: list[Sample] = []
    for record in records:
        key = record.prompt_id
        samples.append(Sample(key=f"{key}-{times[key]}" if times[key] else key, record=record))
        times[key] += 1
    source = {
        "name": config.train if part == "train" else config.evaluation,
        "part": part,
        "seed": config.seed,
        "distinct_prompts": len(times),
        "samples_by_tag": dict(Counter(record.tag for record in records)),
    }
    return write_shards(
        store, prefix, samples, samples_per_shard=config.samples_per_shard, kind="prompts", source=source
    )


def prompt_records(config: DataConfig, part: Part) -> list[PromptRecord]:
    """Records of one part. Training prompts may occur several times (tag weights, repeated rows), evaluation's once.

    Any first stretch of evaluation's list holds the tags about evenly.

    Errors: InputError if training and evaluation share a request, if more distinct prompts are wanted than there are,
    or if `tag_weights` names a tag that is not there.
    """
    train, evaluation = _records(config.train, "train"), _records(config.evaluation, "held_out")
    if config.train == EMOJI_SOURCE:
        train += _more_records(config)
    _check_separate(train, evaluation, config)
    distinct = list({record.prompt_id: record for record in (train if part == "train" else evaluation)}.values())
    if part == "evaluation":
        return _chosen(distinct, config.evaluation_prompts, {}, config, "evaluation_prompts")
    weights = config.tag_weights
    if config.train != EMOJI_SOURCE and not weights:
        if config.train_prompts is None:
            return train
        weights = {tag: float(count) for tag, count in Counter(record.tag for record in train).items()}
    chosen = _chosen(distinct, config.train_prompts, weights, config, "train_prompts")
    return _repeated(chosen, weights)


def _records(source: str, split: Split) -> list[PromptRecord]:
    if source == EMOJI_SOURCE:
        return [validated(record, where=f"emoji prompt {record['prompt']!r}") for record in compositions(split)]
    return read_prompt_file(source)


def _more_records(config: DataConfig) -> list[PromptRecord]:
    """Training prompts of the kinds beyond the six that `tag_weights` names."""
    records = []
    for number, (tag, draw) in enumerate(MORE_CAPTIONS.items()):
        if config.tag_weights.get(tag):
            rng = np.random.default_rng([config.seed, number])
            drawn = {record["prompt"]: record for record in (draw(rng) for _ in range(MORE_DRAWS))}
            records += [validated(record, where=f"emoji prompt {prompt!r}") for prompt, record in drawn.items()]
    return records


def _check_separate(train: Sequence[PromptRecord], evaluation: Sequence[PromptRecord], config: DataConfig) -> None:
    asked = {record.asked(config.separate_by): record for record in train}
    shared = [record for record in evaluation if record.asked(config.separate_by) in asked]
    if shared:
        first, other = shared[0], asked[shared[0].asked(config.separate_by)]
        relax = "; separate_by: request tells relations apart" if config.separate_by == "composition" else ""
        raise InputError(
            f"{len(shared)} of {len(evaluation)} evaluation prompts ask for what training asks for, "
            f"first {first.prompt[:80]!r} and {other.prompt[:80]!r}",
            where=f"evaluation {config.evaluation}, train {config.train}, field prompt",
            hint=f"take them out of one of the two files{relax}",
        )


def _chosen(
    records: Sequence[PromptRecord], n: int | None, weights: dict[str, float], config: DataConfig, field: str
) -> list[PromptRecord]:
    """`n` of the records, always the next one of the tag that is furthest behind its weight (empty: all tags alike)."""
    by_tag: dict[str, list[PromptRecord]] = defaultdict(list)
    for record in records:
        by_tag[record.tag].append(record)
    for tag in weights:
        if tag not in by_tag:
            raise InputError(f"no prompt has the tag {tag!r}", where=f"tag_weights.{tag}", hint=f"use {sorted(by_tag)}")
    weight = {tag: weights.get(tag, 0.0) if weights else 1.0 for tag in by_tag}
    waiting = {
        tag: [items[i] for i in permutation(config.seed, place, len(items))]
        for place, (tag, items) in enumerate(by_tag.items())
        if weight[tag] > 0
    }
    available = sum(map(len, waiting.values()))
    if n is not None and n > available:
        raise InputError(f"{n} distinct prompts are wanted, there are {available}", where=f"data.{field}")
    taken: Counter[str] = Counter()
    chosen: list[PromptRecord] = []
    while len(chosen) < (available if n is None else n):
        tag = min((t for t in waiting if waiting[t]), key=lambda t: taken[t] / weight[t])
        chosen.append(waiting[tag].pop())
        taken[tag] += 1
    return chosen


def _repeated(records: list[PromptRecord], weights: dict[str, float]) -> list[PromptRecord]:
    """The records, those of scarce tags several times, so that tags occur in the ratio of their weights, rounded."""
    counts = Counter(record.tag for record in records)
    largest = max(counts, key=lambda tag: counts[tag])
    unit = counts[largest] / weights.get(largest, 1.0)
    times = {tag: max(1, math.floor(unit * weights.get(tag, 1.0) / counts[tag] + 0.5)) for tag in counts}
    return [record for record in records for _ in range(times[record.tag])]


def build_scene_set(
    store: Store,
    prefix: str,
    *,
    n: int,
    noise: float,
    seed: int,
    split: Split = "train",
    mixed: bool = False,
    tag_weights: dict[str, float] | None = None,
    samples_per_shard: int = 2000,
) -> PromptSet:
    """Write `n` captioned scenes (PNG and record), the six tags in turn, for supervised training.

    With `mixed` every second caption is one beyond the six kinds (scenes.mixed_record). `tag_weights` draws the tags
    at random in this ratio instead, with those of MORE_CAPTIONS among them.

    With probability `noise` one fact of a caption is wrong, as in captions from the web; the record's metadata holds
    the scene that was drawn (`scene`: [[glyph, cell], ...]) and which fact is wrong (`wrong`: "" if none).
    """
    if n < 1 or not 0.0 <= noise <= 1.0:
        raise InputError(
            f"{n} scenes with noise {noise} cannot be made", where="scene set", hint="n >= 1, noise 0 to 1"
        )
    source = {"name": EMOJI_SOURCE, "part": split, "seed": seed, "noise": noise, "mixed": mixed}
    source |= {"tag_weights": tag_weights} if tag_weights else {}
    samples = _scenes(n, noise, seed, split, mixed, tag_weights or {})
    return write_shards(store, prefix, samples, samples_per_shard=samples_per_shard, kind="scenes", source=source)


def _scenes(
    n: int, noise: float, seed: int, split: Split, mixed: bool, tag_weights: dict[str, float]
) -> Iterator[Sample]:
    by_tag = {tag: [record for record in compositions(split) if record["tag"] == tag] for tag in TAGS}
    for number in range(n):
        rng = np.random.default_rng([seed, number])
        tag = "mixed" if mixed and number % 2 else TAGS[number // (1 + mixed) % len(TAGS)]
        if tag_weights:
            shares = np.array(list(tag_weights.values()), dtype=float)
            tag = str(rng.choice(list(tag_weights), p=shares / shares.sum()))
        record = MORE_CAPTIONS[tag](rng) if tag in MORE_CAPTIONS else by_tag[tag][int(rng.integers(len(by_tag[tag])))]
        scene, wrong = noisy_scene_for(record, rng, noise)
        fields = record | {
            "metadata": record.get("metadata", {}) | {"scene": [list(item) for item in scene], "wrong": wrong}
        }
        key = f"{number:08d}"
        yield Sample(key=key, record=validated(fields, where=f"scene {key}"), png=_png(render(scene)))


def _png(image: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return buffer.getvalue()
