"""Multi-trajectory expectation (MTE), arXiv 2604.06966: several trajectories from the latent that made a token.

The trajectories branch at the head's pure noise, once an image, under z at the step that committed each token (the
composite latent), guided as the rollout was then. On uncertain tokens the update averages over them instead of trusting
the one trajectory that happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from mar_grpo.algorithms.selection import most_uncertain, uncertainty
from mar_grpo.diffusion.gaussian import Schedule
from mar_grpo.rollout import Guided, Rollout, denoise, noise_key


class TrajectoryConfig(BaseModel):
    """Args:
    count: S, extra trajectories a token; 0 switches MTE off.
    share: part of an image's tokens, the most uncertain ones, on which the average replaces the single trajectory.
    include_rollout: whether the average also holds the trajectory that made the image. Without it the average
        carries no credit for tokens scored under the latent that made them: its expectation is zero there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    count: int = Field(3, ge=0)
    share: float = Field(0.3, gt=0, le=1)
    include_rollout: bool = True


@dataclass(frozen=True)
class Trajectories:
    """paths float32 [S, T+1, B, L, C], final spread [B, L], and the most uncertain tokens, bool [B, L]."""

    paths: Tensor
    spread: Tensor
    uncertain: Tensor


@torch.no_grad()
def draw_trajectories(
    guided: Guided, rollout: Rollout, schedule: Schedule, keys: Sequence[int], config: TrajectoryConfig
) -> Trajectories:
    """S trajectories of every token of a rollout, each image from its own generator."""
    batch, length, channels = rollout.tokens.shape
    states = schedule.num_steps + 1
    noise = torch.empty(config.count, states, batch, length, channels)
    for row, key in enumerate(keys):
        generator = torch.Generator().manual_seed(noise_key(key, 2))
        noise[:, :, row] = torch.randn(config.count, states, length, channels, generator=generator)
    predict = guided.predictor(guided.head_conditions(rollout.z, rollout.z_unconditional), rollout.scale)
    path = denoise(predict, schedule, noise[:, 0], noise[:, 1:].transpose(0, 1))
    spread = uncertainty(path[-1])
    return Trajectories(path.transpose(0, 1), spread, most_uncertain(spread, config.share))
