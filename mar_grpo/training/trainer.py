"""The training loop of MAR-GRPO, to be read from top to bottom.

One update: take prompts, make a group of images of each (recording what the loss reads), score them, turn scores into
group-relative advantages, accumulate the gradient of the policy term micro-batch by micro-batch, sum it over the
processes, step. With inner updates the last three are done again with the same images. Everything random is drawn from
(seed, update, prompt's place, image's place), never from a rank, so the number of processes does not change what is
made. What processes share is images, not prompts: a group may lie on several.

Departures from the textbook GRPO: unless the recipe says otherwise there is one on-policy step per rollout (the ratio
is 1, there is nothing to clip) and the head is frozen; a transition without variance is not scored.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mar_grpo import __version__
from mar_grpo.algorithms.advantage import advantages, counted_share
from mar_grpo.algorithms.loss import LossParts, kept, scales
from mar_grpo.algorithms.steps import choose_steps
from mar_grpo.data.stream import PromptStream
from mar_grpo.documents import DocumentRef, PromptSet, TrainingRun, read_document, write_document
from mar_grpo.errors import MarGrpoError, RetryableError, UnhealthyError
from mar_grpo.models.checkpoint import fetch_checkpoint, load_policy, publish_checkpoint, save_policy
from mar_grpo.models.policy import Policy
from mar_grpo.noise import noise_key
from mar_grpo.rewards.mix import RewardMix, reward_device
from mar_grpo.rollout import schedule_of
from mar_grpo.store import Store
from mar_grpo.training.distributed import Processes, deal
from mar_grpo.training.health import Health
from mar_grpo.training.learner import Learner
from mar_grpo.training.micro_batches import Wanted, gradient, make_images
from mar_grpo.training.state import States
from mar_grpo.training.stopping import Abandoned, Stopping

if TYPE_CHECKING:
    from mar_grpo.config import Recipe


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
    store = Store(store.uri(), retry_seconds=config.store_patience_seconds)
    with Processes() as processes, Stopping(config.stop_grace_seconds) as stopping:
        policy = load_policy(fetch_checkpoint(checkpoint, work / f"rank{processes.rank}"))
        policy.keep_features(store)
        learner = Learner(recipe, policy, processes.device, processes.mesh() if config.parallel == "fsdp" else None)
        prompt_set = read_document(prompts, PromptSet)
        stream = PromptStream(
            prompt_set, store, seed=recipe.seed, rank=processes.rank, world=processes.world,
            cache_bytes=recipe.data.cache_bytes,
        )  # fmt: skip
        rewards = RewardMix(recipe.rewards, reward_device(recipe.rewards, processes.device))
        about = {"recipe": recipe.model_dump(mode="json"), "checkpoint": checkpoint.sha256, "prompts": prompts.sha256}
        states = States(store, prefix, processes, config.keep, about)
        state = states.load(learner)
        stopping.watch(learner.optimizer)
        metrics: list[dict[str, Any]] = state["metrics"] if state else []
        update = state["update"] if state else 0
        health = Health(config.health, [row for row in metrics if row["update"]])
        began = time.monotonic() - (state["seconds"] if state else 0.0)
        if state:
            learner.restore(state["learner"])
            stream.restore(state["stream"])

        def look() -> dict[str, float]:
            if held_out is None:
                return {}
            with learner.shown() as shown:
                return held_out(shown, processes)

        def notes() -> dict[str, Any]:
            return {"stream": stream.state(), "metrics": metrics, "seconds": time.monotonic() - began}

        outcome, failure, score = "completed", None, None
        try:
            if held_out and config.held_out_every and not metrics:
                metrics.append({"update": 0, **look()})
            while update < config.updates:
                if code := max(processes.gather(stopping.code)):
                    states.wait()
                    states.save(update, learner.state, notes, due=True, score=score)
                    states.wait()
                    raise stopping.error(code, update)
                started, place = time.monotonic(), stream.state()
                try:
                    with stopping.update():
                        numbers = _update(recipe, learner, stream, rewards, health, processes, update)
                except Abandoned:
                    stream.restore(place)  # nothing else has moved
                    states.wait_alone()
                    states.save_alone(update, learner.state(), notes())
                    states.wait_alone()
                    raise stopping.error(stopping.code, update) from None
                update += 1
                with processes.together():
                    health.tensors(update, "weight", learner.parameters)
                row: dict[str, Any] = {"update": update, **numbers, "seconds": time.monotonic() - started}
                if config.held_out_every and update % config.held_out_every == 0:
                    row |= look()
                save = update % config.save_every == 0 or update == config.updates
                if save or update % config.health.compare_every == 0:
                    mine = learner.fingerprint() | {"place in the prompts": str(stream.state())}
                    health.compare(update, processes.gather(mine))
                metrics.append(row)
                if processes.first:
                    report(row)
                score = row.get(f"held_out/{recipe.gate.score}")
                states.save(update, learner.state, notes, due=save, score=score)
            states.wait()
        except MarGrpoError as error:
            outcome = "unhealthy" if isinstance(error, UnhealthyError) else "failed"
            failure = {"error": str(error), "exit_code": error.exit_code, "update": update, "rank": processes.rank}
            if processes.first:
                quick = Store(store.uri(), retry_seconds=5)  # the store may be what failed
                with contextlib.suppress(RetryableError):
                    _finish(recipe, quick, prefix, metrics, outcome, failure, None, update, time.monotonic() - began)
            raise
        finished = learner.finished()
        if not processes.first:
            return None
        folder = save_policy(finished, work / "trained")
        published = publish_checkpoint(
            folder, store, f"{prefix}/checkpoint", step=update, parent=checkpoint.sha256, recipe_digest=recipe.digest
        )
        return _finish(recipe, store, prefix, metrics, outcome, failure, published, update, time.monotonic() - began)


def _update(
    recipe: Recipe,
    learner: Learner,
    stream: PromptStream,
    rewards: RewardMix,
    health: Health,
    processes: Processes,
    update: int,
) -> dict[str, float]:
    """One update of all processes. Returns its numbers, the same on every rank."""
    config, algorithm, policy = recipe.training, recipe.algorithm, learner.policy
    counts = policy.mask_schedule(recipe.sampling.ar_steps)
    steps = choose_steps(
        algorithm.scored_ar_steps, algorithm.scored_diffusion_steps, seed=recipe.seed, update=update,
        num_ar_steps=len(counts), schedule=schedule_of(policy, recipe.sampling),
    )  # fmt: skip

    # 1. rollout and reward of this process's images
    shares = deal(config.prompts_per_update, config.group_size, processes.world)
    places, members = np.array(shares[processes.rank]).T
    with learner.gathered(), processes.together():
        records = [sample.record for sample in stream.take(config.prompts_per_update, places.tolist())]
        wanted = [
            Wanted(place, member, one, noise_key(recipe.seed, update, place, member))
            for (place, member), one in zip(shares[processes.rank], records, strict=True)
        ]
        batches = make_images(recipe, policy, wanted, steps, rewards)

    # 2. advantages of the whole update, then those of this process's images
    names = list(recipe.rewards.components)
    everyone = processes.gather({name: np.concatenate([each.rewards[name] for each in batches]) for name in names})
    grouped = {name: torch.empty(config.prompts_per_update, config.group_size) for name in names}
    for images, scores in zip(shares, everyone, strict=True):
        for name, values in scores.items():
            grouped[name][tuple(np.array(images).T)] = torch.from_numpy(values)
    whole = advantages(grouped, recipe.rewards.components, algorithm.advantage)
    advantage = whole[places, members]
    numbers: dict[str, float] = {}
    live_groups = torch.zeros(config.prompts_per_update, dtype=torch.bool)
    for name, table in grouped.items():
        numbers[f"reward/{name}"] = table.double().mean().item()
        numbers[f"reward_std/{name}"] = table.double().std(dim=1).mean().item()
        live_groups |= table.amax(dim=1) > table.amin(dim=1)
    numbers["live_groups"] = live_groups.double().mean().item()
    health.check(update + 1, numbers)

    # 3. gradient, one micro-batch after the other, and a step; again for each inner update
    weights = scales(
        algorithm, steps, sum(processes.gather(kept([each.batch for each in batches], steps))), counts=counts,
        images=config.prompts_per_update * config.group_size, token_dim=policy.token_dim,
        counted_share=counted_share(whole, algorithm.advantage),
    )  # fmt: skip
    numbers["learning_rate"] = learner.set_rate(update)
    for _ in range(algorithm.inner_updates):
        learner.optimizer.zero_grad(set_to_none=True)
        with nullcontext() if learner.sharded else processes.together():
            parts = gradient(recipe, policy, learner.reference, batches, advantage, steps, weights, learner.sharded)
        processes.sum_gradients(learner.trained)
        merged = LossParts()
        for sums in processes.gather(parts.numbers()):
            merged.merge(LossParts.of(sums))
        with processes.together():  # of what is sharded each sees its part
            health.tensors(update + 1, "gradient", {name: value.grad for name, value in learner.parameters.items()})
        numbers |= {"gradient_norm": learner.clip(), **merged.means()}
        health.finite(update + 1, numbers)
        learner.step()
    learner.end(update)
    return numbers


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
