"""MAR-GRPO's step as the authors' code does it, waste and all: what `tests.benchmarks.update` measures ours against.

A plain, slow version of the method (arXiv 2604.06966) in the released order of work. Defects that the golden data
correct are corrected here too, so that both make the same images and the same gradient: the condition is the BOS
tokens' alone, an AR step's mask is the one before it, no dropout, transitions without variance are not scored. The cost
is the released one:

- rollout: z of every token at every AR step, with and without the prompt; the head on ALL tokens at every AR step
  (NOVA), or at every AR step that is scored, precedes a scored one or is the last (Harmon), and on committed tokens
  elsewhere; states, next states, means, deviations and log-densities of all of them are stored;
- extra trajectories of all tokens, S times over, for NOVA with both guidance rows although they are the same;
- update: for each scored AR step the condition and the trunk on each image, with gradient and for the reference; the
  head on all tokens, transitions and trajectories, in one graph; one backward pass an AR step.

Two things are cheaper here than there, so that nothing flatters ours: the last block of an encoder leaves the
condition's rows out, and z is projected to the head's condition once an AR step, not at every transition (6 % of NOVA's
head, but much more of a miniature's).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mar_grpo.algorithms.config import AlgorithmConfig
from mar_grpo.algorithms.loss import Steps
from mar_grpo.algorithms.selection import consistent, most_uncertain, uncertainty, units
from mar_grpo.diffusion.gaussian import Schedule
from mar_grpo.diffusion.guidance import guide
from mar_grpo.models.nova_policy import NovaPolicy
from mar_grpo.models.policy import Policy
from mar_grpo.noise import draw_noise, noise_key, with_hypothetical
from mar_grpo.rollout import SamplingConfig, _at, schedule_of


@dataclass
class Denoised:
    """T transitions of some tokens, all that is known of them, [T, B, M, C] each."""

    before: Tensor
    after: Tensor
    mean: Tensor
    std: Tensor
    log_prob: Tensor


@dataclass
class Step:
    """An AR step at which the head saw every token: canvas and masks [B, L(, C)] before it, what it committed."""

    canvas: Tensor
    known: Tensor
    committed: Tensor
    chain: Denoised


@dataclass
class Recording:
    """A rollout: tokens [B, L, C], AR steps, and S extra trajectories."""

    tokens: Tensor
    steps: dict[int, Step]
    extra: list[Denoised]


def denoise(
    policy: Policy, schedule: Schedule, latents: Sequence[Tensor], scale: float, noise: Tensor
) -> tuple[Tensor, Denoised]:
    """Final values [B, M, C] and the chain, from z of the guidance rows [B, M, D] and noise [T + 1, B, M, C]."""
    conditions = [policy.head_condition(z) for z in latents]
    state, rows = noise[0], list[tuple[Tensor, ...]]()
    for j in range(schedule.num_steps):
        time = schedule.timestep(j)
        cond, uncond = (policy.head_conditioned(state, policy.head_time(time), part) for part in conditions)
        prediction = guide(cond, uncond, scale, channels=state.shape[-1])
        mean, std = schedule.transition(j, state, prediction)
        after = schedule.step(j, state, prediction, noise[j + 1])
        deviation = torch.as_tensor(std).expand_as(mean)
        rows.append((state, after.clone(), mean, deviation.clone(), log_density(after, mean, deviation, 0.0)))
        state = after
    return state, Denoised(*(torch.stack(part) for part in zip(*rows, strict=True)))


def log_density(x: Tensor, mean: Tensor, std: Tensor, variance_floor: float) -> Tensor:
    quadratic = (x - mean).square() / std.square().clamp(min=variance_floor)
    return -0.5 * quadratic - std.log() - 0.5 * math.log(2 * math.pi)


@torch.no_grad()
def roll_out(
    policy: Policy,
    prompts: Sequence[str],
    keys: Sequence[int],
    steps: Steps,
    sampling: SamplingConfig,
    config: AlgorithmConfig,
) -> Recording:
    """One image per prompt and key, and the extra trajectories, with the noise that `rollout.roll_out` draws."""
    schedule, everywhere = schedule_of(policy, sampling), isinstance(policy, NovaPolicy)
    length, channels, batch = policy.num_tokens, policy.token_dim, len(prompts)
    order, noise = draw_noise(keys, length, channels, schedule.num_steps + 1)
    conditioning = policy.encode_prompts(prompts)
    cond, uncond = (policy.condition(part) for part in (conditioning, conditioning.unconditional()))
    counts = policy.mask_schedule(sampling.ar_steps)
    every_token = torch.arange(length).expand(batch, -1)
    tokens, known = torch.zeros(batch, length, channels), torch.zeros(batch, length, dtype=torch.bool)
    composite = [torch.zeros(batch, length, 1)] * 2
    stored: dict[int, Step] = {}
    done = 0
    for i, count in enumerate(counts):
        z = [policy.ar_latents(tokens, known, part) for part in (cond, uncond)]
        whole = everywhere or i in steps or i + 1 in steps or i + 1 == len(counts)
        places = every_token if whole else order[:, done : done + count]
        drawn = _at(with_hypothetical(noise, order, done + count, keys, i) if whole else noise, places)
        rows = [part.gather(1, places[..., None].expand(-1, -1, part.shape[2])) for part in z]
        final, chain = denoise(policy, schedule, rows, sampling.guidance_scale, drawn)
        committed = torch.zeros_like(known).scatter_(1, order[:, done : done + count], True)
        if whole:
            stored[i] = Step(tokens, known, committed, chain)
        full = tokens.scatter(1, places[..., None].expand_as(final), final)
        tokens = torch.where(committed[..., None], full, tokens)
        composite = [torch.where(committed[..., None], new, old) for new, old in zip(z, composite, strict=True)]
        known = known | committed
        done += count
    if config.trajectories.guidance == "none":
        composite = [composite[0]] * 2
    extra = [
        denoise(policy, schedule, composite, sampling.guidance_scale, noise)[1]
        for noise in _extra_noise(keys, config.trajectories.count, schedule.num_steps + 1, length, channels)
    ]
    return Recording(tokens, stored, extra)


def _extra_noise(keys: Sequence[int], count: int, states: int, length: int, channels: int) -> Tensor:
    """[S, T + 1, B, L, C], as `trajectories.draw_trajectories` draws it."""
    shape = (count, states, length, channels)
    drawn = [torch.randn(shape, generator=torch.Generator().manual_seed(noise_key(key, 2))) for key in keys]
    return torch.stack(drawn, dim=2)


def update(
    policy: Policy,
    reference: Policy,
    prompts: Sequence[str],
    recording: Recording,
    advantage: Tensor,
    steps: Steps,
    sampling: SamplingConfig,
    config: AlgorithmConfig,
) -> float:
    """Add the gradient of the loss to the parameters that require one. Returns the sum of the AR steps' losses."""
    schedule, pixels, total = schedule_of(policy, sampling), policy.pixels_per_token, 0.0
    spread = uncertainty(units(torch.stack([chain.after[-1] for chain in recording.extra]), pixels))
    uncertain = most_uncertain(spread.flatten(1), config.trajectories.share).view_as(spread)
    for i, transitions in steps.items():
        step, j = recording.steps[i], torch.tensor(transitions)
        chains = [step.chain, *recording.extra]
        z = policy.ar_latents(step.canvas, step.known, policy.condition(policy.encode_prompts(prompts)))
        before, after = (torch.stack([getattr(c, part)[j] for c in chains], 1) for part in ("before", "after"))
        mean = _mean(policy, schedule, j, before, z)  # [k, 1 + S, B, L, C]
        with torch.no_grad():
            anchor = reference.condition(reference.encode_prompts(prompts))
            z_anchor = reference.ar_latents(step.canvas, step.known, anchor)
            other = _mean(reference, schedule, j, before[:, :1], z_anchor)[:, 0]
        log_prob = log_density(after, mean, step.chain.std[j][:, None], config.variance_floor)
        ratio = (log_prob - log_prob.detach()).exp() * advantage[:, None, None]
        unknown = (~step.known)[..., None].expand_as(spread)
        keep = unknown & _consistent(recording, i, pixels, config)
        averaged = torch.where(_elements(uncertain, mean), ratio[:, 1:].mean(1), ratio[:, 0])
        shift = other - mean[:, 0]
        kl = shift.exp() - shift - 1
        wide = 1 if config.per == "element" else policy.token_dim
        gain = wide * (averaged * _elements(keep, mean)).sum() / (_elements(keep, mean).sum() * len(j))
        drift = wide * (kl * _elements(unknown, mean)).sum() / (_elements(unknown, mean).sum() * len(j))
        loss = -gain + config.kl.coefficient * drift
        loss.backward()
        total += loss.item()
    return total


