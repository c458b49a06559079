"""The training loop of MAR-GRPO, to be read from top to bottom.

One update: take prompts, make a group of images of each (recording what the loss reads), score them, turn scores into
group-relative advantages, accumulate the gradient of the policy term micro-batch by micro-batch, sum it over the
processes, step. Everything random is drawn from (seed, update, prompt's place, image's place), never from a rank, so
the number of processes does not change what is made.

Departures from the textbook GRPO: one on-policy update per rollout (the ratio is 1, there is nothing to clip); the head
is frozen and only the trunk moves; a transition without variance is not scored.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from mar_grpo import __version__
from mar_grpo.algorithms.advantage import advantages
from mar_grpo.algorithms.loss import LossParts, backward
from mar_grpo.algorithms.trajectories import Trajectories, draw_trajectories
from mar_grpo.data.stream import PromptStream
from mar_grpo.diffusion.gaussian import Schedule
from mar_grpo.documents import DocumentRef, PromptSet, TrainingRun, read_document, write_document
from mar_grpo.errors import InputError, MarGrpoError, UnhealthyError
from mar_grpo.models.checkpoint import fetch_checkpoint, load_policy, publish_checkpoint, save_policy
from mar_grpo.models.policy import Policy
from mar_grpo.rewards.mix import RewardMix
from mar_grpo.rollout import Guided, Rollout, noise_key, roll_out, schedule_of
from mar_grpo.store import Store
from mar_grpo.training.distributed import Processes, checksum
from mar_grpo.training.health import Health, HealthConfig
from mar_grpo.training.optimization import make_optimizer, set_rate
from mar_grpo.training.state import load_state, save_state

if TYPE_CHECKING:
    from mar_grpo.config import Recipe


class TrainingConfig(BaseModel):
    """How long and how wide.

    Args:
        prompts_per_update, group_size: a group is one prompt's images; both over all processes.
        micro_batch: images a process rolls out and scores at once, whole groups; bounds memory, changes no number but
            rounding.
        processes: torchrun processes on this machine; threads: CPU threads each (None: torch decides).
        save_every: updates between saved states.
        held_out_every: updates between looks at held-out prompts (for the curves only; nothing is chosen by them),
            0 for none; held_out_prompts: how many prompts, one image each.
        max_relaunches: how often the launcher goes on from the last state after an error that may pass.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    updates: int = Field(40, gt=0)
    prompts_per_update: int = Field(32, gt=0)
    group_size: int = Field(8, ge=2)
    micro_batch: int = Field(128, gt=0)
    processes: int = Field(2, gt=0)
    threads: int | None = Field(1, gt=0)
    save_every: int = Field(10, gt=0)
    held_out_every: int = Field(10, ge=0)
    held_out_prompts: int = Field(100, gt=0)
    max_relaunches: int = Field(2, ge=0)
    health: HealthConfig = HealthConfig()

    @model_validator(mode="after")
    def _whole_groups(self) -> TrainingConfig:
        if self.micro_batch < self.group_size:
            raise ValueError(f"micro_batch {self.micro_batch} cannot hold one group of group_size {self.group_size}")
        return self


@dataclass
class MicroBatch:
    """Images of one process that are rolled out together: B images of P prompts."""

    records: list[dict[str, Any]]  # one a prompt
    index: Tensor  # int64 [B], prompt of each image
    keys: list[int]
    rollout: Rollout
    trajectories: Trajectories | None
    rewards: dict[str, np.ndarray]


