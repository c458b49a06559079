"""A folder of the `harmon` set: prompts, the bridge, a whole generation, and the loss of MAR-GRPO on top of it.

The recorded loss is that of the public trainer (documented defects corrected): it scores without guidance, with the
deviation of the recorded trajectory and floors, and sums over channels. It is written down here from `log_density` on,
for its intermediate tensors; its values and gradients must then come out of `algorithms.loss` with the preset
`released_harmon` once more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mar_grpo.algorithms.advantage import advantages
from mar_grpo.algorithms.loss import AlgorithmConfig
from mar_grpo.algorithms.selection import most_uncertain, uncertainty
from mar_grpo.diffusion.gaussian import log_prob
from mar_grpo.models.blocks import known_places
from mar_grpo.rollout import denoise
from tests.conformance.checks import Comparison
from tests.conformance.harmon_case import FORWARD, GENERATED, Case, make_policy
from tests.conformance.harmon_update import densities, update
from tests.conformance.nova_forward import states_of

LOG_PROB = {"atol": 2e-3}
REFERENCE = 1.02  # the reference model is the policy with every parameter of its MAR times this


def check(folder: Path, compare: Comparison) -> None:
    case = Case(compare, make_policy(compare))
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
        path = states_of(denoise(predict, schedule, noise[i, 0], noise[i, 1:]))
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
    path = states_of(denoise(predict, case.schedule, noise[:, 0], noise[:, 1:].transpose(0, 1)))
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
    return advantages(
        {"sum": columns.sum(1).view(groups, -1)}, {"sum": 1.0}, AlgorithmConfig(preset="released_harmon").advantage
    ).flatten()
