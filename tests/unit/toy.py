"""What the tests of rollout, loss and training share: a small policy whose untrained head already says something."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mar_grpo.algorithms.loss import AlgorithmConfig, LossParts, backward
from mar_grpo.algorithms.trajectories import Trajectories, draw_trajectories
from mar_grpo.diffusion.gaussian import Schedule
from mar_grpo.models.policy import Policy
from mar_grpo.rollout import Guided, Rollout, SamplingConfig, roll_out, schedule_of
from tests.unit import tiny

PROMPTS = ("a photo of two red apples", "a dog")


def policy(seed: int = 0, **changes: dict[str, Any]) -> Policy:
    """`tiny.policy` whose zero-initialised layers are filled; only the trunk wants gradients, as in training."""
    made = tiny.policy(seed, **changes)
    generator = torch.Generator().manual_seed(seed + 1000)
    for parameter in made.transformer.parameters():
        if not parameter.any():
            parameter.data.normal_(0.0, 0.3, generator=generator)
    made.requires_grad_(False)
    for parameter in made.trunk_parameters():
        parameter.requires_grad_(True)
    return made


def few_tokens(count: int) -> dict[str, Any]:
    """Changes of the transformer's configuration: `count` tokens in one row."""
    return {"image_size": [8, 8 * count], "image_base_size": [1, count]}


@dataclass
class Update:
    """One micro-batch, rolled out and ready to be scored."""

    policy: Policy
    sampling: SamplingConfig
    config: AlgorithmConfig
    index: Tensor
    rollout: Rollout
    trajectories: Trajectories | None
    schedule: Schedule
    diffusion_steps: list[int]
    scale: float

    def gradient(self, advantage: Tensor, reference: Policy | None = None) -> tuple[Tensor, LossParts]:
        """All gradients of the trunk as one vector, by `loss.backward`."""
        conditioning = self.policy.encode_prompts(PROMPTS)
        anchor = None
        if reference is not None:
            with torch.no_grad():
                anchor = Guided.of(reference, conditioning, self.sampling)
        parameters = self.policy.trunk_parameters()
        for parameter in parameters:
            parameter.grad = None
        live = Guided.of(self.policy, conditioning, self.sampling)
        parts = backward(
            live, anchor, self.index, self.rollout, self.trajectories, advantage, self.schedule, self.diffusion_steps,
            self.config, self.scale,
        )  # fmt: skip
        return flat(parameters), parts


def update(
    made: Policy,
    index: Sequence[int],
    keys: Sequence[int],
    sampling: SamplingConfig,
    config: AlgorithmConfig,
    *,
    ar_steps: Collection[int] | None = None,
    diffusion_steps: Sequence[int] | None = None,
    trajectory_keys: Sequence[int] | None = None,
) -> Update:
    """Roll out one image per key (image b under PROMPTS[index[b]]); all AR steps and noisy transitions are scored."""
    schedule = schedule_of(made, sampling)
    rows = torch.tensor(index)
    guided = Guided.of(made, made.encode_prompts(PROMPTS), sampling).rows(rows)
    steps = range(len(made.mask_schedule(sampling.ar_steps))) if ar_steps is None else ar_steps
    rollout = roll_out(guided, keys, recorded=steps, scope=config.scope, keep_before=config.selection.mode == "delta")
    trajectories = None
    if config.trajectories.count:
        trajectories = draw_trajectories(guided, rollout, schedule, trajectory_keys or keys, config.trajectories)
    noisy = [j for j in range(schedule.num_steps) if schedule.stochastic(j)]
    scored = noisy if diffusion_steps is None else list(diffusion_steps)
    return Update(made, sampling, config, rows, rollout, trajectories, schedule, scored, 1.0 / len(keys))


def flat(parameters: Sequence[Tensor]) -> Tensor:
    """Gradients as one vector; zero where there is none."""
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
