"""Masked autoregressive generation that records exactly what an update needs.

An image is made in K AR steps. Step i commits the next tokens of the image's own random order; the diffusion head turns
noise into each of them in T Gaussian transitions. A token's noise is drawn from the image's key alone, so an image
depends on (prompt, key) only: not on the batch, the number of processes, or which steps are recorded.

The head runs on committed tokens only, except where a recorded step also wants the tokens that are still unknown
(scope "unknown": their trajectories are hypothetical and thrown away after the update).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor

from mar_grpo.diffusion.gaussian import Schedule, Std
from mar_grpo.diffusion.guidance import guide
from mar_grpo.diffusion.respaced import kept_steps
from mar_grpo.errors import InputError
from mar_grpo.models.policy import Conditioning, Policy
from mar_grpo.noise import draw_noise, with_hypothetical

Scope = Literal["committed", "unknown"]
Kept = Literal["before", "z", "std", "unconditional"]
Predict = Callable[[Tensor, Tensor], Tensor]


class SamplingConfig(BaseModel):
    """How an image is sampled.

    Args:
        ar_steps: K; more than tokens makes no sense and is refused when sampling starts.
        diffusion_steps: T; or, for MAR and Harmon, a respacing of their 1000 steps ("ddim10", see `kept_steps`).
        guidance_scale: 1 is no guidance (and half the work); guidance_renorm below 1 limits the norm.
        guidance_schedule: `linear` lets the scale grow from 1 with the share of tokens that are committed after a step.
        noise_level: eta of the flow SDE, 0 for the ODE (DDPM checkpoints have their own noise).
        temperature: what the deviation of every diffusion step is multiplied by.
        batch_size: images generated at once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ar_steps: int = Field(12, gt=0)
    diffusion_steps: int | str = 10
    guidance_scale: float = Field(1.0, ge=0, allow_inf_nan=False)
    guidance_renorm: float = Field(1.0, gt=0, le=1)
    guidance_schedule: Literal["constant", "linear"] = "constant"
    noise_level: float = Field(0.7, ge=0, allow_inf_nan=False)
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    batch_size: int = Field(128, gt=0)

    @field_validator("diffusion_steps", mode="before")
    @classmethod
    def _steps(cls, value: Any) -> int | str:
        """A number in quotes is that number; a respacing must be one."""
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError("Input should be a number of steps or a respacing such as 'ddim10'")
        if isinstance(value, int) and value < 1:
            raise ValueError("Input should be greater than 0")
        if isinstance(value, str):
            try:
                kept_steps(value)
            except InputError as error:
                raise ValueError(str(error)) from None
        return value

    @property
    def num_diffusion_steps(self) -> int:
        """T."""
        return self.diffusion_steps if isinstance(self.diffusion_steps, int) else len(kept_steps(self.diffusion_steps))


def schedule_of(policy: Policy, sampling: SamplingConfig) -> Schedule:
    """The diffusion schedule that sampling and scoring share. Raises InputError as `Policy.schedule`."""
    return policy.schedule(sampling.diffusion_steps, eta=sampling.noise_level).at_temperature(sampling.temperature)


@dataclass(frozen=True)
class Chain:
    """What is kept of T transitions: states float32 [..., C] by step (T: the final one), and deviations of steps."""

    final: Tensor
    states: dict[int, Tensor]
    std: dict[int, Std] = field(default_factory=dict)

    def pair(self, j: int) -> tuple[Tensor, Tensor]:
        """States before and after step j."""
        return self.states[j], self.states[j + 1]


@dataclass(frozen=True)
class RecordedStep:
    """One AR step as the update reads it.

    `places` are the tokens with a trajectory, the `num_committed` that the step committed first. Shapes: M places.
    """

    index: int
    tokens: Tensor  # [B, L, C] canvas before the step
    known: Tensor  # bool [B, L]
    num_known: int
    places: Tensor  # int64 [B, M]
    num_committed: int
    path: Chain  # [B, M, C]: states around the scored transitions
    z: Tensor  # [B, M, D], without gradient
    z_unconditional: Tensor | None = None  # the same, where it was asked for
    before: Tensor | None = None  # float32 [B, M, C], final state of the same tokens in the AR step before


