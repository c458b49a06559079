"""How much of an update's gradient is signal: gradients of independent batches at one policy, part by part.

Two batches of n images share the expected gradient g and have independent noise v / n, so that their cosine is about
c(n) = |g|^2 / (|g|^2 + v / n): near 0 an update is a random step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mar_grpo.algorithms.advantage import advantages, counted_share
from mar_grpo.algorithms.config import AlgorithmConfig
from mar_grpo.algorithms.loss import LossParts, Scales, Steps, backward, kept, record, scales
from mar_grpo.algorithms.steps import choose_steps
from mar_grpo.algorithms.trajectories import Extra, Trajectories
from mar_grpo.data.prompts import PromptRecord
from mar_grpo.models.policy import Policy
from mar_grpo.noise import noise_key
from mar_grpo.rewards.mix import RewardMix
from mar_grpo.rollout import Chain, Guided, schedule_of
from mar_grpo.training.micro_batches import MicroBatch, Wanted, gradient, make_images
from mar_grpo.training.parts import trained_parameters

if TYPE_CHECKING:
    from mar_grpo.config import Recipe

Gradient = dict[str, Tensor]
"""Part (`condition`, `trunk`: the rest of it, `head`) -> all its gradients [N]."""


@dataclass(frozen=True)
class Drawn:
    """One batch as an update sees it."""

    batches: Sequence[MicroBatch]
    advantage: Tensor
    steps: Steps
    scales: Scales


class Probe:
    """Draws batches of a recipe's update at one policy, which stays as it is.

    Args:
        policy: gets gradients in the parts that the recipe trains.
        records: training prompts.

    Raises:
        InputError: the policy lacks the part.
    """

    def __init__(self, recipe: Recipe, policy: Policy, records: Sequence[PromptRecord]) -> None:
        self.recipe, self.policy, self.records = recipe, policy, records
        self.rewards = RewardMix(recipe.rewards)
        policy.eval().requires_grad_(False)
        parameters = list(trained_parameters(policy, recipe.algorithm.trained).values())
        named = {id(p): "condition" for p in policy.condition_parameters()}
        named |= {id(p): "head" for p in policy.head_parameters()}
        self.parts: dict[str, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            parameter.requires_grad_(True)
            self.parts.setdefault(named.get(id(parameter), "trunk"), []).append(parameter)

    def draw(self, number: int, images: int) -> Drawn:
        """Batch `number` of so many images (whole groups): the same for every recipe that samples alike."""
        recipe, algorithm, size = self.recipe, self.recipe.algorithm, self.recipe.training.group_size
        rng = np.random.default_rng([recipe.seed, number, 1])
        chosen = [self.records[i] for i in rng.choice(len(self.records), size=images // size)]
        counts = self.policy.mask_schedule(recipe.sampling.ar_steps)
        steps = choose_steps(
            algorithm.scored_ar_steps, algorithm.scored_diffusion_steps, seed=recipe.seed, update=number,
            num_ar_steps=len(counts), schedule=schedule_of(self.policy, recipe.sampling),
        )  # fmt: skip
        wanted = [
            Wanted(place, g, one, noise_key(recipe.seed, number, place, g, 1))
            for place, one in enumerate(chosen)
            for g in range(size)
        ]
        batches = make_images(recipe, self.policy, wanted, steps, self.rewards)
        grouped = {
            name: torch.from_numpy(np.concatenate([each.rewards[name] for each in batches])).view(-1, size)
            for name in recipe.rewards.components
        }
        signal = advantages(grouped, recipe.rewards.components, algorithm.advantage)
        scale = scales(
            algorithm, steps, kept([each.batch for each in batches], steps), counts=counts, images=len(wanted),
            token_dim=self.policy.token_dim, counted_share=counted_share(signal, algorithm.advantage),
        )  # fmt: skip
        return Drawn(batches, signal.flatten(), steps, scale)

    def gradient(self, drawn: Drawn, algorithm: AlgorithmConfig | None = None) -> Gradient:
        """Of the policy term (the KL to a policy from itself has none).

        Args:
            algorithm: another than the recipe's, for what `drawn` holds.
        """
        recipe = self.recipe.model_copy(update={"algorithm": algorithm or self.recipe.algorithm})
        for parameters in self.parts.values():
            for parameter in parameters:
                parameter.grad = None
        gradient(recipe, self.policy, None, drawn.batches, drawn.advantage, drawn.steps, drawn.scales)
        return {
            part: torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])
            for part, parameters in self.parts.items()
        }


def some_trajectories(drawn: Drawn, which: slice) -> Drawn:
    """The same batch with a part of its extra trajectories; what counts as uncertain stays as all of them said."""

    def of(extra: Extra) -> Extra:
        states = {j: state[which] for j, state in extra.path.states.items()}
        return dataclasses.replace(extra, path=Chain(extra.path.final[which], states))

    batches = []
    for each in drawn.batches:
        found = each.batch.trajectories
        assert found is not None
        steps = {i: of(extra) for i, extra in found.steps.items()}
        fewer = Trajectories(None if found.whole is None else of(found.whole), steps)
        batches.append(dataclasses.replace(each, batch=dataclasses.replace(each.batch, trajectories=fewer, old={})))
    return dataclasses.replace(drawn, batches=batches)


def mean_cosine(rows: Tensor) -> tuple[float, float]:
    """Mean pairwise cosine of gradients [B, N], B at least 3, and its jackknife standard error."""
    unit = (rows / rows.norm(dim=1, keepdim=True)).double()
    cosines, n = unit @ unit.T, len(rows)
    others = cosines.sum(1) - cosines.diagonal()
    total = others.sum() / (n * (n - 1))
    without = (others.sum() - 2 * others) / ((n - 1) * (n - 2))
    return total.item(), ((n - 1) / n * (without - without.mean()).square().sum()).sqrt().item()


def images_for_half(cosine: float, error: float, images: int) -> tuple[float | None, float | None]:
    """Images a batch needs for a cosine of 0.5, from that of batches of `images`: n (1 - c) / c.

    Returns:
        (about so many, None); or (None, at least so many) where the cosine is less than two standard errors above 0;
        (None, None) where it is so far below that there is no bound.
    """
    if cosine > 2 * error:
        return images * (1 - cosine) / cosine, None
    highest = cosine + 2 * error
    return None, images * (1 - highest) / highest if highest > 0 else None


def variance(rows: Tensor) -> float:
    """Variance of gradients [B, N], summed over parameters."""
    return (rows - rows.mean(dim=0)).square().sum().item() / (len(rows) - 1)


def distance(recipe: Recipe, policy: Policy, start: Policy, records: Sequence[PromptRecord]) -> float:
    """KL of a policy's transitions from the start model's, nats an element: one image of each prompt, all committed
    tokens, all transitions with a variance."""
    algorithm = AlgorithmConfig.model_validate(
        {"scope": "committed", "trajectories": {"mode": "off"}, "selection": {"mode": "off"}}
    )
    counts, schedule = policy.mask_schedule(recipe.sampling.ar_steps), schedule_of(policy, recipe.sampling)
    steps = choose_steps(
        algorithm.scored_ar_steps, algorithm.scored_diffusion_steps, seed=0, update=0, num_ar_steps=len(counts),
        schedule=schedule,
    )  # fmt: skip
    found = LossParts()
    at_once = recipe.training.micro_batch
    for first in range(0, len(records), at_once):
        some = records[first : first + at_once]
        with torch.no_grad():
            conditioning = policy.encode_prompts([one.prompt for one in some])
            live, anchor = (Guided.of(each, conditioning, recipe.sampling) for each in (policy, start))
        index = torch.arange(len(some), device=policy.device)
        keys = [noise_key(recipe.evaluation.seed, int(one.prompt_id, 16), 1) for one in some]
        batch = record(live, index, keys, steps, algorithm)
        nothing = torch.zeros(len(some), device=policy.device)
        unit = Scales(dict.fromkeys(steps, 1.0), dict.fromkeys(steps, 1.0))
        found.merge(backward(live, anchor, batch, nothing, steps, unit, algorithm))
    return found.means()["kl"]
