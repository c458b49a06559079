"""Noise of a gradient: known cosines are found, fresh trajectories average out as 1/S, batches are what updates see."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mar_grpo.algorithms.config import AlgorithmConfig
from mar_grpo.config import Recipe
from mar_grpo.data.prompts import PromptRecord, validated
from mar_grpo.training.gradients import (
    Probe,
    distance,
    images_for_half,
    mean_cosine,
    some_trajectories,
    variance,
)
from tests.unit import toy, toy_run

RECORDS: list[PromptRecord] = [
    validated({"prompt": prompt, "tag": "toy", "include": []}, where="toy") for prompt in toy_run.PROMPTS
]
WIDE = ("algorithm.scope=unknown", "algorithm.kl.kind=off")


def probe(*overrides: str) -> Probe:
    return Probe(toy_run.recipe(*WIDE, *overrides), toy.policy(), RECORDS)


def whole(gradient: dict[str, Tensor]) -> Tensor:
    return torch.cat(list(gradient.values()))


def test_the_cosine_is_that_of_signal_and_noise_and_its_error_is_its_spread() -> None:
    signal, noise, size = 1.0, 2.0, 4000
    found = []
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        rows = torch.full((8, size), signal / size**0.5) + torch.randn(8, size, generator=draw) * noise / size**0.5
        found.append(mean_cosine(rows))
    cosines, errors = torch.tensor(found).T
    expected = signal**2 / (signal**2 + noise**2)
    assert cosines.mean().item() == pytest.approx(expected, abs=3 * cosines.std().item() / 40**0.5 + 0.005)
    assert errors.mean().item() == pytest.approx(cosines.std().item(), rel=0.5)


def test_images_for_a_cosine_of_half() -> None:
    """Twice the noise of 100 images' signal: 200 of them; and only a bound where the cosine may be 0."""
    needed, bound = images_for_half(1 / 3, 0.01, 100)
    assert needed == pytest.approx(200)
    assert bound is None
    assert images_for_half(0.01, 0.02, 100) == (None, pytest.approx(100 * 0.95 / 0.05))
    assert images_for_half(-0.5, 0.1, 100) == (None, None)


def test_variance_is_summed_over_parameters() -> None:
    assert variance(torch.tensor([[0.0, 1.0], [2.0, 1.0], [4.0, 4.0]])) == pytest.approx(4.0 + 3.0)


@pytest.mark.parametrize(
    ("trained", "parts"),
    [("trunk", {"condition", "trunk"}), ("both", {"condition", "trunk", "head"}), ("head", {"head"})],
)
def test_a_gradient_is_told_part_by_part_and_the_same_again(trained: str, parts: set[str]) -> None:
    one = probe(f"algorithm.trained={trained}")
    gradient = one.gradient(one.draw(0, 6))
    assert set(gradient) == parts
    assert all(values.any() for values in gradient.values())
    again = probe(f"algorithm.trained={trained}", "training.micro_batch=3")
    for part, values in again.gradient(again.draw(0, 6)).items():
        assert torch.allclose(values, gradient[part], atol=1e-6 * float(gradient[part].abs().max()))
    other = one.gradient(one.draw(1, 6))
    assert not any(torch.equal(other[part], gradient[part]) for part in parts)


def changed(recipe: Recipe, **changes: Any) -> AlgorithmConfig:
    trajectories = recipe.algorithm.trajectories.model_copy(update=changes)
    return recipe.algorithm.model_copy(update={"trajectories": trajectories})


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_variance_of_fresh_trajectories_falls_as_one_over_s(share: float) -> None:
    """The rollouts and the uncertain tokens stay, so that what is left is the noise of the average."""
    one = probe("algorithm.trajectories.count=64", f"algorithm.trajectories.share={share}")
    drawn = one.draw(0, 6)
    found = {}
    for count in (1, 4, 16):
        algorithm = changed(one.recipe, count=count, include_rollout=False)
        starts = range(0, 64, count)
        rows = [whole(one.gradient(some_trajectories(drawn, slice(i, i + count)), algorithm)) for i in starts]
        found[count] = variance(torch.stack(rows)) * count
    assert found[4] == pytest.approx(found[1], rel=0.4)
    assert found[16] == pytest.approx(found[1], rel=0.6)


def test_all_of_the_trajectories_are_the_batch_itself() -> None:
    one = probe("algorithm.trajectories.count=3")
    drawn = one.draw(0, 6)
    assert torch.equal(whole(one.gradient(some_trajectories(drawn, slice(3)))), whole(one.gradient(drawn)))


def test_the_distance_to_itself_is_zero_and_grows_with_the_head_or_the_trunk() -> None:
    recipe = toy_run.recipe("training.micro_batch=4")
    start = toy.policy()
    assert distance(recipe, toy.policy(), start, RECORDS) == 0.0
    for parameters in ("trunk_parameters", "head_parameters"):
        found = []
        for size in (0.01, 0.02):
            moved, draw = toy.policy(), torch.Generator().manual_seed(0)
            with torch.no_grad():
                for parameter in getattr(moved, parameters)():
                    parameter += size * torch.randn(parameter.shape, generator=draw)
            found.append(distance(recipe, moved, start, RECORDS))
        assert 0 < found[0] < found[1]
        assert math.isfinite(found[1])
