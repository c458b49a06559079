"""A folder of the `mar` set: forward, head, schedules, transitions, training loss, whole generations, log-prob chain.

Noise, orders and masks are recorded, nothing is drawn here. Recorded orders reveal tokens from their end, ours from the
front; recorded noise belongs to an AR step, ours to a token, which is made in one AR step only.
"""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mar_grpo.diffusion.gaussian import log_prob
from mar_grpo.diffusion.guidance import guide
from mar_grpo.diffusion.respaced import RespacedSchedule, noised, training_loss
from mar_grpo.models.blocks import known_places
from mar_grpo.models.heads import time_frequencies
from mar_grpo.models.mar import Mar, MarConfig, MarPolicy, mask_schedule
from mar_grpo.models.policy import Policy
from mar_grpo.rollout import Guided, SamplingConfig, denoise, roll_out
from tests.conformance.checks import Comparison
from tests.conformance.nova_forward import states_of

FORWARD = {"atol": 2e-5, "rtol": 1e-4}
SAMPLED = {"of_max": 1e-3}
TABLES = {"rtol": 1e-12}  # float64
DENSITY = {"atol": 2e-3}


class BarePolicy(MarPolicy):
    """A policy without an autoencoder, which the folder does not hold."""

    def __init__(self, transformer: Mar) -> None:
        Policy.__init__(self)
        self.transformer, self.class_names = transformer, {}


def check(folder: Path, compare: Comparison) -> None:
    policy = BarePolicy(model(compare)).eval().requires_grad_(False)
    with torch.no_grad():
        forward(policy.transformer, compare)
        head(policy, compare)
        tables(compare)
        transitions(policy, compare)
        training(policy, compare)
        generations(policy, compare)
        chain(policy, compare)
    counts(folder, compare)


def model(compare: Comparison) -> Mar:
    """The network of the folder; the images' shape is that of the recorded latents, which need not be square."""
    published = dict(compare.manifest["config"])
    pixels = [side * published["vae_stride"] for side in compare.input("fwd.latent_image").shape[2:]]
    made = Mar(MarConfig.from_dict({**published, "img_size": pixels}))
    compare.load(made)
    return made


def forward(mar: Mar, compare: Comparison) -> None:
    tokens = mar.patchify(compare.input("fwd.latent_image"))
    compare.equal("fwd.tokens", tokens)
    compare.same("fwd.unpatchify", mar.unpatchify(tokens), compare.golden("fwd.latent_image"))
    known = compare.input("fwd.mask") == 0
    places = known_places(known)
    cond = mar.class_emb(compare.input("fwd.labels"))[:, None]
    encoded = mar.encode(tokens, places, cond)
    compare.equal("fwd.enc_out", encoded, **FORWARD)
    compare.equal("fwd.enc_out_uncond", mar.encode(tokens, places, mar.fake_latent[None]), **FORWARD)
    compare.equal("fwd.dec_z", mar.decode(encoded, places), **FORWARD)
    compare.equal("fwd.dec_z", mar.ar_latents(tokens, known, cond), **FORWARD)
    wanted = (~known).byte().argsort(dim=1, descending=True, stable=True)[:, :3]
    some = compare.golden("fwd.dec_z")
    some = some.gather(1, wanted[..., None].expand(-1, -1, some.shape[2]))
    compare.same("fwd.dec_z wanted", mar.ar_latents(tokens, known, cond, wanted=wanted), some, **FORWARD)


def head(policy: MarPolicy, compare: Comparison) -> None:
    net, t = policy.transformer.diffloss.net, compare.input("head.t_embed_in")
    # FORWARD, or what one float32 ulp of the frequency (of `exp`, which differs from CPU to CPU) makes of the angle
    ulp = t[:, None] * torch.exp(-math.log(1e4) * torch.arange(128) / 128).repeat(2) * 2.0**-23
    compare.equal("head.t_embed_freq", time_frequencies(t), atol=ulp.clamp(min=FORWARD["atol"]), rtol=FORWARD["rtol"])
    compare.equal("head.t_embed_out", net.time_embed(t), **FORWARD)
    x, t, z = (compare.input(f"head.{name}") for name in ("x", "t", "z"))
    compare.equal("head.out", policy.head(x, t, z), **FORWARD)
    half, channels = len(x) // 2, policy.token_dim
    for name in compare.names("head.out_cfg"):  # forward_with_cfg(x, t=5, z, 3.0) is called out_cfg3
        at = re.search(r"t=(\d+)", compare.manifest["tensors"].get(name, {}).get("desc", ""))
        cond, uncond = policy.head(x[:half].repeat(2, 1), torch.tensor(int(at[1]) if at else 5), z).chunk(2)
        guided = guide(cond, uncond, float(name.removeprefix("head.out_cfg")), channels=channels)
        other = torch.cat([guided[:, :channels], uncond[:, channels:]], dim=1)
        compare.equal(name, torch.cat([guided, other]), **FORWARD)


