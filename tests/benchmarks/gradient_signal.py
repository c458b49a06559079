"""How much of an update's gradient is signal: cosine between the gradients of independent batches.

    python -m tests.benchmarks.gradient_signal --recipe emoji --batches 12 --images 128

Near 0 an update is a random step; images needed for a cosine of 0.5: see `mar_grpo.training.gradients`. Each variant is
a list of recipe overrides. Standard errors: a jackknife of batches.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from mar_grpo.config import Recipe, load_recipe
from mar_grpo.data.build import prompt_records
from mar_grpo.models.checkpoint import fetch_checkpoint, load_policy
from mar_grpo.training.gradients import Probe, images_for_half, mean_cosine

ALL = "algorithm.scored_diffusion_steps={count: null, which: uniform}"
COMMITTED = ["algorithm.scope=committed", "algorithm.selection.mode=off"]
UNKNOWN = ["algorithm.scope=unknown", "algorithm.trajectories.mode=off"]
MTE = "algorithm.trajectories={mode: composite, count: 3}"
ABSOLUTE = ["algorithm.selection.mode=absolute", "algorithm.selection.threshold=0.7"]
VARIANTS: dict[str, list[str]] = {
    "as in the recipe": [],
    "all transitions": [ALL],
    "condition path": ["algorithm.trained=condition"],
    "trunk and head": ["algorithm.trained=both"],
    "committed": [*COMMITTED, "algorithm.trajectories.mode=off"],
    "committed + MTE": [*COMMITTED, MTE],
    "unknown, all": [*UNKNOWN, "algorithm.selection.mode=off"],
    "unknown, delta": [*UNKNOWN, "algorithm.selection.mode=delta"],
    "unknown, absolute 0.7": [*UNKNOWN, *ABSOLUTE],
    "unknown, absolute 0.7 + MTE": ["algorithm.scope=unknown", MTE, *ABSOLUTE],
}


def gradients(recipe: Recipe, checkpoint: str, batches: int, images: int, work: Path) -> tuple[torch.Tensor, float]:
    """Gradients [batches, parameters] of independent batches, and seconds per batch."""
    policy = load_policy(fetch_checkpoint(checkpoint, work))
    probe = Probe(recipe, policy, prompt_records(recipe.data, "train"))
    began = time.monotonic()
    rows = [torch.cat(list(probe.gradient(probe.draw(number, images)).values())) for number in range(batches)]
    return torch.stack(rows), (time.monotonic() - began) / batches


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
    print(f"{'variant':32} {'cosine':>8} {'se':>7} {'images for 0.5':>15} {'s/batch':>8}")
    for name, overrides in VARIANTS.items():
        if arguments.only and arguments.only not in name:
            continue
        recipe = load_recipe(arguments.recipe, [*arguments.set, *overrides])
        source = arguments.checkpoint or recipe.checkpoint.uri
        rows, seconds = gradients(recipe, source, arguments.batches, arguments.images, Path(".mar-grpo/checkpoints"))
        cosine, error = mean_cosine(rows)
        about, least = images_for_half(cosine, error, arguments.images)
        needed = f"{about:.0f}" if about is not None else f"over {least:.0f}" if least is not None else "-"
        print(f"{name:32} {cosine:8.4f} {error:7.4f} {needed:>15} {seconds:8.2f}", flush=True)


if __name__ == "__main__":
    main()
