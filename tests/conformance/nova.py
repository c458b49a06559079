"""A folder of the `nova` set: transformer, head, schedules, whole generations, and the loss of MAR-GRPO on top of them.

The recorded update is that of the public trainer (documented defects corrected): it scores latent pixels without
guidance and sums over AR steps. It is written down here from `recorded_loss` on, for its intermediate tensors; its
values and gradients must then come out of `algorithms.loss` with the preset `released` once more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mar_grpo.algorithms.advantage import advantages
from mar_grpo.algorithms.loss import AlgorithmConfig, Batch, backward, kept, scales
from mar_grpo.algorithms.objective import gaussian_kl
from mar_grpo.algorithms.selection import SelectionConfig, consistent, most_uncertain, uncertainty
from mar_grpo.algorithms.trajectories import Extra, Trajectories
from mar_grpo.diffusion.gaussian import Schedule, log_prob
from mar_grpo.models.heads import TIME_DIM, time_frequencies
from mar_grpo.models.nova import NovaConfig, NovaTransformer
from mar_grpo.rollout import Chain, Guided, RecordedStep, Rollout, denoise
from tests.conformance import nova_forward as forward
from tests.conformance.checks import Comparison
from tests.conformance.nova_forward import Case, states_of, take

FLOW_LOG_PROB, DDPM_LOG_PROB, LOSS, GRADIENT = 3e-3, 2e-3, 1e-6, 1e-4  # gradients: of the tensor's largest
PLAIN = {"trajectories": {"mode": "off"}, "selection": {"mode": "off"}}


def check(folder: Path, compare: Comparison) -> None:
    published = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = NovaConfig.from_dict({**published, "num_heads": compare.manifest["params"]["heads"]})
    model = NovaTransformer(config)
    compare.load(model)
    case = Case(compare, model.eval().requires_grad_(False), compare.manifest["params"])
    with torch.no_grad():
        forward.embeddings(case)
        forward.head(case)
        forward.guidance(case)
        forward.schedules(case)
        forward.ddpm_steps(case)
        for name, settings in compare.manifest["rollouts"].items():
            forward.generation(case, f"gen_{name}", settings)
    forward.flow_steps(case)
    formula(case)
    flow_update(case)
    ddpm_update(case)


def recorded_loss(
    density: Tensor, extra: Tensor | None, advantage: Tensor, weight: Tensor, uncertain: Tensor, unknown: Tensor,
    shift: Tensor, beta: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(policy term, trainer's KL, loss) of the public trainer, all over [..., c, H, W] or what broadcasts to it.

    Args:
        density, extra: log-probabilities of the rollout [...] and of S extra trajectories [S, ...].
        weight: consistency weight of the policy term, within `unknown`.
        uncertain: 1 where the trajectories stand for the rollout.
        shift: mean of the reference minus mean of the policy.
    """
    ratio = torch.exp(density - density.detach())
    if extra is not None:
        ratio = (1 - uncertain) * ratio + uncertain * torch.exp(extra - extra.detach()).mean(0)
    policy = (advantage * unknown * weight * ratio).sum() / (unknown * weight).expand_as(ratio).sum()
    kl = (unknown * trainer_kl(shift)).sum() / unknown.expand_as(shift).sum()
    return policy, kl, -(policy - beta * kl)


def trainer_kl(shift: Tensor) -> Tensor:
    return shift.exp() - shift - 1


def formula(case: Case) -> None:
    names = ("log_prob", "mte_log_prob", "mean")
    given = [*names, "ref_mean", "advantage", "unknown_mask", "critic_mask", "consistency_mask"]
    v = {name: case.input(f"formula.{name}") for name in given}
    leaves = [v[name].requires_grad_() for name in names]
    found = recorded_loss(
        leaves[0], leaves[1], v["advantage"], v["consistency_mask"], v["critic_mask"], v["unknown_mask"],
        v["ref_mean"] - leaves[2], case.params["beta"],
    )  # fmt: skip
    case.equal("formula.out", torch.stack(found))
    for name, gradient in zip(names, torch.autograd.grad(found[2], leaves), strict=True):
        case.equal(f"formula.grad_{name}", gradient)


