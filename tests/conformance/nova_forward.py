"""Forward half of the `nova` set: embeddings, head, guidance, schedules, single steps, whole generations."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mar_grpo.diffusion.ddpm import DdpmSchedule
from mar_grpo.diffusion.flow import FlowSchedule
from mar_grpo.diffusion.gaussian import Schedule, log_prob
from mar_grpo.diffusion.guidance import decayed_scale, guide
from mar_grpo.models.heads import time_frequencies
from mar_grpo.models.nova import NovaTransformer, mask_schedule
from mar_grpo.models.nova_policy import NovaPolicy
from mar_grpo.models.policy import Conditioning
from mar_grpo.rollout import Chain, Guided, SamplingConfig, denoise
from tests.conformance.checks import Comparison

CLOSE = 1e-5  # embeddings, head, schedules, single steps, loss formula
Z = 2e-5  # conditions and teacher-forced z, extra trajectories, generations without guidance
ROLLOUT_Z, ROLLOUT = 2e-3, 1e-3  # guidance amplifies rounding from AR step to AR step
LOG_PROB, GRADIENT = 2e-3, 1e-4  # of a DDPM step, the gradient relative to the largest


@dataclass(frozen=True)
class Case:
    """A folder, the transformer of its weights, and the settings in its manifest."""

    compare: Comparison
    model: NovaTransformer
    params: dict[str, Any]

    def input(self, name: str) -> Tensor:
        return self.compare.input(name)

    def equal(self, name: str, value: Tensor, atol: float | Tensor = CLOSE) -> None:
        """Compare what the folder has under this name; that it has nothing else is for `Comparison.unchecked`."""
        if name in self.compare:
            self.compare.equal(name, value, atol=atol)

    def tokens(self, latents: Tensor) -> Tensor:
        """[..., c, H, W] -> [..., L, C]."""
        return self.model.patchify(latents.flatten(0, -4)).unflatten(0, latents.shape[:-3])

    def pixels(self, tokens: Tensor) -> Tensor:
        """[..., L, C] -> [..., c, H, W]."""
        return self.model.unpatchify(tokens).unflatten(0, tokens.shape[:-2])

    def schedule(self, kind: str) -> Schedule:
        """The schedule of a recorded rollout: "ode", "fm" (the SDE, noisy to its end) or "ddpm"."""
        if kind == "ddpm":
            return DdpmSchedule(self.params["ddpm"], self.params["T"])
        eta = 0.0 if kind == "ode" else 0.7
        return FlowSchedule.from_config(self.params["fm"], self.params["T"], eta=eta, last_step_deterministic=False)

    def guided(self, model: NovaTransformer | None = None, scale: float = 1.0) -> Guided:
        """Trunk and head of a transformer under the recorded prompts."""
        prompts, empty = self.compare.golden("embed.prompt_cond"), self.compare.golden("embed.prompt_uncond")
        sampling = SamplingConfig(ar_steps=self.params["ar_steps"], guidance_scale=scale)
        return Guided.of(Bare(model or self.model), Conditioning(prompts, empty[0]), sampling)


class Bare(NovaPolicy):
    """A policy without autoencoder and text encoder, of which the folder has none."""

    def __init__(self, transformer: NovaTransformer) -> None:
        super(NovaPolicy, self).__init__()
        self.transformer = transformer


def take(values: Tensor, ids: Tensor) -> Tensor:
    """values [B, L, C] at ids [B, M] -> [B, M, C]."""
    return values.gather(1, ids[..., None].expand(-1, -1, values.shape[2]))


def states_of(path: Chain) -> Tensor:
    """All states, [T+1, ...]."""
    return torch.stack([path.states[j] for j in range(len(path.states))])


def embeddings(case: Case) -> None:
    model, raw = case.model, [case.input(name) for name in case.compare.names("embed.text_features_")]
    prompts = model.pad_text(raw).repeat_interleave(case.params["gens"], dim=0)
    empty = model.pad_text([prompts.new_zeros(0, prompts.shape[2])] * len(prompts))
    case.equal("embed.prompt_cond", prompts)
    case.equal("embed.prompt_uncond", empty)
    case.equal("embed.text_tokens", model.text_embed(torch.cat([prompts, empty])))
    case.equal("embed.image_pos", model.image_pos)
    case.equal("embed.video_pos", model.video_pos)
    case.equal("embed.time_embed_T1", model.video_pos_embed()[None])
    latents = case.input("embed.patchify_in")
    tokens = model.patchify(latents)
    case.equal("embed.patchify_out", tokens, 0.0)
    case.equal("embed.patchify_in", model.unpatchify(tokens), 0.0)
    case.equal("embed.patch_embed_out", model.image_encoder.patch_embed(tokens))


def head(case: Case) -> None:
    t, z, tokens = case.input("head.t"), case.input("head.z"), case.tokens(case.input("head.x"))
    # 1e-5, or what one float32 ulp of the frequency makes of the angle: `exp` of the recording CPU is one ulp off here
    # and there (MKL_CBWR=COMPATIBLE reproduces it to the bit), which t = 999.5 turns into 3e-5. The head's output,
    # made from these, is compared at 1e-5.
    frequency = torch.exp(-math.log(1e4) * torch.arange(128) / 128).repeat(2)
    case.equal("head.time_freq", time_frequencies(t), (t[:, None] * frequency * 2.0**-23).clamp(min=CLOSE))
    found = case.model.head(tokens, t[:, None], z)
    case.equal("head.out_tokens", found)
    case.equal("head.out_latent", case.pixels(found))
    ids = case.input("head.pred_ids")[..., 0]
    case.equal("head.out_tokens_gathered", case.model.head(take(tokens, ids), t[:, None], take(z, ids)))


def guidance(case: Case) -> None:
    """Names hold the numbers: plain_s5, renorm07_s5 (0.7), decay_7_min2_of4."""
    cond, uncond = case.input("guidance.cond_uncond").chunk(2)
    for name in case.compare.names("guidance."):
        if found := re.fullmatch(r"guidance\.plain_s([\d.]+)", name):
            case.equal(name, guide(cond, uncond, float(found[1])))
        elif found := re.fullmatch(r"guidance\.renorm0(\d+)_s([\d.]+)", name):
            case.equal(name, guide(cond, uncond, float(found[2]), renorm=float(f"0.{found[1]}")))
        elif found := re.fullmatch(r"guidance\.decay_([\d.]+)_min([\d.]+)_of(\d+)", name):
            steps = int(found[3])
            scales = [decayed_scale(float(found[1]), float(found[2]), i, steps) for i in range(steps)]
            case.equal(name, torch.tensor(scales))


def schedules(case: Case) -> None:
    params = case.params
    flow = FlowSchedule.from_config(params["fm"], params["T"])
    case.equal("sched.fm_sigmas", flow.sigmas)
    case.equal("sched.fm_timesteps", flow.timesteps)
    for name in case.compare.names("sched.fm_sigmas_"):
        case.equal(name, FlowSchedule.from_config(params["fm"], int(name.rpartition("_")[2])).sigmas)
    ddpm = DdpmSchedule(params["ddpm"], params["T"])
    case.equal("sched.ddpm_timesteps", ddpm.timesteps, 0.0)
    case.equal("sched.ddpm_alphas_cumprod", ddpm.alphas_cumprod)
    for key, counts in case.compare.manifest["mask_schedules"].items():
        length, steps = (int(number) for number in re.findall(r"\d+", key))
        case.compare.same(f"mask_schedules.{key}", mask_schedule(length, steps), [n for n in counts if n])
    recorded = case.compare.manifest["num_preds"]
    case.compare.same("num_preds", mask_schedule(case.model.config.num_tokens, params["ar_steps"]), recorded)


def flow_steps(case: Case) -> None:
    for part in sorted({name.split(".")[0] for name in case.compare.names("step_fm")}):
        index, x, after = (case.input(f"{part}.{key}") for key in ("index", "x", "prev"))
        velocity = case.input(f"{part}.v").requires_grad_()
        count = int(part.removeprefix("step_fm") or case.params["T"])
        schedule = FlowSchedule.from_config(case.params["fm"], count, last_step_deterministic=False)
        case.equal(f"{part}.sigmas", schedule.sigmas)
        mean, std = schedule.transition(index, x, velocity)
        density = log_prob(after, mean, std)
        (gradient,) = torch.autograd.grad(density.sum(), velocity)
        case.equal(f"{part}.std", torch.as_tensor(std).flatten())
        case.equal(f"{part}.dlogp_dv", gradient)
        rows = [schedule.transition(j, x[row], velocity[row]) for row, j in enumerate(index.tolist())]
        densities = [log_prob(after[row], *gaussian) for row, gaussian in enumerate(rows)]
        for means, found in ((mean, density), (torch.stack([m for m, _ in rows]), torch.stack(densities))):
            case.equal(f"{part}.mean", means)  # steps by index tensor and one by one
            case.equal(f"{part}.log_prob", found)


def ddpm_steps(case: Case) -> None:
    x, noise, after = (case.input(f"step_ddpm.{key}") for key in ("x", "eps", "prev"))
    schedule = DdpmSchedule(case.params["ddpm"], case.params["T"])
    steps = range(schedule.num_steps)
    valid = [schedule.stochastic(j) for j in steps]
    case.equal("step_ddpm.valid", torch.tensor(valid), 0.0)
    case.equal("step_ddpm.var", torch.tensor(schedule.std) ** 2)
    density, gradient = torch.zeros_like(x), torch.zeros_like(x)
    samples, means = [], []
    for j in steps:
        prediction = noise[j].requires_grad_()
        samples.append(schedule.predicted_sample(j, x[j], prediction))
        with torch.enable_grad():
            mean, std = schedule.transition(j, x[j], prediction)
            means.append(mean.detach())
            if valid[j]:
                found = log_prob(after[j], mean, std)
                density[j] = found.detach()
                (gradient[j],) = torch.autograd.grad(found.sum(), prediction)
    case.equal("step_ddpm.x0", torch.stack(samples))
    case.equal("step_ddpm.mean", torch.stack(means))
    case.equal("step_ddpm.log_prob", density, LOG_PROB)
    case.compare.equal("step_ddpm.dlogp_deps", gradient, of_max=GRADIENT)


def generation(case: Case, name: str, settings: dict[str, Any]) -> None:
    """Replay a recorded generation, order and noise given."""
    schedule, scale, compare = case.schedule(settings["scheduler"]), settings["guidance_scale"], case.compare
    all_tokens, bound = settings["head_on"] == "all tokens", Z if scale == 1.0 else ROLLOUT
    order, start = case.input(f"{name}.mask_order"), case.tokens(case.input(f"{name}.init_noise"))
    noise = start[:, None].expand(-1, schedule.num_steps, -1, -1, -1)  # not read where a step is deterministic
    if f"{name}.step_noise" in compare:
        noise = case.tokens(case.input(f"{name}.step_noise"))
    guided = case.guided(scale=scale)
    batch, length = order.shape
    case.equal(f"{name}.c", _both(guided.cond, guided.uncond), Z)
    tokens, known = torch.zeros_like(start[0]), torch.zeros(order.shape, dtype=torch.bool)
    everywhere = torch.arange(length).expand(batch, -1)
    states, canvases, done = [], [], 0
    for i, count in enumerate(compare.manifest["num_preds"]):
        canvases.append(case.pixels(tokens))
        z = guided.latents(tokens, known, done, everywhere)
        case.equal(f"{name}.z_{i}", _both(*z), ROLLOUT_Z)
        now = order[:, done : done + count]
        rows = everywhere if all_tokens else now
        if i == 0:  # where the head did not run, the noise stands
            conditions = guided.head_conditions(*(part if part is None else take(part, rows) for part in z))
            x, t = take(start[0], rows), schedule.timestep(0)
            outs = [case.model.head_conditioned(x, case.model.head_time(t), condition) for condition in conditions]
            at = rows[..., None].expand_as(x)
            case.equal(f"{name}.head_out_0", torch.cat([start[0].scatter(1, at, out) for out in outs]))
        predict = guided.predictor(guided.head_conditions(*(part if part is None else take(part, rows) for part in z)))
        path = states_of(
            denoise(predict, schedule, take(start[i], rows), torch.stack([take(step, rows) for step in noise[i]]))
        )
        states.append(path[1:])
        new = take(path[-1], now) if all_tokens else path[-1]
        tokens = tokens.scatter(1, now[..., None].expand_as(new), new)
        known, done = known.scatter(1, now, True), done + count
    case.equal(f"{name}.latents", case.pixels(tokens)[:, :, None], bound)
    case.equal(f"{name}.latents_fp64", case.pixels(tokens), bound)
    if all_tokens:
        means = [schedule.mean(j, path[j], predict(path[j], schedule.timestep(j))) for j in range(schedule.num_steps)]
        case.equal(f"{name}.x_latent", torch.stack(canvases), bound)
        case.equal(f"{name}.xs", case.pixels(torch.stack(states)), bound)
        case.equal(f"{name}.mean_last_ar", case.pixels(torch.stack(means)), bound)


def _both(cond: Tensor, uncond: Tensor | None) -> Tensor:
    return cond if uncond is None else torch.cat([cond, uncond.expand_as(cond)])
