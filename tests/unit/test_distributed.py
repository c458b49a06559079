"""Several processes make what one makes, whoever has which image and which part of the policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mar_grpo.documents import TrainingRun, read_document
from mar_grpo.errors import RetryableError
from mar_grpo.noise import noise_key
from mar_grpo.store import Store
from mar_grpo.training.distributed import deal
from mar_grpo.training.learner import Learner
from tests.unit import toy
from tests.unit.toy_run import finished, parameters, spawn, stored_rows, without_time

FSDP, LOW = ["training.parallel=fsdp"], ["training.precision=bfloat16"]
BOTH = ["algorithm.trained=both"]
ADAM = ["optimizer.kind=adamw", "optimizer.learning_rate=1e-4"]


COARSE = ["rewards.components={tests.unit.test_distributed:coarse: 1}"]


def coarse(images: np.ndarray, records: Sequence[Any]) -> np.ndarray:
    """Brightness in hundredths: a byte that rounds otherwise in another batch is not seen."""
    return np.round(images.mean(axis=(1, 2, 3)) / 255.0, 2)


def several(folder: Path, prefix: str, *overrides: str, world: int = 2) -> tuple[list[dict], dict[str, Tensor]]:
    """Metrics and weights of a run of several processes."""
    ends = spawn(folder, prefix, *overrides, f"training.processes={world}", world=world)
    assert [code for code, _ in ends] == [0] * world, ends
    run = read_document(Store(folder / "store").uri(f"{prefix}/run.json"), TrainingRun)
    return without_time(stored_rows(folder, prefix)), parameters(folder, run)


def close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(one[name], other[name], rtol=0, atol=tolerance) for name in one
    )


# --- who has which image -------------------------------------------------------------------------------------------


@given(groups=st.integers(1, 9), size=st.integers(2, 9), world=st.integers(1, 8))
def test_images_are_dealt_out_evenly_and_once(groups: int, size: int, world: int) -> None:
    shares = deal(groups, size, world)
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    everything = [image for share in shares for image in share]
    assert sorted(everything) == [(place, member) for place in range(groups) for member in range(size)]
    if groups % world == 0:  # whole groups
        assert all(share == [(p, g) for p in range(rank, groups, world) for g in range(size)]
                   for rank, share in enumerate(shares))  # fmt: skip


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_no_two_images_of_a_run_share_a_seed(world: int) -> None:
    keys = [
        noise_key(7, update, place, member)
        for update in range(20)
        for share in deal(6, 8, world)
        for place, member in share
    ]
    assert len(set(keys)) == len(keys) == 20 * 6 * 8


@pytest.mark.parametrize(
    "shape",
    [
        ["training.prompts_per_update=3", "training.group_size=4", "training.micro_batch=2"],
        ["training.prompts_per_update=1", "training.group_size=6", "training.micro_batch=4", "algorithm.kl.kind=off"],
    ],
    ids=["3 x 4", "1 x 6"],
)
def test_one_to_four_processes_give_the_same_trace(toy_folder: Path, shape: list[str]) -> None:
    """A group may span ranks: 12 images and 6 images on 1, 2, 3 and 4 processes."""
    shape = [*shape, *COARSE, "training.updates=3"]
    run, rows = finished(toy_folder, "runs/1", *shape, "training.processes=1")
    assert all(row["gradient_norm"] > 0 for row in rows)
    for world in (2, 3, 4):
        found, weights = several(toy_folder, f"runs/{world}", *shape, world=world)
        for row, expected in zip(found, without_time(rows), strict=True):
            assert row == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert close(weights, parameters(toy_folder, run), 1e-6)


# --- what must be the same -----------------------------------------------------------------------------------------


def _tampered(change: Callable[[Learner], None]) -> None:
    """Rank 2 does something else at the end of its second update."""
    usual = Learner.end

    def end(self: Learner, update: int) -> None:
        usual(self, update)
        if update == 1 and os.environ["RANK"] == "2":
            change(self)

    Learner.end = end  # type: ignore[method-assign]


def other_parameters() -> None:
    def change(learner: Learner) -> None:
        with torch.no_grad():
            learner.trained[3].view(-1)[0] += 1e-7
            learner.trained[3].view(-1)[1] -= 1e-7

    _tampered(change)


def other_step() -> None:
    def change(learner: Learner) -> None:
        learner.optimizer.state[learner.trained[0]]["step"] += 1

    _tampered(change)


def other_place() -> None:
    from mar_grpo.data.stream import PromptStream

    usual = PromptStream.take

    def take(self: PromptStream, n: int, places: object = None) -> object:
        found = usual(self, n, places)  # type: ignore[arg-type]
        if os.environ["RANK"] == "2":
            self.position += 1
        return found

    PromptStream.take = take  # type: ignore


@pytest.mark.parametrize(
    ("tamper", "what"),
    [(other_parameters, "parameters"), (other_step, "optimiser step"), (other_place, "place in the prompts")],
)
def test_a_rank_that_differs_is_named(toy_folder: Path, tamper: Callable[[], None], what: str) -> None:
    overrides = [*ADAM, "training.processes=3", "training.updates=2", "training.health.compare_every=2"]
    ends = spawn(toy_folder, "runs/a", *overrides, world=3, tamper=tamper)
    for code, text in ends:
        assert code == 3 and f"rank 2 has another {what} than rank 0 (update 2)" in text


# --- who has which part of the policy, and how exactly -------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [*ADAM, "algorithm.kl.kind=off", "training.activation_checkpointing=true", "sampling.guidance_scale=2"],
        pytest.param(
            [*BOTH, "training.lora.rank=2", "algorithm.kl.reference=adapter_off", "optimizer.learning_rate=0.5"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [*BOTH, "optimizer.head_ema_decay=0.5", "algorithm.kl.refresh_every=2", "algorithm.inner_updates=2"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["sgd", "adamw, checkpointed", "lora", "average, refreshed"],
)  # fmt: skip
def test_a_sharded_policy_learns_the_same(toy_folder: Path, changes: list[str]) -> None:
    usual, rows = finished(toy_folder, "runs/usual", *changes)
    found, weights = several(toy_folder, "runs/fsdp", *changes, *FSDP)
    for row, expected in zip(found, without_time(rows), strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-5)
    expected = parameters(toy_folder, usual)
    if "optimizer.kind=adamw" in changes:  # it divides gradients by their size: that of a key's bias is rounding alone
        weights, expected = ({n: v for n, v in each.items() if "qkv.bias" not in n} for each in (weights, expected))
    assert close(weights, expected, 1e-5)


def test_activation_checkpointing_changes_no_number(toy_folder: Path) -> None:
    usual, rows = finished(toy_folder, "runs/a")
    other, same = finished(toy_folder, "runs/b", "training.activation_checkpointing=true")
    assert without_time(same) == without_time(rows)
    one, two = parameters(toy_folder, usual), parameters(toy_folder, other)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("world", [1, 2])
def test_bfloat16_weights_learn_nearly_the_same(toy_folder: Path, world: int) -> None:
    """What is published is float32: what is not trained to the last bit, what is trained with steps far below one of
    bfloat16."""
    changes = [*COARSE, "training.updates=2", "optimizer.learning_rate=1e-3"]
    usual, rows = finished(toy_folder, "runs/usual", *changes)
    if world == 1:
        low, found = finished(toy_folder, "runs/low", *changes, *LOW)
        weights = parameters(toy_folder, low)
    else:
        found, weights = several(toy_folder, "runs/low", *changes, *LOW, *FSDP)
    assert all(row["gradient_norm"] > 0 for row in found) and found[0] != rows[0]
    exact, start = parameters(toy_folder, usual), dict(toy.policy().transformer.named_parameters())
    for name, value in weights.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, start[name]) == torch.equal(exact[name], start[name]), name
    assert close(weights, exact, 2e-3)


def stop_after_the_third() -> None:
    def change(self: Learner, update: int) -> None:
        usual(self, update)
        if update == 2:
            raise RetryableError("stopped")

    usual, Learner.end = Learner.end, change  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "changes",
    [pytest.param([], marks=pytest.mark.slow), [*LOW, *BOTH, "optimizer.head_ema_decay=0.5"]],
    ids=["float32", "bfloat16"],
)
def test_a_sharded_run_goes_on_where_it_stopped(toy_folder: Path, changes: list[str]) -> None:
    changes = [*changes, *ADAM, *FSDP, *COARSE]
    rows, weights = several(toy_folder, "runs/whole", *changes)
    stopped = spawn(toy_folder, "runs/cut", *changes, "training.processes=2", tamper=stop_after_the_third)
    assert [code for code, _ in stopped] == [75, 75], stopped
    again, same = several(toy_folder, "runs/cut", *changes)
    assert again == rows and close(same, weights, 0.0)
