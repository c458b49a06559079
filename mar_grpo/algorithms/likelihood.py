"""The head's part of the update: recorded transitions under the current condition, chunk by chunk.

A row is a token of an AR step. Where it has extra trajectories they are evaluated together with its own: the
modulation, three fifths of the head's work, is the same for all of them. Memory is bounded by ROWS evaluations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mar_grpo.algorithms.config import AlgorithmConfig
from mar_grpo.algorithms.objective import density, kl_term, policy_term
from mar_grpo.diffusion.gaussian import Schedule, Std
from mar_grpo.rollout import Chain, Guided, Predict

ROWS = 2048
Old = dict[tuple[int, int, int, bool], Tensor]  # (AR step, transition, first row of the chunk, extra) -> log-densities


@dataclass
class LossParts:
    """Parts of the loss as they were added up, on the device; `merge` adds, `means` reads."""

    values: dict[str, Tensor] = field(default_factory=dict)

    def add(self, **sums: Tensor) -> None:
        for name, value in sums.items():
            value = value.detach().double()
            self.values[name] = self.values[name] + value if name in self.values else value

    def merge(self, other: LossParts) -> None:
        self.add(**other.values)

    def numbers(self) -> dict[str, float]:
        """What processes exchange."""
        return {name: value.item() for name, value in self.values.items()}

    @classmethod
    def of(cls, numbers: dict[str, float]) -> LossParts:
        return cls({name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()})

    def means(self) -> dict[str, float]:
        """policy_loss (weights and all), kl (nats per element), kept_share of the units in scope; and where there was
        an old policy, ratio and clip_share: mean ratio to it, and share that was cut, of the elements that weigh."""
        sums = self.numbers()
        found = {"policy_loss": -sums.get("policy", 0.0), "kept_share": sums["kept"] / sums["units"]}
        if "kl" in sums:
            found["kl"] = sums["kl"] / sums["kl_elements"]
        if sums.get("elements"):
            found |= {name: sums[name] / sums["elements"] for name in ("ratio", "clip_share")}
        return found


@dataclass(frozen=True)
class HeadRows:
    """N = B * M tokens of one AR step, image by image, U units each.

    Attributes:
        path: states [B, M, C] of the rollout; main: what a unit weighs in the policy term, advantage and all [N, U].
        extra_path: states [S, n, C]; extra: what a unit of each trajectory weighs [N, U]; extra_row: the token's row in
            the path [N], -1 where there is none. None without extra trajectories.
    """

    index: int
    places: int
    path: Chain
    main: Tensor
    extra_path: Chain
    extra: Tensor | None
    extra_row: Tensor | None

    def groups(self, everything: bool) -> Iterator[tuple[Tensor, bool, bool]]:
        """(rows int64 [n], with their own trajectory, with the extra ones); rows that weigh nothing are left out.

        Args:
            everything: all rows' own trajectories are wanted (a KL sees every token).
        """
        main = torch.ones(len(self.main), dtype=torch.bool) if everything else (self.main != 0).any(-1).cpu()
        if self.extra is None:
            yield main.nonzero()[:, 0], True, False
            return
        extra = (self.extra != 0).any(-1).cpu()
        for rows, own, more in ((main & ~extra, True, False), (main & extra, True, True), (extra & ~main, False, True)):
            yield rows.nonzero()[:, 0], own, more


def score_rows(
    live: Guided,
    conditions: list[Tensor],
    reference: Guided | None,
    anchor: list[Tensor] | None,
    guidance: float,
    rows: HeadRows,
    schedule: Schedule,
    transitions: Sequence[int],
    kl_scale: float,
    old: Old,
    config: AlgorithmConfig,
) -> tuple[LossParts, list[Tensor]]:
    """Gradient of one AR step's loss with respect to the head's conditions (and the head, where it is trained).

    Args:
        conditions: [B, M, W] each, detached; anchor: those of the reference.
        guidance: scale of this AR step.
        old: log-densities of the policy that made the images; filled here where they are needed and not there yet.

    Returns:
        Sums, and a gradient for each condition.
    """
    flat = [condition.flatten(0, 1) for condition in conditions]
    anchors = None if anchor is None else [condition.flatten(0, 1) for condition in anchor]
    gradients = [torch.zeros_like(condition) for condition in flat]
    parts = LossParts()
    fold = rows.places if live.sampling.guidance_renorm < 1 else None  # the norm ties the tokens of an image
    for all_rows, own, more in rows.groups(reference is not None or fold is not None):
        trajectories = own + (rows.extra_path.final.shape[0] if more else 0)
        size = max(1, ROWS // trajectories)
        for chosen in all_rows.split(size if fold is None else fold * max(1, size // fold)):
            if not len(chosen):
                continue
            chunk = _Chunk(rows, chosen.to(flat[0].device), own, more)
            cut = [condition[chunk.rows].requires_grad_() for condition in flat]
            predict = live.predictor([_fold(part, fold) for part in cut], guidance)
            with torch.no_grad():
                kept = None if anchors is None else [_fold(condition[chunk.rows], fold) for condition in anchors]
            for j in transitions:
                state, after = chunk.pair(j)
                folded = _fold(state, fold)
                mean, std = _transition(schedule, j, folded, predict, fold)
                with torch.no_grad():
                    if config.deviation == "recorded" and isinstance(std, Tensor):
                        std = chunk.recorded_std(j)
                    slope = _policy(chunk, rows.index, j, after, mean, std, old, config, parts)
                    if reference is not None and kept is not None and own:
                        other = reference.predictor(kept, guidance)
                        target, target_std = _transition(schedule, j, folded[:1], other, fold)
                        first = std[:1] if isinstance(std, Tensor) else std
                        if config.deviation == "recorded" and isinstance(std, Tensor):
                            target_std = first
                        slope = slope.clone()
                        slope[:1] += _kl(mean[:1], target, first, target_std, after[:1], kl_scale, config, parts)
                torch.autograd.backward(mean, slope)
            for gradient, part in zip(gradients, cut, strict=True):
                if part.grad is not None:
                    gradient[chunk.rows] += part.grad
    return parts, [gradient.view_as(part) for gradient, part in zip(gradients, conditions, strict=True)]


def _policy(
    chunk: _Chunk, index: int, j: int, after: Tensor, mean: Tensor, std: Std, old: Old, config: AlgorithmConfig,
    parts: LossParts,
) -> Tensor:  # fmt: skip
    """Derivative of minus the policy term with respect to the mean [s, n, C]."""
    log_prob, score = density(after, mean, std, config.variance_floor)
    key = (index, j, int(chunk.rows[0]), chunk.more) if config.inner_updates > 1 else None
    before = old.get(key) if key else None
    weight = chunk.weight(score.shape[-1])
    value, slope, ratio = policy_term(log_prob, score, weight, before, config.clip)
    if key and before is None:
        old[key] = log_prob
    parts.add(policy=value.sum())
    if before is not None:
        weighs = (weight != 0).expand_as(ratio)
        cut = torch.zeros(()) if config.clip is None else ((ratio - 1) * weight.sign() > config.clip).sum()
        parts.add(ratio=ratio.masked_fill(~weighs, 0.0).sum(), clip_share=cut, elements=weighs.sum())
    return -slope


def _kl(
    mean: Tensor, target: Tensor, std: Std, target_std: Std, after: Tensor, scale: float, config: AlgorithmConfig,
    parts: LossParts,
) -> Tensor:  # fmt: skip
    """Derivative of the KL's part of the loss with respect to the mean [1, n, C]."""
    assert config.kl.kind != "off"
    value, slope = kl_term(config.kl.kind, mean, target, std, target_std, after, config.variance_floor)
    parts.add(kl=value.sum(), kl_elements=torch.tensor(float(value.numel())))
    return scale * slope


