"""Building modules without the global random generator and without allocating weights that are about to be replaced."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def on_meta(factory: Callable[[], Module]) -> Module:
    """What `factory` builds, on the meta device: shapes without memory, and no random number drawn."""
    with torch.device("meta"):
        return factory()


@torch.no_grad()
def initialise(module: Module, generator: torch.Generator) -> Module:
    """Give a module memory (CPU, float32) and PyTorch's default distributions, drawn from `generator` alone.

    Linear and convolution: uniform within 1 / sqrt(fan in), weight and bias. Embedding: N(0, 1). Norms: one and zero.

    Raises:
        TypeError: a layer with parameters is none of these; its owner must fill it.
    """
    module.to_empty(device="cpu")
    for name, layer in module.named_modules():
        own = dict(layer.named_parameters(recurse=False))
        if isinstance(layer, nn.Linear | nn.Conv2d):
            bound = 1 / math.sqrt(layer.weight[0].numel())
            for parameter in own.values():
                parameter.uniform_(-bound, bound, generator=generator)
        elif isinstance(layer, nn.Embedding):
            layer.weight.normal_(generator=generator)
        elif isinstance(layer, nn.LayerNorm | nn.GroupNorm) or type(layer).__name__.endswith("RMSNorm"):
            for key, parameter in own.items():
                parameter.fill_(1.0 if key == "weight" else 0.0)
        elif own:
            raise TypeError(f"no rule to initialise {name} ({type(layer).__name__})")
    return module
