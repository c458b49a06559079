"""Drawing, judging and publishing an evaluation, and what reading it back believes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from mar_grpo.data import scenes
from mar_grpo.data.prompts import PromptRecord
from mar_grpo.documents import ScoreTable, read_document, read_rows
from mar_grpo.errors import InputError
from mar_grpo.evaluation.benchmarks import (
    Evaluation,
    EvaluationConfig,
    evaluate,
    judged_by,
    load_images,
    pixel_digest,
    publish_evaluation,
    score_images,
    summarise,
)
from mar_grpo.evaluation.diversity import distance_to_group
from mar_grpo.models.policy import Policy
from mar_grpo.rewards.templates import TemplateJudge
from mar_grpo.rollout import SamplingConfig
from mar_grpo.store import Store
from tests.unit import tiny

SAMPLING = SamplingConfig(ar_steps=4, diffusion_steps=2, noise_level=0.0, batch_size=3)
PROMPTS = ("a photo of an apple", "a photo of a dog", "a photo of two apples")
KNOWN = {record["prompt"]: record for split in ("train", "held_out") for record in scenes.compositions(split)}
RECORDS = [PromptRecord.model_validate(KNOWN[prompt]) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def policy() -> Policy:
    """Draws meaningless pictures of 64 x 64 px."""
    return tiny.policy(transformer={"image_size": [64, 64], "image_base_size": [8, 8]})


def brightness(images: np.ndarray, records: Sequence[dict[str, Any]]) -> Mapping[str, np.ndarray]:
    """A scorer whose numbers tell pictures apart."""
    return {"brightness": images.reshape(len(images), -1).mean(1)}


def look(policy: Policy, records: list[PromptRecord], seed: int = 0, samples: int = 2, **changes: Any) -> Evaluation:
    config = EvaluationConfig(samples_per_prompt=samples, seed=seed)
    return evaluate(policy, records, sampling=SAMPLING.model_copy(update=changes), config=config, scorer=brightness)


def test_a_picture_depends_on_seed_prompt_and_sample_only(policy: Policy) -> None:
    whole, alone = look(policy, RECORDS), look(policy, RECORDS[2:], batch_size=1)
    assert whole.images.shape == (6, 64, 64, 3)
    assert [(row.prompt_id, row.sample) for row in whole.rows] == [(r.prompt_id, s) for r in RECORDS for s in (0, 1)]
    assert [row.seed for row in whole.rows[4:]] == [row.seed for row in alone.rows]
    np.testing.assert_allclose(whole.images[4:].astype(int), alone.images.astype(int), atol=1)
    assert len({row.image_sha256 for row in whole.rows}) == 6
    assert not {row.seed for row in whole.rows} & {row.seed for row in look(policy, RECORDS, seed=1).rows}
    assert whole.images_per_second > 0


def test_progress_and_repeated_records(policy: Policy) -> None:
    seen: list[tuple[int, int]] = []
    evaluation = evaluate(
        policy,
        [*RECORDS, RECORDS[0]],
        sampling=SAMPLING,
        config=EvaluationConfig(),
        scorer=judged_by([TemplateJudge()]),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(3, 6), (6, 6)]
    assert len(evaluation.rows) == 6
    assert {"templates/strict", "templates/graded", "picture/diversity"} <= set(evaluation.rows[0].scores)


def test_real_scenes_are_right_and_their_numbers_are_those_of_the_picture() -> None:
    rng = np.random.default_rng(0)
    images = np.stack([scenes.render(scenes.scene_for(r.as_dict(), rng)) for r in RECORDS for _ in range(2)])
    images[3] = images[0]  # an apple where a dog is asked for
    plan = [(record, sample) for record in RECORDS for sample in range(2)]
    rows = score_images(images, plan, list(range(6)), judged_by([TemplateJudge()]))
    assert [row.scores["templates/strict"] for row in rows] == [1, 1, 1, 0, 1, 1]
    assert rows[0].image_sha256 == pixel_digest(images[0]) == rows[3].image_sha256
    distances = distance_to_group(images, [row.prompt_id for row in rows])
    assert [row.scores["picture/diversity"] for row in rows] == pytest.approx(distances)
    summary = summarise(rows)["templates/strict"]
    assert (summary.overall.n, summary.overall.mean) == (6, pytest.approx(5 / 6))
    assert {tag: score.n for tag, score in summary.by_tag.items()} == {"single_object": 4, "counting": 2}
    assert summary.by_tag["single_object"].standard_error == pytest.approx(0.25)
    assert summary.by_tag["counting"].standard_error is None


def test_one_picture_a_prompt_has_no_diversity(policy: Policy) -> None:
    assert "picture/diversity" not in look(policy, RECORDS, samples=1).rows[0].scores


def test_what_was_published_reads_back_the_same(policy: Policy, store: Store) -> None:
    evaluation = look(policy, RECORDS)
    reference, table = publish(store, evaluation)
    assert read_document(reference, ScoreTable) == table
    assert table.summary["brightness"].overall.n == 6
    assert table.sampling["seed"] == 0
    assert table.sampling["ar_steps"] == 4
    rows = read_rows(table)
    assert rows == list(evaluation.rows)
    images = load_images(table, rows[1:4])
    assert list(images) == [(row.prompt_id, row.sample) for row in rows[1:4]]
    for row, image in zip(evaluation.rows[1:4], evaluation.images[1:4], strict=True):
        np.testing.assert_array_equal(images[row.prompt_id, row.sample], image)
    assert store.read_bytes("before/contact_sheet.png").startswith(b"\x89PNG")


def publish(store: Store, evaluation: Evaluation) -> Any:
    names = {"checkpoint": "c" * 64, "prompt_set": "p" * 64}
    return publish_evaluation(store, "before", evaluation, **names, sampling=SAMPLING, config=EvaluationConfig())


def test_a_picture_that_is_not_the_scored_one_is_found(policy: Policy, file_store: Store) -> None:
    evaluation = look(policy, RECORDS)
    swapped = dataclasses.replace(evaluation, images=evaluation.images[::-1])
    _, table = publish(file_store, swapped)
    with pytest.raises(InputError, match="not the one that was scored"):
        load_images(table, evaluation.rows)


def test_a_picture_that_is_not_there_is_missed(policy: Policy, file_store: Store) -> None:
    evaluation = look(policy, RECORDS)
    _, table = publish(file_store, look(policy, RECORDS[:2]))
    with pytest.raises(InputError, match="2 pictures are missing"):
        load_images(table, evaluation.rows)


def test_no_prompts_and_bad_scores_are_named(policy: Policy) -> None:
    with pytest.raises(InputError, match="no prompt to evaluate"):
        look(policy, [])
    images, plan = np.zeros((1, 64, 64, 3), np.uint8), [(RECORDS[0], 0)]
    with pytest.raises(InputError, match=rf"not finite .odd, prompt {RECORDS[0].prompt_id} sample 0."):
        score_images(images, plan, [1], lambda images, records: {"odd": np.array([np.nan])})
    with pytest.raises(InputError, match=r"scores of shape \(2,\) .odd."):
        score_images(images, plan, [1], lambda images, records: {"odd": np.zeros(2)})
