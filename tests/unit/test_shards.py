"""Shards: what is written is what is read, to the byte, by our reader and by WebDataset's own."""

from __future__ import annotations

import tarfile
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mar_grpo.data.build import build_prompt_set, build_scene_set, prompt_records
from mar_grpo.data.emoji import GLYPHS
from mar_grpo.data.prompts import parse_row
from mar_grpo.data.scenes import TAGS, render
from mar_grpo.data.shards import Sample, read_shards, write_shards
from mar_grpo.data.stream import DataConfig
from mar_grpo.data.tar import parse_tar
from mar_grpo.documents import PromptSet, read_document, write_document
from mar_grpo.errors import InputError
from mar_grpo.store import Store, read_uri

FILES_CONFIG = {"train_prompts": None, "evaluation_prompts": None}


def plain(number: int) -> Sample:
    return Sample(key=f"{number:04d}", record=parse_row(f"prompt number {number}", where="test"))


@pytest.mark.parametrize("samples_per_shard", [1, 3, 7, 100])
def test_samples_come_back_in_order(store: Store, samples_per_shard: int) -> None:
    samples = [plain(i) for i in range(7)]
    made = write_shards(
        store, "set", samples, samples_per_shard=samples_per_shard, kind="prompts", source={"name": "test"}
    )
    assert [shard.samples for shard in made.shards] == [
        min(samples_per_shard, 7 - first) for first in range(0, 7, samples_per_shard)
    ]
    known = read_document(write_document(store, "set/manifest.json", made), PromptSet)
    assert known == made
    assert list(read_shards(known, store)) == list(read_shards(known)) == samples


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompts=st.lists(st.text(min_size=1, max_size=60).map(lambda text: "x" + text), min_size=1, max_size=12),
    samples_per_shard=st.integers(1, 13),
)
def test_any_prompts_come_back_and_equal_sets_have_equal_bytes(
    tmp_path: Path, prompts: list[str], samples_per_shard: int
) -> None:
    samples = [Sample(str(i), parse_row(prompt, where="test")) for i, prompt in enumerate(prompts)]
    sets = [
        write_shards(
            Store(tmp_path / place), "p", samples, samples_per_shard=samples_per_shard, kind="prompts", source={}
        )
        for place in ("one", "two")
    ]
    assert list(read_shards(sets[0])) == samples
    assert [shard.sha256 for shard in sets[0].shards] == [shard.sha256 for shard in sets[1].shards]
    assert sum(shard.samples for shard in sets[0].shards) == sets[0].samples == len(prompts)


def test_tar_headers_hold_nothing_of_this_machine(file_store: Store) -> None:
    made = build_scene_set(file_store, "scenes", n=3, noise=0.0, seed=0)
    with tarfile.open(fileobj=BytesIO(read_uri(made.shards[0].uri))) as tar:
        facts = {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in tar}
    assert facts == {(0, 0, 0, "mar-grpo", "mar-grpo", 0o444)}


def test_webdataset_reads_our_shards(file_store: Store) -> None:
    import webdataset

    made = build_scene_set(file_store, "scenes", n=5, noise=0.5, seed=3, samples_per_shard=2)
    paths = [shard.uri.removeprefix("file://") for shard in made.shards]
    theirs = list(webdataset.WebDataset(paths, shardshuffle=False, empty_check=False).decode("rgb8"))
    ours = list(read_shards(made))
    assert [sample["__key__"] for sample in theirs] == [sample.key for sample in ours]
    assert [sample["json"] for sample in theirs] == [sample.record.as_dict() for sample in ours]
    assert all(np.array_equal(a["png"], b.image()) for a, b in zip(theirs, ours, strict=True))


def test_a_new_set_under_the_same_prefix_leaves_the_earlier_one_readable(file_store: Store) -> None:
    old, new = (
        write_shards(file_store, "p", [plain(i)], samples_per_shard=9, kind="prompts", source={}) for i in (1, 2)
    )
    assert list(read_shards(old)) == [plain(1)]
    assert list(read_shards(new)) == [plain(2)]


# --- what is built -----------------------------------------------------------------------------------------------


def test_emoji_prompts_are_balanced_and_separate(file_store: Store) -> None:
    config = DataConfig(train_prompts=200, evaluation_prompts=120, samples_per_shard=64)
    sides = {}
    for part in ("train", "evaluation"):
        made = build_prompt_set(file_store, part, config, part)
        samples = list(read_shards(made, file_store))
        assert len(samples) == made.samples
        assert (
            len({s.record.prompt_id for s in samples})
            == made.source["distinct_prompts"]
            == {
                "train": 200,
                "evaluation": 120,
            }[part]
        )
        sides[part] = samples
    tags = Counter(sample.record.tag for sample in sides["train"])
    assert set(tags) == set(TAGS)
    assert max(tags.values()) < 2 * min(tags.values())  # whole repetitions come within a third of the ideal
    asked = [{s.record.asked("composition") for s in side} for side in sides.values()]
    assert not asked[0] & asked[1]
    assert {sample.record.tag for sample in sides["evaluation"][:6]} == set(TAGS)


def test_tag_weights_give_the_shares_and_zero_takes_a_tag_out() -> None:
    config = DataConfig(train_prompts=300, tag_weights={"two_object": 3, "color_attr": 1, "counting": 0})
    tags = Counter(record.tag for record in prompt_records(config, "train"))
    assert set(tags) == {"two_object", "color_attr"}
    assert tags["two_object"] / tags["color_attr"] == pytest.approx(3, rel=0.1)


