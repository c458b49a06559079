"""Multi-trajectory expectation (MTE), arXiv 2604.06966: several trajectories from the latent that made a token.

The trajectories branch at the head's pure noise, once an image, under z at the step that committed each token (the
composite latent), guided as the rollout was then. On uncertain tokens the update averages over them instead of trusting
the one trajectory that happened.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from mar_grpo.algorithms.selection import Unit, most_uncertain, off_is_a_word, uncertainty, units
from mar_grpo.noise import noise_key
from mar_grpo.rollout import Chain, Guided, RecordedStep, Rollout, denoise, schedule_of


class TrajectoryConfig(BaseModel):
    """Args:
    mode: `composite` averages over trajectories from z at the step that committed each token; `per_step` over
        trajectories from the z of each scored AR step, whose expectation is zero where the rollout is not included;
        `drop_topk`, the control, takes the uncertain part out of the policy term instead; `off`.
    count: S, extra trajectories a token.
    share: part of an image, its most uncertain, on which the average replaces the single trajectory.
    unit: of uncertainty: whole tokens, or, as released for NOVA, each `pixel` of the latent (which splits tokens).
    pick: the most `uncertain`, or a `random` part of the same size (a control).
    guidance: trajectories are drawn guided, as the `sampler` draws; or `none`, as released for NOVA.
    include_rollout: whether the average also holds the trajectory that made the image. Without it the average
        carries no credit for tokens scored under the latent that made them: its expectation is zero there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    mode: Literal["composite", "per_step", "drop_topk", "off"] = "composite"
    count: int = Field(3, gt=0)
    share: float = Field(0.3, gt=0, le=1)
    unit: Unit = "token"
    pick: Literal["uncertain", "random"] = "uncertain"
    guidance: Literal["sampler", "none"] = "sampler"
    include_rollout: bool = True

    @model_validator(mode="before")
    @classmethod
    def _off(cls, values: Any) -> Any:
        return off_is_a_word(values, "mode")


@dataclass(frozen=True)
class Extra:
    """S trajectories of some tokens, at N places an image.

    Attributes:
        spread: float32 [B, N, U], deviation over the S final values of each of U units a token.
        uncertain: bool [B, N, U], the units that trajectories stand for.
        row: int64 [B, N], the token's row in `path`, -1 where it has none.
        path: states [S, n, C] of the n tokens with an uncertain unit.
    """

    spread: Tensor
    uncertain: Tensor
    row: Tensor
    path: Chain

    @classmethod
    def choose(cls, path: Chain, keys: Sequence[int], pixels: int, config: TrajectoryConfig, purpose: int = 0) -> Extra:
        """Keep what the update reads of S trajectories [S, B, N, C].

        Args:
            keys: noise key of each image, for a random choice.
            pixels: latent pixels a token.
            purpose: makes the choice another one (of another AR step).
        """
        spread = uncertainty(units(path.final, pixels if config.unit == "pixel" else 1))
        ranked = spread.flatten(1)
        if config.pick == "random":
            ranked = torch.stack([_random(noise_key(key, 4, purpose), ranked.shape[1]) for key in keys])
        uncertain = most_uncertain(ranked, config.share).view(spread.shape).to(spread.device)
        chosen = uncertain.any(-1) & (config.mode != "drop_topk")
        row = torch.where(chosen, chosen.flatten().cumsum(0).view(chosen.shape) - 1, -1)
        states = {j: state[:, chosen] for j, state in path.states.items() if config.mode != "drop_topk"}
        return cls(spread, uncertain, row, Chain(path.final[:, chosen], states))

    def at(self, places: Tensor) -> Extra:
        """The same at places [B, M]."""
        index = places[..., None].expand(-1, -1, self.uncertain.shape[2])
        spread, uncertain = self.spread.gather(1, index), self.uncertain.gather(1, index)
        return Extra(spread, uncertain, self.row.gather(1, places), self.path)


@dataclass(frozen=True)
class Trajectories:
    """Those of whole images (`composite`), or of each recorded AR step (`per_step`)."""

    whole: Extra | None
    steps: dict[int, Extra]

    def at(self, step: RecordedStep) -> Extra:
        """Those of the places [B, M] of an AR step."""
        return self.steps[step.index] if self.whole is None else self.whole.at(step.places)


@torch.no_grad()
def draw_trajectories(
    guided: Guided,
    rollout: Rollout,
    keys: Sequence[int],
    steps: Mapping[int, Collection[int]],
    config: TrajectoryConfig,
) -> Trajectories:
    """S trajectories of every token, with noise of their own.

    Args:
        guided: the policy under each image's prompt.
        rollout: with z at commitment (`composite`, `drop_topk`).
        keys: noise key of each image.
        steps: AR step -> transitions that are scored; states of others are not kept.
    """
    live = guided if config.guidance == "sampler" else guided.unguided()
    pixels = guided.policy.pixels_per_token
    if config.mode != "per_step":
        assert rollout.z is not None
        scored = sorted(set().union(*steps.values()))
        other = rollout.z_unconditional if config.guidance == "sampler" else None
        path = _draw(live, rollout.z, other, rollout.scale, keys, (2,), scored, config.count)
        return Trajectories(Extra.choose(path, keys, pixels, config), {})
    found = {}
    for step in rollout.steps:
        scale = guided.scale(step.num_known + step.num_committed)
        other = step.z_unconditional if config.guidance == "sampler" else None
        path = _draw(live, step.z, other, scale, keys, (3, step.index), steps[step.index], config.count)
        found[step.index] = Extra.choose(path, keys, pixels, config, step.index + 1)
    return Trajectories(None, found)


def _draw(
    guided: Guided,
    z: Tensor,
    z_uncond: Tensor | None,
    scale: float | Tensor | None,
    keys: Sequence[int],
    purpose: tuple[int, ...],
    scored: Collection[int],
    count: int,
) -> Chain:
    """Paths [S, B, N, C] under z [B, N, D]."""
    schedule = schedule_of(guided.policy, guided.sampling)
    shape = (count, schedule.num_steps + 1, z.shape[1], guided.policy.token_dim)
    noise = torch.stack(
        [torch.randn(shape, generator=torch.Generator().manual_seed(noise_key(key, *purpose))) for key in keys], dim=2
    ).to(z.device)
    predict = guided.predictor(guided.head_conditions(z, z_uncond), scale)
    return denoise(predict, schedule, noise[:, 0], noise[:, 1:].transpose(0, 1), scored=scored)


def _random(key: int, count: int) -> Tensor:
    """A random rank for each of `count` units."""
    return torch.rand(count, generator=torch.Generator().manual_seed(key))