class _Chunk:
    """Some rows of an AR step: their own trajectory first (if wanted), then the extra ones."""

    def __init__(self, rows: HeadRows, chosen: Tensor, own: bool, more: bool) -> None:
        self.all, self.rows, self.own, self.more = rows, chosen, own, more
        self.extra_rows = rows.extra_row[chosen] if more and rows.extra_row is not None else None

    def pair(self, j: int) -> tuple[Tensor, Tensor]:
        """States before and after transition j, [s, n, C]."""
        before, after = (self._states(k) for k in (j, j + 1))
        return before, after

    def _states(self, j: int) -> Tensor:
        parts = []
        if self.own:
            parts.append(self.all.path.states[j].flatten(0, 1)[self.rows][None])
        if self.extra_rows is not None:
            parts.append(self.all.extra_path.states[j][:, self.extra_rows])
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def recorded_std(self, j: int) -> Tensor:
        """Deviation of the rollout's transition, for all trajectories [1, n, C]."""
        std = self.all.path.std[j]
        assert isinstance(std, Tensor)
        return std.flatten(0, 1)[self.rows][None]

    def weight(self, channels: int) -> Tensor:
        """What each element weighs, [s, n, C] or [s, n, 1]."""
        parts = [self.all.main[self.rows][None]] if self.own else []
        if self.extra_rows is not None and self.all.extra is not None:
            extra = self.all.extra[self.rows][None]
            parts.append(extra.expand(self.all.extra_path.final.shape[0], -1, -1))
        weight = torch.cat(parts) if len(parts) > 1 else parts[0]
        return weight if weight.shape[-1] == 1 else weight.repeat_interleave(channels // weight.shape[-1], dim=-1)


def _fold(x: Tensor, fold: int | None) -> Tensor:
    """[..., n, F] as images [..., b, M, F] where guidance looks at whole images."""
    return x if fold is None else x.unflatten(-2, (-1, fold))


def _transition(
    schedule: Schedule, j: int, state: Tensor, predict: Predict, fold: int | None
) -> tuple[Tensor, Std]:  # fmt: skip
    """Mean and deviation of transition j, [s, n, C] again."""
    mean, std = schedule.transition(j, state, predict(state, schedule.timestep(j)))
    if fold is None:
        return mean, std
    return mean.flatten(-3, -2), std.flatten(-3, -2) if isinstance(std, Tensor) else std
