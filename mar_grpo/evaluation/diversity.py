"""What pictures are like apart from being right: how they differ within a prompt, and whether they are degenerate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mar_grpo.errors import InputError

GRID = 16
"""Side of the grid of area averages that stands for a picture."""
FOREGROUND_DISTANCE = 24
"""A pixel is foreground where any channel differs by more than this (0..255) from the median colour of the border."""


def _area_weights(size: int, cells: int) -> NDArray[np.float32]:
    """[cells, size]; row i holds the share of each of `size` pixels in the i-th of `cells` equal intervals."""
    edges = np.linspace(0, size, cells + 1)[:, None]
    pixels = np.arange(size)[None, :]
    overlap = np.minimum(edges[1:], pixels + 1) - np.maximum(edges[:-1], pixels)
    return (np.clip(overlap, 0, None) * cells / size).astype(np.float32)


def _checked(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3:
        raise InputError(f"need uint8 images [B, H, W, 3], got {images.dtype} {list(images.shape)}", where="images")
    return images


def picture_features(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8 [B, H, W, 3] -> float32 [B, 768]: area averages on a 16 x 16 grid, RGB in [0, 1]."""
    _, height, width, _ = _checked(images).shape
    rows, columns = _area_weights(height, GRID), _area_weights(width, GRID)
    cells = np.einsum("yh,bhwc,xw->byxc", rows, images.astype(np.float32) / 255, columns, optimize=True)
    return cells.reshape(len(images), -1)


def distance_to_group(images: NDArray[np.uint8], groups: Sequence[str]) -> NDArray[np.float64]:
    """Mean distance of each picture to the other pictures of its prompt, [B]; NaN for a picture that is alone.

    d(a, b) = ||f(a) - f(b)||_2 / sqrt(768), f = `picture_features`: the root mean square difference of RGB in [0, 1],
    0 for equal pictures, 1 for black against white. The mean of these numbers over the m pictures of a prompt is its
    diversity, the mean pairwise distance 2 / (m (m - 1)) sum_{i < j} d(i, j).
    """
    features = picture_features(images).astype(np.float64)
    if len(groups) != len(features):
        raise InputError(f"{len(features)} images but {len(groups)} group names", where="groups")
    result = np.full(len(features), np.nan)
    names = np.asarray(groups, dtype=str)
    for name in np.unique(names):
        rows = np.flatnonzero(names == name)
        if rows.size > 1:
            pairs = features[rows, None, :] - features[None, rows, :]
            result[rows] = np.sqrt(np.square(pairs).mean(-1)).sum(1) / (rows.size - 1)
    return result


def picture_statistics(images: NDArray[np.uint8]) -> dict[str, NDArray[np.float64]]:
    """Numbers that tell a picture from a degenerate one, each [B].

    deviation: standard deviation of grey values in [0, 1]; 0 for a flat canvas.
    saturated_share: share of RGB values that are exactly 0 or 255.
    foreground_share: share of pixels that differ from the median border colour by more than 24 of 255 in a channel.
    roughness: mean absolute difference of neighbouring RGB values in [0, 1]; high for noise and adversarial texture.
    """
    pixels = _checked(images).astype(np.float32)
    border = np.concatenate([pixels[:, 0], pixels[:, -1], pixels[:, :, 0], pixels[:, :, -1]], axis=1)
    background = np.median(border, axis=1)[:, None, None, :]
    flat = len(pixels), -1
    down, right = np.abs(np.diff(pixels, axis=1)).reshape(flat), np.abs(np.diff(pixels, axis=2)).reshape(flat)
    return {
        "deviation": pixels.mean(-1).reshape(flat).std(1, dtype=np.float64) / 255,
        "saturated_share": ((images == 0) | (images == 255)).reshape(flat).mean(1),
        "foreground_share": (np.abs(pixels - background).max(-1) > FOREGROUND_DISTANCE).reshape(flat).mean(1),
        "roughness": (down.mean(1, dtype=np.float64) + right.mean(1, dtype=np.float64)) / 510,
    }
