"""Training runs: what they write, that they go on to the last bit, that a split changes nothing, how they end."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mar_grpo.data.shards import Sample, read_shards
from mar_grpo.documents import Checkpoint, DocumentRef, PromptSet, TrainingRun, read_document
from mar_grpo.errors import InputError, RetryableError, UnhealthyError
from mar_grpo.store import Store
from mar_grpo.training import micro_batches, trainer
from mar_grpo.training.distributed import Processes, digest
from mar_grpo.training.health import Health, HealthConfig
from mar_grpo.training.optimization import OptimizerConfig, make_optimizer, set_rate
from tests.unit import toy, toy_run
from tests.unit.toy_run import finished, parameters, spawn, stored_rows, without_time

TRACE = Path(__file__).parent / "data" / "loss_trace.json"
TRACED = {
    "committed": [],
    "unknown": [
        "algorithm.scope=unknown", "algorithm.selection.mode=delta", "sampling.guidance_scale=2",
        "algorithm.scored_ar_steps.count=2", "algorithm.advantage.scale=batch",
    ],
}  # fmt: skip
NAME = "tests.unit.toy_run"


def test_what_a_run_leaves(toy_folder: Path) -> None:
    run, rows = finished(toy_folder, "runs/a")
    assert run.outcome == "completed" and run.failure is None and run.steps == 4
    assert run.recipe == toy_run.recipe().model_dump(mode="json") and run.recipe_digest == toy_run.recipe().digest
    assert run.seconds_per_step is not None and 0 < run.seconds_per_step <= run.seconds
    store = Store(toy_folder / "store")
    assert stored_rows(toy_folder, "runs/a") == rows and [row["update"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert all(np.isfinite(value) for value in row.values())
        assert {"gradient_norm", "kl", "live_groups", f"reward/{NAME}:brightness", "seconds"} <= row.keys()
    states = [key for key in store.list("runs/a/state") if key.endswith("state.json")]
    assert states == [f"runs/a/state/update-00000{update}/state.json" for update in (2, 4)]
    assert run.checkpoint is not None
    document = read_document(run.checkpoint, Checkpoint)
    references = json.loads((toy_folder / "references.json").read_text())
    assert (document.step, document.parent) == (4, references["checkpoint"]["sha256"])
    assert document.recipe_digest == run.recipe_digest


@pytest.mark.parametrize("name", TRACED)
def test_the_recorded_trace_is_reproduced(toy_folder: Path, name: str) -> None:
    """A change that is not meant to change numbers leaves this alone; one that is says so and records it anew:

    python -m tests.unit.test_trainer
    """
    _, rows = finished(toy_folder, "runs/a", *TRACED[name])
    recorded = json.loads(TRACE.read_text())[name]
    for row, expected in zip(without_time(rows), recorded, strict=True):
        assert row == pytest.approx(expected, rel=0, abs=1e-6)


@pytest.mark.parametrize("size", [3, 12])
def test_micro_batches_do_not_matter(toy_folder: Path, size: int) -> None:
    overrides = ["algorithm.advantage.scale=batch", "algorithm.scope=unknown", "algorithm.selection.mode=delta"]
    usual, rows = finished(toy_folder, "runs/a", *overrides)
    other, same = finished(toy_folder, "runs/b", *overrides, f"training.micro_batch={size}")
    for row, expected in zip(without_time(same), without_time(rows), strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-5)
    one, two = parameters(toy_folder, usual), parameters(toy_folder, other)
    assert all(torch.allclose(one[name], two[name], rtol=0, atol=1e-5) for name in one)


def test_an_error_of_one_process_is_that_of_all(toy_folder: Path) -> None:
    """One dog among four prompts: one process meets it. The other says the same at once and does not wait for it."""
    ends = spawn(
        toy_folder, "runs/a", "training.processes=2", f"rewards.components={{{NAME}:broken_for_dogs: 1}}"
    )  # fmt: skip
    assert [code for code, _ in ends] == [3, 3]
    first, second = (text.strip().splitlines()[-1] for _, text in ends)
    assert first == second and re.search(
        r"broken_for_dogs' is nan \(prompt [0-9a-f]{16} 'a dog', image 0 of its group, rank [01]\)", first
    )
    run = read_document(Store(toy_folder / "store").uri("runs/a/run.json"), TrainingRun)
    assert run.outcome == "unhealthy" and run.failure is not None
    assert run.failure["exit_code"] == 3 and run.failure["error"] == first


def test_draws_of_ar_steps_average_to_the_whole_gradient(toy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = [
        "training.updates=1", "optimizer.learning_rate=1", "optimizer.warmup_updates=0", "optimizer.beta1=0",
        "optimizer.max_grad_norm=1e9",
    ]  # fmt: skip
    start = dict(toy.policy().transformer.named_parameters())

    def gradient(prefix: str, ar_steps: list[int]) -> Tensor:
        monkeypatch.setattr(trainer, "choose_steps", lambda *_, **__: {i: [0, 1] for i in ar_steps})
        run, _ = finished(toy_folder, prefix, *overrides)
        return torch.cat([(start[name] - value).flatten() for name, value in parameters(toy_folder, run).items()])

    whole = gradient("runs/whole", [0, 1, 2])
    parts = torch.stack([gradient(f"runs/{number}", [number]) for number in range(3)])
    torch.testing.assert_close(parts.mean(dim=0), whole, rtol=0, atol=1e-4 * whole.abs().max().item())
    assert (parts[0] - parts[2]).abs().max() > 0.1 * whole.abs().max()


def test_held_out_looks(toy_folder: Path) -> None:
    seen: list[bool] = []

    def look(policy: Any, processes: Processes) -> dict[str, float]:
        seen.append(processes.first)
        return {"held_out/number": float(len(seen))}

    overrides = ["training.held_out_every=2", "training.updates=5"]
    run, rows = finished(toy_folder, "runs/a", *overrides, held_out=look)
    stored = stored_rows(toy_folder, "runs/a")
    assert {row["update"]: row.get("held_out/number") for row in stored} == {
        0: 1.0, 1: None, 2: 2.0, 3: None, 4: 3.0, 5: None,
    }  # fmt: skip
    assert stored[1:] == rows and run.steps == 5


def stored_prompts(folder: Path) -> list[Sample]:
    references = json.loads((folder / "references.json").read_text())
    return list(read_shards(read_document(DocumentRef(**references["prompts"]), PromptSet)))


# --- ends that are not good ----------------------------------------------------------------------------------------


def failed(toy_folder: Path, kind: type[Exception], match: str, *overrides: str) -> TrainingRun:
    with pytest.raises(kind, match=match):
        toy_run.run(toy_folder, "runs/a", *overrides)
    run = read_document(Store(toy_folder / "store").uri("runs/a/run.json"), TrainingRun)
    assert run.checkpoint is None and run.failure is not None
    return run


def test_numbers_that_are_not_finite_end_the_run(toy_folder: Path) -> None:
    run = failed(toy_folder, UnhealthyError, "not finite", "optimizer.learning_rate=1e38", "training.updates=20")
    assert run.outcome == "unhealthy" and run.failure is not None
    assert run.failure["exit_code"] == 3 and "learning_rate" in run.failure["error"]
    assert run.steps < 20
    rows = stored_rows(toy_folder, "runs/a")
    assert [row["update"] for row in rows] == list(range(1, len(rows) + 1))


def test_a_reward_that_tells_nothing_apart_ends_the_run(toy_folder: Path) -> None:
    overrides = [
        f"rewards.components={{{NAME}:nothing: 1}}", "algorithm.kl.kind=off", "training.updates=9",
        "training.health.patience=3",
    ]  # fmt: skip
    what = r"no group held two different rewards for 3 updates \(update 3\)"
    run = failed(toy_folder, UnhealthyError, what, *overrides)
    assert run.outcome == "unhealthy" and run.steps == 2
    rows = stored_rows(toy_folder, "runs/a")
    assert [row["gradient_norm"] for row in rows] == [0.0, 0.0]
    failed(toy_folder, UnhealthyError, what, *overrides)  # goes on from update 2, which was the second without


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_reward_that_is_no_number_ends_the_run(toy_folder: Path, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(images: np.ndarray, records: Sequence[Any]) -> np.ndarray:
        scores = np.ones(len(images))
        if records[-1]["prompt"] == "a dog":
            scores[-2] = float(value)
        return scores

    monkeypatch.setattr(toy_run, "brightness", broken)
    prompt = next(sample.record for sample in stored_prompts(toy_folder) if sample.record.prompt == "a dog")
    run = failed(
        toy_folder, UnhealthyError,
        rf"the reward '{NAME}:brightness' is {value} \(prompt {prompt.prompt_id} 'a dog', image 1 of its group\)",
        "training.micro_batch=3",
    )  # fmt: skip
    assert run.outcome == "unhealthy" and run.failure is not None and run.failure["exit_code"] == 3


def test_rewards_beside_the_next_rollout_change_nothing(toy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, rows = finished(toy_folder, "runs/a")
    threads: set[int] = set()
    score = micro_batches._scores
    monkeypatch.setattr(micro_batches, "_beside", lambda _: ThreadPoolExecutor(1))
    monkeypatch.setattr(micro_batches, "_scores", lambda *a: (threads.add(threading.get_ident()), score(*a))[1])
    _, same = finished(toy_folder, "runs/b")
    assert without_time(same) == without_time(rows)
    assert threads and threading.get_ident() not in threads


@pytest.mark.parametrize("what", ["gradient", "weight"])
def test_a_tensor_that_is_not_finite_is_named(what: str) -> None:
    health, named = Health(HealthConfig()), {"a.weight": torch.ones(3), "b.bias": torch.zeros(2), "c": None}
    health.tensors(1, what, named)
    health.tensors(1, what, {"huge": torch.full((2,), 1e30)})  # only its norm is infinite
    named["b.bias"] = torch.tensor([0.0, float("-inf")])
    with pytest.raises(UnhealthyError, match=rf"the {what} of b\.bias is not finite \(update 4, -inf in b\.bias\)"):
        health.tensors(4, what, named)


def test_a_gradient_that_is_not_finite_stops_before_the_step(toy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, stepped = trainer.gradient, []

    def spoiled(recipe: Any, policy: Any, *rest: Any) -> Any:
        parts = work(recipe, policy, *rest)
        next(p for p in policy.trunk_parameters() if p.grad is not None).grad.flatten()[0] = float("nan")
        return parts

    monkeypatch.setattr(trainer, "gradient", spoiled)
    monkeypatch.setattr(torch.optim.SGD, "step", lambda *_, **__: stepped.append(1))
    failed(toy_folder, UnhealthyError, r"the gradient of \S+ is not finite \(update 1, nan in")
    assert not stepped


def test_an_image_that_is_not_finite_is_named(toy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = micro_batches.record

    def spoiled(*given: Any) -> Any:
        batch = work(*given)
        batch.rollout.tokens[4, 0, 0] = float("inf")
        return batch

    monkeypatch.setattr(micro_batches, "record", spoiled)
    what = r"tokens of an image are not finite \(prompt [0-9a-f]{16} '.*', image 1 of its group\)"
    failed(toy_folder, UnhealthyError, what)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("seed=1", "seed: 0 -> 1"),
        ("optimizer.learning_rate=0.01", "optimizer.learning_rate: 0.05 -> 0.01"),
        ("training.updates=1", "training.updates: 2 -> 1, 2 done"),
        ("training.lora={}", "training.lora.rank: absent -> "),
    ],
)
def test_a_change_that_would_spoil_the_run_is_refused(toy_folder: Path, change: str, difference: str) -> None:
    finished(toy_folder, "runs/a", "training.updates=2")
    before = Store(toy_folder / "store").read_bytes("runs/a/run.json")
    with pytest.raises(InputError, match="belongs to another recipe") as error:
        toy_run.run(toy_folder, "runs/a", "training.updates=2", change)
    assert error.value.exit_code == 2 and difference in str(error.value) and "update-000002" in str(error.value)
    assert Store(toy_folder / "store").read_bytes("runs/a/run.json") == before  # the other run is left as it is


def test_a_run_goes_on_with_more_updates(toy_folder: Path) -> None:
    """The numbers are those of a run that was to be as long from the beginning."""
    whole, _ = finished(toy_folder, "runs/whole")
    finished(toy_folder, "runs/a", "training.updates=2")
    changes = ["training.save_every=1", "training.keep.every=3", "training.threads=1", "gate.min_prompts=5"]
    longer, rows = finished(toy_folder, "runs/a", "training.updates=4", *changes)
    assert [row["update"] for row in rows] == [3, 4]
    stored = [stored_rows(toy_folder, prefix) for prefix in ("runs/whole", "runs/a")]
    assert without_time(stored[0]) == without_time(stored[1])
    one, two = parameters(toy_folder, whole), parameters(toy_folder, longer)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("name", ["state.json", "rank-0000-0000.bin"])
def test_a_damaged_state_is_refused(toy_folder: Path, name: str) -> None:
    finished(toy_folder, "runs/a", "training.updates=2")
    path = toy_folder / f"store/runs/a/state/update-000002/{name}"
    content = path.read_bytes()
    for damaged in (content[:-10], content[:100] + b"x" + content[101:], None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(InputError, match=rf"update-000002/{name}"):
            toy_run.run(toy_folder, "runs/a", "training.updates=2")


# --- the parts -----------------------------------------------------------------------------------------------------


def test_health_counts_updates_in_a_row() -> None:
    health = Health(HealthConfig(patience=3), [{"live_groups": 1.0}, {"live_groups": 0.0}])
    health.check(3, {"live_groups": 0.0})
    with pytest.raises(UnhealthyError, match=r"for 3 updates \(update 4\)") as error:
        health.check(4, {"live_groups": 0.0})
    assert error.value.exit_code == 3
    health = Health(HealthConfig(patience=2))
    for update in range(6):
        health.check(update, {"live_groups": float(update % 2)})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_health_names_the_number_that_is_not_finite(value: float) -> None:
    with pytest.raises(UnhealthyError, match=rf"kl is {value} \(update 7\)"):
        Health(HealthConfig()).check(7, {"live_groups": 1.0, "kl": value})
    with pytest.raises(UnhealthyError, match=r"parameters are not finite \(update 7\)"):
        Health(HealthConfig()).compare(7, [{"finite": True}, {"finite": math.isfinite(value)}])


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_health_names_the_rank_that_differs(wrong: int) -> None:
    said: list[dict[str, Any]] = [{"finite": True, "parameters": "a", "optimiser step": "b"} for _ in range(3)]
    Health(HealthConfig()).compare(1, said)
    said[wrong]["optimiser step"] = "c"
    with pytest.raises(UnhealthyError, match=rf"rank {wrong} has another optimiser step than rank {int(wrong == 0)}"):
        Health(HealthConfig()).compare(1, said)


def test_the_digest_sees_what_a_sum_does_not() -> None:
    values = [torch.linspace(-1, 1, 1000), torch.ones(7), torch.tensor(3.0), torch.ones(2, dtype=torch.bfloat16)]
    before = digest(values)
    assert digest([value.clone() for value in values]) == before
    assert digest([values[0].flip(0), *values[1:]]) != before
    values[0][1] += 1e-7
    values[0][2] -= 1e-7
    assert digest(values) != before


def test_one_process_passes_errors_on_as_they_are() -> None:
    wrong = RetryableError("the store is away", where="s3://a", hint="wait")
    with Processes() as processes:
        assert processes.first and processes.gather(3) == [3]
        with pytest.raises(RetryableError) as caught, processes.together():
            raise wrong
    assert caught.value is wrong


def test_the_rate_warms_up_and_stays() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    config = OptimizerConfig(learning_rate=0.4, warmup_updates=4)
    optimizer = make_optimizer([parameter], config)
    assert [set_rate(optimizer, update, config) for update in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.4)
    assert set_rate(optimizer, 0, config.model_copy(update={"warmup_updates": 0})) == pytest.approx(0.4)


def test_optimizers_do_what_they_say() -> None:
    sgd, adamw = (
        make_optimizer([nn.Parameter(torch.ones(1))], OptimizerConfig(kind=kind, learning_rate=0.1, beta1=0.5))
        for kind in ("sgd", "adamw")
    )
    for optimizer in (sgd, adamw):
        for _ in range(2):
            (parameter,) = optimizer.param_groups[0]["params"]
            parameter.grad = torch.tensor([2.0])
            optimizer.step()
    assert sgd.param_groups[0]["params"][0].item() == pytest.approx(1 - 0.1 * 2.0 - 0.1 * 3.0)  # momentum 0.5
    assert adamw.param_groups[0]["params"][0].item() == pytest.approx(1 - 0.2, abs=1e-6)  # the sign, twice


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        toy_run.prepare(Path(name))
        torch.set_num_threads(1)
        traces = {key: without_time(toy_run.run(Path(name), key, *changes)[1]) for key, changes in TRACED.items()}
    TRACE.write_text(json.dumps(traces, indent=1) + "\n")
