"""Which rewards a recipe may train on, and what a scorer of the user's gets and must give."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from mar_grpo.data import scenes
from mar_grpo.errors import InputError, MarGrpoError
from mar_grpo.rewards.heatmap import HeatmapJudge
from mar_grpo.rewards.mix import REWARDS, RewardConfig, RewardMix, reward_device

RECORD = {"tag": "single_object", "include": [{"class": "cat", "count": 1}], "prompt": "a photo of a cat"}
PICTURES = scenes.render_batch([((0, 0),), ((1, 0),)])


@pytest.fixture
def user_module() -> Iterator[types.ModuleType]:
    module = types.ModuleType("my_scorers")
    sys.modules["my_scorers"] = module
    yield module
    del sys.modules["my_scorers"]


def test_every_reward_of_the_package_is_computed_from_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    look = HeatmapJudge.scores

    def counted(self: HeatmapJudge, images: np.ndarray, records: list) -> dict[str, np.ndarray]:
        looks.append(len(images))
        return look(self, images, records)

    monkeypatch.setattr(HeatmapJudge, "scores", counted)
    scores = RewardMix(RewardConfig(components=dict.fromkeys(REWARDS, 1.0))).compute(PICTURES, [RECORD, RECORD])
    assert list(scores) == list(REWARDS) and looks == [2]
    for values in scores.values():
        assert values.shape == (2,) and values.dtype == np.float32
        assert values[0] > 0.8 > 0.2 > values[1]


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ({}, "at least one reward component"),
        ({"templates": 1.0}, "held-out judge"),
        ({"templates/strict": 1.0}, "held-out judge"),
        ({"heatmap/strict": 1.0, "templates/graded": 0.1}, "held-out judge"),
        ({"heatmap": 1.0}, "unknown reward 'heatmap'"),
        ({"heatmap/graded": 0.0}, "weight of 'heatmap/graded'"),
        ({"heatmap/graded": float("nan")}, "weight of 'heatmap/graded'"),
    ],
)
def test_components_that_cannot_be_trained_on_are_refused(components: dict[str, float], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RewardConfig(components=components)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValidationError, match="weights"):
        RewardConfig.model_validate({"weights": {}})
    assert set(RewardConfig.model_fields) == {"components", "device"}


def test_a_scorer_of_the_user_gets_pictures_and_records(user_module: types.ModuleType) -> None:
    def redness(images: np.ndarray, records: list) -> list[float]:
        assert images.dtype == np.uint8 and images.shape == (2, 64, 64, 3) and records[0]["prompt"] == RECORD["prompt"]
        return [float(image[..., 0].mean()) for image in images]

    user_module.redness = redness  # type: ignore[attr-defined]
    mix = RewardMix(RewardConfig(components={"my_scorers:redness": 0.5, "heatmap/strict": 1.0}))
    scores = mix.compute(torch.from_numpy(PICTURES), [RECORD, RECORD])
    assert list(scores) == ["my_scorers:redness", "heatmap/strict"]
    np.testing.assert_allclose(scores["my_scorers:redness"], PICTURES[..., 0].mean(axis=(1, 2)), rtol=1e-6)


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        ([1.0], InputError, r"'my_scorers:score' returned shape \(1,\)"),
        (RuntimeError("no weights"), MarGrpoError, "'my_scorers:score' failed: RuntimeError: no weights"),
        (["one", "two"], MarGrpoError, "'my_scorers:score' failed: ValueError"),
    ],
)
def test_a_bad_scorer_is_named(
    user_module: types.ModuleType, returned: object, error: type[Exception], message: str
) -> None:
    def score(images: np.ndarray, records: list) -> object:
        if isinstance(returned, Exception):
            raise returned
        return returned

    user_module.score = score  # type: ignore[attr-defined]
    mix = RewardMix(RewardConfig(components={"my_scorers:score": 1.0}))
    with pytest.raises(error, match=message):
        mix.compute(PICTURES, [RECORD, RECORD])


@pytest.mark.parametrize("name", ["no_such_module:score", "math:no_such_function", ":score"])
def test_a_scorer_that_cannot_be_imported_is_named(name: str) -> None:
    with pytest.raises(InputError, match=f"'{name}' cannot be imported"):
        RewardMix(RewardConfig(components={name: 1.0}))


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match=r"no device cuda:99: this machine has \d+ GPUs \(rewards.device\)"):
        reward_device(RewardConfig(device="cuda:99"), torch.device("cpu"))
    assert reward_device(RewardConfig(device="auto"), torch.device("cpu")) == torch.device("cpu")
