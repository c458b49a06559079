"""python -m tests.benchmarks.update [--json FILE] [--size small|large|both]: a whole step, the released way and ours.

Both make the same images of one prompt from the same noise and arrive at the same gradient (checked). The released way
is `released_procedure`; ours is `algorithms.loss` with the preset `released`; the models are those of `update_models`.
For rollout, rewards, update and the step: seconds (medians of runs that take turns), operations (torch's
FlopCounterMode, attention included), and peak memory (bytes of live tensors above weights, gradients and reference,
which are the same for both; what the rollout stored counts in the update).

The steps that are drawn decide how many tokens are unknown, so the draw is the one of 200 that is nearest to the mean.
The last column of the rate is over a plain 1024 x 1024 matrix product in the same run. The JSON holds the larger size
that ran. Each takes one to three minutes; nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mar_grpo.algorithms import loss
from mar_grpo.algorithms.advantage import advantages
from mar_grpo.algorithms.loss import Steps
from mar_grpo.algorithms.steps import choose_steps
from mar_grpo.models.policy import Policy
from mar_grpo.rollout import Guided, noise_key, schedule_of
from tests.benchmarks import released_procedure
from tests.benchmarks.update_meters import Cost, counted, matmul_rate, timed
from tests.benchmarks.update_models import PUBLISHED, SIZES, Size, reference_of

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


def typical_steps(policy: Policy, size: Size) -> Steps:
    """The draw of scored steps, of 200, whose numbers of tokens are nearest to the mean."""
    schedule, counts = schedule_of(policy, size.sampling), policy.mask_schedule(size.sampling.ar_steps)
    unknown = [sum(counts[i:]) for i in range(len(counts))]
    config, found = size.algorithm, list[tuple[Steps, Tensor]]()
    for update in range(200):
        steps = choose_steps(
            config.scored_ar_steps, config.scored_diffusion_steps, seed=0, update=update, num_ar_steps=len(counts),
            schedule=schedule,
        )  # fmt: skip
        wide = [i for i in range(len(counts)) if i in steps or i + 1 in steps]
        found.append((steps, torch.tensor([sum(unknown[i] for i in some) for some in (steps, wide)]).double()))
    mean = torch.stack([numbers for _, numbers in found]).mean(0)
    return min(found, key=lambda one: float(((one[1] - mean) / mean).abs().max()))[0]


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


def count(way: Released) -> tuple[dict[str, Cost], dict[str, Tensor]]:
    """What each phase costs, and the gradient."""
    policies = [way.policy, way.reference]
    clear(way.policy)
    costs: dict[str, Cost] = {}
    recorded, costs["rollout"] = counted(way.rollout, policies)
    advantage, costs["rewards"] = counted(lambda: way.rewards(recorded), policies)
    held = list(tensors(recorded))
    _, costs["update"] = counted(lambda: way.update(recorded, advantage), policies, held)
    gradient = {name: value.grad for name, value in way.policy.named_parameters() if value.grad is not None}
    return costs, gradient


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


def measure(size: Size, repeats: int) -> dict[str, Any]:
    """All of one size's numbers; printed on the way."""
    policy = size.make()
    steps, reference = typical_steps(policy, size), reference_of(policy)
    ways = {"released": Released(size, policy, reference, steps), "ours": Ours(size, policy, reference, steps)}
    costs, gradients = {}, {}
    for name, way in ways.items():
        costs[name], gradients[name] = count(way)
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
    rate = statistics.median(rates)
    return show(size, policy, steps, costs, medians, rate, largest_difference(gradients["ours"], gradients["released"]))


def show(
    size: Size,
    policy: Policy,
    steps: Steps,
    costs: dict[str, dict[str, Cost]],
    seconds: dict[str, dict[str, float]],
    rate: float,
    difference: float,
) -> dict[str, Any]:
    counts = policy.mask_schedule(size.sampling.ar_steps)
    unknown = [sum(counts[i:]) / policy.num_tokens for i in range(len(counts))]
    weights = sum(value.numel() for value in policy.transformer.parameters()) / 1e6
    print(f"\n{size.name}: {weights:.1f} million parameters, {policy.num_tokens} tokens, {size.group} images, ")
    print(
        f"  {len(steps)} of {len(counts)} AR steps and {len(next(iter(steps.values())))} of "
        f"{size.sampling.num_diffusion_steps} transitions scored, {size.algorithm.trajectories.count} trajectories; "
        f"unknown tokens {sum(unknown) / len(unknown):.2f}, in scored steps "
        f"{sum(unknown[i] for i in steps) / len(steps):.2f}"
    )
    published = PUBLISHED[size.family]
    print("  " + "; ".join(f"{name} {value:.3f} (published {published[name]:.3f})" for name, value in
                           size.proportions.items()))  # fmt: skip
    print(f"  {'':10}{'seconds':>24}{'operations, 1e9':>30}{'peak, MB':>24}")
    print(f"  {'':10}" + f"{'released':>9}{'ours':>8}{'ratio':>7}" + f"{'released':>14}{'ours':>9}{'ratio':>7}"
          + f"{'released':>9}{'ours':>8}{'ratio':>7}")  # fmt: skip
    sums = {name: sum(part.values()) for name, part in seconds.items()}
    whole = {name: sum(part.operations for part in parts.values()) for name, parts in costs.items()}
    peak = {name: max(part.peak_bytes for part in parts.values()) for name, parts in costs.items()}
    for phase in (*PHASES, "step"):
        time = [sums[name] if phase == "step" else seconds[name][phase] for name in ("released", "ours")]
        work = [whole[name] if phase == "step" else costs[name][phase].operations for name in ("released", "ours")]
        held = [peak[name] if phase == "step" else costs[name][phase].peak_bytes for name in ("released", "ours")]
        print(f"  {phase:10}{time[0]:>9.2f}{time[1]:>8.2f}{time[1] / time[0]:>7.2f}"
              f"{work[0] / 1e9:>14.1f}{work[1] / 1e9:>9.1f}{work[1] / max(1, work[0]):>7.3f}"
              f"{held[0] / 1e6:>9.0f}{held[1] / 1e6:>8.0f}{held[1] / held[0]:>7.3f}")  # fmt: skip
    heads = [costs[name]["rollout"].head_operations for name in ("released", "ours")]
    print(f"  of the rollout the head: {heads[0] / 1e9:.1f} and {heads[1] / 1e9:.1f}, ratio {heads[1] / heads[0]:.3f}")
    found = {
        "size": size.name,
        "operations_ratio": whole["ours"] / whole["released"],
        "rollout_head_operations_ratio": heads[1] / heads[0],
        "seconds_ratio": sums["ours"] / sums["released"],
        "update_memory_ratio": costs["ours"]["update"].peak_bytes / costs["released"]["update"].peak_bytes,
        "gradient_max_relative_difference": difference,
        "matmul_rate_fraction": whole["ours"] / sums["ours"] / rate,
    }
    print(f"  gradients differ by at most {difference:.1e}; ours runs at {whole['ours'] / sums['ours'] / 1e9:.1f}e9 "
          f"operations a second, {found['matmul_rate_fraction']:.0%} of the matrix product's {rate / 1e9:.1f}e9",
          flush=True)  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=("small", "large", "both"), default="both")
    parser.add_argument("--family", choices=("nova", "harmon", "both"), default="both")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)  # as training does
    found = {
        family: [measure(size, options.repeats) for name, size in sizes.items() if options.size in (name, "both")][-1]
        for family, sizes in SIZES.items()
        if options.family in (family, "both")
    }
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
