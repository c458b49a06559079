"""Whether training may go on: finite numbers, groups that still differ, ranks that agree."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from mar_grpo.errors import UnhealthyError
from mar_grpo.training.distributed import local


class HealthConfig(BaseModel):
    """Args:
    patience: updates in a row without one group whose rewards differ, after which the run stops as collapsed.
    compare_every: updates between comparisons of what all ranks must have the same: parameters, optimiser steps, place
        in the prompts.
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
            kind: what they are, `gradient` or `weight`; named: by name, None where there is none;
                of what is sharded this process's part is looked at.
        """
        there = {name: local(value) for name, value in named.items() if value is not None}
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

    def compare(self, update: int, said: Sequence[Mapping[str, Any]]) -> None:
        """Compare what the ranks have: `finite`, whether their parameters are, and what must be the same.

        Raises:
            UnhealthyError: parameters are not finite; or naming the rank that differs from most (of two: rank 1).
        """
        if not all(each["finite"] for each in said):
            hint = "lower optimizer.learning_rate; the last checkpoint is intact"
            raise UnhealthyError("the parameters are not finite", where=f"update {update}", hint=hint)
        for name in said[0]:
            values = [each[name] for each in said]
            usual = Counter(values).most_common(1)[0][0]
            for rank, value in enumerate(values):
                if value != usual:
                    raise UnhealthyError(
                        f"rank {rank} has another {name} than rank {values.index(usual)}",
                        where=f"update {update}",
                        hint="its memory or device may be faulty; the last checkpoint is from when all were the same",
                    )

    def _count(self, numbers: Mapping[str, float]) -> None:
        self._dead_updates = 0 if numbers["live_groups"] > 0 else self._dead_updates + 1
