"""Means with honest standard errors.

Images of one prompt are not independent, so every standard error here is clustered by prompt: the linearised variance
of a mean over clusters (Cameron & Miller, "A practitioner's guide to cluster-robust inference", 2015, section II, with
the G / (G - 1) correction). Sums run in a fixed order, so that shuffling the rows changes no bit of a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mar_grpo.errors import InputError


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` values, and its standard error; None where one cluster leaves it unknown."""

    n: int
    mean: float
    standard_error: float | None

    def above(self, limit: float, errors: float) -> bool:
        """True if the mean exceeds `limit` by more than `errors` standard errors; an unknown error counts as never."""
        return self.standard_error is not None and self.mean - limit > errors * self.standard_error

    def below(self, limit: float, errors: float) -> bool:
        """True if the mean is under `limit` by more than `errors` standard errors; an unknown error counts as zero."""
        return limit - self.mean > errors * (self.standard_error or 0.0)


def _values(values: ArrayLike, name: str) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not array.size:
        raise InputError(f"need a non-empty list of numbers, got shape {array.shape}", where=name)
    if not np.isfinite(array).all():
        raise InputError("a value is not finite", where=f"{name}[{int(np.flatnonzero(~np.isfinite(array))[0])}]")
    return array


def clustered_mean(values: ArrayLike, clusters: Sequence[str]) -> Estimate:
    """Mean of `values` [n] and its standard error when values of one cluster (prompt) hang together.

    mean = sum y / n,  SE^2 = G / (G - 1) * sum_g (sum_{i in g} (y_i - mean))^2 / n^2  over G clusters.

    Raises:
        InputError: no values, a value that is not finite, or another number of clusters than of values.
    """
    y = _values(values, "values")
    if len(clusters) != y.size:
        raise InputError(f"{y.size} values but {len(clusters)} cluster names", where="clusters")
    names, group = np.unique(np.asarray(clusters, dtype=str), return_inverse=True)
    order = np.lexsort((y, group))
    y, group = y[order], group[order]
    mean = float(y.sum() / y.size)
    residual = np.bincount(group, weights=y - mean, minlength=names.size)
    if names.size == 1:
        return Estimate(y.size, mean, None)
    variance = names.size / (names.size - 1) * float(np.square(residual).sum()) / y.size**2
    return Estimate(y.size, mean, variance**0.5)


def paired_difference(before: ArrayLike, after: ArrayLike, clusters: Sequence[str]) -> Estimate:
    """Mean of after - before over pairs [n] (same prompt, same noise), with its clustered standard error."""
    first, second = _values(before, "before"), _values(after, "after")
    if first.size != second.size:
        raise InputError(f"{first.size} values before but {second.size} after", where="after")
    return clustered_mean(second - first, clusters)


def paired_ratio(before: ArrayLike, after: ArrayLike) -> Estimate | None:
    """Ratio of means, mean(after) / mean(before), over independent pairs [n]; None where mean(before) is zero.

    Delta method: with R the ratio and e_i = after_i - R before_i, SE = sqrt(sum e_i^2 / (n (n - 1))) / mean(before)
    (Cochran, "Sampling techniques", 3rd ed., equation 6.13).
    """
    first, second = _values(before, "before"), _values(after, "after")
    if first.size != second.size:
        raise InputError(f"{first.size} values before but {second.size} after", where="after")
    order = np.lexsort((second, first))
    first, second = first[order], second[order]
    base = float(first.mean())
    if base == 0:
        return None
    ratio, n = float(second.mean()) / base, first.size
    if n == 1:
        return Estimate(n, ratio, None)
    residual = float(np.square(second - ratio * first).sum())
    return Estimate(n, ratio, (residual / (n * (n - 1))) ** 0.5 / abs(base))
