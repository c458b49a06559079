"""The promotion gate: a candidate replaces the incumbent only if a judge it never trained against sees it improve.

Both score tables hold the same prompts with the same noise, so every comparison is paired, and every standard error is
clustered by prompt. A training reward is never looked at: it rises just as well when the reward is hacked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from mar_grpo.documents import GateDecision, GateRule, ScoreRow
from mar_grpo.errors import InputError
from mar_grpo.evaluation.statistics import Estimate, paired_difference, paired_ratio
from mar_grpo.evaluation.words import percent, tag_order

DIVERSITY = "picture/diversity"
RANGE = (0.01, 0.99)
"""Quantiles of the incumbent's pictures between which a picture counts as ordinary."""


class GateConfig(BaseModel):
    """When a candidate may replace the incumbent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    score: str = "templates/strict"
    """The held-out judge's verdict on an image, 0 or 1."""
    standard_errors: float = Field(2.0, ge=1.0)
    """By how many of its standard errors accuracy must rise, and by how many no tag may fall."""
    min_prompts: int = Field(100, ge=2)
    """Fewer prompts than this are no evidence."""
    min_diversity_ratio: float = Field(0.9, gt=0, le=1)
    """What must be left of the mean distance between pictures of one prompt."""
    max_degenerate_rise: float = Field(0.02, ge=0, le=1)
    """By how much the share of flat or saturated pictures may rise."""
    flat_deviation: float = Field(0.02, ge=0)
    """A picture whose grey values (0 to 1) deviate less than this is flat."""
    saturated_share: float = Field(0.5, gt=0, le=1)
    """A picture with more than this share of RGB values at 0 or 255 is saturated."""
    max_unusual_share: float = Field(0.1, gt=0, le=1)
    """How many pictures may lie outside the middle 98 % of the incumbent's in foreground share or in roughness."""


def decide(
    before: Sequence[ScoreRow], after: Sequence[ScoreRow], config: GateConfig, *, candidate: str, incumbent: str
) -> GateDecision:
    """Compare the rows of the incumbent (`before`) with those of the candidate (`after`), in any order.

    Args:
        candidate: digest of the checkpoint that wants to be promoted.
        incumbent: digest of the checkpoint it would replace.

    Returns:
        Every rule with what was measured and what was asked; `promote` is true only if all passed.

    Raises:
        InputError: the tables do not hold the same prompts, samples and noise, or a row lacks a score.
    """
    pairs = _pairs(before, after)
    rules = tuple(_rules(pairs, config))
    return GateDecision(
        candidate=candidate, incumbent=incumbent, rules=rules, promote=all(rule.passed for rule in rules)
    )


def _pairs(before: Sequence[ScoreRow], after: Sequence[ScoreRow]) -> list[tuple[ScoreRow, ScoreRow]]:
    """Rows of one image before and after, ordered by prompt and sample."""
    tables: list[dict[tuple[str, int], ScoreRow]] = []
    for name, rows in (("before", before), ("after", after)):
        table = {(row.prompt_id, row.sample): row for row in rows}
        if not rows:
            raise InputError("the score table is empty", where=name)
        if len(table) != len(rows):
            raise InputError("the score table holds an image twice", where=name)
        tables.append(table)
    first, second = tables
    if odd := sorted(first.keys() ^ second.keys()):
        side = "before" if odd[0] in first else "after"
        hint = "evaluate both checkpoints on the same prompt set with the same samples_per_prompt"
        raise InputError(f"prompt {odd[0][0]} sample {odd[0][1]} is in one table only", where=side, hint=hint)
    for key, row in first.items():
        other = second[key]
        if (row.seed, row.tag, row.prompt) != (other.seed, other.tag, other.prompt):
            hint = "evaluate both checkpoints with the same prompts and seed"
            raise InputError(
                "an image differs in prompt, tag or noise", where=f"prompt {key[0]} sample {key[1]}", hint=hint
            )
    return [(first[key], second[key]) for key in sorted(first)]


def _numbers(rows: Sequence[ScoreRow], name: str) -> np.ndarray:
    """One score of every row, [n]."""
    values = []
    for row in rows:
        if name not in row.scores:
            raise InputError(f"no score {name!r}", where=f"prompt {row.prompt_id} sample {row.sample}")
        values.append(row.scores[name])
    return np.array(values, dtype=np.float64)