def train(
    recipe: Recipe,
    store: Store,
    prefix: str,
    *,
    checkpoint: DocumentRef,
    prompts: DocumentRef,
    held_out: Callable[[Policy, Processes], dict[str, float]] | None,
    work: Path,
    report: Callable[[dict[str, Any]], None],
) -> DocumentRef | None:
    """Run the recipe from the last saved state under `prefix` (or from the start) to its end.

    Args:
        held_out: called every `held_out_every` updates by all processes; its numbers go into the metrics.
        work: local folder for files that come from the store.
        report: called on rank 0 with the metrics of every update.

    Returns:
        On rank 0, the TrainingRun document `prefix/run.json`. A run that failed leaves such a document too.
    """
    config = recipe.training
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.set_flush_denormal(True)  # GELU's far tail makes them, and they slow CPU matrix products five times
    with Processes() as processes:
        policy = load_policy(fetch_checkpoint(checkpoint, work / f"rank{processes.rank}")).eval().requires_grad_(False)
        policy.keep_features(store)
        trained = trained_parameters(policy, recipe.algorithm.trained)
        for parameter in trained.values():
            parameter.requires_grad_(True)
        reference = policy.frozen_copy() if recipe.algorithm.kl else None
        optimizer = make_optimizer(list(trained.values()), recipe.optimizer)
        prompt_set = read_document(prompts, PromptSet)
        stream = PromptStream(
            prompt_set, store, seed=recipe.seed, rank=processes.rank, world=processes.world,
            cache_bytes=recipe.data.cache_bytes,
        )  # fmt: skip
        rewards = RewardMix(recipe.rewards)
        fingerprint = hashlib.sha256(f"{recipe.digest} {checkpoint.sha256} {prompts.sha256}".encode()).hexdigest()
        state = load_state(store, prefix, fingerprint=fingerprint, parameters=trained, optimizer=optimizer)
        metrics: list[dict[str, Any]] = state["metrics"] if state else []
        update = state["update"] if state else 0
        health = Health(config.health, [row for row in metrics if row["update"]])
        began = time.monotonic() - (state["seconds"] if state else 0.0)
        if state:
            stream.restore(state["stream"])
        outcome, failure = "completed", None
        try:
            if held_out and config.held_out_every and not metrics:
                metrics.append({"update": 0, **held_out(policy, processes)})
            while update < config.updates:
                started = time.monotonic()
                numbers = _update(
                    recipe, policy, reference, trained, optimizer, stream, rewards, health, processes, update
                )
                update += 1
                row: dict[str, Any] = {"update": update, **numbers, "seconds": time.monotonic() - started}
                if held_out and config.held_out_every and update % config.held_out_every == 0:
                    row |= held_out(policy, processes)
                save = update % config.save_every == 0 or update == config.updates
                if save or update % config.health.compare_every == 0:
                    health.compare(update, processes.gather(checksum(list(trained.values()))))
                metrics.append(row)
                if processes.first:
                    report(row)
                    if save:
                        save_state(
                            store, prefix, update, fingerprint=fingerprint, parameters=trained, optimizer=optimizer,
                            stream=stream.state(), metrics=metrics, seconds=time.monotonic() - began,
                        )  # fmt: skip
        except MarGrpoError as error:
            outcome = "unhealthy" if isinstance(error, UnhealthyError) else "failed"
            failure = {"error": str(error), "exit_code": error.exit_code, "update": update, "rank": processes.rank}
            if processes.first:
                _finish(recipe, store, prefix, metrics, outcome, failure, None, update, time.monotonic() - began)
            raise
        if not processes.first:
            return None
        folder = save_policy(policy, work / "trained")
        published = publish_checkpoint(
            folder, store, f"{prefix}/checkpoint", step=update, parent=checkpoint.sha256, recipe_digest=recipe.digest
        )
        return _finish(recipe, store, prefix, metrics, outcome, failure, published, update, time.monotonic() - began)


def _update(
    recipe: Recipe,
    policy: Policy,
    reference: Policy | None,
    trained: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    stream: PromptStream,
    rewards: RewardMix,
    health: Health,
    processes: Processes,
    update: int,
) -> dict[str, float]:
    """One update of all processes. Returns its numbers, the same on every rank."""
    config, algorithm = recipe.training, recipe.algorithm
    schedule = schedule_of(policy, recipe.sampling)
    counts = policy.mask_schedule(recipe.sampling.ar_steps)
    ar_steps, diffusion_steps = choose_steps(recipe, update, len(counts), schedule)

    # 1. rollout and reward, every image of a prompt on one process
    batches = []
    prompts_at_once = config.micro_batch // config.group_size
    with processes.together():
        records = [sample.record.as_dict() for sample in stream.take(config.prompts_per_update)]
        for start in range(0, len(records), prompts_at_once):
            some = records[start : start + prompts_at_once]
            places = [processes.rank + processes.world * (start + i) for i in range(len(some))]
            keys = [noise_key(recipe.seed, update, place, g) for place in places for g in range(config.group_size)]
            batches.append(roll_out_batch(recipe, policy, schedule, some, keys, ar_steps, rewards))

    # 2. advantages of the whole update, per group and per component, then this process's share (every world-th prompt)
    names = list(recipe.rewards.components)
    own = {name: np.concatenate([batch.rewards[name] for batch in batches]) for name in names}
    everyone = processes.gather(own)
    grouped = {
        name: torch.from_numpy(
            np.stack([scores[name].reshape(-1, config.group_size) for scores in everyone], axis=1)
        ).flatten(0, 1)
        for name in names
    }
    advantage = advantages(grouped, recipe.rewards.components, algorithm.advantage)[processes.rank :: processes.world]

    # 3. gradient, one micro-batch after the other
    images = config.prompts_per_update * config.group_size
    tokens = sum(sum(counts[i:]) if algorithm.scope == "unknown" else counts[i] for i in range(len(counts)))
    # of those drawn on average, so that the weight of an AR step does not depend on the others that were drawn
    elements = images * tokens * len(ar_steps) / len(counts) * policy.token_dim * len(diffusion_steps)
    optimizer.zero_grad(set_to_none=True)
    parts = LossParts()
    with processes.together():
        for batch, part in zip(batches, advantage.flatten().split([len(b.keys) for b in batches]), strict=True):
            conditioning = policy.encode_prompts([record["prompt"] for record in batch.records])
            anchor = None
            if reference is not None:
                with torch.no_grad():
                    anchor = Guided.of(reference, conditioning, recipe.sampling)
            live = Guided.of(policy, conditioning, recipe.sampling)
            parts.merge(
                backward(
                    live, anchor, batch.index, batch.rollout, batch.trajectories, part, schedule, diffusion_steps,
                    algorithm, 1.0 / elements,
                )
            )  # fmt: skip
    parameters = list(trained.values())
    processes.sum_gradients(parameters)
    norm = torch.nn.utils.clip_grad_norm_(parameters, recipe.optimizer.max_grad_norm).item()

    # 4. numbers of all processes, health, step
    merged = LossParts()
    for sums in processes.gather(vars(parts)):
        merged.merge(LossParts(**sums))
    numbers = {"gradient_norm": norm, **merged.means()}
    if reference is None:
        del numbers["kl"]  # not measured is not zero
    live_groups = torch.zeros(config.prompts_per_update, dtype=torch.bool)
    for name, table in grouped.items():
        numbers[f"reward/{name}"] = table.double().mean().item()
        numbers[f"reward_std/{name}"] = table.double().std(dim=1).mean().item()
        live_groups |= table.amax(dim=1) > table.amin(dim=1)
    numbers["live_groups"] = live_groups.double().mean().item()
    health.check(update + 1, numbers)
    numbers["learning_rate"] = set_rate(optimizer, update, recipe.optimizer)
    optimizer.step()
    return numbers