@dataclass(frozen=True)
class Rollout:
    """A batch of finished images: tokens [B, L, C], what each recorded step needs, and z at commitment [B, L, D].

    z is None where nobody asked for it. `scale` is the guidance scale at commitment [B, L, 1]; None where it is
    constant.
    """

    tokens: Tensor
    steps: list[RecordedStep]
    z: Tensor | None
    z_unconditional: Tensor | None
    scale: Tensor | None = None


class Guided:
    """Trunk and head of a policy under guidance: one place for sampling and for scoring.

    Valid until the policy's weights change: it remembers what the head makes of a diffusion step.
    """

    def __init__(self, policy: Policy, cond: Tensor, uncond: Tensor | None, sampling: SamplingConfig) -> None:
        self.policy, self.cond, self.uncond, self.sampling = policy, cond, uncond, sampling
        self._times: dict[tuple[Tensor, bool], Tensor] = {}

    def _same(self, cond: Tensor, uncond: Tensor | None) -> Guided:
        """The same policy under another condition."""
        other = Guided(self.policy, cond, uncond, self.sampling)
        other._times = self._times
        return other

    @classmethod
    def of(
        cls, policy: Policy, conditioning: Conditioning, sampling: SamplingConfig, *, unguided: bool = False
    ) -> Guided:
        """Condition tokens of the prompts, [P, N, F], and of no prompt, [1, N', F], where guidance needs them."""
        uncond = None
        if sampling.guidance_scale != 1.0 and not unguided:
            uncond = policy.condition(conditioning.unconditional(1))
        return cls(policy, policy.condition(conditioning), uncond, sampling)

    def rows(self, index: Tensor) -> Guided:
        """The same for images that share prompts: image b has prompt index[b]."""
        uncond = None if self.uncond is None else self.uncond.expand(len(index), -1, -1)
        return self._same(self.cond[index], uncond)

    def unguided(self) -> Guided:
        """The conditional branch alone."""
        return self._same(self.cond, None)

    def leaves(self) -> Guided:
        """The same values cut off from the graph, collecting gradient (where there is any) for `backward_through`."""
        cond = self.cond.detach().requires_grad_(self.cond.requires_grad)
        uncond = self.uncond if self.uncond is None else self.uncond.detach().requires_grad_(self.uncond.requires_grad)
        return self._same(cond, uncond)

    def backward_through(self, leaves: Guided) -> None:
        """Send the gradient that `leaves` collected on to the parameters behind the condition."""
        pairs = [(self.cond, leaves.cond), (self.uncond, leaves.uncond)]
        used = [
            (out, leaf.grad) for out, leaf in pairs if out is not None and leaf is not None and leaf.grad is not None
        ]
        if used:
            torch.autograd.backward([out for out, _ in used], [grad for _, grad in used])

    def scale(self, num_done: int) -> float:
        """Guidance scale of the AR step after which `num_done` tokens are committed.

        Linear: 1 + (scale - 1) num_done / L, where the last step counts all tokens but one (as MAR does).
        """
        scale = self.sampling.guidance_scale
        if self.sampling.guidance_schedule == "constant":
            return scale
        length = self.policy.num_tokens
        return 1.0 + (scale - 1.0) * min(num_done, length - 1) / length

    def latents(self, tokens: Tensor, known: Tensor, num_known: int, places: Tensor) -> tuple[Tensor, Tensor | None]:
        """z [B, M, D] at `places`, conditional and (under guidance) unconditional."""
        z = self.policy.ar_latents(tokens, known, self.cond, num_known=num_known, wanted=places)
        if self.uncond is None:
            return z, None
        uncond = self.uncond.expand(len(tokens), -1, -1)
        return z, self.policy.ar_latents(tokens, known, uncond, num_known=num_known, wanted=places)

    def head_conditions(self, z: Tensor, z_uncond: Tensor | None) -> list[Tensor]:
        """What the head needs of z, once for all transitions: [conditional] or [conditional, unconditional]."""
        return [self.policy.head_condition(part) for part in (z, z_uncond) if part is not None]

    def time(self, t: Tensor) -> Tensor:
        """What the head makes of t, once for each tensor (a schedule has one for each step)."""
        key = (t, torch.is_grad_enabled())
        if (found := self._times.get(key)) is not None:
            return found
        found = self.policy.head_time(t)
        if not found.requires_grad:  # a graph serves one backward pass
            self._times[key] = found
        return found

    def predictor(self, conditions: Sequence[Tensor], scale: float | Tensor | None = None) -> Predict:
        """A function (x_t [..., B, M, C], t) -> guided prediction [..., B, M, P]; guidance is here and nowhere else.

        Args:
            scale: from `self.scale`, or [B, M, 1]; default the constant scale.
        """
        policy, renorm = self.policy, self.sampling.guidance_renorm
        scale = self.sampling.guidance_scale if scale is None else scale
        if len(conditions) == 1:
            return lambda x_t, t: policy.head_conditioned(x_t, self.time(t), conditions[0])
        both = torch.stack(list(conditions))

        def guided(x_t: Tensor, t: Tensor) -> Tensor:
            trajectories = (1,) * (x_t.dim() + 1 - both.dim())
            cond, uncond = policy.head_conditioned(x_t, self.time(t), both.view(2, *trajectories, *both.shape[1:]))
            channels = x_t.shape[-1]
            if renorm >= 1.0:
                return guide(cond, uncond, scale, channels=channels)
            one = scale.expand(*cond.shape[:-1], 1).flatten(0, -3) if isinstance(scale, Tensor) else scale
            flat = [part.reshape(-1, *part.shape[-2:]) for part in (cond, uncond)]
            return guide(flat[0], flat[1], one, renorm, channels=channels).view_as(cond)

        return guided


