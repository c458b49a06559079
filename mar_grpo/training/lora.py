"""LoRA through peft (arXiv 2106.09685): low-rank adapters are trained, merged tensors of the usual names published."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from mar_grpo.algorithms.config import Trained
from mar_grpo.errors import InputError
from mar_grpo.models.blocks import Attention
from mar_grpo.models.policy import Policy
from mar_grpo.noise import noise_key
from mar_grpo.training.parts import trained_parameters

ADAPTER = "default"  # peft's name of the one adapter
WHERE = "training.lora"


class LoraConfig(BaseModel):
    """Adapters beside the linear layers of the trained part; their own weights stay as they are.

    Args:
        rank: r of the product B A that is added to a layer's weight.
        alpha: the product is multiplied by alpha / rank.
        targets: names of layers or ends of names ("qkv", "mlp.fc1"); None is every linear layer of the trained part.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rank: int = Field(8, gt=0)
    alpha: float = Field(8.0, gt=0)
    targets: tuple[str, ...] | None = Field(None, min_length=1)


def add_adapters(policy: Policy, part: Trained, config: LoraConfig, seed: int) -> dict[str, nn.Parameter]:
    """Give the layers adapters that change nothing yet, in place; everything else of the policy is frozen.

    Args:
        seed: of A, uniform as in peft; B is zero.

    Returns:
        the adapters' parameters by name within the transformer.

    Raises:
        InputError: the part has no linear layer, or a target is none of them.
    """
    import peft  # seconds, and it brings transformers

    network = policy.transformer
    names = _targets(network, trained_parameters(policy, part), config)
    alpha: Any = config.alpha  # peft says int and divides it
    pattern = "|".join(re.escape(name) for name in names)
    wanted = peft.LoraConfig(r=config.rank, lora_alpha=alpha, target_modules=pattern)
    peft.inject_adapter_in_model(wanted, network, ADAPTER, low_cpu_mem_usage=True)  # so that nothing is drawn
    generator = torch.Generator().manual_seed(noise_key(seed, 1))
    for _, layer in _adapted(network):
        weight = layer.base_layer.weight
        bound = 1 / math.sqrt(layer.in_features)
        first = torch.empty(config.rank, layer.in_features).uniform_(-bound, bound, generator=generator)
        layer.lora_A[ADAPTER].weight = nn.Parameter(first.to(weight))
        layer.lora_B[ADAPTER].weight = nn.Parameter(weight.new_zeros(layer.out_features, config.rank))
    for module in network.modules():
        if isinstance(module, Attention) and hasattr(module.qkv, "base_layer"):
            module.__class__ = _AdaptedAttention
    policy.requires_grad_(False)
    return {name: value.requires_grad_(True) for name, value in network.named_parameters() if ".lora_" in name}


def merge_adapters(policy: Policy) -> None:
    """Add what the adapters do to the weights and take them away, in place: the layout is the published one again."""
    network = policy.transformer
    for name, layer in list(_adapted(network)):
        layer.merge(safe_merge=False)
        network.set_submodule(name, layer.get_base_layer())
    for module in network.modules():
        if type(module) is _AdaptedAttention:
            module.__class__ = Attention  # type: ignore[assignment]
    del network.peft_config


def without_adapters(policy: Policy) -> Policy:
    """The policy before it gets adapters: modules of its own that share every tensor, so it costs no memory."""
    network = policy.transformer
    shared = [*network.parameters(), *network.buffers(), vars(policy).get("text")]
    shared += [part for part in policy.children() if part is not network]
    return copy.deepcopy(policy, {id(part): part for part in shared})


def _targets(network: nn.Module, trained: dict[str, nn.Parameter], config: LoraConfig) -> list[str]:
    reached = {id(parameter) for parameter in trained.values()}
    layers = [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and id(module.weight) in reached
    ]
    if not layers:
        raise InputError("the trained part has no linear layer", where=WHERE, hint="train another part")
    if config.targets is None:
        return layers
    for target in config.targets:
        if not any(_matches(name, target) for name in layers):
            kinds = sorted({re.sub(r"^.*?\b(\w*[a-z]\w*(\.\d+)?)$", r"\1", name) for name in layers})
            raise InputError(
                f"no linear layer of the trained part is named {target!r}",
                where=f"{WHERE}.targets",
                hint=f"names end in {', '.join(kinds)}",
            )
    return [name for name in layers if any(_matches(name, target) for target in config.targets)]


def _matches(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def _adapted(network: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    return ((name, module) for name, module in network.named_modules() if isinstance(module, LoraLayer))


class _AdaptedAttention(Attention):
    """Attention whose `qkv` has an adapter, which does not show in the rows of its weight."""

    def forward(self, x: Tensor, query: Tensor | None = None) -> Tensor:
        if query is None:
            return super().forward(x)
        width = x.shape[-1]
        (q,) = self._heads(self._rows(query, slice(width)), 1)
        k, v = self._heads(self._rows(x, slice(width, None)), 2)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def _rows(self, x: Tensor, rows: slice) -> Tensor:
        """`qkv(x)[..., rows]`."""
        layer: Any = self.qkv
        own = F.linear(x, layer.base_layer.weight[rows], layer.base_layer.bias[rows])
        added = F.linear(layer.lora_A[ADAPTER](x), layer.lora_B[ADAPTER].weight[rows])
        return own + layer.scaling[ADAPTER] * added
