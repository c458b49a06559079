"""No option does nothing: each changes what a short training run publishes, or is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mar_grpo.config import Recipe, load_recipe
from mar_grpo.errors import InputError
from tests.unit import tiny_mar, toy_run
from tests.unit.test_config import options

HEAD, ADAM, LORA = ["algorithm.trained=both"], ["optimizer.kind=adamw"], ["training.lora.rank=2"]
UNKNOWN = ["algorithm.scope=unknown"]
DELTA = [*UNKNOWN, "algorithm.selection.mode=delta"]
GUIDED = ["sampling.guidance_scale=2"]
MOVED = ["algorithm.kl.coefficient=5"]  # a KL that is felt after the first update
DOGS = [f"rewards.components={{{toy_run.__name__}:same_for_dogs: 1}}"]

CHANGES: dict[str, tuple[list[str], str]] = {  # option -> what else is set in both runs, another value
    "algorithm.preset": (["algorithm.scored_ar_steps.count=2", "algorithm.scored_diffusion_steps.count=1"], "released"),
    "algorithm.scored_ar_steps.count": ([], "2"),
    "algorithm.scored_ar_steps.which": (["algorithm.scored_ar_steps.count=1"], "late"),
    "algorithm.scored_diffusion_steps.count": ([], "1"),
    "algorithm.scored_diffusion_steps.which": (["algorithm.scored_diffusion_steps.count=1"], "window"),
    "algorithm.scored_diffusion_steps.draw": (["algorithm.scored_diffusion_steps.count=1"], "ar_step"),
    "algorithm.trained": ([], "condition"),
    "algorithm.scope": ([], "unknown"),
    "algorithm.likelihood_guidance": (GUIDED, "none"),
    "algorithm.variance_floor": ([], "2"),
    "algorithm.reduction": ([], "steps"),
    "algorithm.per": ([], "token"),
    "algorithm.inner_updates": ([], "2"),
    "algorithm.clip": (["algorithm.inner_updates=3"], "1e-6"),
    "algorithm.advantage.combine": ([], "summed"),
    "algorithm.advantage.baseline": ([], "leave_one_out"),
    "algorithm.advantage.scale": ([], "none"),
    "algorithm.advantage.equal_groups": (DOGS, "leave_out"),
    "algorithm.advantage.clip": ([], "0.5"),
    "algorithm.trajectories.mode": ([], "drop_topk"),
    "algorithm.trajectories.count": ([], "3"),
    "algorithm.trajectories.share": ([], "0.6"),
    "algorithm.trajectories.unit": ([], "pixel"),
    "algorithm.trajectories.pick": ([], "random"),
    "algorithm.trajectories.guidance": (GUIDED, "none"),
    "algorithm.trajectories.include_rollout": ([], "false"),
    "algorithm.selection.mode": (UNKNOWN, "absolute"),
    "algorithm.selection.threshold": (DELTA, "0.2"),
    "algorithm.selection.unit": (DELTA, "pixel"),
    "algorithm.selection.first_ar_step": (DELTA, "2"),
    "algorithm.kl.kind": (MOVED, "mean_k3"),
    "algorithm.kl.coefficient": ([], "5"),
    "algorithm.kl.refresh_every": (MOVED, "1"),
    "optimizer.kind": ([], "adamw"),
    "optimizer.learning_rate": ([], "0.1"),
    "optimizer.head_learning_rate": (HEAD, "0.1"),
    "optimizer.head_ema_decay": (HEAD, "0.9"),
    "optimizer.beta1": ([], "0.5"),
    "optimizer.beta2": (ADAM, "0.5"),
    "optimizer.weight_decay": ([], "0.1"),
    "optimizer.warmup_updates": ([], "5"),
    "optimizer.max_grad_norm": ([], "0.001"),
    "training.lora.rank": (LORA, "3"),
    "training.lora.alpha": (LORA, "2"),
    "training.lora.targets": (LORA, "[qkv]"),
}
REFUSED = {  # options that mean nothing here, and what the refusal says
    "algorithm.kl.reference=adapter_off": "adapter_off",  # the same numbers as a frozen reference: test_learner
    "algorithm.clip=0.1": "the ratio of an on-policy update is 1",
    "optimizer.head_learning_rate=0.1": "the head is frozen",
    "optimizer.head_ema_decay=0.1": "the head is frozen",
    "algorithm.selection.mode=delta": "selection keeps every committed token",
    "algorithm.scored_ar_steps.which=late": "needs a count",
    "algorithm.scored_ar_steps={count: 2, draw: ar_step}": "scored_ar_steps.draw 'ar_step' means nothing",
}
ELSEWHERE = {"algorithm.scored_ar_steps.draw", "algorithm.deviation"}  # named below otherwise


@pytest.fixture(scope="module")
def published() -> dict[tuple[str, ...], dict[str, Tensor]]:
    """Of the runs that are compared with: settings -> the trained network."""
    return {}


def trained(folder: Path, prefix: str, settings: list[str]) -> dict[str, Tensor]:
    run, _ = toy_run.finished(folder, prefix, "training.updates=2", *settings)
    return toy_run.parameters(folder, run)


def differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return any(not torch.allclose(one[name], other[name], rtol=0, atol=1e-7) for name in one)


@pytest.mark.parametrize("name", CHANGES)
def test_an_option_changes_what_is_published(
    name: str, toy_folder: Path, published: dict[tuple[str, ...], dict[str, Tensor]]
) -> None:
    settings, value = CHANGES[name]
    if tuple(settings) not in published:
        published[tuple(settings)] = trained(toy_folder, "runs/a", settings)
    assert differ(trained(toy_folder, "runs/b", [*settings, f"{name}={value}"]), published[tuple(settings)])


def test_a_learned_deviation_is_live_or_recorded(toy_folder: Path, tmp_path: Path) -> None:
    mar = tmp_path / "mar"
    toy_run.prepare(mar, toy_run.speaking(tiny_mar.mar()), ["0", "1", "2", "3"])
    one, other = (trained(mar, f"runs/{value}", [f"algorithm.deviation={value}"]) for value in ("live", "recorded"))
    assert differ(one, other)


@pytest.mark.parametrize("change", REFUSED)
def test_an_option_that_would_do_nothing_is_refused(change: str) -> None:
    with pytest.raises(InputError) as error:
        load_recipe(json.dumps(toy_run.RECIPE), [change])
    assert REFUSED[change] in str(error.value)


def test_every_option_of_the_method_is_here() -> None:
    method = [name for name, _ in options(Recipe) if name.startswith(("algorithm.", "optimizer.", "training.lora."))]
    refused = {change.split("=")[0] for change in REFUSED} & set(method)
    assert set(method) == CHANGES.keys() | refused | ELSEWHERE
