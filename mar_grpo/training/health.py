"""Whether training may go on: finite numbers, groups that still differ, ranks that agree."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from mar_grpo.errors import UnhealthyError


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
