"""What a frozen text model makes of prompts, computed once: kept in memory and, of a large model, in a store."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from tokenizers import Tokenizer
from torch import Tensor, nn

from mar_grpo.store import Store, canonical_json

MEMORY_BYTES = 2**28
LARGE = 20_000_000
"""Parameters from which on reading features is faster than making them (`tests/benchmarks/features.py`)."""


class FeatureCache:
    """Features by prompt, at most MEMORY_BYTES of them (the longest unused go first), forgotten when the model changes.

    Args:
        model, tokenizer: what makes the features.
        settings: JSON values that say how.
    """

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, *settings: Any) -> None:
        self._maker = (model, tokenizer, settings)
        self._features: OrderedDict[str | None, Tensor] = OrderedDict()
        self._version: Hashable = None
        self._place: tuple[Store, str] | None = None
        self._folder = ""

    def keep(self, store: Store, prefix: str, *, at_least: int = LARGE) -> None:
        """Also read and write `prefix/MODEL/PROMPT` in a store, if the model has `at_least` so many parameters.

        Both names are digests: of weights, configuration and tokenizer, and of the prompt. A damaged entry is replaced.
        """
        if sum(parameter.numel() for parameter in self._maker[0].parameters()) >= at_least:
            self._place, self._folder = (store, prefix), ""

    def find(self, prompts: Sequence[str | None], make: Callable[[Any], Tensor]) -> list[Tensor]:
        """Features of each prompt, made one by one where unknown: to the last bit they depend on no other prompt."""
        version = _version(self._maker[0])
        if version != self._version:
            self._features.clear()
            self._version, self._folder = version, ""
        found = []
        for prompt in prompts:
            if prompt not in self._features:
                self._features[prompt] = self._kept(prompt, make) if self._place else make(prompt)
            self._features.move_to_end(prompt)
            found.append(self._features[prompt])
        used = sum(features.nbytes for features in self._features.values())
        while used > MEMORY_BYTES and len(self._features) > 1:
            used -= self._features.popitem(last=False)[1].nbytes
        return found

    def _kept(self, prompt: str | None, make: Callable[[Any], Tensor]) -> Tensor:
        assert self._place is not None
        store, prefix = self._place
        self._folder = self._folder or _digest(*self._maker)[:32]
        key = f"{prefix}/{self._folder}/{hashlib.sha256(canonical_json(prompt)).hexdigest()[:32]}"
        if store.exists(key) and (features := _unpack(store.read_bytes(key))) is not None:
            return features.to(next(self._maker[0].parameters()).device)
        features = make(prompt)
        store.write_bytes(key, _pack(features))
        return features


def _version(model: nn.Module) -> Hashable:
    """Changes when a parameter is written, moved or cast."""
    parameters = list(model.parameters())
    return parameters[0].device, parameters[0].dtype, sum(parameter._version for parameter in parameters)


def _digest(model: Any, tokenizer: Tokenizer, settings: Sequence[Any]) -> str:
    found = hashlib.sha256(canonical_json([model.config.to_dict(), *settings]))
    found.update(tokenizer.to_str().encode())
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _pack(features: Tensor) -> bytes:
    data = save({"features": features.cpu().contiguous()})
    return hashlib.sha256(data).digest() + data


def _unpack(entry: bytes) -> Tensor | None:
    """None: the entry is damaged."""
    digest, data = entry[:32], entry[32:]
    if hashlib.sha256(data).digest() != digest:
        return None
    try:
        return load(data)["features"]
    except (SafetensorError, KeyError):
        return None
