"""Draw every held-out prompt with fixed noise, let the judges look, and keep a row for each picture.

Two checkpoints that are evaluated on the same prompts with the same seed get the same noise picture by picture, so that
their tables can be compared in pairs (gate.py).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from mar_grpo.data.prompts import PromptRecord
from mar_grpo.data.shards import Sample, read_shards, write_shards
from mar_grpo.documents import (
    DocumentRef,
    PromptSet,
    Score,
    ScoreRow,
    ScoreSummary,
    ScoreTable,
    read_document,
    write_document,
    write_rows,
)
from mar_grpo.errors import InputError
from mar_grpo.evaluation.diversity import distance_to_group, picture_statistics
from mar_grpo.evaluation.pictures import contact_sheet, png_bytes
from mar_grpo.evaluation.statistics import clustered_mean
from mar_grpo.models.policy import Policy
from mar_grpo.noise import noise_key
from mar_grpo.rollout import SamplingConfig, generate
from mar_grpo.store import Store

SHARD_SAMPLES = 500
SHEET_COLUMNS = 24
SHEET_PICTURES = 480


class EvaluationConfig(BaseModel):
    """How a checkpoint is evaluated."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    samples_per_prompt: int = Field(2, ge=1)
    """Pictures of each prompt; diversity needs at least two."""
    seed: int = Field(0, ge=0)
    """With prompt and sample number it fixes the noise of a picture, whatever else is drawn with it."""


Scorer = Callable[[NDArray[np.uint8], Sequence[dict[str, Any]]], Mapping[str, np.ndarray]]
"""Pictures uint8 [B, H, W, 3] and their records (GenEval's field names) -> named scores, each [B]."""


class Judge(Protocol):
    """A named scorer, as those of mar_grpo.rewards."""

    name: str

    def scores(self, images: Any, records: Sequence[dict[str, Any]]) -> Mapping[str, np.ndarray]: ...


