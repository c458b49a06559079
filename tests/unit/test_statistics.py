"""Standard errors: closed forms, coverage of a simulation, and what shuffling or bad input does."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mar_grpo.errors import InputError
from mar_grpo.evaluation.statistics import Estimate, clustered_mean, paired_difference, paired_ratio

TABLES = st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(-10, 10)), min_size=1, max_size=40)


def test_clusters_of_one_give_the_textbook_standard_error() -> None:
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    estimate = clustered_mean(values, list("abcde"))
    assert estimate.n == 5
    assert estimate.mean == pytest.approx(0.6)
    assert estimate.standard_error == pytest.approx(np.std(values, ddof=1) / math.sqrt(5))


def test_equal_clusters_give_the_standard_error_of_the_cluster_means() -> None:
    values = np.array([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    estimate = clustered_mean(values.ravel(), [name for name in "abcd" for _ in range(2)])
    assert estimate.standard_error == pytest.approx(values.mean(1).std(ddof=1) / 2)


def test_copies_of_an_image_add_no_information() -> None:
    once = clustered_mean([0.0, 1.0, 1.0], list("abc"))
    thrice = clustered_mean([0.0] * 3 + [1.0] * 6, list("aaabbbccc"))
    assert thrice.standard_error == pytest.approx(once.standard_error)


def test_two_standard_errors_hold_the_truth_95_times_in_100() -> None:
    """1,500 tables of 60 prompts x 1 to 4 images, verdicts correlated within a prompt."""
    rng = np.random.default_rng(0)
    inside = naive_inside = 0
    for _ in range(1500):
        sizes = rng.integers(1, 5, 60)
        chance = np.repeat(rng.beta(0.4, 0.4, 60), sizes)  # mean one half
        right = (rng.random(chance.size) < chance).astype(float)
        estimate = clustered_mean(right, [str(i) for i in np.repeat(np.arange(60), sizes)])
        assert estimate.standard_error is not None
        inside += abs(estimate.mean - 0.5) <= 1.96 * estimate.standard_error
        naive_inside += abs(estimate.mean - 0.5) <= 1.96 * right.std(ddof=1) / math.sqrt(right.size)
    assert 0.93 < inside / 1500 < 0.965
    assert naive_inside / 1500 < 0.90  # what forgetting the clusters would claim


def test_ratio_error_agrees_with_repetition() -> None:
    rng = np.random.default_rng(1)
    estimates = []
    for _ in range(2000):
        before = rng.gamma(4.0, 1.0, 80)
        estimates.append(paired_ratio(before, 0.9 * before + rng.normal(0, 0.5, 80)))
    ratios = np.array([e.mean for e in estimates if e])
    errors = np.array([e.standard_error for e in estimates if e and e.standard_error is not None])
    assert ratios.mean() == pytest.approx(0.9, abs=0.002)
    assert errors.mean() == pytest.approx(ratios.std(), rel=0.05)


def test_ratio_to_nothing_is_absent() -> None:
    assert paired_ratio([0.0, 0.0], [1.0, 2.0]) is None
    assert paired_ratio([2.0], [1.0]) == Estimate(1, 0.5, None)


@given(TABLES, st.randoms(use_true_random=False))
def test_shuffling_rows_changes_no_bit(table: list[tuple[str, float]], random: Random) -> None:
    shuffled = list(table)
    random.shuffle(shuffled)
    assert clustered_mean([v for _, v in table], [c for c, _ in table]) == clustered_mean(
        [v for _, v in shuffled], [c for c, _ in shuffled]
    )


@given(TABLES, st.floats(-3, 3), st.floats(0.1, 3))
@settings(max_examples=60)
def test_shift_and_scale(table: list[tuple[str, float]], shift: float, scale: float) -> None:
    clusters = [c for c, _ in table]
    values = np.array([v for _, v in table])
    first, second = clustered_mean(values, clusters), clustered_mean(scale * values + shift, clusters)
    assert second.mean == pytest.approx(scale * first.mean + shift, abs=1e-9)
    if first.standard_error is None:
        assert second.standard_error is None
    else:
        assert second.standard_error == pytest.approx(scale * first.standard_error, abs=1e-9)


@given(TABLES)
def test_a_table_does_not_differ_from_itself(table: list[tuple[str, float]]) -> None:
    values, clusters = [v for _, v in table], [c for c, _ in table]
    change = paired_difference(values, values, clusters)
    assert change.mean == 0
    assert not change.above(0, 2)
    assert not change.below(0, 2)


def test_an_unknown_error_is_no_proof_of_a_rise_and_no_excuse_for_a_fall() -> None:
    assert not Estimate(2, 1.0, None).above(0, 2)
    assert Estimate(2, -0.1, None).below(0, 2)


@pytest.mark.parametrize(
    ("values", "clusters", "message"),
    [
        ([], [], "non-empty"),
        ([1.0, math.nan], ["a", "b"], r"not finite \(values\[1\]\)"),
        ([1.0], ["a", "b"], "2 cluster"),
    ],
)
def test_bad_input_is_named(values: list[float], clusters: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        clustered_mean(values, clusters)


def test_pairs_must_match() -> None:
    with pytest.raises(InputError, match="2 values before but 1 after"):
        paired_difference([1.0, 2.0], [1.0], ["a", "b"])
    with pytest.raises(InputError, match="1 values before but 2 after"):
        paired_ratio([1.0], [1.0, 2.0])
