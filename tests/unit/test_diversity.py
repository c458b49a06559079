"""Distances within a prompt and the numbers that tell pictures from degenerate ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mar_grpo.data import scenes
from mar_grpo.errors import InputError
from mar_grpo.evaluation.diversity import distance_to_group, picture_features, picture_statistics


def noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("size", [64, 16])
def test_features_are_block_means(size: int) -> None:
    images = noise(0, 3, size, size, 3)
    block = size // 16
    expected = images.reshape(3, 16, block, 16, block, 3).mean((2, 4)) / 255
    np.testing.assert_allclose(picture_features(images), expected.reshape(3, -1), atol=1e-6)


def test_features_of_an_uneven_size_keep_the_mean() -> None:
    """Areas, not samples: every pixel of a 50 x 37 picture counts once."""
    images = noise(1, 2, 50, 37, 3)
    cells = picture_features(images).reshape(2, 256, 3)
    np.testing.assert_allclose(cells.mean(1), images.reshape(2, -1, 3).mean(1) / 255, atol=1e-5)


def test_black_against_white_is_one_and_equal_pictures_are_zero() -> None:
    black, white = np.zeros((64, 64, 3), np.uint8), np.full((64, 64, 3), 255, np.uint8)
    distances = distance_to_group(np.stack([black, white, white, white]), ["a", "a", "b", "b"])
    np.testing.assert_allclose(distances, [1, 1, 0, 0], atol=1e-6)


def test_mean_over_a_group_is_the_mean_pairwise_distance() -> None:
    images = noise(2, 5, 32, 32, 3)
    groups = ["x", "y", "x", "x", "alone"]
    distances = distance_to_group(images, groups)
    features = picture_features(images)
    pairs = [np.linalg.norm(features[i] - features[j]) / np.sqrt(768) for i, j in itertools.combinations([0, 2, 3], 2)]
    assert distances[[0, 2, 3]].mean() == pytest.approx(np.mean(pairs))
    assert np.isnan(distances[[1, 4]]).all()


def test_degenerate_pictures_stand_out_from_scenes() -> None:
    rng = np.random.default_rng(3)
    records = scenes.compositions("held_out")
    picked = [records[i] for i in rng.choice(len(records), 60, replace=False)]
    real = picture_statistics(np.stack([scenes.render(scenes.scene_for(record, rng)) for record in picked]))
    flat = picture_statistics(np.full((1, 64, 64, 3), 200, np.uint8))
    wild = picture_statistics(noise(4, 1, 64, 64, 3))
    burnt = picture_statistics((noise(5, 1, 64, 64, 3) > 127).astype(np.uint8) * 255)
    assert flat["deviation"] == 0
    assert real["deviation"].min() > 0.03
    assert flat["foreground_share"] == 0
    assert 0.03 < real["foreground_share"].min() < real["foreground_share"].max() < 0.8
    assert real["roughness"].max() < 0.5 * wild["roughness"][0]
    assert burnt["saturated_share"] == 1
    assert real["saturated_share"].max() < 0.5


def test_foreground_of_a_square() -> None:
    image = np.full((1, 64, 64, 3), 100, np.uint8)
    image[0, 16:32, 16:48] = (100, 160, 100)
    assert picture_statistics(image)["foreground_share"][0] == 16 * 32 / 64**2


@pytest.mark.parametrize("images", [np.zeros((2, 8, 8, 3)), np.zeros((2, 3, 8, 8), np.uint8)])
def test_only_uint8_rgb_is_taken(images: np.ndarray) -> None:
    with pytest.raises(InputError, match="uint8 images"):
        picture_features(images)
