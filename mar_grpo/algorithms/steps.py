"""Which AR steps and which transitions an update scores. Decided before anything is rolled out."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from mar_grpo.diffusion.gaussian import Schedule


class StepsConfig(BaseModel):
    """Args:
    count: how many; None is all (of transitions: all that have a variance).
    which: `uniform`, without replacement; `early`, the first, or noisiest (what an image shows is decided there; the
        gradient of later ones is mostly noise: `python -m tests.benchmarks.gradient_signal`); `late`, the last;
        `window`, neighbours: the window moves on by one each update and starts over behind the last.
    draw: transitions are drawn once an `update`, or anew for each AR step of it (`ar_step`, as released for NOVA).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int | None = Field(None, gt=0)
    which: Literal["uniform", "early", "late", "window"] = "uniform"
    draw: Literal["update", "ar_step"] = "update"

    @model_validator(mode="after")
    def _fits(self) -> StepsConfig:
        if self.count is None and self.which != "uniform":
            raise ValueError(f"which {self.which!r} needs a count: all steps are scored without one")
        if self.draw == "ar_step" and (self.count is None or self.which != "uniform"):
            raise ValueError("draw 'ar_step' needs a count and which 'uniform': nothing else is drawn")
        return self

    def of(self, pool: list[int], update: int, rng: np.random.Generator) -> list[int]:
        """The chosen steps of `pool`, in its order."""
        if self.count is None or self.count >= len(pool):
            return pool
        if self.which == "uniform":
            return sorted(rng.choice(pool, size=self.count, replace=False).tolist())
        last = len(pool) - self.count
        start = {"early": 0, "late": last, "window": update % (last + 1)}[self.which]
        return pool[start : start + self.count]


def choose_steps(
    ar_steps: StepsConfig,
    diffusion_steps: StepsConfig,
    *,
    seed: int,
    update: int,
    num_ar_steps: int,
    schedule: Schedule,
) -> dict[int, list[int]]:
    """AR step -> transitions of it that this update scores, the same on every rank.

    Transitions without variance have no density and are never chosen.
    """
    rng = np.random.default_rng([seed, update, 0])
    chosen = ar_steps.of(list(range(num_ar_steps)), update, rng)
    noisy = [j for j in range(schedule.num_steps) if schedule.stochastic(j)]
    once = diffusion_steps.of(noisy, update, rng)
    if diffusion_steps.draw == "ar_step":
        return {i: diffusion_steps.of(noisy, update, rng) for i in chosen}
    return dict.fromkeys(chosen, once)
