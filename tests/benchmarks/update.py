"""python -m tests.benchmarks.update [--json FILE] [--size small|large|both]: a whole step, the released way and ours.

Both make the same images of one prompt from the same noise and arrive at the same gradient (checked). The released way
is `released_procedure`; ours is `algorithms.loss` with the preset `released`; the models are those of `update_models`.
For rollout, rewards, update and the step: seconds (medians of runs that take turns), operations (torch's
FlopCounterMode, attention included), and peak memory (bytes of live tensors above weights, gradients and reference,
which are the same for both; what the rollout stored counts in the update). Then what no order of the work avoids
(`update_operations`), and our operations a second over those of a plain 1024 x 1024 matrix product in the same run.

Which steps are drawn decides how many tokens are unknown, so the draw is the one of 200 that is nearest to the mean.
The JSON holds the largest size of a family that ran. All of it takes six to eight minutes on a core of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mar_grpo.algorithms import loss
from mar_grpo.algorithms.advantage import advantages
from mar_grpo.algorithms.config import AlgorithmConfig
from mar_grpo.algorithms.loss import Steps
from mar_grpo.algorithms.steps import choose_steps
from mar_grpo.diffusion.gaussian import Schedule
from mar_grpo.models.policy import Policy
from mar_grpo.noise import noise_key
from mar_grpo.rollout import Guided, schedule_of
from tests.benchmarks import released_procedure, update_table
from tests.benchmarks.update_meters import Cost, counted, matmul_rate, timed
from tests.benchmarks.update_models import SIZES, Size, reference_of
from tests.benchmarks.update_operations import Plan

PROMPT = "a photo of two red apples"
PHASES = ("rollout", "rewards", "update")


class Released:
    """The step as in `released_procedure`, in three phases."""

    def __init__(self, size: Size, policy: Policy, reference: Policy, steps: Steps) -> None:
        self.size, self.policy, self.reference, self.steps = size, policy, reference, steps
        self.prompts, self.keys = [PROMPT] * size.group, [noise_key(0, member) for member in range(size.group)]

    def rollout(self) -> Any:
        return released_procedure.roll_out(
            self.policy, self.prompts, self.keys, self.steps, self.size.sampling, self.size.algorithm
        )

    def rewards(self, recorded: Any) -> Tensor:
        """Advantages [B]: images are decoded and judged one by one."""
        return self.advantage(torch.cat([redness(self.policy.decode(row[None])) for row in recorded.tokens]))

    def advantage(self, rewards: Tensor) -> Tensor:
        return advantages({"redness": rewards[None]}, {"redness": 1.0}, self.size.algorithm.advantage)[0]

    def update(self, recorded: Any, advantage: Tensor) -> None:
        released_procedure.update(
            self.policy, self.reference, self.prompts, recorded, advantage, self.steps, self.size.sampling,
            self.size.algorithm,
        )  # fmt: skip


class Ours(Released):
    """The same with the library."""

    def rollout(self) -> Any:
        index = torch.zeros(self.size.group, dtype=torch.int64)
        with torch.no_grad():
            guided = Guided.of(self.policy, self.policy.encode_prompts([PROMPT]), self.size.sampling).rows(index)
        return loss.record(guided, index, self.keys, self.steps, self.size.algorithm)

    def rewards(self, recorded: Any) -> Tensor:
        return self.advantage(redness(self.policy.decode(recorded.rollout.tokens)))

    def update(self, recorded: Any, advantage: Tensor) -> None:
        policy, config, sampling = self.policy, self.size.algorithm, self.size.sampling
        conditioning = policy.encode_prompts([PROMPT])
        with torch.no_grad():
            reference = Guided.of(self.reference, conditioning, sampling)
        factors = loss.scales(
            config, self.steps, loss.kept([recorded], self.steps), counts=policy.mask_schedule(sampling.ar_steps),
            images=self.size.group, token_dim=policy.token_dim,
        )  # fmt: skip
        live = Guided.of(policy, conditioning, sampling)
        loss.backward(live, reference, recorded, advantage, self.steps, factors, config)


def redness(images: Tensor) -> Tensor:
    """A reward [B] that costs nothing."""
    return (images[..., 0].double() - images[..., 2].double()).mean((1, 2))


def typical_steps(counts: Sequence[int], schedule: Schedule, config: AlgorithmConfig) -> Steps:
    """The draw of scored steps, of 200, whose numbers of tokens are nearest to the mean.

    Args:
        counts: tokens that each AR step commits.
    """
    unknown = [sum(counts[i:]) for i in range(len(counts))]
    found = list[tuple[Steps, Tensor]]()
    for update in range(200):
        steps = choose_steps(
            config.scored_ar_steps, config.scored_diffusion_steps, seed=0, update=update, num_ar_steps=len(counts),
            schedule=schedule,
        )  # fmt: skip
        wide = [i for i in range(len(counts)) if i in steps or i + 1 in steps]
        found.append((steps, torch.tensor([sum(unknown[i] for i in some) for some in (steps, wide)]).double()))
    mean = torch.stack([numbers for _, numbers in found]).mean(0)
    return min(found, key=lambda one: float(((one[1] - mean) / mean).abs().max()))[0]


def plan_of(size: Size, counts: Sequence[int], steps: Steps, averaged: float) -> Plan:
    """What `update_operations` has to know."""
    config = size.algorithm
    return Plan(
        counts, steps, size.sampling.num_diffusion_steps, size.group, config.trajectories.count, averaged,
        everywhere=size.family == "nova", guided=config.trajectories.guidance == "sampler",
        first=config.selection.first_ar_step,
    )  # fmt: skip


def clear(policy: Policy) -> None:
    """Gradients of zero, in memory before anything is measured."""
    for parameter in policy.trunk_parameters():
        parameter.grad = torch.zeros_like(parameter)


def tensors(value: Any) -> Iterator[Tensor]:
    """All that a recording holds."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)
    elif dataclasses.is_dataclass(value):
        yield from tensors(list(vars(value).values()))