@dataclass(frozen=True)
class Step:
    """One AR step of a recorded rollout: what was known, and what our trunk and head make of it, unguided."""

    tokens: Tensor
    known: Tensor
    places: Tensor
    count: int
    z: Tensor

    @classmethod
    def of(cls, case: Case, rollout: str, guided: Guided, i: int) -> Step:
        order, counts = case.compare.golden(f"{rollout}.mask_order"), case.compare.manifest["num_preds"]
        done = sum(counts[:i])
        known = torch.zeros(order.shape, dtype=torch.bool).scatter_(1, order[:, :done], True)
        tokens = case.tokens(case.compare.golden(f"{rollout}.x_latent")[i])
        everywhere = torch.arange(order.shape[1]).expand_as(order)
        z, _ = guided.latents(tokens, known, done, everywhere)
        return cls(tokens, known, order[:, done:], counts[i], z)

    def mask(self, case: Case, places: Tensor) -> Tensor:
        """[B, 1, H, W], 1 at the pixels of these tokens."""
        ones = torch.zeros_like(self.tokens).scatter_(1, places[..., None].expand(-1, -1, self.tokens.shape[2]), 1.0)
        return case.pixels(ones)[:, :1]


def transitions(
    case: Case, schedule: Schedule, guided: Guided, z: Tensor, path: Tensor, steps: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-densities [k, ...], means [k, ...] and deviations [k] of k steps of a path [T+1, ..., B, L, C], as pixels."""
    predict, found = guided.predictor(guided.head_conditions(z, None)), []
    for j in steps:
        mean, std = schedule.transition(j, path[j], predict(path[j], schedule.timestep(j)))
        found.append((case.pixels(log_prob(path[j + 1], mean, std)), case.pixels(mean), torch.as_tensor(std)))
    density, mean, std = (torch.stack(part) for part in zip(*found, strict=True))
    return density, mean, std


def flow_update(case: Case) -> None:
    """The recorded update on the flow rollout, its gradient, and the Gaussian KL by our own update."""
    compare, params = case.compare, case.params
    rollout = next(f"gen_{name}" for name, s in compare.manifest["rollouts"].items() if s["scheduler"] == "fm")
    schedule, batch = case.schedule("fm"), compare.golden("embed.prompt_cond").shape[0]
    start, states = compare.golden(f"{rollout}.init_noise"), compare.golden(f"{rollout}.xs")
    final = compare.golden(f"{rollout}.latents")[:, :, 0]
    case.equal("grpo.final_x", final, 0.0)
    rewards = case.input("grpo.rewards_per_func").sum(1).view(-1, params["gens"])
    advantage = advantages({"sum": rewards}, {"sum": 1.0}, AlgorithmConfig(preset="released").advantage).flatten()
    case.equal("grpo.advantages", advantage, LOSS)
    uncertain, extra = _extra_trajectories(case, rollout, schedule)
    changed = {name.removeprefix("grpo.ref."): case.input(name) for name in compare.names("grpo.ref.")}
    reference = NovaTransformer(case.model.config)
    reference.load_state_dict(case.model.state_dict() | changed)
    trunk = case.model.trunk_parameters()
    for parameter in trunk:
        parameter.requires_grad_(True).grad = None
    for i in params["sel_mask"]:
        prefix, live = f"grpo.m{i}", case.guided()
        steps: list[int] = case.input(f"{prefix}.diff_index").tolist()
        compare.same(f"{prefix}.diff_index", steps, compare.manifest["selected_diff_steps"][str(i)])
        step = Step.of(case, rollout, live, i)
        case.equal(f"{prefix}.z", step.z, forward.Z)
        path = case.tokens(torch.cat([start[i][None], states[i]]))
        density, mean, std = transitions(case, schedule, live, step.z, path, steps)
        case.equal(f"{prefix}.log_prob", density, FLOW_LOG_PROB)
        case.equal(f"{prefix}.mean", mean, forward.Z)
        case.equal(f"{prefix}.std", std)
        trajectories, _, _ = transitions(case, schedule, live, step.z, extra, steps)
        trajectories = trajectories.transpose(0, 1)  # [S, k, ...]
        averaged = len(compare.manifest["tensors"]["grpo"][f"m{i}.mte_log_prob"]["shape"]) == trajectories.dim() - 1
        case.equal(f"{prefix}.mte_log_prob", trajectories.mean(0) if averaged else trajectories, FLOW_LOG_PROB)
        unknown, predicted = step.mask(case, step.places), step.mask(case, step.places[:, : step.count])
        case.equal(f"{prefix}.unknown_mask", unknown, 0.0)
        case.equal(f"{prefix}.predicted_mask", predicted, 0.0)
        case.equal(f"grpo.quirk.m{i}.z_train_as_released", released_z(case, step), forward.Z)
        weight = torch.ones_like(final)
        if i > 1:
            weight = _consistency(case, prefix, states[i, -1], states[i - 1, -1], final, unknown, predicted)
        with torch.no_grad():
            frozen = case.guided(reference)
            other = Step.of(case, rollout, frozen, i)
            _, reference_mean, _ = transitions(case, schedule, frozen, other.z, path, steps)
        shift, column = reference_mean - mean, advantage.view(batch, 1, 1, 1)
        case.equal(f"{prefix}.kl_elementwise", trainer_kl(shift))
        wide = std.view(-1, 1, 1, 1, 1)
        gaussian = (unknown * gaussian_kl(mean, reference_mean, wide, wide)).sum()
        policy, kl, loss = recorded_loss(
            density, trajectories, column, weight, uncertain, unknown, shift, params["beta"]
        )
        loss.backward()
        found = torch.stack([policy, kl, gaussian / unknown.expand_as(shift).sum(), loss])
        case.equal(f"{prefix}.policy_kl_loss", found, LOSS)
    norms = {name: gradient.norm() for name, gradient in _gradients(case, "grpo").items()}
    recorded_norms = compare.manifest["grad_norms"]
    compare.same("grad_norms.names", sorted(norms) == sorted(recorded_norms), True)
    for name, norm in norms.items():
        compare.same(f"grad_norms.{name}", norm, recorded_norms.get(name, math.nan), rtol=GRADIENT)
    total = torch.stack(list(norms.values())).norm()
    compare.same("grad_norms.total", total, compare.manifest["grad_total_norm"], rtol=GRADIENT)
    for parameter in trunk:
        parameter.grad = None
    released(case, rollout, schedule, reference, advantage, extra)


def released(
    case: Case, rollout: str, schedule: Schedule, reference: NovaTransformer, advantage: Tensor, extra: Tensor
) -> None:
    """The same by `algorithms.loss`: values of each AR step, then the gradient of all of them."""
    params, start = case.params, case.compare.golden(f"{rollout}.init_noise")
    states = case.tokens(torch.cat([start[:, None], case.compare.golden(f"{rollout}.xs")], dim=1))  # [K, T+1, B, L, C]
    config = AlgorithmConfig.model_validate(
        {
            "preset": "released",
            "selection": {"threshold": params["thresh"]},
            "trajectories": {"share": params["top"], "count": extra.shape[1]},
            "kl": {"coefficient": params["beta"]},
        }
    )
    path = Chain(extra[-1], dict(enumerate(extra)))
    whole = Extra.choose(path, [], case.model.config.patch**2, config.trajectories)
    for i in params["sel_mask"]:
        recorded = case.compare.golden(f"grpo.m{i}.policy_kl_loss")
        for kind in ("mean_k3", "gaussian"):
            settings = config.model_copy(update={"kl": config.kl.model_copy(update={"kind": kind})})
            for parameter in case.model.trunk_parameters() if kind == "gaussian" else ():
                parameter.requires_grad_(False)
            found = _own_update(
                case, rollout, i, states, schedule, case.compare.golden(f"grpo.m{i}.diff_index").tolist(), advantage,
                settings, Trajectories(whole, {}), case.guided(reference),
            )  # fmt: skip
            policy, kl = -found["policy_loss"], found["kl"]
            if kind == "gaussian":
                case.compare.same(f"grpo.m{i}.policy_kl_loss", kl, recorded[2], atol=LOSS, rtol=GRADIENT)
            else:
                ours = torch.tensor([policy, kl, params["beta"] * kl - policy])
                case.compare.same(f"grpo.m{i}.policy_kl_loss", ours, recorded[[0, 1, 3]], atol=LOSS)
            for parameter in case.model.trunk_parameters():
                parameter.requires_grad_(True)
    norms = {name: gradient.norm() for name, gradient in _gradients(case, "grpo").items()}
    for name, norm in norms.items():
        case.compare.same(f"grad_norms.{name}", norm, case.compare.manifest["grad_norms"][name], rtol=GRADIENT)


@torch.no_grad()
def released_z(case: Case, step: Step) -> Tensor:
    """z as the release trains on it (defect K1): the video encoder sees BOS and, as a second frame, the filled part.

    Two frames over a base of one are at the times 0 and 0.5, and the image encoder is given both.
    """
    model, text = case.model, case.model.text_embed(case.compare.golden("embed.prompt_cond"))
    embed, encoder, half = model.video_pos_embed, model.video_encoder, torch.tensor([0.5])
    later = embed.norm(embed.time_proj(time_frequencies(half).roll(TIME_DIM // 2, 1)))  # sine first
    projection = encoder.patch_embed.proj
    frame = F.conv2d(case.pixels(step.tokens), projection.weight, projection.bias, stride=projection.kernel_size)
    bos = (model.mask_embed.bos_token + model.video_pos + embed()).expand(len(text), -1, -1)
    x = torch.cat([text, bos, frame.flatten(2).transpose(1, 2) + model.video_pos + later], dim=1)
    for block in encoder.blocks:
        x = block(x)
    return model.ar_latents(step.tokens, step.known, encoder.norm(x)[:, text.shape[1] :])


def _extra_trajectories(case: Case, rollout: str, schedule: Schedule) -> tuple[Tensor, Tensor]:
    """Uncertain pixels [B, 1, H, W] and the paths [T+1, S, B, L, C] that say so, from z at commitment, unguided."""
    live, counts = case.guided(), case.compare.manifest["num_preds"]
    start, noise = (case.tokens(case.input(f"grpo.mte_{key}_noise")) for key in ("init", "step"))
    with torch.no_grad():
        steps = [Step.of(case, rollout, live, i) for i in range(len(counts))]
        z = torch.zeros_like(steps[0].z)
        for step in steps:
            z = z.scatter(
                1, (now := step.places[:, : step.count, None].expand(-1, -1, z.shape[2])), step.z.gather(1, now)
            )
        case.equal("grpo.ar_latent_all", z, forward.Z)
        predict = live.predictor(live.head_conditions(z, None))
        path = states_of(denoise(predict, schedule, start, noise.transpose(0, 1)))
    final = case.pixels(path[-1])
    case.equal("grpo.mte_xs", case.pixels(path[1:]).transpose(0, 1), forward.Z)
    spread = uncertainty(_rows(final))
    case.equal("grpo.uncertainty", spread.view_as(final[0, :, :1]), forward.Z)
    uncertain = most_uncertain(spread, case.params["top"]).float().view_as(final[0, :, :1])
    case.equal("grpo.critic_mask", uncertain, 0.0)
    return uncertain, path


def _consistency(
    case: Case, prefix: str, now: Tensor, before: Tensor, final: Tensor, unknown: Tensor, predicted: Tensor
) -> Tensor:
    case.equal(f"{prefix}.cos_cur", F.cosine_similarity(now, final, dim=1)[:, None])
    case.equal(f"{prefix}.cos_prev", F.cosine_similarity(before, final, dim=1)[:, None])
    config = SelectionConfig(mode="delta", threshold=case.params["thresh"])
    keep = consistent(_rows(now), _rows(before), _rows(final), predicted.flatten(1).bool(), config)
    weight = (keep.view_as(unknown) * unknown).expand_as(final)
    case.equal(f"{prefix}.consistency_mask", weight, 0.0)
    return weight


def _rows(latents: Tensor) -> Tensor:
    """[..., c, H, W] -> [..., H*W, c]: pixels where our update has tokens."""
    return latents.flatten(-2).transpose(-1, -2)


def ddpm_update(case: Case) -> None:
    """Unknown tokens of one AR step of the DDPM rollout, policy term only: as recorded, and by our own update."""
    compare = case.compare
    rollout = next(f"gen_{name}" for name, s in compare.manifest["rollouts"].items() if s["scheduler"] == "ddpm")
    schedule, live, i = case.schedule("ddpm"), case.guided(), int(case.input("grpo_ddpm.mask_step"))
    steps: list[int] = case.input("grpo_ddpm.diff_index").tolist()
    step = Step.of(case, rollout, live, i)
    case.equal("grpo_ddpm.z", step.z, forward.Z)
    path = torch.zeros(schedule.num_steps + 1, *step.tokens.shape)
    for j, now, after in zip(steps, case.input("grpo_ddpm.cur"), case.input("grpo_ddpm.next"), strict=True):
        path[j], path[j + 1] = case.tokens(now), case.tokens(after)
    density, mean, std = transitions(case, schedule, live, step.z, path, steps)
    case.equal("grpo_ddpm.log_prob", density, DDPM_LOG_PROB)
    case.equal("grpo_ddpm.mean", mean)
    case.equal("grpo_ddpm.std", std)
    advantage = case.compare.golden("grpo.advantages")
    for parameter in case.model.trunk_parameters():
        parameter.grad = None
    config = AlgorithmConfig.model_validate({"preset": "released", **PLAIN, "kl": {"kind": "off"}})
    found = _own_update(case, rollout, i, path[None], schedule, steps, advantage, config)
    case.equal("grpo_ddpm.policy", torch.tensor([-found["policy_loss"]]), LOSS)
    _gradients(case, "grpo_ddpm")


def _gradients(case: Case, part: str) -> dict[str, Tensor]:
    """Those in the model, by parameter; what is recorded of them is compared."""
    found = {name: p.grad for name, p in case.model.named_parameters() if p.grad is not None}
    for name, gradient in found.items():
        if f"{part}.grad.{name}" in case.compare:
            case.compare.equal(f"{part}.grad.{name}", gradient, of_max=GRADIENT)
    return found


def _own_update(
    case: Case, rollout: str, i: int, states: Tensor, schedule: Schedule, steps: list[int], advantage: Tensor,
    config: AlgorithmConfig, trajectories: Trajectories | None = None, reference: Guided | None = None,
) -> dict[str, float]:  # fmt: skip
    """Numbers of `algorithms.loss.backward` on AR step i of a rollout; the gradient is added to the model's.

    Args:
        states: [K, T+1, B, L, C], or those of this AR step alone.
    """
    live, counts = case.guided(), case.compare.manifest["num_preds"]
    step = Step.of(case, rollout, live, i)
    own, earlier = (states[i], states[i - 1]) if len(states) > 1 else (states[0], None)
    recorded = RecordedStep(
        i, step.tokens, step.known, sum(counts[:i]), step.places, step.count,
        Chain(take(own[-1], step.places), {j: take(state, step.places) for j, state in enumerate(own)}),
        take(step.z.detach(), step.places), before=None if earlier is None else take(earlier[-1], step.places),
    )  # fmt: skip
    final = case.tokens(case.compare.golden(f"{rollout}.latents")[:, :, 0])
    pixels = case.model.config.patch**2
    made = Rollout(final, [recorded], None, None)
    batch = Batch.of(torch.arange(len(final)), made, trajectories, schedule, pixels, config)
    scored = {i: steps}
    scale = scales(
        config, scored, kept([batch], scored), counts=counts, images=len(final), token_dim=final.shape[2]
    )  # fmt: skip
    return backward(live, reference, batch, advantage, scored, scale, config).means()
