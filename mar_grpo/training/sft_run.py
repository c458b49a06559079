"""`mar-grpo sft`: from a checkpoint and a set of captioned pictures to a fine-tuned checkpoint folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field

from mar_grpo.data.build import build_scene_set
from mar_grpo.data.scenes import Split
from mar_grpo.data.shards import read_shards
from mar_grpo.documents import PromptSet, read_document
from mar_grpo.errors import InputError
from mar_grpo.models.checkpoint import fetch_checkpoint, load_policy, save_policy
from mar_grpo.models.nova_policy import NovaPolicy
from mar_grpo.models.policy import Policy
from mar_grpo.store import Store
from mar_grpo.training.sft import SftConfig, train_sft

ENCODE_BATCH = 64


class SftData(BaseModel):
    """What SFT trains on.

    Args:
        source, validation: "emoji" for scenes made on the spot, or the URI of a prompt-set document of kind `scenes`.
        scenes, validation_scenes: how many emoji scenes are made.
        mixed_captions: whether every second emoji scene has a caption beyond the six kinds of evaluation.
        tag_weights: ratio in which the tags and those of data.scenes.MORE_CAPTIONS are drawn to train; empty: in turn.
        caption_noise: share of emoji scenes that differ from their caption in one fact, as captions from the web do.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str = "emoji"
    validation: str = "emoji"
    scenes: int = Field(24_000, gt=0)
    validation_scenes: int = Field(512, gt=0)
    mixed_captions: bool = False
    tag_weights: dict[str, float] = {}
    caption_noise: float = Field(0.0, ge=0, le=1)
    seed: int = 0


class SftRecipe(BaseModel):
    """A whole SFT run; recorded beside the weights it makes (`sft.json`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    checkpoint: str
    checkpoint_sha256: str | None = None
    data: SftData = SftData()
    sft: SftConfig


def run_sft(recipe: SftRecipe, out: Path, work: Path, report: Callable[[dict[str, float]], None]) -> Path:
    """Train and write the checkpoint folder `out` (published layout, float16 weights, `sft.json` with the facts).

    Args:
        work: state and shards live here; a second call with the same recipe goes on from them.
        report: gets one dict a progress point.
    """
    # GELU's far tail makes denormals, which slow CPU matrix products five times; the pool's threads inherit the flag
    # when they start, so it is set before the first of them does.
    torch.set_flush_denormal(True)
    folder = fetch_checkpoint(recipe.checkpoint, work / "checkpoints", sha256=recipe.checkpoint_sha256)
    policy = load_policy(folder)
    if not isinstance(policy, NovaPolicy):
        family, hint = type(policy).__name__.removesuffix("Policy"), "give a NOVA checkpoint"
        raise InputError(
            f"supervised fine-tuning is built for NOVA, this is {family}", where=recipe.checkpoint, hint=hint
        )
    store = Store(work / "scenes")
    store.make_root()
    data = recipe.data
    train = _scene_set(store, "train", data.source, data.scenes, data)
    validation = _scene_set(store, "held_out", data.validation, data.validation_scenes, data)
    tokens, prompts = encode_set(policy, train, store)
    held_out = encode_set(policy, validation, store)
    last = train_sft(policy, tokens, prompts, held_out, recipe.sft, work / "state", report)
    save_policy(policy, out, dtype=torch.float16)
    facts = {"recipe": recipe.model_dump(), "train_set": train.digest, "validation_set": validation.digest} | last
    (out / "sft.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return out


def _scene_set(store: Store, split: Split, source: str, count: int, data: SftData) -> PromptSet:
    if source == "emoji":
        training = split == "train"
        return build_scene_set(
            store, split, n=count, noise=data.caption_noise, seed=data.seed, split=split,
            mixed=training and data.mixed_captions, tag_weights=data.tag_weights if training else None,
        )  # fmt: skip
    document = read_document(source, PromptSet)
    if document.kind != "scenes":
        raise InputError("the set holds prompts without pictures", where=source, hint="SFT needs a set of scenes")
    return document


@torch.no_grad()
def encode_set(policy: Policy, scenes: PromptSet, store: Store) -> tuple[torch.Tensor, list[str]]:
    """Clean tokens float32 [N, L, C] and captions of a set, every shard checked against the manifest."""
    tokens, prompts, images = [], [], []
    for sample in read_shards(scenes, store):
        prompts.append(sample.record.prompt)
        images.append(torch.from_numpy(sample.image().copy()))
        if len(images) == ENCODE_BATCH:
            tokens.append(policy.encode_images(torch.stack(images)))
            images = []
    if images:
        tokens.append(policy.encode_images(torch.stack(images)))
    return torch.cat(tokens), prompts
