"""MAR-GRPO's update, corrected form (arXiv 2604.06966; differences from the released code are in each docstring).

For each recorded AR step the trunk is run again on the canvas of that step. Its output z must equal the rollout's (this
is asserted: a mismatch means that another policy is scored than was sampled). The frozen head is evaluated on the
recorded states, guided as in the rollout, and the gradient with respect to its condition is accumulated over
transitions; then it goes through the trunk once. Memory therefore does not grow with the number of transitions.

Corrected against the released code: guided mean in scoring as in sampling; transitions without variance are not scored;
Gaussian KL; averages instead of sums over AR steps; whole tokens instead of latent pixels; selection without MTE.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from mar_grpo.algorithms.advantage import AdvantageConfig
from mar_grpo.algorithms.objective import gaussian_kl, policy_term
from mar_grpo.algorithms.selection import SelectionConfig, consistent
from mar_grpo.algorithms.trajectories import Trajectories, TrajectoryConfig
from mar_grpo.diffusion.gaussian import Schedule
from mar_grpo.errors import UnhealthyError
from mar_grpo.rollout import Guided, Predict, RecordedStep, Rollout, Scope

Z_TOLERANCE = 1e-4


class AlgorithmConfig(BaseModel):
    """The method.

    Args:
        scored_ar_steps: how many AR steps an update scores, drawn uniformly; None is all of them.
        noisiest_diffusion_steps: only this many transitions of each, counted from pure noise, may be scored; None is
            all that have a variance. What an image shows is decided there, and the later ones are mostly noise in the
            gradient (`python -m tests.benchmarks.gradient_signal`).
        scored_diffusion_steps: how many of those, drawn uniformly; None is all of them.
        trained: all of the `trunk`, or only the `condition` path (text projection and video encoder), whose gradient
            has the most signal; the head is frozen in both.
        scope: `committed` scores the tokens an AR step commits; `unknown` also the hypothetical ones that it does not.
        trajectories: multi-trajectory expectation on uncertain tokens.
        selection: consistency-aware token selection.
        kl: coefficient of the Gaussian KL to the start model, nats per element; 0 saves the reference pass.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    scored_ar_steps: int | None = Field(None, gt=0)
    noisiest_diffusion_steps: int | None = Field(None, gt=0)
    scored_diffusion_steps: int | None = Field(None, gt=0)
    trained: Literal["trunk", "condition"] = "trunk"
    scope: Scope = "committed"
    advantage: AdvantageConfig = AdvantageConfig()
    trajectories: TrajectoryConfig = TrajectoryConfig()
    selection: SelectionConfig = SelectionConfig()
    kl: float = Field(0.01, ge=0)


@dataclass
class LossParts:
    """Sums over what was scored; `merge` adds, `means` divides."""

    elements: float = 0.0
    policy: float = 0.0
    kl: float = 0.0
    kept: float = 0.0
    tokens: float = 0.0

    def merge(self, other: LossParts) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def means(self) -> dict[str, float]:
        return {
            "policy_loss": -self.policy / max(1.0, self.elements),
            "kl": self.kl / max(1.0, self.elements),
            "kept_share": self.kept / max(1.0, self.tokens),
        }