def denoise(
    predict: Predict,
    schedule: Schedule,
    start: Tensor,
    step_noise: Tensor,
    *,
    scored: Collection[int] | None = None,
    keep_std: bool = False,
) -> Chain:
    """T transitions.

    Args:
        predict: (x_t, t) -> prediction.
        start: unit noise [..., C]; step_noise: unit noise [T, ..., C].
        scored: transitions whose states are kept; None keeps all.
        keep_std: also keep the deviations of those.
    """
    state, states, deviations = start.float(), {}, {}
    for j in range(schedule.num_steps):
        wanted = scored is None or j in scored
        if wanted or (scored is not None and j - 1 in scored):
            states[j] = state
        prediction = predict(state, schedule.timestep(j))
        if wanted and keep_std:
            deviations[j] = schedule.transition(j, state, prediction)[1]
        state = schedule.step(j, state, prediction, step_noise[j])
    if scored is None or schedule.num_steps - 1 in scored:
        states[schedule.num_steps] = state
    return Chain(state, states, deviations)


@torch.no_grad()
def roll_out(
    guided: Guided,
    keys: Sequence[int],
    *,
    recorded: Mapping[int, Collection[int]] | None = None,
    scope: Scope = "committed",
    keep: Collection[Kept] = (),
    first_before: int = 1,
    drawn: tuple[Tensor, Tensor] | None = None,
) -> Rollout:
    """Generate one image per key.

    Args:
        guided: the policy under each image's prompt.
        keys: noise key of each image.
        recorded: AR steps (of `Policy.mask_schedule`) to record, and the transitions of each.
        scope: which tokens have a trajectory in a recorded step.
        keep: also `before`, what unknown tokens looked like one AR step earlier (delta consistency); `z`, z at
            commitment (composite trajectories); `std`, deviations of the recorded transitions; `unconditional`, z of
            recorded steps without the prompt.
        first_before: the first AR step that reads `before`.
        drawn: orders and noise instead of those that `draw_noise` makes of the keys.

    Raises:
        InputError: more AR steps than tokens.
    """
    policy, sampling, device = guided.policy, guided.sampling, guided.cond.device
    length, channels = policy.num_tokens, policy.token_dim
    if sampling.ar_steps > length:
        raise InputError(
            f"{sampling.ar_steps} AR steps for {length} tokens", where="ar_steps", hint=f"use at most {length}"
        )
    recorded = recorded or {}
    counts = policy.mask_schedule(sampling.ar_steps)
    schedule = schedule_of(policy, sampling)
    order, noise = (part.to(device) for part in drawn or draw_noise(keys, length, channels, schedule.num_steps + 1))
    batch = len(keys)
    tokens = torch.zeros(batch, length, channels, device=device)
    known = torch.zeros(batch, length, dtype=torch.bool, device=device)
    composite = _Composite(length) if "z" in keep else None
    steps: list[RecordedStep] = []
    before: Tensor | None = None
    num_known = 0
    for index, count in enumerate(counts):
        ahead = "before" in keep and index + 1 in recorded and index + 1 >= first_before
        wide = scope == "unknown" and (index in recorded or ahead)
        places = order[:, num_known:] if wide else order[:, num_known : num_known + count]
        z, z_uncond = guided.latents(tokens, known, num_known, places)
        chosen = noise if not wide else with_hypothetical(noise, order, num_known + count, keys, index)
        chosen = _at(chosen, places)
        scale = guided.scale(num_known + count)
        predict = guided.predictor(guided.head_conditions(z, z_uncond), scale)
        scored = recorded.get(index, ())
        path = denoise(predict, schedule, chosen[0], chosen[1:], scored=scored, keep_std="std" in keep)
        if index in recorded:
            earlier = None if before is None or not wide else _at(before[None], places)[0]
            other = z_uncond if "unconditional" in keep else None
            canvas = (tokens.clone(), known.clone(), num_known)
            steps.append(RecordedStep(index, *canvas, places, count, path, z, other, earlier))
        committed = places[:, :count, None]
        tokens.scatter_(1, committed.expand(-1, -1, channels), path.final[:, :count])
        known.scatter_(1, committed[..., 0], True)
        if composite:
            composite.add(committed, z, z_uncond, scale if sampling.guidance_schedule == "linear" else None)
        before = None
        if wide and ahead:
            before = tokens.clone().scatter_(1, places[..., None].expand(-1, -1, channels), path.final)
        num_known += count
    if composite is None:
        return Rollout(tokens, steps, None, None)
    return Rollout(tokens, steps, composite.z, composite.z_unconditional, composite.scale)


