"""Building modules without the global random generator and without allocating weights that are about to be replaced."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from torch import nn

from mar_grpo.errors import InputError

Module = TypeVar("Module", bound=nn.Module)
Config = TypeVar("Config", bound=BaseModel)


def read_published(kind: type[Config], values: Mapping[str, Any], *, where: str) -> Config:
    """A published configuration. Raises InputError naming the key that is missing, unknown or wrong."""
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        places = [str(part) for number, part in enumerate(first["loc"]) if number == 0 or isinstance(part, int)]
        key = ".".join(places)  # without the names of the types that were tried
        if first["type"] == "extra_forbidden":
            raise InputError(f"unknown key {key!r}", where=where) from error
        what = str(first["msg"]).removeprefix("Value error, ")
        raise InputError(f"{key}: {what}" if key else what, where=where) from error


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
