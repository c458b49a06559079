"""Whether training may go on: finite numbers, groups that still differ, ranks that agree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from mar_grpo.errors import UnhealthyError


class HealthConfig(BaseModel):
    """Args:
    patience: updates in a row without one group whose rewards differ, after which the run stops as collapsed.
    compare_every: updates between comparisons of the parameters of all ranks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    patience: int = Field(10, gt=0)
    compare_every: int = Field(10, gt=0)


class Health:
    """Looks at every update's numbers and stops the run with the reason."""

    def __init__(self, config: HealthConfig, past: Sequence[Mapping[str, float]] = ()) -> None:
        """`past`: numbers of the updates that were done before the run was resumed."""
        self.config, self._dead_updates = config, 0
        for numbers in past:
            self._count(numbers)

    def check(self, update: int, numbers: Mapping[str, float]) -> None:
        """Raises UnhealthyError when a number is not finite, or no group has differed for `patience` updates."""
        self.finite(update, numbers)
        self._count(numbers)
        if self._dead_updates >= self.config.patience:
            raise UnhealthyError(
                f"no group held two different rewards for {self._dead_updates} updates",
                where=f"update {update}",
                hint="the policy has collapsed, or the reward cannot tell its pictures apart",
            )

    def finite(self, update: int, numbers: Mapping[str, float]) -> None:
        """Raises UnhealthyError when a number is not finite."""
        for name, value in numbers.items():
            if not math.isfinite(value):
                hint = "lower optimizer.learning_rate; the last checkpoint is intact"
                raise UnhealthyError(f"{name} is {value}", where=f"update {update}", hint=hint)

    def tensors(self, update: int, kind: str, named: Mapping[str, Tensor | None]) -> None:
        """Raises UnhealthyError with the name of the first tensor that is not finite, and how many others are not.

        Costs one fused pass and one synchronisation.

        Args:
            kind: what they are, `gradient` or `weight`; named: by name, None where there is none.
        """
        there = {name: value.detach() for name, value in named.items() if value is not None}
        if not there or torch.stack(torch._foreach_norm(list(there.values()))).isfinite().all():
            return
        wrong = [name for name, value in there.items() if not value.isfinite().all()]
        if not wrong:  # only the squares of finite numbers overflow: the clipped norm says so
            return
        bad = there[wrong[0]].flatten()
        others = f" and {len(wrong) - 1} others" if len(wrong) > 1 else ""
        raise UnhealthyError(
            f"the {kind} of {wrong[0]} is not finite",
            where=f"update {update}, {bad[~bad.isfinite()][0].item()} in {wrong[0]}{others}",
            hint="lower optimizer.learning_rate; the last checkpoint is intact",
        )

    def compare(self, update: int, sums: Sequence[float]) -> None:
        """Raises UnhealthyError when parameters are not finite, or naming the first rank that differs from rank 0."""
        if not math.isfinite(sums[0]):
            hint = "lower optimizer.learning_rate; the last checkpoint is intact"
            raise UnhealthyError("the parameters are not finite", where=f"update {update}", hint=hint)
        for rank, value in enumerate(sums):
            if value != sums[0]:
                raise UnhealthyError(f"the parameters of rank {rank} differ from rank 0's", where=f"update {update}")

    def _count(self, numbers: Mapping[str, float]) -> None:
        self._dead_updates = 0 if numbers["live_groups"] > 0 else self._dead_updates + 1
