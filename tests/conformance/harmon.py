"""A folder of the `harmon` set: prompts, the bridge, a whole generation, and the loss of MAR-GRPO on top of it.

The recorded loss is that of the public trainer (documented defects corrected): it scores without guidance, with the
deviation of the recorded trajectory and floors, and sums over channels. It is written down here from `log_density` on;
what it is made of (network, head, schedule, advantages, selection) is ours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mar_grpo.algorithms.advantage import AdvantageConfig, advantages
from mar_grpo.algorithms.selection import SelectionConfig, consistent, most_uncertain, uncertainty
from mar_grpo.diffusion.gaussian import log_prob
from mar_grpo.diffusion.respaced import RespacedSchedule
from mar_grpo.models.blocks import known_places
from mar_grpo.models.harmon import Harmon, HarmonConfig, HarmonPolicy
from mar_grpo.models.kl16 import Kl16, Kl16Config
from mar_grpo.models.mar import MarConfig
from mar_grpo.models.text import make_word_tokenizer
from mar_grpo.models.vae import harmon_bytes
from mar_grpo.rollout import Guided, SamplingConfig, denoise
from tests.conformance.checks import Comparison

FORWARD: dict[str, float] = {"atol": 2e-5, "rtol": 1e-4}
GENERATED = {"of_max": 1e-3}
GRADIENT = {"of_max": 1e-3}
LOG_PROB = {"atol": 2e-3}
SCORED = {"atol": 2e-3, "rtol": 1e-4}  # at a deviation of 1e-3 densities reach -1e5, where float32 steps are 8e-3
LOSS = 1e-5  # policy terms near zero are rounding noise, since the advantages of a group sum to zero
REFERENCE = 1.02  # the reference model is the policy with every parameter of its MAR times this
VARIANTS = {  # multi-trajectory expectation, consistency weight, KL
    "full": (True, True, True),
    "plain": (False, False, True),
    "mte_only": (True, False, True),
    "nokl": (True, True, False),
}


def check(folder: Path, compare: Comparison) -> None:
    case = Case(compare, _policy(compare))
    with torch.no_grad():
        prompt(case)
        forward(case)
        generation(case)
        trajectories(case)
        rewards(case)
        densities(case)
    reference = case.policy.frozen_copy()
    with torch.no_grad():
        for parameter in reference.transformer.mar.parameters():
            parameter.mul_(REFERENCE)
    for i in compare.manifest["selected_mask_steps"]:
        update(case, reference, i)


def _policy(compare: Comparison) -> HarmonPolicy:
    manifest = compare.manifest
    sizes = {key: value for key, value in manifest["mar_arch"].items() if key != "note"}
    mar = MarConfig.from_dict({key: value for key, value in manifest["mar"].items() if key != "type"} | sizes)
    pixels = mar.vae_stride * mar.patch_size
    rows, columns = manifest["image_shape"]
    network = Harmon(HarmonConfig(manifest["llm"], mar, (rows * pixels, columns * pixels)))
    network.llm.to_empty(device="cpu")
    compare.load(network)
    if (head := "weights.llm.lm_head.weight") in compare:
        compare.equal(head, network.llm.model.embed_tokens.weight)  # tied; the folder may leave it out
    levels = (1,) * mar.vae_stride.bit_length()
    vae = Kl16(
        Kl16Config(ch=32, ch_mult=levels, z_channels=mar.vae_embed_dim, embed_dim=mar.vae_embed_dim), harmon_bytes
    )
    policy = HarmonPolicy(network.eval(), vae, make_word_tokenizer([]))
    policy.requires_grad_(False)
    for parameter in policy.trunk_parameters():
        parameter.requires_grad_(True)
    return policy


@dataclass
class Case:
    """A folder, the policy made from it, and what its parts share."""

    compare: Comparison
    policy: HarmonPolicy

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return self.compare.manifest

    @cached_property
    def prompts(self) -> Tensor:
        """Packed prompts [2 B, P, F], the second half negative."""
        ids, given = self.compare.input("prompt.input_ids"), self.compare.input("prompt.attention_mask")
        return self.policy.transformer.llm.prefill(ids, given)[1]

    @cached_property
    def schedule(self) -> RespacedSchedule:
        spacing = self.manifest["mar"]["num_sampling_steps"]
        return self.policy.schedule(spacing).at_temperature(self.manifest["temperature"])

    @cached_property
    def counts(self) -> list[int]:
        """Tokens that each AR step predicts, by our schedule; the recorded one also lists steps without any."""
        recorded = [step["predicted"] for step in self.manifest["mask_schedule"]]
        ours = self.policy.mask_schedule(self.manifest["num_iter"])
        self.compare.same("rollout.mask_schedule", ours, [count for count in recorded if count])
        return recorded

    @cached_property
    def diffusion_steps(self) -> list[int]:
        return self.compare.input("loss.diff_idx").tolist()

    def guided(self, policy: HarmonPolicy | None = None) -> Guided:
        batch = len(self.prompts) // 2
        sampling = SamplingConfig(
            ar_steps=self.manifest["num_iter"],
            diffusion_steps=self.manifest["mar"]["num_sampling_steps"],
            guidance_scale=self.manifest["cfg"],
            guidance_schedule=self.manifest["cfg_schedule"],
            temperature=self.manifest["temperature"],
        )
        return Guided(policy or self.policy, self.prompts[:batch], self.prompts[batch : batch + 1], sampling)

    def canvas(self, i: int) -> tuple[Tensor, Tensor, int, Tensor]:
        """(tokens, known, number known, all places) before AR step i of the recorded rollout."""
        tokens = self.compare.input("rollout.tokens")
        order = self.compare.golden("rollout.orders")
        before = tokens[i - 1] if i else torch.zeros_like(tokens[0])
        done = sum(self.counts[:i])
        known = torch.zeros_like(order, dtype=torch.bool).scatter_(1, order.flip(1)[:, :done], True)
        return before, known, done, torch.arange(order.shape[1]).expand_as(order)

    def deviation(self, j: int, prediction: Tensor) -> Tensor:
        """The learned deviation, of the last step too (ours is then deterministic; the public code records one)."""
        return (0.5 * self.schedule.log_variance(j, prediction)).exp() * self.schedule.temperature


def prompt(case: Case) -> None:
    compare, llm = case.compare, case.policy.transformer.llm
    ids = compare.input("prompt.input_ids")
    hidden, packed = llm.prefill(ids, compare.input("prompt.attention_mask"))
    compare.equal("prefill.last_hidden", hidden, **FORWARD)
    heads, layers = llm.config.num_key_value_heads, llm.config.num_hidden_layers
    parts = packed[..., :-1].unflatten(2, (layers, 2, heads, -1)).permute(2, 3, 0, 4, 1, 5)
    for layer, (key, value) in enumerate(parts):
        for name, part in ((f"prefill.k{layer}", key), (f"prefill.v{layer}", value)):
            if name in compare:
                compare.equal(name, part, **FORWARD)
    for row, alone in zip(ids, packed, strict=True):  # by itself and without its padding, a prompt is the same
        length = int(alone[:, -1].sum())
        compare.same("prefill.alone", llm.prefill(row[None, :length])[1][0], alone[:length], **FORWARD)


def forward(case: Case) -> None:
    compare, network = case.compare, case.policy.transformer
    mar, empty = network.mar, network.mar.fake_latent[None]
    tokens, known = compare.input("fwd.tokens"), compare.input("fwd.mask") == 0
    places = known_places(known)
    encoded = mar.encode(tokens, places, empty)
    compare.equal("fwd.mar_enc", encoded, **FORWARD)
    compare.equal("fwd.proj_in", network.to_llm(encoded), **FORWARD)
    bridged = network.bridge(encoded, case.prompts)
    compare.equal("fwd.enc_residual", bridged, **FORWARD)
    compare.equal("fwd.dec_z", mar.decode(bridged, places), **FORWARD)
    compare.equal("fwd.dec_z", case.policy.ar_latents(tokens, known, case.prompts), **FORWARD)
    everything = known_places(torch.ones_like(known))
    compare.equal("fwd.mar_enc_full", mar.encode(tokens, everything, empty), **FORWARD)


def generation(case: Case) -> None:
    """The whole rollout with the recorded orders (theirs start at the end, ours at the front) and noise."""
    compare, guided, schedule = case.compare, case.guided(), case.schedule
    order, noise = compare.input("rollout.orders").flip(1), compare.input("rollout.noise")
    tokens = torch.zeros_like(noise[0, 0])
    everywhere = torch.arange(order.shape[1]).expand_as(order)
    found: dict[str, list[Tensor]] = {key: [] for key in ("tokens", "z", "z_uncond", "masked_before", "predicted")}
    commits = torch.zeros_like(order).scatter_(1, order, _step_of_rank(case.counts).expand_as(order))
    done = 0
    for i, count in enumerate(case.counts):
        known, now = commits < i, commits == i
        z, z_uncond = guided.latents(tokens, known, done, everywhere)
        assert z_uncond is not None
        predict = guided.predictor(guided.head_conditions(z, z_uncond), guided.scale(done + count))
        path = denoise(predict, schedule, noise[i, 0], noise[i, 1:])
        _recorded_step(case, i, path, [predict(path[j], schedule.timestep(j)) for j in range(schedule.num_steps)])
        tokens, done = torch.where(now[..., None], path[-1], tokens), done + count
        for key, value in zip(found, (tokens, z, z_uncond, ~known, now), strict=True):
            found[key].append(value)
    for key in ("masked_before", "predicted"):
        compare.equal(f"rollout.{key}", torch.stack(found[key]).float())
    for key in ("tokens", "z", "z_uncond"):
        compare.equal(f"rollout.{key}", torch.stack(found[key]), **GENERATED)
    latents = case.policy.transformer.mar.unpatchify(tokens)
    compare.equal("rollout.decoded_input", case.policy.vae.unscale(latents), **GENERATED)


def _step_of_rank(counts: Sequence[int]) -> Tensor:
    """AR step that commits the n-th token of an order, [L]."""
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def _recorded_step(case: Case, i: int, path: Tensor, predictions: list[Tensor]) -> None:
    """The log of AR step i, all positions: states, guided means, deviations, densities."""
    schedule, means, deviations, densities = case.schedule, [], [], []
    for j, prediction in enumerate(predictions):
        means.append(schedule.mean(j, path[j], prediction))
        deviations.append(case.deviation(j, prediction))
        densities.append(log_prob(path[j + 1], means[-1], deviations[-1]))
    found = {"xt": path[:-1], "mean": torch.stack(means), "std": torch.stack(deviations)}
    found |= {"final": path[-1], "log_prob": torch.stack(densities)}
    for name in case.compare.names(f"rollout.log{i}."):
        key = name.split(".")[-1]
        case.compare.equal(name, found[key], **(LOG_PROB if key == "log_prob" else GENERATED))


def trajectories(case: Case) -> None:
    """Extra trajectories from z at commitment, guided like the rollout, and which positions they call uncertain."""
    compare, guided, steps = case.compare, case.guided(), case.diffusion_steps
    noise = compare.input("rollout.seed_noise")
    order = compare.golden("rollout.orders").flip(1)
    commits = torch.zeros_like(order).scatter_(1, order, _step_of_rank(case.counts).expand_as(order))
    done = torch.tensor(case.counts).cumsum(0)
    scale = torch.tensor([guided.scale(int(number)) for number in done])[commits][..., None]
    both = [guided.latents(*case.canvas(i)) for i in range(len(case.counts))]
    z, z_uncond = (_at_commitment(torch.stack(part), commits) for part in zip(*both, strict=True))  # type: ignore[arg-type]
    compare.equal("mte.z_all", z, **FORWARD)
    predict = guided.predictor(guided.head_conditions(z, z_uncond), scale)
    path = denoise(predict, case.schedule, noise[:, 0], noise[:, 1:].transpose(0, 1))
    compare.equal("mte.seed_final", path[-1], **GENERATED)
    compare.equal("mte.seed_xt_k", path[steps].transpose(0, 1), **GENERATED)
    compare.equal("mte.seed_xprev_k", path[[j + 1 for j in steps]].transpose(0, 1), **GENERATED)
    spread = uncertainty(path[-1])
    compare.equal("mte.uncertainty", spread[..., None], **GENERATED)
    compare.equal("mte.topk_mask", most_uncertain(spread, case.manifest["top_mask_percent"])[..., None].float())
    compare.equal("loss.diff_t", torch.tensor([case.schedule.num_steps - 1 - j for j in steps]))
    compare.same("mte.num_seeds", len(noise), case.manifest["num_seeds"])


def _at_commitment(z: Tensor, commits: Tensor) -> Tensor:
    """z [K, B, L, D] of every AR step -> [B, L, D] of the one that commits each position [B, L]."""
    return z.gather(0, commits[None, ..., None].expand(1, -1, -1, z.shape[-1]))[0]


def rewards(case: Case) -> None:
    """Advantages of summed rewards per group; "geneval" first drops rewards that are the same in the whole batch."""
    compare = case.compare
    compare.equal("adv.advantages", _advantages(compare.input("adv.rewards"), 1), **FORWARD)
    if "adv2.rewards" in compare:
        columns = compare.input("adv2.rewards")
        size = re.search(r"groups? of (\d+)", case.manifest["tensors"].get("adv2.rewards", {}).get("desc", ""))
        groups = len(columns) // int(size[1]) if size else 2
        compare.equal("adv2.sum", _advantages(columns, groups), **FORWARD)
        varied = columns[:, (columns != columns[0]).any(0)]
        compare.equal("adv2.geneval", _advantages(varied, groups), **FORWARD)


def _advantages(columns: Tensor, groups: int) -> Tensor:
    return advantages({"sum": columns.sum(1).view(groups, -1)}, {"sum": 1.0}, AdvantageConfig(clip=1e9)).flatten()


def densities(case: Case) -> None:
    x, mean, std = (case.compare.input(f"gauss.{key}") for key in ("x", "mean", "std"))
    case.compare.equal("gauss.logp", log_density(x, mean, std), **SCORED)


def log_density(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """The recorded density: the variance in its quadratic term is at least 1e-6, the deviation in its logarithm too."""
    floor = 1e-6
    wide, narrow = std.clamp(min=floor**0.5), std.clamp(min=floor)
    return log_prob(x, mean, wide) + wide.log() - narrow.log()


def update(case: Case, reference: HarmonPolicy, i: int) -> None:
    """The recorded losses of AR step i, on every unknown position, and their gradients."""
    compare, schedule, steps = case.compare, case.schedule, case.diffusion_steps
    canvas, guided, anchor = case.canvas(i), case.guided(), case.guided(reference)
    z, _ = guided.latents(*canvas)
    with torch.no_grad():
        z_reference, _ = anchor.latents(*canvas)
    now, final = compare.input(f"rollout.log{i}.final"), compare.input("rollout.tokens")[-1]
    path = torch.cat([compare.input(f"rollout.log{i}.xt"), now[None]])
    extra, extra_next = compare.input("mte.seed_xt_k"), compare.input("mte.seed_xprev_k")
    condition, other = guided.policy.head_condition(z), anchor.policy.head_condition(z_reference)
    logp, logp_extra, mean, mean_reference = [], [], [], []
    for k, j in enumerate(steps):
        t = schedule.timestep(j)
        prediction = guided.policy.head_conditioned(path[j], t, condition)
        with torch.no_grad():
            std = case.deviation(j, prediction)
            mean_reference.append(schedule.mean(j, path[j], anchor.policy.head_conditioned(path[j], t, other)))
        if f"rollout.log{i}.std" in compare:
            compare.same(f"loss.std{i}", std, compare.golden(f"rollout.log{i}.std")[j], **GENERATED)
        mean.append(schedule.mean(j, path[j], prediction))
        logp.append(log_density(path[j + 1], mean[-1], std))
        again = schedule.mean(j, extra[:, k], guided.policy.head_conditioned(extra[:, k], t, condition))
        logp_extra.append(log_density(extra_next[:, k], again, std))
    main, others = torch.stack(logp), torch.stack(logp_extra, 1)  # [k, B, L, C], [S, k, B, L, C]
    shift = torch.stack(mean_reference) - torch.stack(mean)
    unknown, weight = (~canvas[1]).float(), torch.ones_like(canvas[1], dtype=torch.float32)
    prefix = f"loss.full.step{i}"
    if i > 1:
        weight = _consistency(case, prefix, i, now, final, unknown)
    flat = {"logp": main, "prev_mean": torch.stack(mean), "ref_mean": torch.stack(mean_reference)}
    flat |= {f"logp_seed{s}": value for s, value in enumerate(others)} | {"logp_seed_mean": others.mean(0)}
    for key, value in flat.items():
        if f"{prefix}.{key}" in compare:
            bounds = SCORED if key.startswith("logp") else FORWARD
            compare.equal(f"{prefix}.{key}", value.flatten(0, 1), **bounds)
    compare.equal(f"{prefix}.z", z, **FORWARD)
    compare.equal(f"{prefix}.z_ref", z_reference, **FORWARD)
    compare.equal(f"{prefix}.completion_mask", unknown)
    advantage = compare.golden("adv.advantages")[:, None, None]
    uncertain = compare.golden("mte.topk_mask")
    for variant in case.manifest["loss_variants"]:
        average, selected, anchored = VARIANTS[variant]
        ratio = torch.exp(main - main.detach())
        if average:
            ratio = uncertain * torch.exp(others - others.detach()).mean(0) + (1 - uncertain) * ratio
        chosen = (unknown * weight if selected else unknown)[..., None]
        policy = (ratio * advantage * chosen).sum() / (chosen.sum() * len(steps))
        kl = ((shift.exp() - shift - 1) * unknown[..., None]).sum() / (unknown.sum() * len(steps))
        loss = -(policy - case.manifest["beta"] * kl) if anchored else -policy
        _gradients(case, f"{variant}.step{i}", z, loss, [loss, policy, kl if anchored else torch.zeros(())])


def _consistency(case: Case, prefix: str, i: int, now: Tensor, final: Tensor, unknown: Tensor) -> Tensor:
    """Weight [B, L]: predicted now, or aligned better with the finished image than one AR step before."""
    compare, before = case.compare, case.compare.input(f"rollout.log{i - 1}.final")
    delta = F.cosine_similarity(now, final, dim=-1) - F.cosine_similarity(before, final, dim=-1)
    compare.equal(f"{prefix}.sim_delta", delta[..., None], **FORWARD)
    predicted = compare.golden("rollout.predicted")[i].bool()
    config = SelectionConfig(mode="delta", threshold=case.manifest["latent_sim_thresh"])
    weight = consistent(now, before, final, predicted, config).float() * unknown
    compare.equal(f"{prefix}.weight", weight[..., None])
    return weight


def _gradients(case: Case, name: str, z: Tensor, loss: Tensor, scalars: list[Tensor]) -> None:
    compare, mar = case.compare, case.policy.transformer.mar
    named = {key: value for key, value in mar.named_parameters() if value.requires_grad}
    at_z, *found = torch.autograd.grad(loss, [z, *named.values()], retain_graph=True)
    compare.equal(f"loss.{name}.grad_z", at_z, **GRADIENT)
    gradients = dict(zip(named, found, strict=True))
    for key in compare.names(f"loss.{name}.grad."):
        compare.equal(key, gradients[key.removeprefix(f"loss.{name}.grad.")], **GRADIENT)
    norm = torch.stack([gradient.norm() for gradient in found]).norm()
    found_scalars = torch.stack([*scalars, norm])
    bounds = torch.tensor([LOSS, LOSS, LOSS, 1e-3 * norm.item()])
    compare.equal(f"loss.{name}.scalars", found_scalars, atol=bounds, rtol=1e-4)
    recorded = compare.manifest["loss_scalars"][name]
    for key, value in zip(("loss", "policy_loss", "kl_loss", "grad_norm"), found_scalars, strict=True):
        tolerance = GRADIENT if key == "grad_norm" else {"atol": LOSS, "rtol": 1e-4}
        compare.same(f"loss_scalars.{name}.{key}", value, recorded[key], **tolerance)
