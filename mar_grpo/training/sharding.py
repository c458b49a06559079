"""The trunk's blocks in parts: FSDP2 shares them out over the processes, activation checkpointing over time.

Only the blocks are sharded. What is outside them (embeddings, norms, the diffusion head) is whole on each process: the
head is called chunk by chunk, how often differs from process to process, and a sharded one would talk at each call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from mar_grpo.models.blocks import Block, PreNormBlock


def trunk_blocks(network: nn.Module) -> list[Any]:
    """Transformer blocks of the trunk, in the order of the network."""
    return [module for module in network.modules() if isinstance(module, Block | PreNormBlock)]


def checkpoint_blocks(network: nn.Module) -> None:
    """Keep no activations inside the blocks: the backward pass makes them again (non-reentrant), to the last bit."""
    for block in trunk_blocks(network):
        block.forward = _Checkpointed(block.forward)


class _Checkpointed:
    def __init__(self, forward: Any) -> None:
        self.forward = forward

    def __call__(self, *args: Tensor | None) -> Tensor:
        if not torch.is_grad_enabled():
            return self.forward(*args)
        return checkpoint(self.forward, *args, use_reentrant=False, preserve_rng_state=False)


def shard(network: nn.Module, mesh: DeviceMesh, *, low: bool) -> None:
    """Shard the blocks over the processes of a mesh, in place. Gradients are summed, as elsewhere, in float32.

    With gradient, all processes must then make the same calls of `condition` and `ar_latents`, in the same order.

    Args:
        low: blocks compute in bfloat16; their parts, and what the optimiser sees, stay float32.
    """
    dtypes = (torch.bfloat16, torch.float32) if low else (None, None)
    for block in trunk_blocks(network):
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[1]))
        block.set_force_sum_reduction_for_comms(True)
        block.set_gradient_divide_factor(1.0)
    whole = {parameter for parameter in network.parameters() if not isinstance(parameter, DTensor)}
    fully_shard(network, mesh=mesh, ignored_params=whole)  # so that the blocks know of each other
    for method in ("condition", "ar_latents"):
        if hasattr(network, method):
            register_fsdp_forward_method(network, method)


@contextmanager
def gathered(network: nn.Module) -> Iterator[None]:
    """Inside, sharded blocks are whole: calls without gradient talk to no other process, however many there are."""
    blocks = [block for block in trunk_blocks(network) if isinstance(block, FSDPModule)]
    for block in blocks:
        block.set_reshard_after_forward(False)
        block.unshard()
    try:
        yield
    finally:
        for block in blocks:
            block.reshard()
            block.set_reshard_after_forward(True)


def make_whole(network: nn.Module) -> None:
    """Give every process the whole blocks, to be written. All processes must call it; nothing can be trained after."""
    for name, value in list(network.named_parameters()):
        if isinstance(value, DTensor):
            parent, _, key = name.rpartition(".")
            whole = nn.Parameter(value.full_tensor().detach(), requires_grad=False)
            setattr(network.get_submodule(parent), key, whole)


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> float:
    """`torch.nn.utils.clip_grad_norm_` where some gradients are sharded; returns the norm before."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    if not sharded:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm).item()
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    parts: Any = torch.nn.utils.get_total_norm(sharded)
    norm = torch.stack([torch.nn.utils.get_total_norm(whole), parts.full_tensor()]).norm().item()
    for gradient in gradients:
        gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))
    return norm
