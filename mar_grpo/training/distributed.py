"""The processes of one run: torchrun's group (gloo on CPU), or a single process without one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mar_grpo.errors import MarGrpoError


class Processes:
    """Rank and world size, the device of this process, and the few collectives training needs."""

    def __init__(self) -> None:
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        if self.world > 1:
            dist.init_process_group("gloo", timeout=timedelta(minutes=10))

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        if self.world > 1:
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace every gradient by its sum over the processes, in one message; where there is none it is 0."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.world == 1:
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


def checksum(parameters: Sequence[Tensor]) -> float:
    """A number that two ranks share only if their parameters are equal, float64 sum of |p| and p."""
    return float(sum(p.detach().double().abs().sum() + p.detach().double().sum() * 0.5 for p in parameters))
