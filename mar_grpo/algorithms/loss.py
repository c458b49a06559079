"""MAR-GRPO's update (arXiv 2604.06966): what is recorded of a rollout, and its gradient.

For each scored AR step the trunk is run again on the canvas of that step. Its output z must equal the rollout's (this
is asserted: a mismatch means that another policy is scored than was sampled). The head is evaluated on the recorded
states in `head.py`, chunk by chunk, and the gradient with respect to its condition is collected; then it goes through
the trunk once. Memory therefore does not grow with the number of transitions or trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mar_grpo.algorithms.config import AlgorithmConfig
from mar_grpo.algorithms.likelihood import HeadRows, LossParts, Old, score_rows
from mar_grpo.algorithms.selection import consistent, units
from mar_grpo.algorithms.trajectories import Trajectories, draw_trajectories
from mar_grpo.diffusion.gaussian import Schedule
from mar_grpo.errors import UnhealthyError
from mar_grpo.rollout import Chain, Guided, Kept, RecordedStep, Rollout, roll_out, schedule_of

__all__ = ["AlgorithmConfig", "Batch", "LossParts", "Scales", "Steps", "backward", "kept", "record", "scales"]

Steps = Mapping[int, Sequence[int]]
Z_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 5e-2}


@dataclass
class Batch:
    """Images of one process that are rolled out together, and what the update reads of them.

    Attributes:
        index: int64 [B], the prompt of each image.
        schedule: the diffusion schedule they were made with.
        keep: AR step -> bool [B, M, U]: units (whole tokens, or latent pixels) of the policy term.
        old: log-densities of the policy that made the images, where more than one inner update needs them.
    """

    index: Tensor
    rollout: Rollout
    trajectories: Trajectories | None
    schedule: Schedule
    keep: dict[int, Tensor]
    old: Old = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        index: Tensor,
        rollout: Rollout,
        trajectories: Trajectories | None,
        schedule: Schedule,
        pixels: int,
        config: AlgorithmConfig,
    ) -> Batch:
        """Select the tokens (or their `pixels`) of the policy term."""
        keep = {step.index: _keep(step, rollout, trajectories, pixels, config) for step in rollout.steps}
        return cls(index, rollout, trajectories, schedule, keep)


@torch.no_grad()
def record(
    guided: Guided,
    index: Tensor,
    keys: Sequence[int],
    steps: Steps,
    config: AlgorithmConfig,
    drawn: tuple[Tensor, Tensor] | None = None,
) -> Batch:
    """Roll out one image per key.

    Args:
        guided: the policy under each image's prompt (`Guided.rows(index)`).
        steps: AR step -> transitions that are scored.
        drawn: orders and noise instead of those of the keys, as `roll_out` takes them.
    """
    mode, needs = config.trajectories.mode, list[Kept]()
    if config.selection.mode == "delta":
        needs.append("before")
    if mode in ("composite", "drop_topk"):
        needs.append("z")
    if mode == "per_step" and config.trajectories.guidance == "sampler":
        needs.append("unconditional")
    if config.deviation == "recorded":
        needs.append("std")
    rollout = roll_out(
        guided, keys, recorded=steps, scope=config.scope, keep=needs,
        first_before=config.selection.first_ar_step, drawn=drawn,
    )  # fmt: skip
    trajectories = None
    if mode != "off":
        trajectories = draw_trajectories(guided, rollout, keys, steps, config.trajectories)
    schedule = schedule_of(guided.policy, guided.sampling)
    batch = Batch.of(index, rollout, trajectories, schedule, guided.policy.pixels_per_token, config)
    read = [replace(step, before=None, z_unconditional=None) for step in rollout.steps]
    batch.rollout = Rollout(rollout.tokens, read, None, None)  # selection and trajectories have read the rest
    return batch


def _keep(
    step: RecordedStep, rollout: Rollout, trajectories: Trajectories | None, pixels: int, config: AlgorithmConfig
) -> Tensor:
    """bool [B, M, U]: what selection keeps, less what the control `drop_topk` takes out."""
    selection = config.selection
    if step.index < selection.first_ar_step:
        selection = selection.model_copy(update={"mode": "off"})
    count = pixels if selection.unit == "pixel" else 1
    index = step.places[..., None].expand(-1, -1, step.path.final.shape[-1])
    now, final = (units(part, count) for part in (step.path.final, rollout.tokens.gather(1, index)))
    before = None if step.before is None else units(step.before, count)
    committed = torch.arange(step.places.shape[1], device=now.device)[:, None] < step.num_committed
    keep = consistent(now, before, final, committed, selection)
    if trajectories is not None and config.trajectories.mode == "drop_topk":
        keep = keep & ~trajectories.at(step).uncertain
    return keep


def kept(batches: Sequence[Batch], steps: Steps) -> Tensor:
    """float64 [steps, 2]: units kept and units in scope. Sums over batches and processes add up."""
    return torch.stack(
        [sum(torch.tensor([b.keep[i].sum(), b.keep[i].numel()]).double() for b in batches) for i in steps]  # type: ignore[misc]
    )


@dataclass(frozen=True)
class Scales:
    """What the sums of an AR step are multiplied by in the loss: its policy term, its KL."""

    policy: dict[int, float]
    kl: dict[int, float]


def scales(
    config: AlgorithmConfig,
    steps: Steps,
    kept: Tensor,
    *,
    counts: Sequence[int],
    images: int,
    token_dim: int,
    counted_share: float = 1.0,
) -> Scales:
    """Averages as `AlgorithmConfig.reduction` and `per` say.

    The weights that selection gives to the elements of an AR step have mean one: what is kept counts more by as much as
    was dropped. With `elements` the step itself weighs as it would on average over draws of AR steps, whatever others
    were drawn.

    Args:
        kept: from `kept`, summed over all processes.
        counts: tokens that each AR step commits.
        images: of the whole update; token_dim: C.
        counted_share: share of the images that the policy term counts (`advantage.counted_share`).
    """
    channels = token_dim if config.per == "element" else 1
    tokens = [sum(counts[i:]) if config.scope == "unknown" else counts[i] for i in range(len(counts))]
    transitions = len(next(iter(steps.values())))
    policy, kl = {}, {}
    for (i, scored), (share, whole) in zip(steps.items(), kept.tolist(), strict=True):
        if config.reduction == "elements":
            elements = sum(tokens) * len(steps) / len(counts) * transitions
        else:
            elements = tokens[i] * len(scored) * (len(steps) if config.reduction == "steps" else 1)
        kl[i] = config.kl.coefficient / (elements * images * channels)
        weight = whole / share if share else 0.0
        policy[i] = weight / (elements * images * channels * counted_share) if counted_share else 0.0
    return Scales(policy, kl)


def backward(
    live: Guided,
    reference: Guided | None,
    batch: Batch,
    advantage: Tensor,
    steps: Steps,
    scales: Scales,
    config: AlgorithmConfig,
    always: bool = False,
) -> LossParts:
    """Accumulate the gradient of the loss of one micro-batch in the parameters that require one.

    Args:
        live: the policy under the P prompts of these B images, with gradient.
        reference: what the KL is to, under the same; None where kl.kind is off.
        advantage: [B].
        steps: those the batch was recorded with.
        always: call the trunk even if no image has a gradient: processes that share a policy out do it together.

    Raises:
        UnhealthyError: the trunk does not give the z of the rollout, or gives numbers that are not finite.
    """
    total = LossParts()
    if config.likelihood_guidance == "none":
        live, reference = live.unguided(), reference and reference.unguided()
    leaves = live.leaves()
    first = not batch.old
    images = torch.arange(len(advantage)) if reference else advantage.nonzero()[:, 0].cpu()  # others have no gradient
    if not len(images) and always:
        images = torch.zeros(1, dtype=torch.int64)
    images = images.to(batch.index.device)
    if not len(images):
        total.add(**_selected(batch))
        return total
    for step in batch.rollout.steps:
        canvas = (step.tokens[images], step.known[images], step.num_known, step.places[images])
        latents = leaves.rows(batch.index[images]).latents(*canvas)
        if first:
            _same_policy(latents[0].detach(), step, images)
        conditions = live.head_conditions(*latents)
        guidance = live.scale(step.num_known + step.num_committed)
        anchor = None
        if reference is not None:
            with torch.no_grad():
                anchor = reference.head_conditions(*reference.rows(batch.index).latents(*canvas))
        whole = [
            part.new_zeros(len(advantage), *part.shape[1:]).index_copy(0, images, part.detach()) for part in conditions
        ]
        rows = _rows(step, batch, advantage, scales.policy[step.index], config)
        parts, gradients = score_rows(
            live, whole, reference, anchor, guidance, rows, batch.schedule,
            steps[step.index], scales.kl[step.index], batch.old, config,
        )  # fmt: skip
        total.merge(parts)
        if conditions[0].requires_grad:
            torch.autograd.backward(conditions, [gradient[images] for gradient in gradients])
    live.backward_through(leaves)
    total.add(**_selected(batch))
    return total


def _at_images(part: Tensor, images: Tensor, count: int) -> Tensor:
    """Rows of some images among those of all `count`; zeros elsewhere."""
    return part.new_zeros(count, *part.shape[1:]).index_copy(0, images, part)


def _selected(batch: Batch) -> dict[str, Tensor]:
    """Units kept and units in scope, over all AR steps."""
    units_kept = [keep.sum() for keep in batch.keep.values()]
    return {"kept": torch.stack(units_kept).sum(), "units": torch.tensor(sum(k.numel() for k in batch.keep.values()))}


def _same_policy(z: Tensor, step: RecordedStep, images: Tensor) -> None:
    recorded = step.z[images]
    error, size = torch.stack([(z - recorded).abs().max(), recorded.abs().max()]).tolist()
    where = f"AR step {step.index}"
    if not error < float("inf"):
        hint = "lower optimizer.learning_rate; the last checkpoint is intact"
        raise UnhealthyError("the trunk's output is not finite", where=where, hint=hint)
    if error > Z_TOLERANCE[z.dtype] * max(1.0, size):
        raise UnhealthyError(
            f"the update's z differs from the rollout's by {error:.2g}",
            where=where,
            hint="the policy that is scored is not the one that was sampled",
        )


def _rows(step: RecordedStep, batch: Batch, advantage: Tensor, scale: float, config: AlgorithmConfig) -> HeadRows:
    """The tokens of an AR step as the head's rows, image by image, with what each unit of them weighs."""
    keep = batch.keep[step.index]
    signal = advantage.to(keep.device)[:, None, None] * keep * scale  # [B, M, U]
    main, share, number, path = torch.ones_like(signal), None, None, Chain(step.path.final, {})
    if batch.trajectories is not None and config.trajectories.mode != "drop_topk":
        extra = batch.trajectories.at(step)
        averaged = config.trajectories.count + config.trajectories.include_rollout
        uncertain = extra.uncertain.to(signal.dtype)
        widest = max(signal.shape[2], uncertain.shape[2])
        signal, uncertain = (part.expand(-1, -1, widest) for part in (signal, uncertain))
        main = 1 - uncertain * (1 - config.trajectories.include_rollout / averaged)
        share, number, path = signal * uncertain / averaged, extra.row.flatten(), extra.path
    return HeadRows(
        index=step.index,
        places=step.places.shape[1],
        path=step.path,
        main=(signal * main).flatten(0, 1),
        extra_path=path,
        extra=None if share is None else share.flatten(0, 1),
        extra_row=number,
    )
