"""What the tests of rollout, loss and training share: a small policy whose untrained head already says something."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mar_grpo.algorithms.loss import AlgorithmConfig, Batch, LossParts, Scales, backward, record
from mar_grpo.algorithms.trajectories import draw_trajectories
from mar_grpo.diffusion.gaussian import Schedule
from mar_grpo.models.policy import Policy
from mar_grpo.rollout import Guided, Rollout, SamplingConfig, roll_out, schedule_of
from tests.unit import tiny

PROMPTS = ("a photo of two red apples", "a dog")


def policy(seed: int = 0, **changes: dict[str, Any]) -> Policy:
    """`tiny.policy` whose untrained head says something."""
    made = tiny.policy(seed, **changes)
    return trainable(made, made.transformer, seed + 1000, 0.3)


def trainable(made: Policy, network: nn.Module, seed: int, size: float) -> Policy:
    """Fill the zero-initialised layers of `network`; only the trunk wants gradients, as in training."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        if not parameter.any():
            parameter.data.normal_(0.0, size, generator=generator)
    made.requires_grad_(False)
    for parameter in made.trunk_parameters():
        parameter.requires_grad_(True)
    return made


def few_tokens(count: int) -> dict[str, Any]:
    """Changes of the transformer's configuration: `count` tokens in one row."""
    return {"image_size": [8, 8 * count], "image_base_size": [1, count]}


OFF: dict[str, Any] = {
    "scope": "committed", "trajectories": {"mode": "off"}, "selection": {"mode": "off"}, "kl": {"kind": "off"},
}  # fmt: skip


def configured(**changes: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({**OFF, **changes})


def moved(start: Policy, size: float = 0.02) -> Policy:
    """Another policy: the same with every trunk parameter a little elsewhere."""
    other = policy()
    other.load_state_dict(start.state_dict())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in other.trunk_parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return other.requires_grad_(False)


@dataclass
class Update:
    """One micro-batch, rolled out and ready to be scored; sums over its elements are multiplied by `scale`."""

    policy: Policy
    sampling: SamplingConfig
    config: AlgorithmConfig
    batch: Batch
    schedule: Schedule
    steps: dict[int, list[int]]
    scale: float
    before: dict[int, Tensor | None]  # of each scored AR step: its tokens one AR step earlier

    @property
    def index(self) -> Tensor:
        return self.batch.index

    @property
    def rollout(self) -> Rollout:
        return self.batch.rollout

    def gradient(self, advantage: Tensor, reference: Policy | None = None) -> tuple[Tensor, LossParts]:
        """All gradients of the trunk as one vector, by `loss.backward`."""
        conditioning = self.policy.encode_prompts(PROMPTS)
        anchor = None
        if reference is not None:
            with torch.no_grad():
                anchor = Guided.of(reference, conditioning, self.sampling)
        parameters = self.policy.trunk_parameters()
        for parameter in self.policy.parameters():
            parameter.grad = None
        live = Guided.of(self.policy, conditioning, self.sampling)
        coefficient = self.config.kl.coefficient
        scales = Scales(dict.fromkeys(self.steps, self.scale), dict.fromkeys(self.steps, coefficient * self.scale))
        parts = backward(live, anchor, self.batch, advantage, self.steps, scales, self.config)
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
    noisy = [j for j in range(schedule.num_steps) if schedule.stochastic(j)]
    scored = noisy if diffusion_steps is None else list(diffusion_steps)
    steps = dict.fromkeys(range(len(made.mask_schedule(sampling.ar_steps))) if ar_steps is None else ar_steps, scored)
    batch = record(guided, rows, keys, steps, config)
    if trajectory_keys is not None:
        whole = roll_out(guided, keys, keep=["z"])
        batch.trajectories = draw_trajectories(guided, whole, trajectory_keys, steps, config.trajectories)
    again = roll_out(guided, keys, recorded=steps, scope=config.scope, keep=["before"]).steps
    before = {step.index: step.before if config.selection.mode == "delta" else None for step in again}
    return Update(made, sampling, config, batch, schedule, steps, 1.0 / len(keys), before)


def flat(parameters: Sequence[Tensor]) -> Tensor:
    """Gradients as one vector; zero where there is none."""
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