def backward(
    live: Guided,
    reference: Guided | None,
    index: Tensor,
    rollout: Rollout,
    trajectories: Trajectories | None,
    advantage: Tensor,
    schedule: Schedule,
    diffusion_steps: Sequence[int],
    config: AlgorithmConfig,
    scale: float,
) -> LossParts:
    """Accumulate the gradient of the loss of one micro-batch in the trunk's parameters.

    Args:
        live: the policy under the P prompts of these B images, with gradient.
        reference: the start model under the same; None where kl is 0.
        index: prompt of each image, int64 [B].
        advantage: [B].
        diffusion_steps: transitions to score; each must have a variance.
        scale: one over the elements that the whole update scores (on average over draws of AR steps).

    Raises:
        UnhealthyError: the trunk does not give the z of the rollout, or gives numbers that are not finite.
    """
    total = LossParts()
    leaves = live.leaves()
    for step in rollout.steps:
        canvas = (step.tokens, step.known, step.num_known, step.places)
        latents = leaves.rows(index).latents(*canvas)
        error = (latents[0].detach() - step.z).abs().max().item()
        if not math.isfinite(error):
            hint = "lower optimizer.learning_rate; the last checkpoint is intact"
            raise UnhealthyError("the trunk's output is not finite", where=f"AR step {step.index}", hint=hint)
        if error > Z_TOLERANCE * max(1.0, step.z.abs().max().item()):
            raise UnhealthyError(
                f"the update's z differs from the rollout's by {error:.2g}",
                where=f"AR step {step.index}",
                hint="the policy that is scored is not the one that was sampled",
            )
        conditions = live.head_conditions(*latents)
        cut = [condition.detach().requires_grad_(True) for condition in conditions]
        guidance = live.scale(step.num_known + step.num_committed)
        predict = live.predictor(cut, guidance)
        anchor = None
        if reference is not None:
            with torch.no_grad():
                latents = reference.rows(index).latents(*canvas)
                anchor = reference.predictor(reference.head_conditions(*latents), guidance)
        total.merge(
            _score_step(
                step, predict, anchor, rollout, trajectories, advantage, schedule, diffusion_steps, config, scale
            )
        )
        torch.autograd.backward(conditions, [part.grad for part in cut])
    live.backward_through(leaves)
    return total


def _score_step(
    step: RecordedStep,
    predict: Predict,
    anchor: Predict | None,
    rollout: Rollout,
    trajectories: Trajectories | None,
    advantage: Tensor,
    schedule: Schedule,
    diffusion_steps: Sequence[int],
    config: AlgorithmConfig,
    scale: float,
) -> LossParts:
    """Gradient with respect to z of one AR step, one transition at a time (all trajectories of it at once)."""
    batch, places = step.places.shape
    committed = torch.arange(places) < step.num_committed
    index = step.places[..., None].expand(-1, -1, step.path.shape[-1])
    keep = consistent(step.path[-1], step.before, rollout.tokens.gather(1, index), committed, config.selection)
    signal = advantage[:, None] * keep  # [B, M]
    paths, shares = step.path[None], torch.ones(1, batch, places)
    if trajectories is not None:
        uncertain = trajectories.uncertain.gather(1, step.places)
        extra = torch.stack([path.gather(2, index.expand(len(path), -1, -1, -1)) for path in trajectories.paths])
        paths = torch.cat([paths, extra])
        averaged = len(extra) + config.trajectories.include_rollout
        main = torch.where(uncertain, float(config.trajectories.include_rollout) / averaged, 1.0)
        shares = torch.cat([main[None], (uncertain / averaged).expand(len(extra), -1, -1)])
    channels = paths.shape[-1]
    parts = LossParts(kept=keep.sum().item(), tokens=float(batch * places))
    elements = batch * places * channels
    for j in diffusion_steps:
        state, after, t = paths[:, j], paths[:, j + 1], schedule.timestep(j)
        mean, std = schedule.transition(j, state, predict(state, t))
        ratio = policy_term(after, mean, std)  # [1+S, B, M, C]
        policy = (ratio.sum(-1) * shares * signal).sum()
        loss = -policy
        if anchor is not None:
            with torch.no_grad():
                reference_mean, reference_std = schedule.transition(j, state[:1], anchor(state[:1], t))
            main_std = std[:1] if isinstance(std, Tensor) else std
            kl = gaussian_kl(mean[:1], reference_mean, main_std, reference_std).sum()
            loss = loss + config.kl * kl
            parts.kl += kl.item()
        (loss * scale).backward()
        parts.policy += policy.item()
        parts.elements += elements
    return parts