def count(way: Released) -> tuple[dict[str, Cost], dict[str, Tensor], Any]:
    """What each phase costs, the gradient, and what the rollout recorded."""
    policies = [way.policy, way.reference]
    clear(way.policy)
    costs: dict[str, Cost] = {}
    recorded, costs["rollout"] = counted(way.rollout, policies)
    advantage, costs["rewards"] = counted(lambda: way.rewards(recorded), policies)
    held = list(tensors(recorded))
    _, costs["update"] = counted(lambda: way.update(recorded, advantage), policies, held)
    gradient = {name: value.grad for name, value in way.policy.named_parameters() if value.grad is not None}
    return costs, gradient, recorded


def run(way: Released) -> dict[str, float]:
    """Seconds of each phase."""
    clear(way.policy)
    seconds: dict[str, float] = {}
    recorded, seconds["rollout"] = timed(way.rollout)
    advantage, seconds["rewards"] = timed(lambda: way.rewards(recorded))
    _, seconds["update"] = timed(lambda: way.update(recorded, advantage))
    return seconds


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Over all parameters: the largest difference over the parameter's largest gradient."""
    return max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs)


def averaged_share(batch: loss.Batch) -> float:
    """Share of the unknown tokens of scored AR steps that trajectories stand for."""
    assert batch.trajectories is not None
    steps = batch.rollout.steps
    chosen = [(batch.keep[step.index] & batch.trajectories.at(step).uncertain).any(-1) for step in steps]
    return sum(int(part.sum()) for part in chosen) / sum(part.numel() for part in chosen)


@dataclass
class Measured:
    """One size: costs and gradients of both ways, seconds of each repeat, rates of a matrix product beside them."""

    size: Size
    policy: Policy
    plan: Plan
    costs: dict[str, dict[str, Cost]]
    difference: float
    seconds: dict[str, dict[str, float]]
    rate: float


def measure(size: Size, repeats: int) -> Measured:
    """Count once, then time; the two ways take turns."""
    policy = size.make()
    counts = policy.mask_schedule(size.sampling.ar_steps)
    steps = typical_steps(counts, schedule_of(policy, size.sampling), size.algorithm)
    reference = reference_of(policy)
    ways = {"released": Released(size, policy, reference, steps), "ours": Ours(size, policy, reference, steps)}
    costs, gradients, share = {}, {}, 0.0
    for name, way in ways.items():
        costs[name], gradients[name], recorded = count(way)
        share = averaged_share(recorded) if isinstance(recorded, loss.Batch) else share
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    rates = [matmul_rate()]
    for _ in range(repeats):
        for name, way in ways.items():
            seconds[name].append(run(way))
            rates.append(matmul_rate())
    medians = {
        name: {phase: statistics.median(row[phase] for row in rows) for phase in PHASES}
        for name, rows in seconds.items()
    }
    plan, difference = plan_of(size, counts, steps, share), largest_difference(gradients["ours"], gradients["released"])
    return Measured(size, policy, plan, costs, difference, medians, statistics.median(rates))


def summary(found: Measured) -> dict[str, Any]:
    """The numbers of the JSON."""
    whole = {name: sum(part.operations for part in parts.values()) for name, parts in found.costs.items()}
    seconds = {name: sum(parts.values()) for name, parts in found.seconds.items()}
    heads = {name: parts["rollout"].head_operations for name, parts in found.costs.items()}
    peaks = {name: parts["update"].peak_bytes for name, parts in found.costs.items()}
    return {
        "size": found.size.name,
        "operations_ratio": whole["ours"] / whole["released"],
        "rollout_head_operations_ratio": heads["ours"] / heads["released"],
        "seconds_ratio": seconds["ours"] / seconds["released"],
        "update_memory_ratio": peaks["ours"] / peaks["released"],
        "gradient_max_relative_difference": found.difference,
        "matmul_rate_fraction": whole["ours"] / seconds["ours"] / found.rate,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=("small", "large", "both"), default="both")
    parser.add_argument("--family", choices=("nova", "harmon", "both"), default="both")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="1, as training gives each process")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)  # as training does
    found = {}
    for family, sizes in SIZES.items():
        for name, size in sizes.items():
            if options.family in (family, "both") and options.size in (name, "both"):
                measured = measure(size, options.repeats)
                found[family] = summary(measured)
                print(update_table.render(measured, found[family]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
