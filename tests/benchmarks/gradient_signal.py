"""How much of an update's gradient is signal: cosine between the gradients of independent batches.

    python -m tests.benchmarks.gradient_signal --recipe emoji --batches 12 --images 128

Two batches of n images share the expected gradient g and have independent noise, so the mean pairwise cosine estimates
|g|^2 / (|g|^2 + noise): near 0 an update is a random step; images needed for a cosine c are about
n (1 - c0) c / (c0 (1 - c)). Each variant is a list of recipe overrides. Standard errors: a jackknife of batches.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from mar_grpo.algorithms.advantage import advantages
from mar_grpo.algorithms.loss import backward
from mar_grpo.config import Recipe, load_recipe
from mar_grpo.data.build import prompt_records
from mar_grpo.models.checkpoint import fetch_checkpoint, load_policy
from mar_grpo.rewards.mix import RewardMix
from mar_grpo.rollout import Guided, noise_key, schedule_of
from mar_grpo.training.trainer import choose_steps, roll_out_batch, trained_parameters

VARIANTS: dict[str, list[str]] = {
    "as in the recipe": [],
    "all transitions": ["algorithm.noisiest_diffusion_steps=null"],
    "whole trunk": ["algorithm.trained=trunk"],
    "whole trunk, all transitions": ["algorithm.trained=trunk", "algorithm.noisiest_diffusion_steps=null"],
    "committed": ["algorithm.scope=committed", "algorithm.trajectories.count=0"],
    "committed + MTE": ["algorithm.scope=committed", "algorithm.trajectories.count=3"],
    "unknown, all": ["algorithm.scope=unknown", "algorithm.trajectories.count=0", "algorithm.selection.mode=none"],
    "unknown, delta": ["algorithm.scope=unknown", "algorithm.trajectories.count=0", "algorithm.selection.mode=delta"],
    "unknown, absolute 0.7": [
        "algorithm.scope=unknown", "algorithm.trajectories.count=0", "algorithm.selection.mode=absolute",
        "algorithm.selection.threshold=0.7",
    ],
    "unknown, absolute 0.7 + MTE": [
        "algorithm.scope=unknown", "algorithm.trajectories.count=3", "algorithm.selection.mode=absolute",
        "algorithm.selection.threshold=0.7",
    ],
}  # fmt: skip


def gradients(recipe: Recipe, checkpoint: str, batches: int, images: int, work: Path) -> tuple[torch.Tensor, float]:
    """Gradients [batches, parameters] of independent batches, and seconds per batch."""
    policy = load_policy(fetch_checkpoint(checkpoint, work)).eval().requires_grad_(False)
    parameters = list(trained_parameters(policy, recipe.algorithm.trained).values())
    for parameter in parameters:
        parameter.requires_grad_(True)
    records = [record.as_dict() for record in prompt_records(recipe.data, "train")]
    rewards, group = RewardMix(recipe.rewards), recipe.training.group_size
    schedule = schedule_of(policy, recipe.sampling)
    steps = len(policy.mask_schedule(recipe.sampling.ar_steps))
    rows, began = [], time.monotonic()
    for number in range(batches):
        rng = np.random.default_rng([recipe.seed, number, 1])
        chosen = [records[i] for i in rng.choice(len(records), size=images // group)]
        ar_steps, diffusion_steps = choose_steps(recipe, number, steps, schedule)
        keys = [noise_key(recipe.seed, number, p, g) for p in range(len(chosen)) for g in range(group)]
        batch = roll_out_batch(recipe, policy, schedule, chosen, keys, ar_steps, rewards)
        grouped = {name: torch.from_numpy(v).view(-1, group) for name, v in batch.rewards.items()}
        signal = advantages(grouped, recipe.rewards.components, recipe.algorithm.advantage).flatten()
        for parameter in parameters:
            parameter.grad = None
        live = Guided.of(policy, policy.encode_prompts([r["prompt"] for r in chosen]), recipe.sampling)
        backward(
            live, None, batch.index, batch.rollout, batch.trajectories, signal, schedule, diffusion_steps,
            recipe.algorithm, 1.0 / images,
        )  # fmt: skip
        rows.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))
    return torch.stack(rows), (time.monotonic() - began) / batches


def mean_cosine(rows: torch.Tensor) -> tuple[float, float]:
    """Mean pairwise cosine and its jackknife standard error."""
    unit = rows / rows.norm(dim=1, keepdim=True)
    cosines = (unit @ unit.T).double()
    n = len(rows)
    total = (cosines.sum() - cosines.trace()) / (n * (n - 1))
    without = [(cosines.sum() - cosines.trace() - 2 * (cosines[i].sum() - 1)) / ((n - 1) * (n - 2)) for i in range(n)]
    spread = torch.stack(without)
    return total.item(), ((n - 1) / n * (spread - spread.mean()).square().sum()).sqrt().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="emoji")
    parser.add_argument("--checkpoint", help="default: the recipe's")
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--set", action="append", default=[], help="override of the recipe, for all variants")
    parser.add_argument("--only", help="run the variants whose name holds this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'variant':32} {'cosine':>8} {'se':>7} {'s/batch':>8}")
    for name, overrides in VARIANTS.items():
        if arguments.only and arguments.only not in name:
            continue
        recipe = load_recipe(arguments.recipe, [*arguments.set, *overrides])
        source = arguments.checkpoint or recipe.checkpoint.uri
        rows, seconds = gradients(recipe, source, arguments.batches, arguments.images, Path(".mar-grpo/checkpoints"))
        cosine, error = mean_cosine(rows)
        print(f"{name:32} {cosine:8.4f} {error:7.4f} {seconds:8.2f}", flush=True)


if __name__ == "__main__":
    main()
