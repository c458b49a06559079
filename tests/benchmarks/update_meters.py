"""What a piece of work costs: seconds, operations, bytes that live at its peak."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from mar_grpo.models.policy import Policy
from mar_grpo.training.live import Live


def _attention(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(
    grad: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


CPU_ATTENTION = {  # FlopCounterMode knows those of GPUs only, and would count nothing
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


@dataclass
class Cost:
    """Operations (2 a multiply-add), those of the head within them, and bytes at the peak above those at the start."""

    operations: int = 0
    head_operations: int = 0
    peak_bytes: int = 0


def counted(work: Callable[[], Any], policies: Sequence[Policy], held: Sequence[Tensor] = ()) -> tuple[Any, Cost]:
    """Run something and count.

    Args:
        policies: whose heads are told apart.
        held: tensors from before that count as long as they live (what a rollout stored).
    """
    cost, counter = Cost(), FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
    with Live() as live, counter, _heads(policies, counter, cost):
        for tensor in held:
            live.hold(tensor)
        live.peak = live.now
        result = work()
    cost.operations, cost.peak_bytes = counter.get_total_flops(), live.peak
    return result, cost


@contextmanager
def _heads(policies: Sequence[Policy], counter: FlopCounterMode, cost: Cost) -> Iterator[None]:
    """Adds the operations of the heads' forward passes to a cost."""

    def measured(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any) -> Tensor:
            before = counter.get_total_flops()
            out = plain(*args)
            cost.head_operations += counter.get_total_flops() - before
            return out

        return call

    names = [(policy, name) for policy in policies for name in ("head_condition", "head_time", "head_conditioned")]
    for policy, name in names:
        setattr(policy, name, measured(getattr(policy, name)))
    try:
        yield
    finally:
        for policy, name in names:
            delattr(policy, name)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """(its result, seconds)."""
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def matmul_rate(side: int = 1024, seconds: float = 0.3) -> float:
    """Operations a second of a plain float32 product of two square matrices."""
    left, right = (torch.randn(side, side, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    count, end = 0, time.perf_counter() + seconds
    start = time.perf_counter()
    while time.perf_counter() < end:
        torch.mm(left, right)
        count += 1
    return 2 * side**3 * count / (time.perf_counter() - start)
