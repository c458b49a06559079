"""The arms of an ablation: one recipe with parts of the method left out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mar_grpo.config import Recipe, load_recipe

MTE_OFF, SELECTION_OFF = {"trajectories": {"mode": "off"}}, {"selection": {"mode": "off"}}


@dataclass(frozen=True)
class Arm:
    """A recipe's algorithm with changes (mappings are merged), or a preset instead of it.

    The recipe itself is the arm `full`, so it has MTE and selection on.
    """

    title: str
    what: str
    changes: Mapping[str, Any]
    preset: bool = False


ARMS: dict[str, Arm] = {
    "head": Arm(
        "Head trained",
        "GRPO that trains trunk and head, as without MAR-GRPO; no MTE, no selection",
        {"trained": "both"} | MTE_OFF | SELECTION_OFF,
    ),
    "frozen": Arm("Frozen head", "the same with the head frozen", MTE_OFF | SELECTION_OFF),
    "mte_all": Arm("MTE, all", "frozen head and MTE on all tokens", {"trajectories": {"share": 1.0}} | SELECTION_OFF),
    "mte_topk": Arm("MTE, top-k", "frozen head and MTE on the most uncertain tokens", SELECTION_OFF),
    "consistency": Arm("Selection", "frozen head and consistency selection, no MTE", MTE_OFF),
    "full": Arm("Full", "frozen head, MTE on the most uncertain tokens, consistency selection: the recipe itself", {}),
    "drop_topk": Arm(
        "Drop top-k",
        "control: the most uncertain tokens are left out of the policy term; no selection",
        {"trajectories": {"mode": "drop_topk"}} | SELECTION_OFF,
    ),
    "random": Arm(
        "MTE, random",
        "control: MTE on a random part of the same size; no selection",
        {"trajectories": {"pick": "random"}} | SELECTION_OFF,
    ),
    "corrected": Arm("Corrected", "the preset `corrected`, with nothing of the recipe's algorithm", {}, preset=True),
    "released": Arm("Released", "the preset `released`, the same", {}, preset=True),
}


def arm_recipe(recipe: Recipe, arm: str, seed: int) -> Recipe:
    """The recipe of one arm and seed. InputError names what does not fit."""
    content, chosen = recipe.model_dump(mode="json"), ARMS[arm]
    content |= {"name": f"{recipe.name}-{arm.replace('_', '-')}", "seed": seed}
    content["algorithm"] = {"preset": arm} if chosen.preset else _merged(content["algorithm"], chosen.changes)
    return load_recipe(json.dumps(content))


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **base, **{k: _merged(base[k], v) if isinstance(v, Mapping) else v for k, v in changes.items()}
    }  # fmt: skip
