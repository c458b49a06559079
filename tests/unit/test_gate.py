"""What the gate promotes, what it refuses, and that it sees through the ways a table can be made to look good."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mar_grpo.documents import GateDecision, ScoreRow
from mar_grpo.errors import InputError
from mar_grpo.evaluation.gate import GateConfig, decide

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
CANDIDATE, INCUMBENT = "c" * 64, "b" * 64
FIXED = np.random.default_rng(99).random((2000, 4))


def table(right: Any, **pictures: Any) -> list[ScoreRow]:
    """Rows of `right` [prompts, samples]; tags in turn; ordinary pictures unless one of their numbers is given."""
    verdicts = np.asarray(right, dtype=float)
    rows = []
    for prompt, sample in np.ndindex(verdicts.shape):
        noise = FIXED[prompt * verdicts.shape[1] + sample].tolist()
        numbers: dict[str, float] = {
            "picture/diversity": 0.1 + 0.05 * noise[0],
            "picture/deviation": 0.1 + 0.1 * noise[1],
            "picture/saturated_share": 0.05,
            "picture/foreground_share": 0.1 + 0.3 * noise[2],
            "picture/roughness": 0.02 + 0.02 * noise[3],
        }
        numbers |= {f"picture/{name}": float(np.asarray(value).flat[0]) for name, value in pictures.items()}
        rows.append(
            ScoreRow(
                prompt_id=f"p{prompt:04d}",
                prompt=f"prompt {prompt}",
                tag=TAGS[prompt % len(TAGS)],
                sample=sample,
                seed=1000 * prompt + sample,
                image_sha256="0" * 64,
                scores={"templates/strict": float(verdicts[prompt, sample]), "heatmap/graded": 1.0, **numbers},
            )
        )
    return rows


def gate(before: list[ScoreRow], after: list[ScoreRow], **config: Any) -> GateDecision:
    return decide(before, after, GateConfig(**config), candidate=CANDIDATE, incumbent=INCUMBENT)


def failed(decision: GateDecision) -> set[str]:
    return {rule.name for rule in decision.rules if not rule.passed}


def verdicts(rate: float, seed: int = 0, prompts: int = 300) -> np.ndarray:
    return np.random.default_rng(seed).random((prompts, 2)) < rate


BASE = verdicts(0.45)
BETTER = BASE | verdicts(0.2, seed=1)


def with_pictures(rows: list[ScoreRow], share: float, **pictures: float) -> list[ScoreRow]:
    """The first `share` of the rows with other numbers of their pictures."""
    changed = {f"picture/{name}": value for name, value in pictures.items()}
    count = round(share * len(rows))
    return [row.model_copy(update={"scores": row.scores | changed}) for row in rows[:count]] + rows[count:]


def test_a_clear_gain_is_promoted_with_its_numbers() -> None:
    decision = gate(table(BASE), table(BETTER))
    assert failed(decision) == set()
    assert decision.promote
    assert (decision.candidate, decision.incumbent) == (CANDIDATE, INCUMBENT)
    rose = next(rule for rule in decision.rules if rule.name == "accuracy_rose")
    change = BETTER.mean(1) - BASE.mean(1)
    assert rose.measured == pytest.approx(change.mean())
    assert rose.threshold == pytest.approx(2 * change.std(ddof=1) / np.sqrt(300))
    assert [rule.name for rule in decision.rules if rule.name.startswith("tag_held")] == [
        f"tag_held/{tag}" for tag in TAGS
    ]
    assert gate(table(BASE), table(BETTER)).digest == decision.digest


@given(st.integers(2, 40).flatmap(lambda n: st.lists(st.tuples(st.booleans(), st.booleans()), min_size=n, max_size=n)))
@settings(max_examples=40)
def test_a_table_is_never_promoted_over_itself(right: list[tuple[bool, bool]]) -> None:
    rows = table(right)
    decision = gate(rows, rows, min_prompts=2)
    assert failed(decision) == {"accuracy_rose"}
    assert not decision.promote


@given(st.integers(0, 10**6))
@settings(max_examples=25)
def test_the_order_of_rows_changes_no_bit(seed: int) -> None:
    before, after = table(BASE[:120]), table(BETTER[:120])
    rng = np.random.default_rng(seed)
    shuffled = [[rows[i] for i in rng.permutation(len(rows))] for rows in (before, after)]
    assert gate(*shuffled).digest == gate(before, after).digest


@given(st.sampled_from(range(len(TAGS))), st.integers(6, 25))
@settings(max_examples=25)
def test_a_tag_that_falls_blocks_whatever_the_others_gain(tag: int, lost: int) -> None:
    after = np.ones_like(BASE)
    after[tag :: len(TAGS)] = BASE[tag :: len(TAGS)]
    places = [index for index in range(tag, 300, len(TAGS)) if BASE[index].any()][:lost]
    after[places] = False
    decision = gate(table(BASE), table(after))
    assert failed(decision) == {f"tag_held/{TAGS[tag]}"}
    assert not decision.promote


def test_a_tag_of_one_prompt_may_not_fall_at_all() -> None:
    """No standard error is known for it, and that is no excuse."""
    before, after = table(BASE), table(BETTER)
    extra = before[0].model_copy(
        update={"prompt_id": "q", "tag": "rare", "scores": before[0].scores | {"templates/strict": 1.0}}
    )
    fallen = extra.model_copy(update={"scores": extra.scores | {"templates/strict": 0.0}})
    assert gate([*before, extra], [*after, extra]).promote
    assert failed(gate([*before, extra], [*after, fallen])) == {"tag_held/rare"}


def test_a_gain_within_its_error_is_not_enough() -> None:
    after = BASE.copy()
    rows = np.flatnonzero(~BASE[:, 0])[:9], np.flatnonzero(BASE[:, 0])[:5]
    after[rows[0], 0], after[rows[1], 0] = True, False
    assert failed(gate(table(BASE), table(after))) == {"accuracy_rose"}


def test_chance_is_rarely_promoted() -> None:
    """Two independent tables of the same accuracy: above two standard errors 2.3 times in a hundred."""
    rose = 0
    for seed in range(200):
        before, after = (
            table(verdicts(0.45, seed=2 * seed, prompts=60)),
            table(verdicts(0.45, seed=2 * seed + 1, prompts=60)),
        )
        rose += "accuracy_rose" not in failed(gate(before, after))
    assert rose <= 12


def test_copies_of_each_image_are_no_further_evidence() -> None:
    after = BASE[:, :1] | verdicts(0.03, seed=3)[:, :1]
    single, copied = gate(table(BASE[:, :1]), table(after)), gate(table(BASE[:, [0] * 4]), table(after[:, [0] * 4]))
    rule = [next(r for r in d.rules if r.name == "accuracy_rose") for d in (single, copied)]
    assert rule[0].threshold == pytest.approx(rule[1].threshold)


def test_too_few_prompts_are_no_evidence() -> None:
    before, after = table(BASE[:99]), table(np.ones_like(BASE[:99]))
    assert failed(gate(before, after)) == {"enough_prompts"}
    assert gate(before, after, min_prompts=99).promote


def test_the_training_judge_has_no_say() -> None:
    before = table(BASE)
    hacked = [row.model_copy(update={"scores": row.scores | {"heatmap/graded": 100.0}}) for row in before]
    assert not gate(before, hacked).promote
    assert gate(before, hacked).digest == gate(before, before).digest


@pytest.mark.parametrize(("factor", "promote"), [(0.85, False), (0.91, True), (1.4, True)])
def test_diversity_must_be_kept(factor: float, promote: bool) -> None:
    after = [
        row.model_copy(update={"scores": row.scores | {"picture/diversity": factor * row.scores["picture/diversity"]}})
        for row in table(BETTER)
    ]
    decision = gate(table(BASE), after)
    assert decision.promote is promote
    assert failed(decision) == (set() if promote else {"diversity_kept"})
    assert next(r for r in decision.rules if r.name == "diversity_kept").measured == pytest.approx(factor)


def test_diversity_that_was_not_measured_is_not_kept() -> None:
    rows = [
        [
            row.model_copy(update={"scores": {k: v for k, v in row.scores.items() if k != "picture/diversity"}})
            for row in side
        ]
        for side in (table(BASE[:, :1]), table(np.ones_like(BASE[:, :1])))
    ]
    decision = gate(*rows)
    assert failed(decision) == {"diversity_kept"}


@pytest.mark.parametrize(
    ("share", "pictures", "rules"),
    [
        (0.01, {"deviation": 0.0}, set()),
        (0.05, {"deviation": 0.0}, {"not_degenerate"}),
        (0.05, {"saturated_share": 0.9}, {"not_degenerate"}),
        (0.2, {"foreground_share": 0.9}, {"ordinary/foreground_share"}),
        (0.2, {"foreground_share": 0.0}, {"ordinary/foreground_share"}),
        (0.2, {"roughness": 0.5}, {"ordinary/roughness"}),
    ],
)
def test_degenerate_pictures_block(share: float, pictures: dict[str, float], rules: set[str]) -> None:
    assert failed(gate(table(BASE), with_pictures(table(BETTER), share, **pictures))) == rules


def test_blank_pictures_that_were_there_before_do_not_block() -> None:
    before = with_pictures(table(BASE), 0.3, deviation=0.0)
    after = with_pictures(table(BETTER), 0.2, deviation=0.0)
    assert gate(before, after).promote


def drop(rows: list[ScoreRow]) -> list[ScoreRow]:
    return rows[:-1]


def repeat(rows: list[ScoreRow]) -> list[ScoreRow]:
    return [*rows, rows[0]]


def other_noise(rows: list[ScoreRow]) -> list[ScoreRow]:
    return [rows[0].model_copy(update={"seed": 7}), *rows[1:]]


def no_score(rows: list[ScoreRow]) -> list[ScoreRow]:
    return [rows[0].model_copy(update={"scores": {}}), *rows[1:]]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop, "prompt p0299 sample 1 is in one table only"),
        (repeat, "holds an image twice"),
        (other_noise, "differs in prompt, tag or noise .prompt p0000 sample 0."),
        (no_score, "no score 'templates/strict' .prompt p0000 sample 0."),
        (lambda rows: [], "the score table is empty"),
    ],
)
@pytest.mark.parametrize("side", [0, 1])
def test_tables_that_do_not_fit_are_an_error_not_a_refusal(spoil: Any, message: str, side: int) -> None:
    tables = [table(BASE), table(BETTER)]
    tables[side] = spoil(tables[side])
    with pytest.raises(InputError, match=message):
        gate(*tables)


def test_unknown_and_toothless_settings_are_refused() -> None:
    for settings_ in ({"min_gain": 1}, {"standard_errors": 0.0}, {"min_prompts": 0}):
        with pytest.raises(ValidationError):
            GateConfig(**settings_)
