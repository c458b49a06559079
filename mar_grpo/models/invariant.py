"""Arithmetic in which an image does not notice what else is in its batch, to the last bit, on a CPU.

A matrix product of few rows runs in other kernels than one of many, and the elements that are left over at the end of a
tensor are not rounded as those in a full vector register. Both depend on how many images there are, change a result in
its last bit, and so change pixels. Everything else that our models are made of does not care (`tests/unit/
test_sampling.py` asks it of every family).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

FEW_ROWS = 64  # MKL changes kernels somewhere below 16


class BatchInvariant(TorchFunctionMode):
    """Context manager: inside, these functions of torch give a row the same result whatever rows are beside it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _OURS.get(func, func)(*args, **(kwargs or {}))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
    few = max(0, FEW_ROWS - len(rows))
    product = F.linear(F.pad(rows, (0, 0, 0, few)) if few else rows, weight, bias)
    return product[: len(rows)].view(*x.shape[:-1], len(weight))


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _silu(x: Tensor, inplace: bool = False) -> Tensor:
    return x / (1 + torch.exp(-x))


def _rsqrt(x: Tensor) -> Tensor:
    return 1 / torch.sqrt(x)


_OURS: Mapping[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.silu: _silu,
    torch.sigmoid: _sigmoid,
    Tensor.sigmoid: _sigmoid,
    torch.rsqrt: _rsqrt,
    Tensor.rsqrt: _rsqrt,
}
