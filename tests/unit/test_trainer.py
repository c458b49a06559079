"""Training runs: what they write, that they go on to the last bit, that a split changes nothing, how they end."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mar_grpo.documents import Checkpoint, TrainingRun, read_document
from mar_grpo.errors import InputError, RetryableError, UnhealthyError
from mar_grpo.models.checkpoint import fetch_checkpoint, load_policy
from mar_grpo.store import Store
from mar_grpo.training import trainer
from mar_grpo.training.distributed import Processes, checksum
from mar_grpo.training.health import Health, HealthConfig
from mar_grpo.training.optimization import OptimizerConfig, make_optimizer, set_rate
from tests.unit import toy, toy_run

TRACE = Path(__file__).parent / "data" / "loss_trace.json"
TRACED = {
    "committed": [],
    "unknown": [
        "algorithm.scope=unknown", "sampling.guidance_scale=2", "algorithm.scored_ar_steps=2",
        "algorithm.advantage.scale=batch",
    ],
}  # fmt: skip
NAME = "tests.unit.toy_run"


@pytest.fixture(autouse=True)
def process_settings() -> Iterator[None]:
    """Training sets threads and denormals for the whole process; other tests get them back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    toy_run.prepare(folder)
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    """A store with checkpoint and prompts of its own; what is referenced stays in the first one."""
    (tmp_path / "store").mkdir()
    shutil.copy(prepared / "references.json", tmp_path)
    return tmp_path


