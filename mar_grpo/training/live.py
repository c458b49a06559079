"""How many bytes of tensors live, now and at the peak: of real ones, and of those on the meta device alike."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """Bytes of the storages that operations made inside and that are still alive: now, and at the peak.

    What an operation reads and nobody has seen is from before (weights) and does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in(args):
            self._seen.add(tensor.untyped_storage())
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in((out,)):
            self.hold(tensor)
        return out

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor's storage (once)."""
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, size).atexit = False

    def _drop(self, size: int) -> None:
        self.now -= size


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those among values and lists of values."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
