"""python -m tests.benchmarks.plan [--family F]: the planner's estimates beside measured peaks, on the CPU.

Two updates of a recipe in two micro-batches, for real: weights, reference, optimiser, rollout, decoding, gradient and
step. Measured is the largest number of bytes in tensors that were alive at once (`training.live`), all weights
included; `above` is the same without what lives throughout (weights, gradients, optimiser), which is easy to get right.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mar_grpo.algorithms.loss import backward, kept, record, scales
from mar_grpo.config import Recipe
from mar_grpo.models.mar import Mar, MarConfig, MarPolicy
from mar_grpo.models.policy import Policy
from mar_grpo.models.vae import Vae
from mar_grpo.noise import noise_key
from mar_grpo.rollout import Guided
from mar_grpo.training.learner import Learner
from mar_grpo.training.live import Live
from mar_grpo.training.memory import Layout, Planner
from tests.benchmarks import update_models
from tests.benchmarks.update_models import ready, vae

IMAGES = 8  # of an update
RELEASED = {"scored_ar_steps": {"count": 3}, "scored_diffusion_steps": {"count": 2}}


@dataclass(frozen=True)
class Case:
    """A model and the recipe that it is trained with."""

    name: str
    make: Callable[[], Policy]
    recipe: Recipe
    prompts: str = "two red apples"


def recipe(guidance: float, diffusion_steps: int | str = 6, ar_steps: int = 8, **algorithm: Any) -> Recipe:
    return Recipe.model_validate({
        "name": "plan",
        "sampling": {"ar_steps": ar_steps, "diffusion_steps": diffusion_steps, "guidance_scale": guidance},
        "algorithm": RELEASED | algorithm,
        "training": {"updates": 1, "prompts_per_update": 2, "group_size": 4, "micro_batch": 4, "processes": 1,
                     "held_out_every": 0},
    })  # fmt: skip


def mar_policy(grid: int, width: int, depth: int, head: tuple[int, int]) -> Policy:
    sides = {f"{side}_{key}": value for side in ("encoder", "decoder")
             for key, value in (("embed_dim", width), ("depth", depth), ("num_heads", width // 32))}  # fmt: skip
    config = MarConfig.from_dict(
        {"img_size": 16 * grid, "class_num": 10, "buffer_size": 8, "diffloss_d": head[0], "diffloss_w": head[1]} | sides
    )
    draw = torch.Generator().manual_seed(0)
    network = Mar(config)
    network.initialise_parameters(draw)
    return ready(MarPolicy(network, Vae.from_config(vae(16, 16), draw)))


def nova_case(name: str, *sizes: Any) -> Case:
    transformer = update_models.nova_transformer(*sizes)
    return Case(f"NOVA {name}", lambda: update_models.nova_policy(transformer), recipe(3.0))


def mar_case(name: str, *sizes: Any) -> Case:
    return Case(f"MAR {name}", lambda: mar_policy(*sizes), recipe(2.0, "ddim5"), "3")


def harmon_case(name: str, *sizes: Any) -> Case:
    config = update_models.harmon_config(*sizes)
    return Case(f"Harmon {name}", lambda: update_models.harmon_policy(config), recipe(2.0, "ddim5"))


CASES = {
    "nova": [
        nova_case("tiny", 6, 64, 2, 4, (2, 64)),
        nova_case("small", 10, 96, 3, 8, (2, 76)),
        nova_case("large", 10, 512, 8, 4, (2, 268)),
    ],
    "mar": [
        mar_case("tiny", 6, 64, 2, (2, 64)),
        mar_case("small", 10, 96, 4, (2, 116)),
        mar_case("large", 10, 384, 2, (2, 328)),
    ],
    "harmon": [
        harmon_case("tiny", 8, 32, 2, 2, (2, 192, 64), (2, 32)),
        harmon_case("small", 10, 96, 3, 4, (3, 192, 704), (2, 116)),
        harmon_case("large", 10, 384, 6, 2, (3, 576, 1856), (2, 328)),
    ],
}


def measured(case: Case) -> tuple[int, int, dict[str, int]]:
    """(peak bytes, bytes throughout, peak of each phase) of the second update of a run."""
    config, algorithm = case.recipe, case.recipe.algorithm
    policy = case.make()
    learner = Learner(config, policy, torch.device("cpu"))
    planner_steps = Planner(config, case.make().to("meta")).draws()
    group, at_once = config.training.group_size, config.training.micro_batch
    counts = policy.mask_schedule(config.sampling.ar_steps)
    peaks = {}
    with Live() as live:
        held = {id(tensor): tensor for part in (policy, learner.reference) if part is not None
                for tensor in (*part.parameters(), *part.buffers())}  # fmt: skip
        for tensor in held.values():
            live.hold(tensor)
        for update in range(2):
            throughout = live.now
            live.peak = live.now
            batches = []
            for first in range(0, config.training.prompts_per_update * group, at_once):
                keys = [noise_key(update, first + i) for i in range(at_once)]
                index = torch.arange(at_once // group).repeat_interleave(group)
                with torch.no_grad():
                    conditioning = policy.encode_prompts([case.prompts] * (at_once // group))
                    guided = Guided.of(policy, conditioning, config.sampling).rows(index)
                    batches.append(record(guided, index, keys, planner_steps, algorithm))
                    policy.decode(batches[-1].rollout.tokens)
                    del guided
            peaks["rollout"], live.peak = live.peak, live.now
            factors = scales(
                algorithm, planner_steps, kept(batches, planner_steps), counts=counts, images=8,
                token_dim=policy.token_dim,
            )  # fmt: skip
            learner.optimizer.zero_grad(set_to_none=True)
            for batch in batches:
                conditioning = policy.encode_prompts([case.prompts] * (at_once // group))
                with torch.no_grad():
                    anchor = (
                        None
                        if learner.reference is None
                        else Guided.of(learner.reference, conditioning, config.sampling)
                    )
                guided = Guided.of(policy, conditioning, config.sampling)
                advantage = torch.linspace(-1, 1, at_once)
                backward(guided, anchor, batch, advantage, planner_steps, factors, algorithm)
            del guided, anchor
            peaks["update"], live.peak = live.peak, live.now
            learner.optimizer.step()
            peaks["step"], live.peak = live.peak, live.now
            del batches, batch
    return max(peaks.values()), throughout, peaks


@dataclass(frozen=True)
class Row:
    """Bytes: estimated and measured, of the whole, above what lives throughout, and of each phase."""

    name: str
    estimate: int
    measured: int
    above: tuple[int, int]
    phases: dict[str, tuple[int, int]]

    @property
    def error(self) -> float:
        return self.estimate / self.measured - 1

    @property
    def error_above(self) -> float:
        return self.above[0] / self.above[1] - 1


def compare(case: Case) -> Row:
    found = Planner(case.recipe, case.make().to("meta")).estimate(Layout(micro_batch=case.recipe.training.micro_batch))
    peak, throughout, peaks = measured(case)
    weights = sum(size for name, size in found.always.items() if not name.startswith("recorded"))
    always = sum(found.always.values())
    phases = {name: (always + each.bytes, peaks[name]) for name, each in found.phases.items()}
    return Row(case.name, found.bytes, peak, (found.bytes - weights, peak - throughout), phases)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", choices=tuple(CASES))
    options = parser.parse_args()
    print(f"{'model':<14}{'estimate':>10}{'measured':>10}{'error':>8}{'above':>10}{'measured':>10}{'error':>8}  MiB")
    worst = 0.0
    for family, cases in CASES.items():
        for case in cases if options.family in (family, None) else ():
            row = compare(case)
            worst = max(worst, abs(row.error), abs(row.error_above))
            sizes = [size / 2**20 for size in (row.estimate, row.measured, *row.above)]
            first = f"{row.name:<14}{sizes[0]:>10.1f}{sizes[1]:>10.1f}{row.error:>8.1%}"
            second = f"{sizes[2]:>10.1f}{sizes[3]:>10.1f}{row.error_above:>8.1%}  "
            phases = ", ".join(f"{name} {a / 2**20:.1f}/{b / 2**20:.1f}" for name, (a, b) in row.phases.items())
            print(first + second + phases, flush=True)
    return int(worst >= 0.15)


if __name__ == "__main__":
    raise SystemExit(main())