class _Composite:
    """z at the step that committed each token, float32 [B, L, D], and the guidance scale then [B, L, 1]."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.z: Tensor | None = None
        self.z_unconditional: Tensor | None = None
        self.scale: Tensor | None = None

    def add(self, committed: Tensor, z: Tensor, z_uncond: Tensor | None, scale: float | None) -> None:
        """What a step committed at [B, m, 1], the first m of z [B, M, D]."""
        self.z = self._put(self.z, committed, z)
        if z_uncond is not None:
            self.z_unconditional = self._put(self.z_unconditional, committed, z_uncond)
        if scale is not None:
            self.scale = self._put(self.scale, committed, torch.full_like(z[..., :1], scale, dtype=torch.float32))

    def _put(self, gathered: Tensor | None, committed: Tensor, values: Tensor) -> Tensor:
        if gathered is None:
            gathered = torch.zeros(len(values), self.length, values.shape[2], device=values.device)
        index = committed.expand(-1, -1, values.shape[2])
        return gathered.scatter_(1, index, values[:, : committed.shape[1]].float())


def _at(values: Tensor, places: Tensor) -> Tensor:
    """Values [N, B, L, C] at places [B, M] -> [N, B, M, C]."""
    index = places[None, :, :, None].expand(len(values), -1, -1, values.shape[-1])
    return values.gather(2, index)


@torch.no_grad()
def generate(policy: Policy, prompts: Sequence[str], keys: Sequence[int], sampling: SamplingConfig) -> Tensor:
    """Images uint8 [B, H, W, 3], one per (prompt, key), in batches; the result does not depend on the batches."""
    images = []
    for start in range(0, len(prompts), sampling.batch_size):
        rows = slice(start, start + sampling.batch_size)
        rollout = roll_out(Guided.of(policy, policy.encode_prompts(prompts[rows]), sampling), keys[rows])
        images.append(policy.decode(rollout.tokens))
    return torch.cat(images)