def respacing(compare: Comparison, name: str) -> RespacedSchedule:
    """`gen` is that of the generations, `r100` keeps 100 steps, `train1000` all."""
    if name == "gen":
        return RespacedSchedule(compare.manifest["num_sampling_steps"])
    return RespacedSchedule(name.lstrip("rtain"))


def tables(compare: Comparison) -> None:
    for name in sorted({key.split(".")[1] for key in compare.names("sched.")}):
        schedule = respacing(compare, name)
        for key in compare.names(f"sched.{name}."):
            table = vars(schedule).get(key.split(".")[2])
            if table is not None:
                compare.equal(key, torch.tensor(table), **TABLES)


def transitions(policy: MarPolicy, compare: Comparison) -> None:
    schedule = RespacedSchedule(compare.manifest["num_sampling_steps"])
    x, t, z = (compare.input(f"step.{name}") for name in ("x", "t", "z"))
    compare_step(policy, schedule, "step", x, t, z, compare)
    j = schedule.num_steps - 1 - t
    prediction = policy.head(x, schedule.timestep(j), z)
    mean, std = schedule.transition(j, x, prediction)
    compare.equal("step.mean", mean, **FORWARD)
    noisy = t > 0
    compare.same(
        "step.variance scored", torch.as_tensor(std)[noisy] ** 2, compare.golden("step.variance")[noisy], **FORWARD
    )
    for row, step in enumerate(j.tolist()):  # the integer form is the same transition
        one, deviation = schedule.transition(step, x[row], prediction[row])
        compare.same("step.mean", one, compare.golden("step.mean")[row], **FORWARD)
        if schedule.stochastic(step):
            compare.same("step.std", deviation, compare.golden("step.variance")[row].sqrt(), **FORWARD)
    x, z = compare.golden("head.x"), compare.golden("head.z")
    for name in sorted({key.split(".")[0] for key in compare.names("step")} - {"step"}):  # step100: 100 steps are kept
        kept = RespacedSchedule(name.removeprefix("step"))
        compare_step(policy, kept, name, x, compare.input(f"{name}.t"), z, compare)


def compare_step(
    policy: MarPolicy, schedule: RespacedSchedule, name: str, x: Tensor, t: Tensor, z: Tensor, compare: Comparison
) -> None:
    """One transition per row, at respaced steps t. The tolerance of eps grows as eps enters: by sqrt(1 / abar - 1)."""
    j = schedule.num_steps - 1 - t
    prediction = policy.head(x, schedule.timestep(j), z)
    factor = torch.tensor(schedule.sqrt_recipm1_alphas_cumprod)[t].clamp(min=1.0)[:, None]
    scaled = {"atol": FORWARD["atol"] * factor.expand_as(x), "rtol": FORWARD["rtol"]}
    log_variance = schedule.log_variance(j, prediction)
    compare.equal(f"{name}.mean", schedule.mean(j, x, prediction), **scaled)
    compare.equal(f"{name}.pred_xstart", schedule.predicted_sample(j, x, prediction), **scaled)
    compare.equal(f"{name}.log_variance", log_variance, **FORWARD)
    if f"{name}.variance" in compare:
        compare.equal(f"{name}.variance", log_variance.exp(), **FORWARD)


def training(policy: MarPolicy, compare: Comparison) -> None:
    x_0, t, z, noise, mask = (compare.input(f"train.{name}") for name in ("x0", "t", "z", "noise", "mask"))
    schedule = RespacedSchedule()
    compare.equal("train.q_sample", noised(schedule, x_0, noise, t), **FORWARD)
    mse, vb = training_loss(lambda x_t, at: policy.head(x_t, at, z), x_0, noise, t, schedule)
    loss = mse + vb
    compare.equal("train.mse", mse, **FORWARD)
    compare.equal("train.vb", vb, **FORWARD)
    compare.equal("train.loss", loss, **FORWARD)
    compare.equal("train.masked_mean", ((loss * mask).sum() / mask.sum())[None], **FORWARD)