def test_the_seed_chooses_and_the_choice_is_repeatable() -> None:
    def chosen(seed: int) -> list[str]:
        return [r.prompt_id for r in prompt_records(DataConfig(evaluation_prompts=50, seed=seed), "evaluation")]

    assert chosen(1) == chosen(1) != chosen(2)


@pytest.fixture
def prompt_files(tmp_path: Path) -> dict[str, str]:
    """Training file with a row that occurs twice, evaluation file that shares a pair of objects but no request."""
    rows = {
        "train": [
            '{"prompt": "a photo of a dog", "tag": "single_object", "include": [{"class": "dog", "count": 1}]}',
            '{"prompt": "a photo of a dog", "tag": "single_object", "include": [{"class": "dog", "count": 1}]}',
            '{"prompt": "a photo of a cat above a cup", "tag": "position", "include": '
            '[{"class": "cup", "count": 1}, {"class": "cat", "count": 1, "position": ["above", 0]}]}',
        ],
        "evaluation": [
            '{"prompt": "a photo of a cup above a cat", "tag": "position", "include": '
            '[{"class": "cat", "count": 1}, {"class": "cup", "count": 1, "position": ["above", 0]}]}',
        ],
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return {name: str(tmp_path / f"{name}.jsonl") for name in rows}


def test_prompt_files_keep_their_repeated_rows(prompt_files: dict[str, str], file_store: Store) -> None:
    config = DataConfig.model_validate(FILES_CONFIG | prompt_files | {"separate_by": "request"})
    train = list(read_shards(build_prompt_set(file_store, "train", config, "train")))
    assert [sample.record.prompt for sample in train] == ["a photo of a dog"] * 2 + ["a photo of a cat above a cup"]
    assert train[1].key == f"{train[0].key}-1"
    evaluation = list(read_shards(build_prompt_set(file_store, "evaluation", config, "evaluation")))
    assert [sample.record.prompt for sample in evaluation] == ["a photo of a cup above a cat"]


def test_a_shared_composition_is_refused_and_nothing_is_written(
    prompt_files: dict[str, str], file_store: Store
) -> None:
    file_store.make_root()
    with pytest.raises(InputError, match="1 of 1 evaluation prompts ask for what training asks for") as caught:
        build_prompt_set(file_store, "train", DataConfig.model_validate(FILES_CONFIG | prompt_files), "train")
    assert prompt_files["train"] in str(caught.value)
    assert file_store.list() == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"evaluation_prompts": 100_000}, "evaluation_prompts"),
        ({"train_prompts": 100_000}, "train_prompts"),
    ],
)
def test_more_prompts_than_there_are_is_an_error(options: dict[str, int], text: str, file_store: Store) -> None:
    part = "evaluation" if "evaluation" in text else "train"
    with pytest.raises(InputError, match=f"data.{text}"):
        build_prompt_set(file_store, "p", DataConfig(**options), part)  # type: ignore[arg-type]


def test_scenes_hold_the_picture_and_the_fact_that_is_wrong(file_store: Store) -> None:
    made = build_scene_set(file_store, "scenes", n=60, noise=0.5, seed=5, samples_per_shard=25)
    samples = list(read_shards(made, file_store))
    assert [shard.samples for shard in made.shards] == [25, 25, 10]
    assert [sample.record.tag for sample in samples] == list(TAGS) * 10
    wrong = 0
    for sample in samples:
        metadata: dict[str, Any] = dict(sample.record.metadata)
        scene = tuple((glyph, cell) for glyph, cell in metadata["scene"])
        assert np.array_equal(sample.image(), render(scene))
        drawn = Counter(GLYPHS[glyph][0] for glyph, _ in scene)
        asked: Counter[str] = Counter()
        for entry in sample.record.include:
            asked[entry.class_name] += entry.count
        if not metadata["wrong"]:
            assert drawn == asked
        wrong += bool(metadata["wrong"])
    assert 15 < wrong < 45


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_cut_shard_is_ever_read(data: st.DataObject) -> None:
    """Whatever byte a tar ends at: all of its samples come, or an error that names the shard."""
    whole = BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        for number in range(3):
            member = tarfile.TarInfo(f"{number}.json")
            member.size = 700
            tar.addfile(member, BytesIO(b"x" * 700))
    content = whole.getvalue()
    complete = parse_tar(content, name="shard.tar")
    length = data.draw(st.integers(0, len(content) - 1))
    try:
        assert parse_tar(content[:length], name="shard.tar") == complete
        assert not content[length:].strip(b"\0")
    except InputError as error:
        assert "shard.tar" in str(error)
        assert length < 3 * 1536 + 1024


def test_training_prompts_can_be_of_further_kinds_and_evaluation_never_is() -> None:
    config = DataConfig(tag_weights={"position": 1, "related": 1, "mixed": 2})
    counts = Counter(record.tag for record in prompt_records(config, "train"))
    assert set(counts) == {"position", "related", "mixed"}
    assert counts["mixed"] == pytest.approx(2 * counts["position"], rel=0.4)
    assert {record.tag for record in prompt_records(config, "evaluation")} == set(TAGS)
    assert prompt_records(config, "train") == prompt_records(config, "train")
