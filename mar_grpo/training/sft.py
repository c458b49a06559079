"""Supervised fine-tuning of a NOVA-family model on captioned pictures: the model RL starts from.

The loss is NOVA's (arXiv 2412.14169, section 3): a random subset of tokens is known, the trunk makes z for the others,
and the head predicts the velocity (or noise) of each of them at a random noise level. Departures from the paper: every
part of a batch has one number of known tokens (the trunk gathers them), spread evenly over the schedule instead of
drawn independently; several noise levels are drawn per token because the head is cheap beside the trunk.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from mar_grpo.errors import InputError, UnhealthyError
from mar_grpo.models.nova_policy import NovaPolicy
from mar_grpo.training.muon import Muon
from mar_grpo.training.optimization import Ema


class SftConfig(BaseModel):
    """What SFT does with a set of captioned pictures.

    Args:
        updates: optimiser steps; the learning rate is constant, then falls linearly over the last `decay_share`.
        stop_after: end after this many updates, before the schedule does; None for all.
        batch_size, parts: pictures a step, and in how many parts with their own number of known tokens.
        known_until: numbers of known tokens are spread over this first share of the schedule. A small one shows mostly
            empty canvases, where the layout is decided: relations are learnt there, or not at all.
        draws_per_token: noise levels per unknown token; their logit is normal with mean `noise_logit_mean` and
            deviation 1. What an image shows is decided at high noise: a mean above 0 teaches that part more.
        optimizer: adamw, or muon for the matrices of the transformer and adamw for all else.
        learning_rate: of adamw; muon_learning_rate: of muon (update of unit spectral norm, times this).
        ema_decay: decay per step of the averaged weights, which are what is validated and saved.
        prompt_drop: share of pictures shown with the empty prompt, for guidance.
        train_text_encoder: also train the text encoder; only for one that was never pretrained.
        bfloat16: run the networks under bfloat16 autocast (diffusion arithmetic stays float32).
        validate_every, save_every: in updates.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    updates: int = Field(gt=0)
    stop_after: int | None = Field(None, gt=0)
    batch_size: int = Field(128, gt=0)
    parts: int = Field(4, gt=0)
    known_until: float = Field(1.0, gt=0, le=1)
    draws_per_token: int = Field(4, gt=0)
    noise_logit_mean: float = 0.0
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(1e-4, gt=0)
    muon_learning_rate: float = Field(0.02, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    warmup_updates: int = Field(50, ge=0)
    decay_share: float = Field(0.5, ge=0, le=1)
    ema_decay: float = Field(0.995, ge=0, lt=1)
    prompt_drop: float = Field(0.1, ge=0, lt=1)
    train_text_encoder: bool = False
    bfloat16: bool = False
    validate_every: int = Field(250, gt=0)
    save_every: int = Field(250, gt=0)
    seed: int = 0


def known_counts(parts: int, num_tokens: int, rng: np.random.Generator, until: float = 1.0) -> list[int]:
    """Numbers of known tokens of the parts of one batch: L - ceil(L cos(pi u / 2)), u spread evenly over [0, until)."""
    levels = until * (np.arange(parts) + rng.random()) / parts
    return [num_tokens - max(1, math.ceil(num_tokens * math.cos(0.5 * math.pi * u))) for u in levels]


def sft_loss(
    policy: NovaPolicy, tokens: Tensor, features: Sequence[Tensor], config: SftConfig, rng: np.random.Generator
) -> Tensor:
    """Mean squared error of the head over unknown tokens and noise levels, scalar float32.

    Args:
        tokens: clean tokens [B, L, C].
        features: text features of each picture, [n_i, text_dim].
    """
    generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
    batch, length, channels = tokens.shape
    cond = policy.condition(policy.pad_text(features))
    schedule = policy.schedule(1)
    losses, weights = [], []
    sizes = [len(part) for part in torch.arange(batch).chunk(config.parts)]
    starts = np.cumsum([0, *sizes])
    counts = known_counts(len(sizes), length, rng, config.known_until)
    for start, size, num_known in zip(starts, sizes, counts, strict=False):
        rows = slice(int(start), int(start) + size)
        order = torch.rand(size, length, generator=generator).argsort(dim=1)
        known = torch.zeros(size, length, dtype=torch.bool).scatter_(1, order[:, :num_known], True)
        wanted = order[:, num_known:]
        z = policy.ar_latents(tokens[rows], known, cond[rows], num_known=num_known, wanted=wanted)
        clean = tokens[rows].gather(1, wanted[..., None].expand(-1, -1, channels))
        shape = (config.draws_per_token, *clean.shape[:2])
        level = (torch.randn(shape, generator=generator) + config.noise_logit_mean).sigmoid()
        noise = torch.randn((*shape, channels), generator=generator)
        x_t, t, target = schedule.training_pair(clean, noise, level)
        prediction = policy.head(x_t, t, z)
        losses.append(F.mse_loss(prediction, target, reduction="sum"))
        weights.append(target.numel())
    return torch.stack(losses).sum() / sum(weights)


def make_optimizers(
    policy: NovaPolicy, config: SftConfig
) -> tuple[dict[str, nn.Parameter], list[torch.optim.Optimizer]]:
    """Trained parameters by name, and their optimisers."""
    reached = {id(p) for p in policy.trunk_parameters() + policy.head_parameters()}
    named = {f"transformer.{n}": p for n, p in policy.transformer.named_parameters() if id(p) in reached}
    if config.train_text_encoder:
        named |= {f"text.{n}": p for n, p in policy.text.named_parameters()}
    matrices = [p for n, p in named.items() if config.optimizer == "muon" and p.ndim == 2 and min(p.shape) >= 32]
    chosen = {id(p) for p in matrices}
    others = [p for p in named.values() if id(p) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay)
    ]
    if matrices:
        optimizers.append(Muon(matrices, lr=config.muon_learning_rate, momentum=0.95, weight_decay=config.weight_decay))
    return named, optimizers


