"""Our update against recorded updates of the public implementation, where the two mean the same.

It scores without guidance, all unknown tokens of one AR step, so that is asked of ours here. Where it differs on
purpose (latent pixels instead of tokens in MTE, a KL of means without the deviation, sums over AR steps) there is
nothing to compare; the Gaussian KL was recorded beside its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mar_grpo.algorithms.loss import AlgorithmConfig, backward
from mar_grpo.diffusion.ddpm import DdpmSchedule
from mar_grpo.diffusion.flow import FlowSchedule
from mar_grpo.diffusion.gaussian import Schedule
from mar_grpo.models.nova import NovaTransformer
from mar_grpo.rollout import Guided, RecordedStep, Rollout, SamplingConfig, denoise
from tests.conformance.test_nova import COUNTS, DDPM, close, model, take, vectors

__all__ = ["model"]  # the fixture
UNGUIDED = SamplingConfig(ar_steps=5, diffusion_steps=4)
PLAIN = {"scope": "unknown", "trajectories": {"count": 0}, "selection": {"mode": "none"}}
FLOW = FlowSchedule(4, last_step_deterministic=False)


def guided(model: NovaTransformer) -> Guided:
    """The transformer has all of a policy's methods that an update calls."""
    policy: Any = model
    return Guided(policy, model.condition(vectors("embed")["prompt_cond"]), None, UNGUIDED)


def recorded_step(generation: str, ar_step: int, z: Tensor, path: Tensor) -> tuple[RecordedStep, Rollout]:
    """One AR step of a recorded rollout with all of its unknown tokens; path [T+1, B, L, C]."""
    v, done, count = vectors(generation), sum(COUNTS[:ar_step]), COUNTS[ar_step]
    places = v["mask_order"][:, done:]
    known = torch.zeros(4, 16, dtype=torch.bool).scatter_(1, v["mask_order"][:, :done], True)
    tokens = patches(v["x_latent"][ar_step])
    at = take(z, places[..., None])
    rows = torch.stack([take(state, places[..., None]) for state in path])
    step = RecordedStep(ar_step, tokens, known, done, places, count, rows, at)
    return step, Rollout(patches(v["latents"][:, :, 0]), [step], z, None)


def patches(latents: Tensor) -> Tensor:
    """[..., c, 8, 8] -> tokens [..., 16, 16], last axis (ph, pw, c)."""
    cut = latents.unflatten(-1, (4, 2)).unflatten(-3, (4, 2)).movedim((-5, -4, -3, -2, -1), (-1, -5, -3, -4, -2))
    return cut.flatten(-5, -4).flatten(-3)


def score(
    model: NovaTransformer, reference: Guided | None, rollout: Rollout, advantage: Tensor, schedule: Schedule,
    steps: list[int], kl: float,
) -> tuple[float, float]:  # fmt: skip
    """Gradients are left in the model; returns (policy term, KL), means over elements and transitions."""
    elements = rollout.steps[0].places.numel() * 16 * len(steps)
    for parameter in model.trunk_parameters():
        parameter.requires_grad_(True).grad = None
    live, config = guided(model), AlgorithmConfig.model_validate({**PLAIN, "kl": kl})
    parts = backward(
        live, reference, torch.arange(4), rollout, None, advantage, schedule, steps, config, 1.0 / elements
    )
    return -parts.means()["policy_loss"], parts.means()["kl"]


def test_ddpm_gradient(model: NovaTransformer) -> None:
    v = vectors("grpo_ddpm")
    steps, ar_step = v["diff_index"].tolist(), int(v["mask_step"])
    path = torch.full((5, 4, 16, 16), float("nan"))
    for j, now, after in zip(steps, v["cur"], v["next"], strict=True):
        path[j], path[j + 1] = patches(now), patches(after)
    path[4] = path[4].nan_to_num()  # not scored, but read by the selection
    _, rollout = recorded_step("gen_ddpm_cfg", ar_step, v["z"], path)
    advantage = vectors("grpo")["advantages"]
    policy, _ = score(model, None, rollout, advantage, DdpmSchedule(DDPM, 4), steps, 0.0)
    assert policy == pytest.approx(v["policy"].item(), abs=1e-6)
    expected = v["grad.image_encoder.norm.weight"]
    found = model.get_parameter("image_encoder.norm.weight").grad
    assert found is not None
    close(found, expected, 1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("ar_step", [1, 3])
def test_gaussian_kl(model: NovaTransformer, ar_step: int) -> None:
    v = vectors("grpo")
    other = NovaTransformer(model.config)
    changed = {key.removeprefix("ref."): value for key, value in v.items() if key.startswith("ref.")}
    other.load_state_dict(model.state_dict() | changed)
    generation = vectors("gen_sde_cfg")
    path = torch.cat([patches(generation["init_noise"][ar_step])[None], patches(generation["xs"][ar_step])])
    _, rollout = recorded_step("gen_sde_cfg", ar_step, v[f"m{ar_step}.z"], path)
    steps = v[f"m{ar_step}.diff_index"].tolist()
    with torch.no_grad():
        reference = guided(other)
    _, kl = score(model, reference, rollout, torch.zeros(4), FLOW, steps, 0.01)
    assert kl == pytest.approx(v[f"m{ar_step}.policy_kl_loss"][2].item(), rel=1e-4, abs=1e-6)


def test_extra_trajectories(model: NovaTransformer) -> None:
    v = vectors("grpo")
    live = guided(model)
    predict = live.predictor(live.head_conditions(v["ar_latent_all"], None))
    noise = patches(v["mte_step_noise"]).transpose(0, 1)
    with torch.no_grad():
        path = denoise(predict, FLOW, patches(v["mte_init_noise"]), noise)
    close(path[1:].transpose(0, 1), patches(v["mte_xs"]), 2e-5)


def test_patches_are_those_of_the_model(model: NovaTransformer) -> None:
    latents = torch.arange(4 * 4 * 64.0).view(4, 4, 8, 8)
    assert torch.equal(patches(latents), model.patchify(latents))
