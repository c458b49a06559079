"""Rollout: the schedule, what an image depends on, and what is recorded of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
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
from mar_grpo.noise import draw_noise, noise_key
from mar_grpo.rollout import (
    Guided,
    RecordedStep,
    Rollout,
    SamplingConfig,
    Scope,
    denoise,
    generate,
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


def every(ar_steps: Iterable[int], transitions: Sequence[int] = range(4)) -> dict[int, Sequence[int]]:
    """The same transitions of each AR step."""
    return dict.fromkeys(ar_steps, transitions)


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
    whole = rolled(policy, sampling, keep=["z"])
    for row in range(len(KEYS)):
        alone = rolled(policy, sampling, slice(row, row + 1))
        torch.testing.assert_close(alone.tokens[0], whole.tokens[row], rtol=2e-5, atol=1e-4)
    scopes: list[Scope] = ["committed", "unknown"]
    for scope in scopes:
        for recorded in ([], [2], [0, 3, 4]):
            again = rolled(policy, sampling, recorded=every(recorded), scope=scope, keep=["before", "z"])
            torch.testing.assert_close(again.tokens, whole.tokens, rtol=2e-5, atol=1e-4)
            assert again.z is not None and whole.z is not None
            torch.testing.assert_close(again.z, whole.z, rtol=2e-5, atol=1e-4)
            assert [step.index for step in again.steps] == recorded
    other = Guided.of(policy, policy.encode_prompts(PROMPTS[::-1]), sampling)
    assert (roll_out(other, KEYS).tokens - whole.tokens).abs().amax(dim=(1, 2)).min() > 1e-3
    same_prompt = Guided.of(policy, policy.encode_prompts(PROMPTS[:1] * 4), sampling)
    assert (roll_out(same_prompt, KEYS).tokens.diff(dim=0)).abs().amax(dim=(1, 2)).min() > 1e-3


@pytest.mark.parametrize("scope", ["committed", "unknown"])
@pytest.mark.parametrize("sampling", [SAMPLING, GUIDED], ids=["plain", "guided"])
def test_what_is_recorded_is_what_happened(policy: Policy, scope: Scope, sampling: SamplingConfig) -> None:
    counts = policy.mask_schedule(sampling.ar_steps)
    result = rolled(policy, sampling, recorded=every(range(len(counts))), scope=scope, keep=["z"])
    assert result.z is not None
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
        assert torch.equal(step.path.final[:, :count], final[:, :count])
        if scope == "unknown" and end > done + count:
            assert (step.path.final[:, count:] - final[:, count:]).abs().min(dim=2).values.max() > 0
            assert not torch.equal(step.path.states[0][:, count:], at(noise[0], step.places)[:, count:])
        assert torch.equal(step.path.states[0][:, :count], at(noise[0], step.places)[:, :count])
        z = policy.ar_latents(step.tokens, step.known, cond)
        torch.testing.assert_close(at(z, step.places), step.z, rtol=0, atol=1e-5)
        torch.testing.assert_close(at(result.z, step.places)[:, :count], step.z[:, :count], rtol=0, atol=0)
        for j in range(schedule.num_steps):  # the noise of every transition is what lies between state and mean
            before, after = step.path.pair(j)
            mean, std = schedule.transition(j, before, guided_head(policy, sampling, before, j, result, step))
            own = mean + std * at(noise[j + 1], step.places)
            torch.testing.assert_close(after[:, :count], own[:, :count], rtol=2e-5, atol=1e-4)
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
    steps = rolled(policy, recorded=every(range(5)), scope="unknown").steps
    _, noise = draw_noise(KEYS, policy.num_tokens, policy.token_dim, SAMPLING.diffusion_steps + 1)
    streams = [
        noise.flatten().tolist(),
        *(step.path.states[0][:, step.num_committed :].flatten().tolist() for step in steps),
    ]
    for first, second in combinations(streams, 2):
        assert len(set(first) & set(second)) < 10


def test_tokens_before_are_those_of_the_step_before(policy: Policy) -> None:
    everything = rolled(policy, recorded=every(range(5)), scope="unknown", keep=["before"]).steps
    assert everything[0].before is None
    for earlier, now in pairwise(everything):
        assert now.before is not None
        assert torch.equal(now.before, earlier.path.final[:, earlier.num_committed :])
    (alone,) = rolled(policy, recorded={3: [0]}, scope="unknown", keep=["before"]).steps
    assert alone.before is not None and everything[3].before is not None
    torch.testing.assert_close(alone.before, everything[3].before, rtol=2e-5, atol=1e-4)
    assert rolled(policy, recorded={3: [0]}, scope="unknown").steps[0].before is None
    assert rolled(policy, recorded={3: [0]}, keep=["before"]).steps[0].before is None


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


def test_denoising_keeps_the_states_that_are_asked_for(policy: Policy) -> None:
    schedule = policy.schedule(4)
    generator = torch.Generator().manual_seed(0)
    start, noise = torch.randn(2, 4, generator=generator), torch.randn(4, 2, 4, generator=generator)

    def predict(x: Tensor, t: Tensor) -> Tensor:
        return x * t / 1000

    whole = denoise(predict, schedule, start, noise)
    assert sorted(whole.states) == [0, 1, 2, 3, 4] and torch.equal(whole.states[0], start)
    assert torch.equal(whole.final, whole.states[4]) and whole.std == {}
    for j in range(4):
        before, after = whole.pair(j)
        mean, std = schedule.transition(j, before, predict(before, schedule.timestep(j)))
        torch.testing.assert_close(after, mean + std * noise[j])
    for scored, kept in (([], []), ([0], [0, 1]), ([1, 2], [1, 2, 3]), ([0, 3], [0, 1, 3, 4])):
        some = denoise(predict, schedule, start, noise, scored=scored, keep_std=True)
        assert sorted(some.states) == kept and sorted(some.std) == scored
        assert all(torch.equal(state, whole.states[j]) for j, state in some.states.items())
        assert torch.equal(some.final, whole.final)
        assert all(std == schedule.std[j] for j, std in some.std.items())


def test_only_what_the_update_reads_is_stored(policy: Policy) -> None:
    """States around the scored transitions, those of each AR step its own; nothing else without being asked."""
    result = rolled(policy, GUIDED, recorded={1: [0, 2], 4: [1]}, scope="unknown")
    assert [(step.index, sorted(step.path.states)) for step in result.steps] == [(1, [0, 1, 2, 3]), (4, [1, 2])]
    assert all(step.path.std == {} and step.before is None and step.z_unconditional is None for step in result.steps)
    assert result.z is None and result.z_unconditional is None and result.scale is None
    everything = rolled(policy, GUIDED, recorded=every(range(5)), scope="unknown", keep=["unconditional", "std", "z"])
    assert everything.z_unconditional is not None
    for step in result.steps:
        other = everything.steps[step.index]
        for j, state in step.path.states.items():
            torch.testing.assert_close(state, other.path.states[j], rtol=2e-5, atol=1e-4)
        assert sorted(other.path.std) == [0, 1, 2, 3] and other.z_unconditional is not None
        composite = at(everything.z_unconditional, other.places)[:, : other.num_committed]
        assert torch.equal(other.z_unconditional[:, : other.num_committed], composite)
    assert rolled(policy, recorded={1: [0]}, keep=["unconditional"]).steps[0].z_unconditional is None  # not guided


def test_given_noise_is_used_instead_of_the_keys(policy: Policy) -> None:
    whole, reverse = rolled(policy), KEYS[::-1]
    guided = Guided.of(policy, policy.encode_prompts(PROMPTS), SAMPLING)
    drawn = draw_noise(KEYS, policy.num_tokens, policy.token_dim, SAMPLING.diffusion_steps + 1)  # type: ignore[operator]
    assert torch.equal(roll_out(guided, reverse, drawn=drawn).tokens, whole.tokens)
    assert not torch.equal(roll_out(guided, reverse).tokens, whole.tokens)


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


def test_the_head_embeds_a_diffusion_step_once(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    embed = policy.head_time
    monkeypatch.setattr(policy, "head_time", lambda t: (seen.append(float(t)), embed(t))[1])
    rolled(policy, GUIDED)
    schedule = policy.schedule(GUIDED.diffusion_steps)
    assert seen == [float(schedule.timestep(j)) for j in range(schedule.num_steps)]
    guided = Guided.of(policy, policy.encode_prompts(PROMPTS), GUIDED)
    assert guided.time(schedule.timestep(0)) is guided.rows(torch.tensor([0, 1])).time(schedule.timestep(0))
    monkeypatch.undo()
    trained = policy.frozen_copy().requires_grad_(True)
    guided = Guided.of(trained, policy.encode_prompts(PROMPTS), GUIDED)
    first, second = (guided.time(schedule.timestep(0)) for _ in range(2))
    assert first.requires_grad and first is not second  # each backward pass needs a graph of its own


def test_nobody_looks_at_tokens_before_the_first_step_that_reads_them(policy: Policy) -> None:
    steps = rolled(policy, recorded={1: [0], 3: [0]}, scope="unknown", keep=["before"], first_before=2).steps
    assert steps[0].before is None and steps[1].before is not None