def rate_factor(step: int, config: SftConfig) -> float:
    """Learning-rate factor of update `step`: warm-up, constant, then linear to 0 over the last `decay_share`."""
    left = (config.updates - step) / max(1.0, config.updates * config.decay_share)
    return min(1.0, (step + 1) / max(1, config.warmup_updates), left)


def train_sft(
    policy: NovaPolicy,
    tokens: Tensor,
    prompts: Sequence[str],
    validation: tuple[Tensor, Sequence[str]],
    config: SftConfig,
    state_folder: Path,
    report: Callable[[dict[str, float]], None],
) -> dict[str, float]:
    """Train in place; the policy ends with the averaged weights.

    Continues from `state_folder/state.pt` when it is there and belongs to the same configuration, pictures and start.

    Args:
        tokens, prompts: clean tokens float32 [N, L, C] and their N captions.
        validation: the same for pictures that are not trained on.
        report: gets one dict a progress point: update, loss, validation_loss, seconds.

    Returns:
        The last report.

    Raises:
        InputError: nothing to train on, or the state is damaged or another run's.
        UnhealthyError: the loss is not finite.
    """
    if len(tokens) != len(prompts) or not len(tokens):
        raise InputError(f"{len(tokens)} pictures and {len(prompts)} captions", hint="SFT needs as many, at least one")
    if not len(validation[0]):
        raise InputError("there are no pictures to validate on")
    for parameter in policy.parameters():
        parameter.requires_grad_(False)
    named, optimizers = make_optimizers(policy, config)
    for parameter in named.values():
        parameter.requires_grad_(True)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    ema = Ema(named, config.ema_decay)
    content = hashlib.sha256(json.dumps([config.model_dump(), list(tokens.shape), *prompts]).encode())
    for values in (tokens, *named.values()):
        content.update(values.detach().contiguous().numpy().data)
    fingerprint = content.hexdigest()
    progress = _load_state(state_folder / "state.pt", fingerprint, named, optimizers, ema)
    step, recent, last = progress.step, progress.recent, progress.last
    began = time.monotonic() - progress.seconds
    end = min(config.updates, config.stop_after or config.updates)
    while step < end:
        rng = np.random.default_rng([config.seed, step])
        rows = rng.integers(len(tokens), size=config.batch_size)
        captions = ["" if rng.random() < config.prompt_drop else prompts[row] for row in rows]
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * rate_factor(step, config)
            optimizer.zero_grad(set_to_none=True)
        encode = policy.text.encode_trainable if config.train_text_encoder else policy.text.encode
        with torch.autocast("cpu", torch.bfloat16, enabled=config.bfloat16):
            loss = sft_loss(policy, tokens[torch.from_numpy(rows)], encode(captions), config, rng)
        recent.append(loss.item())
        if not math.isfinite(recent[-1]):
            hint = "lower the learning rate"
            raise UnhealthyError("the SFT loss is not finite", where=f"update {step + 1}", hint=hint)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        step += 1
        ema.update(step)
        if step % config.validate_every == 0 or step == end:
            ema.swap()
            measured = validation_loss(policy, *validation, config)
            ema.swap()
            seconds = time.monotonic() - began
            last = {"update": step, "loss": float(np.mean(recent)), "validation_loss": measured, "seconds": seconds}
            recent.clear()
            report(last)
        if step % config.save_every == 0 or step == end:
            progress = Progress(step, time.monotonic() - began, recent, last)
            _save_state(state_folder / "state.pt", fingerprint, progress, named, optimizers, ema)
    ema.swap()
    return last


@torch.no_grad()
def validation_loss(policy: NovaPolicy, tokens: Tensor, prompts: Sequence[str], config: SftConfig) -> float:
    """`sft_loss` over a fixed set with fixed noise, so that two values differ by the weights alone."""
    rng = np.random.default_rng([config.seed, 2**32])
    total = 0.0
    for start in range(0, len(tokens), config.batch_size):
        rows = slice(start, start + config.batch_size)
        total += sft_loss(policy, tokens[rows], policy.text.encode(prompts[rows]), config, rng).item() * len(
            tokens[rows]
        )
    return total / len(tokens)


@dataclass
class Progress:
    """Where SFT stands: losses since the last report, and that report (empty before the first)."""

    step: int = 0
    seconds: float = 0.0
    recent: list[float] = field(default_factory=list)
    last: dict[str, float] = field(default_factory=dict)


def _save_state(
    path: Path,
    fingerprint: str,
    progress: Progress,
    named: Mapping[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    ema: Ema,
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "fingerprint": fingerprint,
        "progress": asdict(progress),
        "parameters": {name: value.detach() for name, value in named.items()},
        "average": ema.average,
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    beside = path.with_suffix(".tmp")
    torch.save(state, beside)
    beside.replace(path)


def _load_state(
    path: Path,
    fingerprint: str,
    named: Mapping[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    ema: Ema,
) -> Progress:
    if not path.exists():
        return Progress()
    hint = "give another state folder, or remove this one to start anew"
    try:
        state = torch.load(path, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise InputError("the saved SFT state is damaged", where=str(path), hint=hint) from error
    if state["fingerprint"] != fingerprint:
        what = "the saved SFT state belongs to another configuration, data set or start"
        raise InputError(what, where=str(path), hint=hint)
    with torch.no_grad():
        for name, value in named.items():
            value.copy_(state["parameters"][name])
            ema.average[name].copy_(state["average"][name])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return Progress(**state["progress"])
