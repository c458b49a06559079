"""A whole training run that takes a second: checkpoint, prompts, recipe; also by several processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mar_grpo.config import Recipe, load_recipe
from mar_grpo.data.prompts import validated
from mar_grpo.data.shards import Sample, write_shards
from mar_grpo.documents import DocumentRef, TrainingRun, read_document, write_document
from mar_grpo.errors import MarGrpoError
from mar_grpo.models.checkpoint import fetch_checkpoint, load_policy, publish_checkpoint, save_policy
from mar_grpo.models.policy import Policy
from mar_grpo.store import Store
from mar_grpo.training.trainer import train
from tests.unit import toy

START = multiprocessing.get_context("forkserver")
PROMPTS = ("two red apples", "a dog", "a red circle", "a photo of a dog", "a dog and a circle", "two apples")
RECIPE: dict[str, Any] = {
    "name": "toy",
    "sampling": {"ar_steps": 3, "diffusion_steps": 3},
    "rewards": {"components": {"tests.unit.toy_run:brightness": 1.0, "tests.unit.toy_run:redness": 0.5}},
    "algorithm": {
        "scope": "committed", "selection": {"mode": "off"}, "trajectories": {"count": 2}, "kl": {"coefficient": 0.05},
    },
    "optimizer": {"kind": "sgd", "learning_rate": 0.05, "warmup_updates": 2},
    "training": {
        "updates": 4, "prompts_per_update": 4, "group_size": 3, "micro_batch": 6, "processes": 1, "save_every": 2,
        "held_out_every": 0,
    },
}  # fmt: skip


def brightness(images: np.ndarray, records: Sequence[Any]) -> np.ndarray:
    """Mean over pixels, 0 to 1, in steps of a thousandth: a byte that rounds otherwise on another CPU is not seen."""
    return np.round(images.mean(axis=(1, 2, 3)) / 255.0, 3)


def redness(images: np.ndarray, records: Sequence[Any]) -> np.ndarray:
    """Mean of red minus green, or its negative where nothing red is asked for; in steps of a thousandth."""
    sign = np.array([1.0 if "red" in record["prompt"] else -1.0 for record in records])
    return np.round(sign * (images[..., 0].astype(float) - images[..., 1]).mean(axis=(1, 2)) / 255.0, 3)


def nothing(images: np.ndarray, records: Sequence[Any]) -> np.ndarray:
    """A reward that cannot tell pictures apart."""
    return np.full(len(images), 0.25)


def broken_for_dogs(images: np.ndarray, records: Sequence[Any]) -> np.ndarray:
    """A scorer with a hole: no number for the pictures of one prompt."""
    return np.array([np.nan if record["prompt"] == "a dog" else 1.0 for record in records])


def same_for_dogs(images: np.ndarray, records: Sequence[Any]) -> np.ndarray:
    """`brightness`, but one number for all pictures of one prompt."""
    return np.where([record["prompt"] == "a dog" for record in records], 0.5, brightness(images, records))


def speaking(policy: Policy) -> Policy:
    """Layers that training starts at zero are filled, so that the head says something."""
    generator = torch.Generator().manual_seed(1000)
    for parameter in policy.transformer.parameters():
        if not parameter.any():
            parameter.data.normal_(0.0, 0.3, generator=generator)
    return policy


def prepare(
    folder: Path, policy: Policy | None = None, asked: Sequence[str] = PROMPTS, store: Store | None = None
) -> None:
    """Publish a checkpoint and prompts in a store, by default one of files in the folder."""
    store = store or Store(folder / "store")
    store.make_root()
    start = save_policy(policy or toy.policy(), folder / "policy")
    checkpoint = publish_checkpoint(start, store, "checkpoint", step=0)
    samples = [
        Sample(key=f"{number:04d}", record=validated({"prompt": prompt, "tag": "toy", "include": []}, where="toy"))
        for number, prompt in enumerate(asked)
    ]
    prompts = write_document(
        store, "prompts.json",
        write_shards(store, "prompts", samples, samples_per_shard=4, kind="prompts", source={"name": "toy"}),
    )  # fmt: skip
    references = {"checkpoint": checkpoint.model_dump(), "prompts": prompts.model_dump()}
    (folder / "references.json").write_text(json.dumps(references))


def recipe(*overrides: str) -> Recipe:
    return load_recipe(json.dumps(RECIPE), overrides)


def run(folder: Path, prefix: str, *overrides: str, **options: Any) -> tuple[TrainingRun | None, list[dict[str, Any]]]:
    """Train in this process; returns the document and the rows that were reported."""
    references = json.loads((folder / "references.json").read_text())
    rows: list[dict[str, Any]] = []
    reference = train(
        recipe(*overrides),
        Store(folder / "store"),
        prefix,
        checkpoint=DocumentRef.model_validate(references["checkpoint"]),
        prompts=DocumentRef.model_validate(references["prompts"]),
        work=folder / "work",
        **{"held_out": None, "report": rows.append} | options,
    )
    return (read_document(reference, TrainingRun) if reference else None), rows


def finished(folder: Path, prefix: str, *overrides: str, **options: Any) -> tuple[TrainingRun, list[dict[str, Any]]]:
    document, rows = run(folder, prefix, *overrides, **options)
    assert document is not None
    return document, rows


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def spawn(
    folder: Path, prefix: str, *overrides: str, world: int = 2, tamper: Callable[[], None] | None = None
) -> list[tuple[int, str]]:
    """A run of several processes; exit code and error of each.

    Args:
        tamper: called in each before it begins; a function of a module.
    """
    START.set_forkserver_preload(["tests.unit.toy_run"])  # imports once
    group = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    group["GLOO_SOCKET_IFNAME"] = "lo"
    said = [folder / f"rank{rank}.txt" for rank in range(world)]
    ranks = [
        START.Process(target=_rank, args=(group | {"RANK": str(rank)}, folder, prefix, overrides, tamper, said[rank]))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
        process.kill()
        process.join()
    return [(process.exitcode or 0, text.read_text()) for process, text in zip(ranks, said, strict=True)]


def _rank(
    group: dict[str, str], folder: Path, prefix: str, overrides: Sequence[str], tamper: Callable[[], None] | None,
    said: Path,
) -> None:  # fmt: skip
    os.environ |= group
    said.write_text("")
    try:
        if tamper:
            tamper()
        run(folder, prefix, *overrides)
    except MarGrpoError as error:
        said.write_text(f"{error}\n")
        sys.exit(error.exit_code)
    except BaseException:
        said.write_text(traceback.format_exc())
        raise


def parameters(folder: Path, run: TrainingRun) -> dict[str, Tensor]:
    """The trained network, as it was published."""
    assert run.checkpoint is not None
    policy = load_policy(fetch_checkpoint(run.checkpoint, folder / "cache"))
    return dict(policy.transformer.named_parameters())


def without_time(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def stored_rows(folder: Path, prefix: str) -> list[dict[str, Any]]:
    """metrics.jsonl of a run."""
    return [json.loads(line) for line in Store(folder / "store").read_bytes(f"{prefix}/metrics.jsonl").splitlines()]
