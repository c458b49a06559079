"""The method's options, and two presets of them: `corrected` (default) and what the released code computes.

Each difference between the presets is one option; its docstring says what it changes and why the default is as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mar_grpo.algorithms.advantage import AdvantageConfig
from mar_grpo.algorithms.selection import SelectionConfig, off_is_a_word
from mar_grpo.algorithms.steps import StepsConfig
from mar_grpo.algorithms.trajectories import TrajectoryConfig
from mar_grpo.rollout import Scope

Trained = Literal["trunk", "condition", "head", "both"]

# The authors have two trainers; `released` is that of NOVA, `released_harmon` that of Harmon.
RELEASED: dict[str, Any] = {
    "scored_ar_steps": {"count": 12},
    "scored_diffusion_steps": {"count": 10, "draw": "ar_step"},
    "scope": "unknown",
    "likelihood_guidance": "none",
    "deviation": "recorded",
    "reduction": "sum",
    "kl": {"kind": "mean_k3"},
    "advantage": {"combine": "summed", "clip": None},
    "trajectories": {"mode": "composite", "count": 3, "share": 0.3, "unit": "pixel", "guidance": "none",
                     "include_rollout": False},
    "selection": {"mode": "delta", "unit": "pixel", "first_ar_step": 2},
}  # fmt: skip
RELEASED_HARMON: dict[str, Any] = copy.deepcopy(RELEASED) | {"per": "token", "variance_floor": 1e-6}
RELEASED_HARMON["scored_diffusion_steps"] = {"count": 10, "draw": "update"}
RELEASED_HARMON["trajectories"] |= {"count": 5, "guidance": "sampler"}
PRESETS: dict[str, dict[str, Any]] = {"corrected": {}, "released": RELEASED, "released_harmon": RELEASED_HARMON}


class KlConfig(BaseModel):
    """What keeps the policy near a reference. It sees every token of the scope, whatever selection says.

    Args:
        kind: `gaussian`, the KL of the two transitions, (mean - reference)^2 / (2 std^2) where both have the schedule's
            deviation; `k3`, its estimate exp(d) - d - 1 from d, the reference's log-density minus the policy's at the
            recorded state; `mean_k3`, the released code's: the same form with d a difference of means, which has no
            unit a KL could have and ignores the deviation; `off` saves the reference's forward pass.
        coefficient: nats per element; of the loss per element.
        reference: `frozen`, a copy of the start model; `adapter_off`, the policy itself without its LoRA adapters (no
            second trunk in memory).
        refresh_every: the frozen reference becomes the current policy every so many updates; None is never.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["gaussian", "k3", "mean_k3", "off"] = "gaussian"
    coefficient: float = Field(0.01, gt=0)
    reference: Literal["frozen", "adapter_off"] = "frozen"
    refresh_every: int | None = Field(None, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _off(cls, values: Any) -> Any:
        return off_is_a_word(values, "kind")

    @model_validator(mode="after")
    def _fits(self) -> KlConfig:
        if self.refresh_every and self.reference == "adapter_off":
            raise ValueError("refresh_every and reference 'adapter_off' do not fit: without its adapters the policy "
                             "is always the start model")  # fmt: skip
        if self.kind == "off" and (self.refresh_every or self.reference != "frozen"):
            raise ValueError("kind 'off' and refresh_every or reference do not fit: there is no reference then")
        return self


class AlgorithmConfig(BaseModel):
    """The method.

    Args:
        preset: values of the keys that are not given: `corrected`, or the loss of the released code (`released` for
            NOVA, `released_harmon` for Harmon) with those of its defects mended that make it score another model input
            or a transition without variance.
        scored_ar_steps, scored_diffusion_steps: which steps an update scores.
        trained: the `trunk`; only its `condition` path (text projection and video encoder); the diffusion `head`; or
            `both` trunk and head. MAR-GRPO freezes the head: its gradient is mostly noise.
        scope: `committed` scores the tokens an AR step commits; `unknown` also the hypothetical ones that it does not.
        likelihood_guidance: `sampler` scores the guided mean that was sampled; `none`, as released, the conditional one
            alone, which is another policy's density wherever guidance is on (and half the work).
        deviation: where it is learned, `live` takes each trajectory's own under the current policy; `recorded`, as
            released, the rollout's for all trajectories of a token. No gradient flows through it in either.
        variance_floor: a variance below this counts as this in the density's quadratic term (released for Harmon:
            1e-6, where a tiny learned deviation would outweigh every other transition).
        reduction: `elements` averages over all elements an update scores; `steps` averages in each AR step, then over
            them, so that early steps with many tokens weigh no more than late ones; `sum`, as released, adds the AR
            steps' averages up, which multiplies the gradient by their number.
        per: `element` averages over channels as well; `token`, as released for Harmon, sums over channels, which
            multiplies the loss by their number.
        inner_updates: optimiser steps on the same images; after the first, ratios are against the stored densities of
            the policy that made them.
        clip: ratios are cut to 1 +- this where that lowers the objective (PPO); needs inner_updates above 1.
        advantage, trajectories (MTE), selection, kl: see there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    preset: Literal["corrected", "released", "released_harmon"] = "corrected"
    scored_ar_steps: StepsConfig = StepsConfig()
    scored_diffusion_steps: StepsConfig = StepsConfig()
    trained: Trained = "trunk"
    scope: Scope = "unknown"
    likelihood_guidance: Literal["sampler", "none"] = "sampler"
    deviation: Literal["live", "recorded"] = "live"
    variance_floor: float = Field(0.0, ge=0)
    reduction: Literal["elements", "steps", "sum"] = "elements"
    per: Literal["element", "token"] = "element"
    inner_updates: int = Field(1, gt=0)
    clip: float | None = Field(None, gt=0)
    advantage: AdvantageConfig = AdvantageConfig()
    trajectories: TrajectoryConfig = TrajectoryConfig()
    selection: SelectionConfig = SelectionConfig()
    kl: KlConfig = KlConfig()

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return _over(PRESETS.get(str(values.get("preset", "corrected")), {}), values)

    @model_validator(mode="after")
    def _fits(self) -> AlgorithmConfig:
        if self.scope == "committed" and self.selection.mode != "off":
            raise ValueError(
                f"selection.mode {self.selection.mode!r} and scope 'committed' do not fit: selection keeps every "
                "committed token; use selection.mode off or scope unknown"
            )
        if self.clip is not None and self.inner_updates == 1:
            raise ValueError("clip and inner_updates 1 do not fit: the ratio of an on-policy update is 1")
        return self


def _over(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` over `base`, mapping by mapping; a part given as a model stands as it is."""
    merged = dict(base)
    for key, value in given.items():
        nested = isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        merged[key] = _over(base[key], value) if nested else value
    return merged
