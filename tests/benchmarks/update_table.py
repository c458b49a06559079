"""How `tests.benchmarks.update` prints what it measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mar_grpo.models import mar, nova
from mar_grpo.rollout import schedule_of
from tests.benchmarks.update_models import PUBLISHED
from tests.benchmarks.update_operations import needed, released

if TYPE_CHECKING:
    from tests.benchmarks.update import Measured

WAYS = ("released", "ours")


def render(found: Measured, numbers: dict[str, Any]) -> str:
    """A block of text."""
    return "\n".join(
        ["", *_heading(found), *_phases(found), *_floor(found), *_published(found), *_rest(found, numbers)]
    )


def _heading(found: Measured) -> list[str]:
    size, plan = found.size, found.plan
    tokens, scored = sum(plan.counts), [plan.unknown[i] for i in plan.steps]
    weights = sum(value.numel() for value in found.policy.transformer.parameters()) / 1e6
    there, here = PUBLISHED[size.family].network.proportions(), size.network.proportions()
    return [
        f"{size.name}: {weights:.1f} million parameters, {tokens} tokens, {size.group} images",
        f"  scored: {len(plan.steps)} of {len(plan.counts)} AR steps, {len(next(iter(plan.steps.values())))} of "
        f"{plan.transitions} transitions, {plan.trajectories} trajectories more on {plan.averaged:.2f} of the tokens",
        f"  unknown tokens: {sum(plan.unknown) / len(plan.unknown) / tokens:.2f}, in scored AR steps "
        f"{sum(scored) / len(scored) / tokens:.2f}",
        "  " + ", ".join(f"{name} {here[name]:.3f} (published {there[name]:.3f})" for name in here),
    ]


def _phases(found: Measured) -> list[str]:
    lines = [f"  {'':10}{'seconds':>22}{'operations, 1e9':>31}{'peak, MB':>27}",
             f"  {'':10}" + f"{'released':>12}{'ours':>9}{'ratio':>7}" * 3]  # fmt: skip
    seconds = {name: {**found.seconds[name], "step": sum(found.seconds[name].values())} for name in WAYS}
    for phase in next(iter(seconds.values())):
        parts = [[found.costs[name][phase]] if phase != "step" else list(found.costs[name].values()) for name in WAYS]
        columns = (
            [seconds[name][phase] for name in WAYS],
            [sum(part.operations for part in some) / 1e9 for some in parts],
            [max(part.peak_bytes for part in some) / 1e6 for some in parts],
        )
        lines.append(f"  {phase:10}" + "".join(f"{a:>12.2f}{b:>9.2f}{b / max(a, 1e-9):>7.3f}" for a, b in columns))
    return lines


def _floor(found: Measured) -> list[str]:
    floor, paper = needed(found.size.network, found.plan), released(found.size.network, found.plan)
    rollout, update = found.costs["ours"]["rollout"], found.costs["ours"]["update"]
    rows = {
        "rollout, trunk": (rollout.operations - rollout.head_operations, floor["rollout, trunk"]),
        "rollout, head": (rollout.head_operations, floor["rollout, head"] + floor["rollout, trajectories"]),
        "update": (update.operations, floor["update, trunk"] + floor["update, head"]),
    }
    rows["all"] = tuple(sum(column) for column in zip(*rows.values(), strict=True))
    counted = sum(part.operations for name, part in found.costs["released"].items() if name != "rewards")
    return [
        "  what no order of the work avoids, 1e9 operations, and ours over it: "
        + ", ".join(f"{name} {least / 1e9:.1f} {ours / least:.3f}" for name, (ours, least) in rows.items()),
        f"  the released way: counted over on paper {counted / sum(paper.values()):.3f}",
    ]


def _published(found: Measured) -> list[str]:
    from tests.benchmarks.update import plan_of, typical_steps

    size = PUBLISHED[found.size.family]
    make = {"nova": nova.mask_schedule, "harmon": mar.mask_schedule}[size.family]
    counts = make(size.network.tokens, size.sampling.ar_steps)
    steps = typical_steps(counts, schedule_of(found.policy, size.sampling), size.algorithm)
    plan = plan_of(size, counts, steps, found.plan.averaged)
    there, least = (sum(price(size.network, plan).values()) for price in (released, needed))
    return [
        f"  on paper for {size.name}, {size.group} images: {there / 1e12:.0f}e12 released, {least / 1e12:.0f}e12 "
        f"needed, ratio {least / there:.3f}"
    ]


def _rest(found: Measured, numbers: dict[str, Any]) -> list[str]:
    whole = sum(part.operations for part in found.costs["ours"].values())
    rate = whole / sum(found.seconds["ours"].values())
    return [
        f"  rollout's head, operations ratio {numbers['rollout_head_operations_ratio']:.3f}; "
        f"gradients differ by at most {found.difference:.1e} of a tensor's largest",
        f"  ours: {rate / 1e9:.1f}e9 operations a second, {numbers['matmul_rate_fraction']:.0%} of a matrix product's "
        f"{found.rate / 1e9:.1f}e9",
    ]