def choose_steps(recipe: Recipe, update: int, num_ar_steps: int, schedule: Schedule) -> tuple[list[int], list[int]]:
    """AR steps and transitions that this update scores, the same on every rank, before anything is rolled out."""
    rng = np.random.default_rng([recipe.seed, update, 0])
    stochastic = [j for j in range(schedule.num_steps) if schedule.stochastic(j)]
    stochastic = stochastic[: recipe.algorithm.noisiest_diffusion_steps]
    chosen = []
    for pool, count in (
        (list(range(num_ar_steps)), recipe.algorithm.scored_ar_steps),
        (stochastic, recipe.algorithm.scored_diffusion_steps),
    ):
        if count is not None and count < len(pool):
            pool = sorted(rng.choice(pool, size=count, replace=False).tolist())
        chosen.append(pool)
    return chosen[0], chosen[1]


@torch.no_grad()
def roll_out_batch(
    recipe: Recipe,
    policy: Policy,
    schedule: Schedule,
    records: list[dict[str, Any]],
    keys: list[int],
    ar_steps: list[int],
    rewards: RewardMix,
) -> MicroBatch:
    """Images of some prompts and their rewards."""
    algorithm, group = recipe.algorithm, recipe.training.group_size
    index = torch.arange(len(records)).repeat_interleave(group)
    guided = Guided.of(policy, policy.encode_prompts([r["prompt"] for r in records]), recipe.sampling).rows(index)
    rollout = roll_out(
        guided, keys, recorded=ar_steps, scope=algorithm.scope, keep_before=algorithm.selection.mode == "delta"
    )
    trajectories = None
    if algorithm.trajectories.count:
        trajectories = draw_trajectories(guided, rollout, schedule, keys, algorithm.trajectories)
    images = policy.decode(rollout.tokens)
    scores = rewards.compute(images, [records[i] for i in index.tolist()])
    return MicroBatch(records, index, keys, rollout, trajectories, scores)


def trained_parameters(policy: Policy, part: str) -> dict[str, nn.Parameter]:
    """Parameters of the trained part by their published names."""
    parameters = policy.condition_parameters() if part == "condition" else policy.trunk_parameters()
    if not parameters:
        raise InputError("the checkpoint's condition is frozen", where="algorithm.trained", hint="train the trunk")
    reached = {id(parameter) for parameter in parameters}
    return {name: value for name, value in policy.transformer.named_parameters() if id(value) in reached}


def _finish(
    recipe: Recipe,
    store: Store,
    prefix: str,
    metrics: list[dict[str, Any]],
    outcome: Any,
    failure: dict[str, Any] | None,
    checkpoint: DocumentRef | None,
    updates: int,
    seconds: float,
) -> DocumentRef:
    """Write metrics.jsonl, then the TrainingRun that points to it."""
    lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in metrics)
    entry = store.write_bytes(f"{prefix}/metrics.jsonl", lines.encode())
    timed = [row["seconds"] for row in metrics if "seconds" in row]
    run = TrainingRun(
        recipe=recipe.model_dump(mode="json"), recipe_digest=recipe.digest, code_version=__version__,
        state_uri=store.uri(f"{prefix}/state"), metrics_uri=entry.uri, checkpoint=checkpoint, outcome=outcome,
        failure=failure, steps=updates, seconds=seconds,
        seconds_per_step=float(np.median(timed)) if timed else None,
    )  # fmt: skip
    return write_document(store, f"{prefix}/run.json", run)