def without_time(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def parameters(folder: Path, run: TrainingRun) -> dict[str, Tensor]:
    assert run.checkpoint is not None
    policy = load_policy(fetch_checkpoint(run.checkpoint, folder / "cache"))
    return dict(policy.transformer.named_parameters())


def finished(folder: Path, prefix: str, *overrides: str, **options: Any) -> tuple[TrainingRun, list[dict[str, Any]]]:
    run, rows = toy_run.run(folder, prefix, *overrides, **options)
    assert run is not None
    return run, rows


def test_what_a_run_leaves(folder: Path) -> None:
    run, rows = finished(folder, "runs/a")
    assert run.outcome == "completed" and run.failure is None and run.steps == 4
    assert run.recipe == toy_run.recipe().model_dump(mode="json") and run.recipe_digest == toy_run.recipe().digest
    assert run.seconds_per_step is not None and 0 < run.seconds_per_step <= run.seconds
    store = Store(folder / "store")
    lines = store.read_bytes("runs/a/metrics.jsonl").splitlines()
    assert [json.loads(line) for line in lines] == rows and [row["update"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert all(np.isfinite(value) for value in row.values())
        assert {"gradient_norm", "kl", "live_groups", f"reward/{NAME}:brightness", "seconds"} <= row.keys()
    states = [key for key in store.list("runs/a/state") if key.endswith(".pt")]
    assert states == ["runs/a/state/update-000002.pt", "runs/a/state/update-000004.pt"]
    assert run.checkpoint is not None
    document = read_document(run.checkpoint, Checkpoint)
    references = json.loads((folder / "references.json").read_text())
    assert (document.step, document.parent) == (4, references["checkpoint"]["sha256"])
    assert document.recipe_digest == run.recipe_digest


@pytest.mark.parametrize("part", ["trunk", "condition"])
def test_only_the_trained_part_moves(folder: Path, part: str) -> None:
    run, _ = finished(folder, "runs/a", f"algorithm.trained={part}", "training.updates=2")
    start = dict(toy.policy().transformer.named_parameters())
    moved = {name for name, value in parameters(folder, run).items() if not torch.equal(value, start[name])}
    assert moved and not any(name.startswith("image_decoder.") for name in moved)
    if part == "condition":
        assert not any(name.startswith("image_encoder.") or "mask_token" in name for name in moved)
        assert any(name.startswith("text_embed.") for name in moved)
        assert any(name.startswith("video_encoder.") for name in moved)
    else:
        reached = {id(parameter) for parameter in toy.policy().trunk_parameters()}
        assert len(moved) == len(reached)


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_an_interrupted_run_ends_as_an_uninterrupted_one(folder: Path, kind: str) -> None:
    change = f"optimizer.kind={kind}"
    whole, rows = finished(folder, "runs/whole", change, "training.updates=5")

    def stop_after_third(row: dict[str, Any]) -> None:
        if row["update"] == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        toy_run.run(folder, "runs/cut", change, "training.updates=5", report=stop_after_third)
    cut, rest = finished(folder, "runs/cut", change, "training.updates=5")
    assert [row["update"] for row in rest] == [3, 4, 5]
    assert without_time(rest) == without_time(rows[2:])
    stored = [json.loads(line) for line in Store(folder / "store").read_bytes("runs/cut/metrics.jsonl").splitlines()]
    assert without_time(stored) == without_time(rows)
    one, other = parameters(folder, whole), parameters(folder, cut)
    assert all(torch.equal(one[name], other[name]) for name in one)
    again, none = finished(folder, "runs/cut", change, "training.updates=5")  # it is done already
    assert none == [] and again.checkpoint == cut.checkpoint


@pytest.mark.parametrize("name", TRACED)
def test_the_recorded_trace_is_reproduced(folder: Path, name: str) -> None:
    """A change that is not meant to change numbers leaves this alone; one that is says so and records it anew:

    python -m tests.unit.test_trainer
    """
    _, rows = finished(folder, "runs/a", *TRACED[name])
    recorded = json.loads(TRACE.read_text())[name]
    for row, expected in zip(without_time(rows), recorded, strict=True):
        assert row == pytest.approx(expected, rel=0, abs=1e-6)


@pytest.mark.parametrize("size", [3, 12])
def test_micro_batches_do_not_matter(folder: Path, size: int) -> None:
    overrides = ["algorithm.advantage.scale=batch", "algorithm.scope=unknown"]
    usual, rows = finished(folder, "runs/a", *overrides)
    other, same = finished(folder, "runs/b", *overrides, f"training.micro_batch={size}")
    for row, expected in zip(without_time(same), without_time(rows), strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-5)
    one, two = parameters(folder, usual), parameters(folder, other)
    assert all(torch.allclose(one[name], two[name], rtol=0, atol=1e-5) for name in one)


def spawn(folder: Path, prefix: str, *overrides: str) -> list[tuple[int, str]]:
    """Two processes as torchrun would start them; exit code and stderr of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.unit.toy_run", str(folder), prefix, *overrides]
    ranks = [
        subprocess.Popen(
            command, env=os.environ | group | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    return [(rank.wait(timeout=120), (rank.communicate()[1] or "")) for rank in ranks]


def test_two_processes_make_what_one_makes(folder: Path) -> None:
    overrides = ["algorithm.advantage.scale=batch", "training.processes=2", "training.updates=3"]
    alone, rows = finished(folder, "runs/one", *overrides)
    assert [code for code, _ in spawn(folder, "runs/two", *overrides)] == [0, 0]
    store = Store(folder / "store")
    shared = [json.loads(line) for line in store.read_bytes("runs/two/metrics.jsonl").splitlines()]
    for row, expected in zip(without_time(shared), without_time(rows), strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-5)
    run = read_document(store.uri("runs/two/run.json"), TrainingRun)
    one, two = parameters(folder, alone), parameters(folder, run)
    assert all(torch.allclose(one[name], two[name], rtol=0, atol=1e-5) for name in one)


def test_an_error_of_one_process_is_that_of_all(folder: Path) -> None:
    """One dog among four prompts: one process meets it. The other says the same at once and does not wait for it."""
    ends = spawn(
        folder, "runs/a", "training.processes=2", f"rewards.components={{{NAME}:broken_for_dogs: 1}}"
    )  # fmt: skip
    assert [code for code, _ in ends] == [2, 2]
    first, second = (text.strip().splitlines()[-1] for _, text in ends)
    assert first == second and re.search(r"broken_for_dogs' returned nan \(.*'a dog', rank [01]\)", first)
    run = read_document(Store(folder / "store").uri("runs/a/run.json"), TrainingRun)
    assert run.outcome == "failed" and run.failure is not None
    assert run.failure["exit_code"] == 2 and run.failure["error"] == first


def test_draws_of_ar_steps_average_to_the_whole_gradient(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = [
        "training.updates=1", "optimizer.learning_rate=1", "optimizer.warmup_updates=0", "optimizer.beta1=0",
        "optimizer.max_grad_norm=1e9",
    ]  # fmt: skip
    start = dict(toy.policy().transformer.named_parameters())

    def gradient(prefix: str, ar_steps: list[int]) -> Tensor:
        monkeypatch.setattr(trainer, "choose_steps", lambda *_: (ar_steps, [0, 1]))
        run, _ = finished(folder, prefix, *overrides)
        return torch.cat([(start[name] - value).flatten() for name, value in parameters(folder, run).items()])

    whole = gradient("runs/whole", [0, 1, 2])
    parts = torch.stack([gradient(f"runs/{number}", [number]) for number in range(3)])
    torch.testing.assert_close(parts.mean(dim=0), whole, rtol=0, atol=1e-4 * whole.abs().max().item())
    assert (parts[0] - parts[2]).abs().max() > 0.1 * whole.abs().max()


def test_steps_are_drawn_evenly_and_known_beforehand() -> None:
    recipe = toy_run.recipe("sampling.ar_steps=5", "algorithm.scored_ar_steps=2")
    schedule = toy.policy().schedule(3)
    drawn = [trainer.choose_steps(recipe, update, 5, schedule) for update in range(400)]
    assert drawn == [trainer.choose_steps(recipe, update, 5, schedule) for update in range(400)]
    counts = np.bincount([step for ar_steps, _ in drawn for step in ar_steps], minlength=5)
    assert all(len(set(ar_steps)) == 2 and ar_steps == sorted(ar_steps) for ar_steps, _ in drawn)
    assert np.abs(counts - 160).max() < 4 * np.sqrt(400 * 0.4 * 0.6)
    assert all(diffusion_steps == [0, 1] for _, diffusion_steps in drawn)  # the last has no noise
    few = toy_run.recipe("sampling.diffusion_steps=6", "algorithm.noisiest_diffusion_steps=3")
    assert trainer.choose_steps(few, 0, 3, toy.policy().schedule(6)) == ([0, 1, 2], [0, 1, 2])


def test_held_out_looks(folder: Path) -> None:
    seen: list[bool] = []

    def look(policy: Any, processes: Processes) -> dict[str, float]:
        seen.append(processes.first)
        return {"held_out/number": float(len(seen))}

    overrides = ["training.held_out_every=2", "training.updates=5"]
    run, rows = finished(folder, "runs/a", *overrides, held_out=look)
    stored = [json.loads(line) for line in Store(folder / "store").read_bytes("runs/a/metrics.jsonl").splitlines()]
    assert {row["update"]: row.get("held_out/number") for row in stored} == {
        0: 1.0, 1: None, 2: 2.0, 3: None, 4: 3.0, 5: None,
    }  # fmt: skip
    assert stored[1:] == rows and run.steps == 5


# --- ends that are not good ----------------------------------------------------------------------------------------


def failed(folder: Path, kind: type[Exception], match: str, *overrides: str) -> TrainingRun:
    with pytest.raises(kind, match=match):
        toy_run.run(folder, "runs/a", *overrides)
    run = read_document(Store(folder / "store").uri("runs/a/run.json"), TrainingRun)
    assert run.checkpoint is None and run.failure is not None
    return run


def test_numbers_that_are_not_finite_end_the_run(folder: Path) -> None:
    run = failed(folder, UnhealthyError, "not finite", "optimizer.learning_rate=1e38", "training.updates=20")
    assert run.outcome == "unhealthy" and run.failure is not None
    assert run.failure["exit_code"] == 3 and "learning_rate" in run.failure["error"]
    assert run.steps < 20
    lines = Store(folder / "store").read_bytes("runs/a/metrics.jsonl").splitlines()
    assert [json.loads(line)["update"] for line in lines] == list(range(1, len(lines) + 1))


def test_a_reward_that_tells_nothing_apart_ends_the_run(folder: Path) -> None:
    overrides = [
        f"rewards.components={{{NAME}:nothing: 1}}", "algorithm.kl=0", "training.updates=9",
        "training.health.patience=3",
    ]  # fmt: skip
    what = r"no group held two different rewards for 3 updates \(update 3\)"
    run = failed(folder, UnhealthyError, what, *overrides)
    assert run.outcome == "unhealthy" and run.steps == 2
    rows = [json.loads(line) for line in Store(folder / "store").read_bytes("runs/a/metrics.jsonl").splitlines()]
    assert [row["gradient_norm"] for row in rows] == [0.0, 0.0]
    failed(folder, UnhealthyError, what, *overrides)  # goes on from update 2, which was the second without


def test_a_wrong_score_ends_the_run(folder: Path) -> None:
    run = failed(
        folder, InputError, "broken_for_dogs' returned nan", f"rewards.components={{{NAME}:broken_for_dogs: 1}}"
    )
    assert run.outcome == "failed" and run.failure is not None and run.failure["exit_code"] == 2


@pytest.mark.parametrize("change", ["training.updates=6", "seed=1", "optimizer.learning_rate=0.01"])
def test_the_state_of_another_recipe_is_refused(folder: Path, change: str) -> None:
    finished(folder, "runs/a", "training.updates=2")
    before = Store(folder / "store").read_bytes("runs/a/run.json")
    with pytest.raises(InputError, match="belongs to another recipe, checkpoint or prompt set") as error:
        toy_run.run(folder, "runs/a", "training.updates=2", change)
    assert error.value.exit_code == 2 and "update-000002.pt" in str(error.value)
    assert Store(folder / "store").read_bytes("runs/a/run.json") == before  # the other run is left as it is


def test_a_damaged_state_is_refused(folder: Path) -> None:
    finished(folder, "runs/a", "training.updates=2")
    path = folder / "store/runs/a/state/update-000002.pt"
    content = path.read_bytes()
    for damaged in (content[:-10], content[:100] + b"x" + content[101:]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"update-000002\.pt"):
            toy_run.run(folder, "runs/a", "training.updates=2")
    path.unlink()
    with pytest.raises(InputError, match=r"update-000002\.pt"):
        toy_run.run(folder, "runs/a", "training.updates=2")


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
        Health(HealthConfig()).compare(7, [value, value])


def test_health_names_the_rank_that_differs() -> None:
    Health(HealthConfig()).compare(1, [0.5, 0.5])
    with pytest.raises(UnhealthyError, match="rank 2 differ from rank 0's"):
        Health(HealthConfig()).compare(1, [0.5, 0.5, 0.5000001])


def test_checksum_sees_one_changed_number() -> None:
    values = [torch.linspace(-1, 1, 1000), torch.ones(7)]
    before = checksum(values)
    assert checksum([value.clone() for value in values]) == before
    for change in (values[0][1:2], values[1][3:4]):
        change += 1e-6
        assert checksum(values) != before
        change -= 1e-6


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
