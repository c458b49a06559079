"""The processes of one run: torchrun's group (gloo on CPU, NCCL between GPUs), or a single process without one.

Where each process has the whole policy, its gradient is summed in one message when all micro-batches are done. That is
what DistributedDataParallel computes, without a wrapper around the policy.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from mar_grpo.errors import MarGrpoError


class Processes:
    """Rank and world size, the device of this process, and the few collectives training needs."""

    def __init__(self) -> None:
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.device, backend = torch.device("cpu"), "gloo"
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
            if int(os.environ.get("LOCAL_WORLD_SIZE", self.world)) <= torch.cuda.device_count():
                backend = "cpu:gloo,cuda:nccl"  # which refuses two processes on one GPU
        if self.world > 1:
            dist.init_process_group(backend, timeout=timedelta(minutes=10))

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        if self.world > 1:
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        return self.rank == 0

    def mesh(self) -> DeviceMesh | None:
        """All processes, to share a policy out over; None where there is one."""
        return init_device_mesh(self.device.type, (self.world,)) if self.world > 1 else None

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace every gradient by its sum over the processes, in one message; where there is none it is 0.

        Those of sharded parameters are sums already.
        """
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        parameters = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
        if self.world == 1 or not parameters:
            return
        flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        dist.all_reduce(flat)
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)

    def gather(self, value: Any) -> list[Any]:
        """`value` of every process, in the order of ranks."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work of each process by itself: if it fails in one of them, every process raises the first one's error.

        Without this the others would wait for the failed one until the connection breaks, and report that. The block
        must not talk to other processes.
        """
        mine: MarGrpoError | None = None
        try:
            yield
        except MarGrpoError as error:
            if self.world == 1:
                raise
            mine = error
        said = self.gather(mine and (type(mine), mine.what, mine.where, mine.hint))
        for rank, (kind, what, where, hint) in [(rank, error) for rank, error in enumerate(said) if error]:
            raise kind(what, where=f"{where}, rank {rank}" if where else f"rank {rank}", hint=hint) from mine


def deal(groups: int, size: int, world: int) -> list[list[tuple[int, int]]]:
    """Images (place of the group, place in the group) of each process: no process has two more than another.

    Each takes every world-th group; where that is uneven, what is left over is cut in the middle of groups.
    """
    order = sorted(range(groups), key=lambda place: place % world)
    images = [(place, member) for place in order for member in range(size)]
    ends = [len(images) * rank // world for rank in range(world + 1)]
    return [images[first:end] for first, end in pairwise(ends)]


def digest(values: Iterable[Tensor]) -> str:
    """sha256 of the bytes of tensors, 64 hex digits."""
    found = hashlib.sha256()
    for value in values:
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def local(value: Tensor) -> Tensor:
    """This process's part of a tensor that may be sharded, without gradient."""
    return value.to_local().detach() if isinstance(value, DTensor) else value.detach()