def _mean(policy: Policy, schedule: Schedule, j: Tensor, states: Tensor, z: Tensor) -> Tensor:
    """Means of transitions j [k] of states [k, s, B, L, C] under z [B, L, D]; every state has its own row of it."""
    condition = policy.head_condition(z)
    rows = condition.expand(*states.shape[:2], *condition.shape).contiguous()
    prediction = policy.head_conditioned(states, policy.head_time(schedule.timestep(j)[:, None, None, None]), rows)
    return schedule.mean(j, states, prediction)


def _consistent(recording: Recording, i: int, pixels: int, config: AlgorithmConfig) -> Tensor:
    """bool [B, L, U]: tokens (latent pixels for NOVA) that grew more like the finished image, or are committed now."""
    step, final = recording.steps[i], units(recording.tokens, pixels)
    if i < config.selection.first_ar_step:
        return torch.ones(final.shape[:-1], dtype=torch.bool)
    now, past = (units(recording.steps[k].chain.after[-1], pixels) for k in (i, i - 1))
    return consistent(now, past, final, step.committed[..., None], config.selection)


def _elements(mask: Tensor, like: Tensor) -> Tensor:
    """A mask [B, L, U] for each of C channels."""
    return mask.repeat_interleave(like.shape[-1] // mask.shape[-1], dim=-1)
