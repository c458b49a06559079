"""Rollout: the schedule, what an image depends on, and what is recorded of it."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mar_grpo.diffusion.guidance import guide
from mar_grpo.errors import InputError
from mar_grpo.models.nova import mask_schedule
from mar_grpo.models.policy import Policy
from mar_grpo.rollout import (
    Guided,
    RecordedStep,
    Rollout,
    SamplingConfig,
    Scope,
    denoise,
    draw_noise,
    generate,
    noise_key,
    roll_out,
)
from tests.unit import tiny, toy

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/nova/mask_schedules.json").read_text())
SAMPLING = SamplingConfig(ar_steps=5, diffusion_steps=4)
GUIDED = SAMPLING.model_copy(update={"guidance_scale": 3.0})
PROMPTS = ["a photo of two red apples", "a dog", "a red circle and a dog", "two apples"]
KEYS = [11, 12, 13, 2**62 + 1]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return toy.policy()


def rolled(
    policy: Policy, sampling: SamplingConfig = SAMPLING, rows: slice = slice(None), **options: object
) -> Rollout:
    guided = Guided.of(policy, policy.encode_prompts(PROMPTS[rows]), sampling)
    return roll_out(guided, KEYS[rows], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", GOLDEN)
def test_schedule_equals_the_recorded_one(name: str) -> None:
    length, steps = (int(part.split("=")[1]) for part in name.split(","))
    assert mask_schedule(length, steps) == [count for count in GOLDEN[name] if count]


@given(length=st.integers(1, 5000), data=st.data())
def test_schedule_commits_every_token_once(length: int, data: st.DataObject) -> None:
    counts = mask_schedule(length, data.draw(st.integers(1, length)))
    assert sum(counts) == length and min(counts) > 0


@pytest.mark.parametrize("scheduler", [tiny.FLOW, {"_class_name": "DDPMScheduler", "prediction_type": "v_prediction"}])
@pytest.mark.parametrize("sampling", [SAMPLING, GUIDED], ids=["plain", "guided"])
def test_an_image_depends_on_prompt_and_key_only(scheduler: dict[str, object], sampling: SamplingConfig) -> None:
    policy = toy.policy(scheduler=scheduler)
    whole = rolled(policy, sampling)
    for row in range(len(KEYS)):
        alone = rolled(policy, sampling, slice(row, row + 1))
        torch.testing.assert_close(alone.tokens[0], whole.tokens[row], rtol=0, atol=1e-4)
    scopes: list[Scope] = ["committed", "unknown"]
    for scope in scopes:
        for recorded in ([], [2], [0, 3, 4]):
            again = rolled(policy, sampling, recorded=recorded, scope=scope, keep_before=True)
            torch.testing.assert_close(again.tokens, whole.tokens, rtol=0, atol=1e-4)
            torch.testing.assert_close(again.z, whole.z, rtol=0, atol=1e-4)
            assert [step.index for step in again.steps] == recorded
    other = Guided.of(policy, policy.encode_prompts(PROMPTS[::-1]), sampling)
    assert (roll_out(other, KEYS).tokens - whole.tokens).abs().amax(dim=(1, 2)).min() > 1e-3
    same_prompt = Guided.of(policy, policy.encode_prompts(PROMPTS[:1] * 4), sampling)
    assert (roll_out(same_prompt, KEYS).tokens.diff(dim=0)).abs().amax(dim=(1, 2)).min() > 1e-3


@pytest.mark.parametrize("scope", ["committed", "unknown"])
@pytest.mark.parametrize("sampling", [SAMPLING, GUIDED], ids=["plain", "guided"])
def test_what_is_recorded_is_what_happened(policy: Policy, scope: Scope, sampling: SamplingConfig) -> None:
    counts = policy.mask_schedule(sampling.ar_steps)
    result = rolled(policy, sampling, recorded=range(len(counts)), scope=scope, keep_before=True)
    order, noise = draw_noise(KEYS, policy.num_tokens, policy.token_dim, sampling.diffusion_steps + 1)
    cond = policy.condition(policy.encode_prompts(PROMPTS))
    schedule = policy.schedule(sampling.diffusion_steps)
    canvas, known = torch.zeros_like(result.tokens), torch.zeros(len(KEYS), policy.num_tokens, dtype=torch.bool)
    for step, count in zip(result.steps, counts, strict=True):
        done = step.num_known
        assert torch.equal(step.known, known) and (known.sum(dim=1) == done).all()
        assert torch.equal(step.tokens, canvas)
        assert step.num_committed == count
        end = policy.num_tokens if scope == "unknown" else done + count
        assert torch.equal(step.places, order[:, done:end])
        final = result.tokens.gather(1, step.places[..., None].expand(-1, -1, policy.token_dim))
        assert torch.equal(step.path[-1][:, :count], final[:, :count])
        if scope == "unknown" and end > done + count:
            assert (step.path[-1][:, count:] - final[:, count:]).abs().min(dim=2).values.max() > 0
            assert not torch.equal(step.path[0][:, count:], at(noise[0], step.places)[:, count:])
        assert torch.equal(step.path[0][:, :count], at(noise[0], step.places)[:, :count])
        z = policy.ar_latents(step.tokens, step.known, cond)
        torch.testing.assert_close(at(z, step.places), step.z, rtol=0, atol=1e-5)
        torch.testing.assert_close(at(result.z, step.places)[:, :count], step.z[:, :count], rtol=0, atol=0)
        deterministic = schedule.num_steps - 1
        mean, _ = schedule.transition(
            deterministic, step.path[-2], guided_head(policy, sampling, step.path[-2], deterministic, result, step)
        )
        torch.testing.assert_close(mean[:, :count], step.path[-1][:, :count], rtol=0, atol=1e-4)
        canvas, known = canvas.clone(), known.clone()
        canvas.scatter_(1, step.places[:, :count, None].expand(-1, -1, policy.token_dim), final[:, :count])
        known.scatter_(1, step.places[:, :count], True)
    assert known.all() and torch.equal(canvas, result.tokens)


def guided_head(
    policy: Policy, sampling: SamplingConfig, x: Tensor, j: int, result: Rollout, step: RecordedStep
) -> Tensor:
    """Guidance written out: u + w (c - u), under the z of this step (for committed tokens that of the rollout)."""
    t = policy.schedule(sampling.diffusion_steps).timestep(j)
    conditional = policy.head(x, t, step.z)
    if result.z_unconditional is None:
        assert sampling.guidance_scale == 1.0
        return conditional
    unconditional = policy.head(x, t, at(result.z_unconditional, step.places))
    return unconditional + sampling.guidance_scale * (conditional - unconditional)


def at(values: Tensor, places: Tensor) -> Tensor:
    return values.gather(1, places[..., None].expand(-1, -1, values.shape[-1]))


def test_what_is_thrown_away_has_noise_of_its_own(policy: Policy) -> None:
    """No number of it is one of the image's, or of another AR step's: streams that overlap share a thousand."""
    steps = rolled(policy, recorded=range(5), scope="unknown").steps
    _, noise = draw_noise(KEYS, policy.num_tokens, policy.token_dim, SAMPLING.diffusion_steps + 1)
    streams = [noise.flatten().tolist(), *(step.path[0][:, step.num_committed :].flatten().tolist() for step in steps)]
    for first, second in combinations(streams, 2):
        assert len(set(first) & set(second)) < 10


def test_tokens_before_are_those_of_the_step_before(policy: Policy) -> None:
    everything = rolled(policy, recorded=range(5), scope="unknown", keep_before=True).steps
    assert everything[0].before is None
    for earlier, now in pairwise(everything):
        assert now.before is not None
        assert torch.equal(now.before, earlier.path[-1][:, earlier.num_committed :])
    (alone,) = rolled(policy, recorded=[3], scope="unknown", keep_before=True).steps
    assert alone.before is not None and everything[3].before is not None
    torch.testing.assert_close(alone.before, everything[3].before, rtol=0, atol=1e-4)
    assert rolled(policy, recorded=[3], scope="unknown").steps[0].before is None
    assert rolled(policy, recorded=[3], keep_before=True).steps[0].before is None


def test_guidance_is_one_function(policy: Policy) -> None:
    conditioning = policy.encode_prompts(PROMPTS[:2])
    generator = torch.Generator().manual_seed(0)
    z, z_uncond = (torch.randn(2, 3, 16, generator=generator) for _ in range(2))
    x = torch.randn(2, 2, 3, policy.token_dim, generator=generator)  # two trajectories of two images
    t = torch.tensor(400.0)
    cond, uncond = policy.head(x, t, z), policy.head(x, t, z_uncond)
    for scale, renorm in ((1.0, 1.0), (3.0, 1.0), (0.0, 1.0), (3.0, 0.2)):
        guided = Guided.of(
            policy, conditioning, SAMPLING.model_copy(update={"guidance_scale": scale, "guidance_renorm": renorm})
        )
        both = guided.head_conditions(z, z_uncond if scale != 1.0 else None)
        expected = torch.stack([guide(c, u, scale, renorm) for c, u in zip(cond, uncond, strict=True)])
        torch.testing.assert_close(guided.predictor(both)(x, t), expected)
        assert (guided.uncond is None) == (scale == 1.0)


def test_denoising_keeps_every_state(policy: Policy) -> None:
    schedule = policy.schedule(3)
    generator = torch.Generator().manual_seed(0)
    start, noise = torch.randn(2, 4, generator=generator), torch.randn(3, 2, 4, generator=generator)
    path = denoise(lambda x, t: x * t / 1000, schedule, start, noise)
    assert path.shape == (4, 2, 4) and torch.equal(path[0], start)
    for j in range(3):
        mean, std = schedule.transition(j, path[j], path[j] * schedule.timestep(j) / 1000)
        torch.testing.assert_close(path[j + 1], mean + std * noise[j])


def test_generating_in_batches_changes_nothing(policy: Policy) -> None:
    whole = generate(policy, PROMPTS, KEYS, SAMPLING)
    parts = generate(policy, PROMPTS, KEYS, SAMPLING.model_copy(update={"batch_size": 3}))
    assert whole.shape == (4, 32, 32, 3) and whole.dtype == torch.uint8
    assert (whole.int() - parts.int()).abs().max() <= 1
    state = torch.get_rng_state()
    generate(policy, PROMPTS[:1], KEYS[:1], SAMPLING)
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_keys_tell_their_parts_apart() -> None:
    keys = {noise_key(*parts) for parts in ((0, 1, 2, 3), (0, 1, 3, 2), (1, 1, 2, 3), (0, 1, 2, 4), (2**40, 1, 2, 3))}
    assert len(keys) == 5 and all(0 <= key < 2**63 for key in keys)
    assert noise_key(7, 1, 2, 3) == noise_key(7, 1, 2, 3)
    assert noise_key(0, 1, 2, 3) == 6463705122041852897  # a change of this number is a change of every image


def test_more_steps_than_tokens_are_refused(policy: Policy) -> None:
    with pytest.raises(InputError, match="17 AR steps for 16 tokens") as error:
        rolled(policy, SAMPLING.model_copy(update={"ar_steps": 17}))
    assert error.value.exit_code == 2