def _rules(pairs: list[tuple[ScoreRow, ScoreRow]], config: GateConfig) -> Iterator[GateRule]:
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    prompts = [row.prompt_id for row in first]
    distinct = len(set(prompts))
    yield GateRule(
        name="enough_prompts",
        passed=distinct >= config.min_prompts,
        measured=distinct,
        threshold=config.min_prompts,
        detail=f"{distinct} prompts, {len(pairs)} images of each checkpoint",
    )
    was, now = _numbers(first, config.score), _numbers(second, config.score)
    change = paired_difference(was, now, prompts)
    error = change.standard_error
    yield GateRule(
        name="accuracy_rose",
        passed=change.above(0, config.standard_errors),
        measured=change.mean,
        threshold=config.standard_errors * error if error is not None else None,
        detail=_moved(was, now, change),
    )
    for tag in sorted({row.tag for row in first}, key=tag_order):
        rows = [i for i, row in enumerate(first) if row.tag == tag]
        change = paired_difference(was[rows], now[rows], [prompts[i] for i in rows])
        yield GateRule(
            name=f"tag_held/{tag}",
            passed=not change.below(0, config.standard_errors),
            measured=change.mean,
            threshold=0.0 - config.standard_errors * (change.standard_error or 0.0),
            detail=_moved(was[rows], now[rows], change),
        )
    yield _diversity(first, second, config)
    yield _degenerate(first, second, config)
    for name in ("foreground_share", "roughness"):
        yield _ordinary(name, first, second, config)


def _diversity(first: list[ScoreRow], second: list[ScoreRow], config: GateConfig) -> GateRule:
    """Mean distance within a prompt (`diversity.distance_to_group`), after over before; both means are over prompts."""
    name, least = "diversity_kept", config.min_diversity_ratio
    if not all(DIVERSITY in row.scores for row in first + second):
        detail = "needs at least two images a prompt"
        return GateRule(name=name, passed=False, measured=None, threshold=least, detail=detail)
    prompts = np.array([row.prompt_id for row in first])
    starts = np.flatnonzero(np.r_[True, prompts[1:] != prompts[:-1]])
    sizes = np.diff(np.r_[starts, prompts.size])
    was = np.add.reduceat(_numbers(first, DIVERSITY), starts) / sizes
    now = np.add.reduceat(_numbers(second, DIVERSITY), starts) / sizes
    ratio = paired_ratio(was, now)
    if ratio is None:
        detail = "the incumbent's pictures of a prompt are all alike, so there is nothing to keep"
        return GateRule(name=name, passed=True, measured=None, threshold=least, detail=detail)
    error = "unknown" if ratio.standard_error is None else percent(ratio.standard_error)
    return GateRule(
        name=name,
        passed=ratio.mean >= least,
        measured=ratio.mean,
        threshold=least,
        detail=f"mean distance {was.mean():.4f} to {now.mean():.4f}, standard error of the ratio {error}",
    )


def _degenerate(first: list[ScoreRow], second: list[ScoreRow], config: GateConfig) -> GateRule:
    shares = []
    for rows in (first, second):
        flat = _numbers(rows, "picture/deviation") < config.flat_deviation
        saturated = _numbers(rows, "picture/saturated_share") > config.saturated_share
        shares.append(float((flat | saturated).mean()))
    limit = shares[0] + config.max_degenerate_rise
    return GateRule(
        name="not_degenerate",
        passed=shares[1] <= limit,
        measured=shares[1],
        threshold=limit,
        detail=f"flat or saturated pictures, {percent(shares[0])} to {percent(shares[1])}",
    )


def _ordinary(name: str, first: list[ScoreRow], second: list[ScoreRow], config: GateConfig) -> GateRule:
    low, high = np.quantile(_numbers(first, f"picture/{name}"), RANGE, method="inverted_cdf")
    values = _numbers(second, f"picture/{name}")
    outside = float(((values < low) | (values > high)).mean())
    return GateRule(
        name=f"ordinary/{name}",
        passed=outside <= config.max_unusual_share,
        measured=outside,
        threshold=config.max_unusual_share,
        detail=f"pictures outside {low:.3f} to {high:.3f}, where 98 % of those before lie",
    )


def _moved(was: np.ndarray, now: np.ndarray, change: Estimate) -> str:
    error = "unknown" if change.standard_error is None else f"{100 * change.standard_error:.1f} points"
    return f"{percent(was.mean())} to {percent(now.mean())} of {change.n} images, standard error of the change {error}"
