"""Both judges on real scenes: accept what is right, refuse what is wrong, and do not mind the blur of a VAE."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
from importlib import resources

import numpy as np
import pytest
import torch

from mar_grpo.data import scenes
from mar_grpo.data.emoji import GLYPHS
from mar_grpo.data.scenes import Record, Scene
from mar_grpo.errors import InputError
from mar_grpo.rewards import heatmap, heatmap_training, templates
from mar_grpo.rewards.geneval import MALFORMED
from mar_grpo.rewards.heatmap import HeatmapJudge
from mar_grpo.rewards.templates import TemplateJudge
from tests.benchmarks.judges import WRONG, degrade, held_out_scenes, spoil, wrong_pictures

JUDGES = [TemplateJudge(), HeatmapJudge()]
Judge = TemplateJudge | HeatmapJudge
Cases = tuple[list[Record], list[Scene], np.ndarray]
both = pytest.mark.parametrize("judge", JUDGES, ids=lambda judge: judge.name)


@pytest.fixture(scope="module")
def cases() -> Cases:
    records, shown = held_out_scenes(180, np.random.default_rng(7))
    return records, shown, scenes.render_batch(shown)


@both
def test_right_scenes_are_accepted(judge: Judge, cases: Cases) -> None:
    records, _, pictures = cases
    assert judge.strict(pictures, records).mean() >= 0.97
    assert judge.strict(degrade(pictures, np.random.default_rng(8)), records).mean() >= 0.97


@both
def test_wrong_scenes_are_refused(judge: Judge, cases: Cases) -> None:
    records, shown, _ = cases
    rng = np.random.default_rng(9)
    pictures, kinds = wrong_pictures(records, shown, rng)
    refused = ~judge.strict(degrade(pictures, rng), records)
    assert refused.mean() >= 0.97
    for kind in WRONG:
        assert refused[np.array(kinds) == kind].mean() >= 0.9, kind


@both
def test_every_glyph_is_found_in_every_cell(judge: Judge) -> None:
    shown = [((glyph, cell),) for glyph in range(len(GLYPHS)) for cell in range(scenes.CELLS)]
    for scene, found in zip(shown, judge.detect(scenes.render_batch(list(shown))), strict=True):
        truth = scenes.scene_objects(scene)[0]
        assert [(d.class_name, d.color) for d in found] == [(truth["class"], truth["color"])]
        assert np.abs(np.subtract(found[0].box, truth["box"])).max() <= 4
        assert found[0].score > 0.8


@both
def test_an_empty_picture_holds_nothing_and_a_blob_is_malformed(judge: Judge) -> None:
    empty = scenes.render_batch([()])
    blob = empty.copy()
    blob[0, 20:30, 12:21] = (40, 160, 90)
    assert judge.detect(empty) == [[]]
    assert [d.class_name for d in judge.detect(blob)[0]] == [MALFORMED]


@both
def test_a_batch_is_judged_as_its_pictures_one_by_one(
    judge: Judge, cases: tuple[list[Record], list, np.ndarray]
) -> None:
    records, _, pictures = cases
    together = judge.graded(torch.from_numpy(pictures[:9]), records[:9])
    alone = np.concatenate([judge.graded(pictures[i : i + 1], records[i : i + 1]) for i in range(9)])
    np.testing.assert_allclose(together, alone, atol=1e-4)
    assert together.dtype == np.float32


@both
def test_graded_prefers_the_right_picture(judge: Judge, cases: Cases) -> None:
    records, shown, pictures = cases
    right = judge.graded(pictures, records)
    assert np.quantile(right, 0.02) > 0.8
    wrong, _ = wrong_pictures(records, shown, np.random.default_rng(10))
    value = judge.graded(wrong, records)
    assert (value >= 0).all() and (value < right).mean() > 0.97


def test_half_an_object_scores_between_none_and_all() -> None:
    judge, rng = HeatmapJudge(), np.random.default_rng(11)
    record = {"tag": "single_object", "include": [{"class": "star", "count": 1}], "prompt": "a photo of a star"}
    star = scenes.scene_for(record, rng)
    faded = spoil(record, star, "half erased", rng)
    assert faded is not None
    nothing, half, whole = judge.graded(np.stack([scenes.render(()), faded, scenes.render(star)]), [record] * 3)
    assert nothing == 0.0 < half < 0.5 < whole


def test_clutter_cheats_presence_and_nothing_else() -> None:
    judge = HeatmapJudge()
    record = {"tag": "single_object", "include": [{"class": "cat", "count": 1}], "prompt": "a photo of a cat"}
    cluttered = scenes.render_batch([((0, 0), (1, 1), (2, 2), (3, 3))])
    scores = judge.scores(cluttered, [record])
    assert scores["presence"][0] > 0.9
    assert scores["graded"][0] < 0.5 and scores["strict"][0] == 0.0


@both
def test_an_object_the_judge_cannot_see_is_refused(judge: Judge) -> None:
    record = {"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a photo of a bench"}
    with pytest.raises(InputError, match=f"'{judge.name}' does not know 'bench'"):
        judge.strict(scenes.render_batch([()]), [record])


@both
def test_pictures_of_another_size_or_type_are_refused(judge: Judge) -> None:
    with pytest.raises(ValueError, match="expected uint8"):
        judge.detect(np.zeros((1, 32, 32, 3), dtype=np.uint8))
    with pytest.raises(ValueError, match="expected uint8"):
        judge.detect(np.zeros((1, 64, 64, 3), dtype=np.float32))


def test_the_judges_share_rules_but_no_detection_code() -> None:
    def imported(module: object) -> set[str]:
        tree = ast.parse(inspect.getsource(module))  # type: ignore[arg-type]
        return {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}

    assert not any("heatmap" in name for name in imported(templates))
    assert not any("templates" in name for name in imported(heatmap) | imported(heatmap_training))


# --- training of the training judge ------------------------------------------------------------------------------


def test_labels_are_distributions_and_pictures_are_reproducible() -> None:
    first, second = (heatmap_training.training_batch(np.random.default_rng(12), 16) for _ in range(2))
    pictures, labels, weights = first
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.allclose(labels.sum(dim=1), torch.ones(()), atol=1e-5) and bool((labels >= -1e-6).all())
    assert pictures.shape == (16, 64, 64, 3) and float(pictures.min()) >= 0 and float(pictures.max()) <= 255
    asked = weights > 0
    assert 0.7 < float(asked.float().mean()) < 1.0


def test_training_lowers_the_loss_and_repeats_to_the_bit() -> None:
    short, longer = (heatmap_training.Settings(updates=n, batch=4, warmup_updates=5) for n in (3, 20))
    net, loss = heatmap_training.train(short)
    again, loss_again = heatmap_training.train(short)
    assert loss == loss_again
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))
    assert heatmap_training.train(longer)[1] < 0.5 * loss


def test_the_weights_in_the_package_are_the_recorded_ones() -> None:
    folder = resources.files("mar_grpo.assets") / "judges"
    facts = json.loads((folder / "heatmap.json").read_text(encoding="utf-8"))
    weights = (folder / "heatmap.safetensors").read_bytes()
    assert facts["sha256"] == hashlib.sha256(weights).hexdigest()
    assert len(weights) < 600_000
    assert facts["accepted_of_500_right_scenes"] >= 0.97
