"""The update half of the `harmon` set: densities, the loss as it was recorded, and the same by `algorithms.loss`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mar_grpo.algorithms.loss import AlgorithmConfig, Batch, backward, kept, scales
from mar_grpo.algorithms.selection import SelectionConfig, consistent
from mar_grpo.algorithms.trajectories import Extra, Trajectories
from mar_grpo.diffusion.gaussian import log_prob
from mar_grpo.models.harmon import HarmonPolicy
from mar_grpo.rollout import Chain, Guided, RecordedStep, Rollout
from tests.conformance.harmon_case import FORWARD, GENERATED, GRADIENT, Case
from tests.conformance.nova_forward import take

MEAN_ROUNDING = 2e-6  # a tenth of FORWARD; what CPUs with other kernels differ by. A density has it times its slope
SCORED = {"atol": 2e-3, "rtol": 1e-4}  # at a deviation of 1e-3 densities reach -1e5, where float32 steps are 8e-3
LOSS = 1e-5  # policy terms near zero are rounding noise, since the advantages of a group sum to zero
VARIANTS = {  # multi-trajectory expectation, consistency weight, KL
    "full": (True, True, True),
    "plain": (False, False, True),
    "mte_only": (True, False, True),
    "nokl": (True, True, False),
}


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
    logp, logp_extra, mean, mean_reference, slope, slope_extra = [], [], [], [], [], []
    for k, j in enumerate(steps):
        t = schedule.timestep(j)
        time, other_time = (each.policy.head_time(t) for each in (guided, anchor))
        prediction = guided.policy.head_conditioned(path[j], time, condition)
        with torch.no_grad():
            std = case.deviation(j, prediction)
            mean_reference.append(schedule.mean(j, path[j], anchor.policy.head_conditioned(path[j], other_time, other)))
        if f"rollout.log{i}.std" in compare:
            compare.same(f"loss.std{i}", std, compare.golden(f"rollout.log{i}.std")[j], **GENERATED)
        mean.append(schedule.mean(j, path[j], prediction))
        logp.append(log_density(path[j + 1], mean[-1], std))
        again = schedule.mean(j, extra[:, k], guided.policy.head_conditioned(extra[:, k], time, condition))
        logp_extra.append(log_density(extra_next[:, k], again, std))
        slope.append((path[j + 1] - mean[-1]).detach().abs() / std**2)
        slope_extra.append((extra_next[:, k] - again).detach().abs() / std**2)
    main, others = torch.stack(logp), torch.stack(logp_extra, 1)  # [k, B, L, C], [S, k, B, L, C]
    steep, others_steep = torch.stack(slope), torch.stack(slope_extra, 1)
    shift = torch.stack(mean_reference) - torch.stack(mean)
    unknown, weight = (~canvas[1]).float(), torch.ones_like(canvas[1], dtype=torch.float32)
    prefix = f"loss.full.step{i}"
    if i > 1:
        weight = _consistency(case, prefix, i, now, final, unknown)
    flat = {"logp": main, "prev_mean": torch.stack(mean), "ref_mean": torch.stack(mean_reference)}
    flat |= {f"logp_seed{s}": value for s, value in enumerate(others)} | {"logp_seed_mean": others.mean(0)}
    slopes = {"logp": steep, "logp_seed_mean": others_steep.mean(0)}
    slopes |= {f"logp_seed{s}": value for s, value in enumerate(others_steep)}
    for key, value in flat.items():
        if f"{prefix}.{key}" in compare:
            bounds: dict[str, Any] = dict(FORWARD)
            if key in slopes:
                bounds = {**SCORED, "atol": SCORED["atol"] + MEAN_ROUNDING * slopes[key].flatten(0, 1).double()}
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
        released(case, variant, i, z.detach(), path, anchor)


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


def released(case: Case, variant: str, i: int, z: Tensor, path: Tensor, anchor: Guided) -> None:
    """The same by `algorithms.loss`: the values of one AR step and the gradients of its loss."""
    compare, schedule, steps, manifest = case.compare, case.schedule, case.diffusion_steps, case.manifest
    average, selected, anchored = VARIANTS[variant]
    config = AlgorithmConfig.model_validate(
        {
            "preset": "released_harmon",
            "trajectories": {
                "mode": "composite" if average else "off",
                "count": manifest["num_seeds"],
                "share": manifest["top_mask_percent"],
            },
            "selection": {"mode": "delta" if selected else "off", "threshold": manifest["latent_sim_thresh"]},
            "kl": {"kind": "mean_k3" if anchored else "off", "coefficient": manifest["beta"]},
        }
    )
    tokens, known, done, _ = case.canvas(i)
    places = compare.golden("rollout.orders").flip(1)[:, done:]
    live = case.guided()
    deviation = {}
    with torch.no_grad():
        predict = live.unguided().predictor(live.unguided().head_conditions(z, None))
        for j in steps:
            deviation[j] = take(case.deviation(j, predict(path[j], schedule.timestep(j))), places)
    states = {j: take(state, places) for j, state in enumerate(path)}
    before = None
    if f"rollout.log{i - 1}.final" in compare:
        before = take(compare.golden(f"rollout.log{i - 1}.final"), places)
    recorded = RecordedStep(
        i, tokens, known, done, places, case.counts[i], Chain(states[len(path) - 1], states, deviation),
        take(z, places), before=before,
    )  # fmt: skip
    extra = None
    if average:
        seeds, following = compare.golden("mte.seed_xt_k"), compare.golden("mte.seed_xprev_k")
        pairs = {j + 1: following[:, k] for k, j in enumerate(steps)} | {j: seeds[:, k] for k, j in enumerate(steps)}
        chosen = Extra.choose(Chain(compare.golden("mte.seed_final"), pairs), [], 1, config.trajectories)
        extra = Trajectories(chosen, {})
    batch = Batch.of(
        torch.arange(len(tokens)), Rollout(compare.golden("rollout.tokens")[-1], [recorded], None, None), extra,
        schedule, 1, config,
    )  # fmt: skip
    scored, channels = {i: steps}, tokens.shape[2]
    scale = scales(
        config, scored, kept([batch], scored), counts=case.counts, images=len(tokens), token_dim=channels
    )  # fmt: skip
    parameters = case.policy.trunk_parameters()
    for parameter in parameters:
        parameter.grad = None
    reference = anchor if anchored else None
    found = backward(live, reference, batch, compare.golden("adv.advantages"), scored, scale, config).means()
    kl = found["kl"] * channels if anchored else 0.0
    name = f"loss.{variant}.step{i}"
    norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm().item()
    ours = torch.tensor([found["policy_loss"] + manifest["beta"] * kl, -found["policy_loss"], kl, norm])
    compare.equal(f"{name}.scalars", ours, atol=torch.tensor([LOSS, LOSS, LOSS, 1e-3 * norm]), rtol=1e-4)
    for key, parameter in case.policy.transformer.mar.named_parameters():
        if f"{name}.grad.{key}" in compare and parameter.grad is not None:
            compare.equal(f"{name}.grad.{key}", parameter.grad, **GRADIENT)


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