def generations(policy: MarPolicy, compare: Comparison) -> None:
    """Whole generations by `roll_out` itself, with the recorded orders and noise."""
    manifest = compare.manifest
    order, noise, labels = (compare.input(f"sample.{name}") for name in ("orders", "noise", "labels"))
    length, steps = policy.num_tokens, manifest["num_iter"]
    left = [length, *(row["masked_after"] for row in manifest["mask_schedule"][:-1]), 0]
    rank = order.argsort(dim=1)  # place of a token in the order; the first m stay masked
    before = rank < torch.tensor(left[:-1])[:, None, None]
    predicted = before & (rank >= torch.tensor(left[1:])[:, None, None])
    compare.equal("sample.masked_before", before)
    compare.equal("sample.predicted", predicted)
    own = mask_schedule(length, steps)
    compare.same("sample.counts", own, [count for count in predicted[:, 0].sum(1).tolist() if count])
    made_in = predicted.byte().argmax(dim=0)[None, None, ..., None].expand(1, *noise.shape[1:])
    drawn = (order.flip(1), noise.gather(0, made_in)[0])
    conditioning = policy.encode_prompts([str(label) for label in labels.tolist()])
    for name, settings in manifest["sampling"].items():
        sampling = SamplingConfig(
            ar_steps=steps,
            diffusion_steps=manifest["num_sampling_steps"],
            guidance_scale=settings["cfg"],
            guidance_schedule=settings["cfg_schedule"],
            temperature=settings["temperature"],
        )
        guided = Guided.of(policy, conditioning, sampling)
        scales = [guided.scale(length - m) for m in left[1:]]
        compare.same(f"sample.{name}.scales", scales, settings["cfg_per_step"], rtol=1e-6)
        rollout = roll_out(guided, labels.tolist(), recorded=dict.fromkeys(range(len(own)), ()), drawn=drawn)
        canvas = {step.num_known: step.tokens for step in rollout.steps} | {length: rollout.tokens}
        compare.equal(f"sample.{name}.tokens", torch.stack([canvas[length - m] for m in left[1:]]), **SAMPLED)
        compare.equal(f"sample.{name}.latent", policy.transformer.unpatchify(rollout.tokens), **SAMPLED)


def chain(policy: MarPolicy, compare: Comparison) -> None:
    """One trajectory of some tokens without guidance: its states, and all transitions and densities at the recorded."""
    z, noise = compare.input("logp.z"), compare.input("logp.noise")
    schedule = RespacedSchedule(compare.manifest["num_sampling_steps"])
    temperature = compare.manifest.get("chain_temperature")
    if temperature is None:  # then one number, read off one element, must explain all
        _, plain = schedule.transition(0, noise[0], policy.head(noise[0], schedule.timestep(0), z))
        temperature = round((compare.golden("logp.std")[0] / plain).flatten()[0].item(), 4)
    schedule.at_temperature(temperature)
    path = states_of(denoise(lambda x, t: policy.head(x, t, z), schedule, noise[0], noise[1:]))
    compare.equal("logp.xt", path[:-1], **SAMPLED)
    compare.equal("logp.x_prev", path[1:], **SAMPLED)
    states, after = compare.golden("logp.xt"), compare.golden("logp.x_prev")
    found: dict[str, list[Tensor]] = {key: [] for key in ("mean", "std", "pred_x0", "log_prob")}
    for j in range(schedule.num_steps):
        prediction = policy.head(states[j], schedule.timestep(j), z)
        mean, std = schedule.transition(j, states[j], prediction)
        if not schedule.stochastic(j):  # recorded with the deviation that the step would have; ours never scores it
            std = (0.5 * schedule.log_variance(j, prediction)).exp() * schedule.temperature
        row: dict[str, Any] = {"mean": mean, "std": std, "log_prob": log_prob(after[j], mean, std)}
        row["pred_x0"] = schedule.predicted_sample(j, states[j], prediction)
        for key, value in row.items():
            found[key].append(value)
    for key, rows in found.items():
        compare.equal(f"logp.{key}", torch.stack(rows), **(DENSITY if key == "log_prob" else SAMPLED))


def counts(folder: Path, compare: Comparison) -> None:
    """`mask_schedules.json` beside the folder, where there is one: tokens still masked after each AR step."""
    beside = folder.parent / "mask_schedules.json"
    if not beside.is_file():
        return
    for name, left in json.loads(beside.read_text(encoding="utf-8")).items():
        length, steps = (int(number) for number in re.findall(r"\d+", name))
        masked = [length, *left[:-1], 0]
        expected = [now - after for now, after in pairwise(masked) if now > after]
        compare.same(f"mask_schedules.{name}", mask_schedule(length, steps), expected)