def judged_by(judges: Sequence[Judge]) -> Scorer:
    """The scores of all judges, each as "judge/score"."""

    def look(images: NDArray[np.uint8], records: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
        return {f"{judge.name}/{name}": v for judge in judges for name, v in judge.scores(images, records).items()}

    return look


@dataclass(frozen=True)
class Evaluation:
    """Rows and their pictures uint8 [N, H, W, 3], ordered by prompt (as given) and sample; seconds by activity."""

    rows: tuple[ScoreRow, ...]
    records: tuple[PromptRecord, ...]
    """The record of each row."""
    images: NDArray[np.uint8]
    drawing_seconds: float
    judging_seconds: float

    @property
    def images_per_second(self) -> float:
        """Pictures drawn in a second."""
        return len(self.images) / max(self.drawing_seconds, 1e-9)


def evaluate(
    policy: Policy,
    records: Sequence[PromptRecord],
    *,
    sampling: SamplingConfig,
    config: EvaluationConfig,
    scorer: Scorer,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Draw `samples_per_prompt` pictures of each prompt and score them. A record that occurs twice is drawn once.

    Args:
        scorer: `judged_by([...])` for a benchmark, `RewardMix.compute` for the training reward.
        progress: called with (pictures drawn, pictures in all) after every batch.

    Raises:
        InputError: there are no records.
    """
    distinct = list({record.prompt_id: record for record in records}.values())
    if not distinct:
        raise InputError("there is no prompt to evaluate", where="records")
    plan = [(record, sample) for record in distinct for sample in range(config.samples_per_prompt)]
    keys = [noise_key(config.seed, int(record.prompt_id, 16), sample) for record, sample in plan]
    start = time.perf_counter()
    drawn: list[np.ndarray] = []
    for first in range(0, len(plan), sampling.batch_size):
        batch = slice(first, first + sampling.batch_size)
        prompts = [record.prompt for record, _ in plan[batch]]
        drawn.append(generate(policy, prompts, keys[batch], sampling).cpu().numpy())
        progress(min(first + sampling.batch_size, len(plan)), len(plan))
    images = np.concatenate(drawn)
    middle = time.perf_counter()
    rows = score_images(images, plan, keys, scorer)
    judged = time.perf_counter() - middle
    return Evaluation(tuple(rows), tuple(record for record, _ in plan), images, middle - start, judged)


def score_images(
    images: NDArray[np.uint8], plan: Sequence[tuple[PromptRecord, int]], keys: Sequence[int], scorer: Scorer
) -> list[ScoreRow]:
    """A row for each picture: the scorer's scores, and the numbers of the picture itself.

    Args:
        images: uint8 [N, H, W, 3].
        plan: record and sample number of each picture.
        keys: noise key of each picture.

    Raises:
        InputError: a score is not one finite number a picture; names score and prompt.
    """
    records = [record.as_dict() for record, _ in plan]
    prompt_ids = [record.prompt_id for record, _ in plan]
    scores = dict(scorer(images, records))
    scores |= {f"picture/{name}": values for name, values in picture_statistics(images).items()}
    for name, values in scores.items():
        if np.shape(values) != (len(plan),):
            raise InputError(f"{len(plan)} pictures got scores of shape {np.shape(values)}", where=name)
        if not np.isfinite(values).all():
            bad = int(np.flatnonzero(~np.isfinite(values))[0])
            raise InputError("a score is not finite", where=f"{name}, prompt {prompt_ids[bad]} sample {plan[bad][1]}")
    distances = distance_to_group(images, prompt_ids)
    rows = []
    for index, (record, sample) in enumerate(plan):
        numbers = {name: float(values[index]) for name, values in scores.items()}
        if np.isfinite(distances[index]):
            numbers["picture/diversity"] = float(distances[index])
        rows.append(
            ScoreRow(
                prompt_id=record.prompt_id,
                prompt=record.prompt,
                tag=record.tag,
                sample=sample,
                seed=keys[index],
                image_sha256=pixel_digest(images[index]),
                scores=numbers,
            )
        )
    return rows


def pixel_digest(image: NDArray[np.uint8]) -> str:
    """sha256 of the pixels in row-major RGB order: the picture, not the file it is in."""
    return hashlib.sha256(np.ascontiguousarray(image).tobytes()).hexdigest()


def summarise(rows: Iterable[ScoreRow]) -> dict[str, ScoreSummary]:
    """n, mean and standard error (clustered by prompt) of each score, over all pictures and by tag."""
    rows = list(rows)

    def score(name: str, chosen: list[ScoreRow]) -> Score:
        estimate = clustered_mean([row.scores[name] for row in chosen], [row.prompt_id for row in chosen])
        return Score(n=estimate.n, mean=estimate.mean, standard_error=estimate.standard_error)

    summary = {}
    for name in sorted({name for row in rows for name in row.scores}):
        having = [row for row in rows if name in row.scores]
        tags = sorted({row.tag for row in having})
        by_tag = {tag: score(name, [row for row in having if row.tag == tag]) for tag in tags}
        summary[name] = ScoreSummary(overall=score(name, having), by_tag=by_tag)
    return summary


def publish_evaluation(
    store: Store,
    prefix: str,
    evaluation: Evaluation,
    *,
    checkpoint: str,
    prompt_set: str,
    sampling: SamplingConfig,
    config: EvaluationConfig,
) -> tuple[DocumentRef, ScoreTable]:
    """Write pictures (shards and one contact sheet), rows, and last the score table that refers to them.

    Args:
        prefix: folder in the store.
        checkpoint: digest of the checkpoint that drew.
        prompt_set: digest of the prompt set it was asked.
    """
    samples = (
        Sample(key=f"{row.prompt_id}-{row.sample}", record=record, png=png_bytes(image))
        for row, record, image in zip(evaluation.rows, evaluation.records, evaluation.images, strict=True)
    )
    source = {"checkpoint": checkpoint, "prompt_set": prompt_set}
    folder = f"{prefix}/images"
    shards = write_shards(store, folder, samples, samples_per_shard=SHARD_SAMPLES, kind="scenes", source=source)
    images = write_document(store, f"{prefix}/images.json", shards)
    sheet = contact_sheet(evaluation.images[:SHEET_PICTURES], SHEET_COLUMNS)
    store.write_bytes(f"{prefix}/contact_sheet.png", png_bytes(sheet))
    rows = write_rows(store, f"{prefix}/rows.jsonl", evaluation.rows)
    table = ScoreTable(
        checkpoint=checkpoint,
        prompt_set=prompt_set,
        sampling=sampling.model_dump(mode="json") | config.model_dump(mode="json"),
        rows_uri=rows.uri,
        rows_sha256=rows.sha256,
        images_uri=images.uri,
        summary=summarise(evaluation.rows),
        seconds=evaluation.drawing_seconds + evaluation.judging_seconds,
    )
    return write_document(store, f"{prefix}/score_table.json", table), table


def load_images(table: ScoreTable, rows: Iterable[ScoreRow]) -> dict[tuple[str, int], NDArray[np.uint8]]:
    """(prompt id, sample) -> uint8 [H, W, 3] of the wanted rows of a published table.

    Raises:
        InputError: a picture is missing, or is not the one its row was scored on.
    """
    where = table.images_uri or table.rows_uri
    if table.images_uri is None:
        raise InputError("the score table has no pictures", where=where)
    wanted = {f"{row.prompt_id}-{row.sample}": row for row in rows}
    found = {}
    for sample in read_shards(read_document(table.images_uri, PromptSet)):
        if row := wanted.pop(sample.key, None):
            found[row.prompt_id, row.sample] = image = sample.image()
            if pixel_digest(image) != row.image_sha256:
                raise InputError("a picture is not the one that was scored", where=f"{where}, sample {sample.key}")
    if wanted:
        raise InputError(f"{len(wanted)} pictures are missing", where=f"{where}, sample {min(wanted)}")
    return found


def accuracy_table(summary: Mapping[str, ScoreSummary], score: str) -> list[tuple[str, Score]]:
    """Rows of the table a command prints: each tag of one score, then all."""
    return [*sorted(summary[score].by_tag.items()), ("all", summary[score].overall)]
