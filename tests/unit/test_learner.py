"""What an update changes: which part, with adapters or not, the head's average, the reference; resumed, shared out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mar_grpo.documents import TrainingRun, read_document
from mar_grpo.errors import InputError
from mar_grpo.models.policy import Policy
from mar_grpo.rollout import Guided
from mar_grpo.store import Store
from mar_grpo.training.distributed import Processes
from mar_grpo.training.learner import Learner
from tests.unit import tiny_mar, toy, toy_run
from tests.unit.toy_run import finished, parameters, spawn, stored_rows, without_time

BOTH = ["algorithm.trained=both"]
LORA = ["training.lora.rank=2", "optimizer.learning_rate=0.5"]
VARIANTS: dict[str, list[str]] = {
    "sgd": [],
    "adamw": ["optimizer.kind=adamw"],
    "average of the head": [*BOTH, "optimizer.head_ema_decay=0.5", "optimizer.head_learning_rate=0.01"],
    "lora": LORA,
    "lora without its adapters": [
        *LORA,
        *BOTH,
        "algorithm.kl.reference=adapter_off",
        "optimizer.kind=adamw",
        "optimizer.learning_rate=0.02",
    ],
    "refreshed": ["algorithm.kl.refresh_every=2"],
    "lora refreshed": [*LORA, "algorithm.kl.refresh_every=2"],
    "inner updates": ["algorithm.inner_updates=2", "algorithm.clip=0.01", "algorithm.scope=unknown"],
}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("part", ["trunk", "condition", "head", "both"])
@pytest.mark.parametrize("lora", [[], LORA], ids=["", "lora"])
def test_only_the_trained_part_moves(toy_folder: Path, part: str, lora: list[str]) -> None:
    run, _ = finished(toy_folder, "runs/a", f"algorithm.trained={part}", "training.updates=2", *lora)
    made = toy.policy()
    start = dict(made.transformer.named_parameters())
    trained = {
        "trunk": made.trunk_parameters(),
        "condition": made.condition_parameters(),
        "head": made.head_parameters(),
        "both": made.trunk_parameters() + made.head_parameters(),
    }[part]
    names = {name for name, value in start.items() if any(value is own for own in trained)}
    moved = {name for name, value in parameters(toy_folder, run).items() if not torch.equal(value, start[name])}
    if lora:
        linear = {name for name, module in made.transformer.named_modules() if isinstance(module, torch.nn.Linear)}
        names = {name for name in names if name.endswith(".weight") and name.removesuffix(".weight") in linear}
    assert moved == names
    assert any(name.startswith("image_decoder.") for name in moved) == (part in ("head", "both"))
    assert any(name.startswith("video_encoder.") for name in moved) == (part != "head")


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("name", VARIANTS)
def test_an_interrupted_run_ends_as_an_uninterrupted_one(toy_folder: Path, name: str) -> None:
    """To the last bit, looks at held-out prompts included. States are saved after updates 2, 4 and 5."""
    options: dict[str, Any] = {"held_out": weight_of_the_head}
    changes = [*VARIANTS[name], "training.updates=5", "training.held_out_every=1"]
    whole, rows = finished(toy_folder, "runs/whole", *changes, **options)

    def stop_after_third(row: dict[str, Any]) -> None:
        if row["update"] == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        toy_run.run(toy_folder, "runs/cut", *changes, report=stop_after_third, **options)
    cut, rest = finished(toy_folder, "runs/cut", *changes, **options)
    assert [row["update"] for row in rest] == [3, 4, 5]
    assert without_time(rest) == without_time(rows[2:])
    assert without_time(stored_rows(toy_folder, "runs/cut")) == without_time(stored_rows(toy_folder, "runs/whole"))
    assert equal(parameters(toy_folder, whole), parameters(toy_folder, cut))
    again, none = finished(toy_folder, "runs/cut", *changes, **options)  # it is done already
    assert none == [] and again.checkpoint == cut.checkpoint


def weight_of_the_head(policy: Policy, processes: Processes) -> dict[str, float]:
    return {"held_out/weight": sum(value.double().sum().item() for value in policy.head_parameters())}


@pytest.mark.parametrize(
    "changes",
    [
        ["algorithm.advantage.scale=batch"],
        ["algorithm.scope=unknown", "algorithm.selection.mode=delta", "algorithm.inner_updates=2"],
        [*LORA, *BOTH, "optimizer.head_ema_decay=0.5", "algorithm.kl.refresh_every=1"],
        [
            "algorithm.preset=released", "algorithm.scored_ar_steps.count=2",
            "algorithm.scored_diffusion_steps.count=1",
            f"rewards.components={{{toy_run.__name__}:same_for_dogs: 1}}", "algorithm.advantage.equal_groups=leave_out",
        ],
        [
            f"rewards.components={{{toy_run.__name__}:nothing: 1}}", "algorithm.kl.kind=off", "optimizer.kind=adamw",
            "optimizer.weight_decay=0.1",
        ],
    ],
    ids=["batch", "selected", "lora", "released", "nothing to learn"],
)  # fmt: skip
def test_two_processes_make_what_one_makes(toy_folder: Path, changes: list[str]) -> None:
    overrides = [*changes, "training.processes=2", "training.updates=3"]
    alone, rows = finished(toy_folder, "runs/one", *overrides)
    assert [code for code, _ in spawn(toy_folder, "runs/two", *overrides)] == [0, 0]
    for row, expected in zip(without_time(stored_rows(toy_folder, "runs/two")), without_time(rows), strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-5)
    run = read_document(Store(toy_folder / "store").uri("runs/two/run.json"), TrainingRun)
    one, two = parameters(toy_folder, alone), parameters(toy_folder, run)
    assert all(torch.allclose(one[name], two[name], rtol=0, atol=1e-5) for name in one)


def test_looks_and_checkpoint_have_the_average_of_the_head_and_rollouts_the_head(toy_folder: Path) -> None:
    changes = [*BOTH, "training.held_out_every=4"]
    seen: list[dict[str, Tensor]] = []

    def look(policy: Policy, processes: Processes) -> dict[str, float]:
        seen.append({name: value.clone() for name, value in policy.transformer.named_parameters()})
        return {}

    live, plain_rows = finished(toy_folder, "runs/live", *changes, held_out=look)
    averaged, rows = finished(toy_folder, "runs/averaged", *changes, "optimizer.head_ema_decay=0.9", held_out=look)
    assert without_time(rows) == without_time(plain_rows)
    one, other = parameters(toy_folder, live), parameters(toy_folder, averaged)
    assert equal(seen[1], one) and equal(seen[3], other)
    moved = {name for name in one if not torch.equal(one[name], other[name])}
    reached = {id(value) for value in toy.policy().head_parameters()}
    head = [name for name in one if name.startswith("image_decoder.")]
    assert len(head) == len(reached) and moved == set(head)
    start = dict(toy.policy().transformer.named_parameters())
    assert all(((other[n] - start[n]).norm() < (one[n] - start[n]).norm()) for n in head)


def test_the_head_has_its_own_learning_rate(toy_folder: Path) -> None:
    one, other = (
        parameters(toy_folder, finished(toy_folder, f"runs/{rate}", *BOTH, "training.updates=1", *change)[0])
        for rate, change in (("same", []), ("third", ["optimizer.head_learning_rate=0.15"]))
    )
    for name, value in toy.policy().transformer.named_parameters():
        factor = 3.0 if name.startswith("image_decoder.") else 1.0
        torch.testing.assert_close(other[name] - value, factor * (one[name] - value), rtol=1e-3, atol=1e-6)


def test_a_reference_that_is_refreshed_is_the_policy_before_the_update(toy_folder: Path) -> None:
    def kl(prefix: str, *changes: str) -> list[float]:
        return [row["kl"] for row in finished(toy_folder, prefix, "training.updates=4", *changes)[1]]

    never, always, second = (
        kl("runs/a"),
        kl("runs/b", "algorithm.kl.refresh_every=1"),
        kl("runs/c", "algorithm.kl.refresh_every=2"),
    )
    assert never[0] < 1e-12 and all(value > 0 for value in never[1:])
    assert max(always) < 1e-9 < never[1] / 100
    assert second[:2] == never[:2] and second[2] < 1e-9 and second[3] > 1e-7


def test_the_policy_without_adapters_is_the_frozen_start(toy_folder: Path) -> None:
    changes = [*LORA, *BOTH]
    frozen, rows = finished(toy_folder, "runs/a", *changes)
    off, same = finished(toy_folder, "runs/b", *changes, "algorithm.kl.reference=adapter_off")
    for one, other in zip(without_time(rows), without_time(same), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-7)  # a copy lies elsewhere in memory: other kernels
    assert rows[-1]["kl"] > 0.01
    theirs = parameters(toy_folder, off)
    for name, value in parameters(toy_folder, frozen).items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-3, atol=1e-5)


def test_inner_updates_go_on_with_the_same_images(toy_folder: Path) -> None:
    _, (once,) = finished(toy_folder, "runs/a", "training.updates=1", "optimizer.warmup_updates=0")
    changes = ["training.updates=1", "optimizer.warmup_updates=0", "algorithm.inner_updates=3"]
    _, (thrice,) = finished(toy_folder, "runs/b", *changes)
    _, (cut,) = finished(toy_folder, "runs/c", *changes, "algorithm.clip=1e-6")
    assert "ratio" not in once and once["kl"] < 1e-12
    assert all(once[name] == thrice[name] for name in once if name.startswith("reward"))
    assert thrice["kl"] > 1e-7 and thrice["clip_share"] == 0 and 0 < abs(thrice["ratio"] - 1) < 0.5
    assert thrice["policy_loss"] < once["policy_loss"]  # it has gone down on these images
    assert 0.3 < cut["clip_share"] < 0.7  # those on the side that would gain more


def test_without_a_kl_there_is_no_reference(monkeypatch: pytest.MonkeyPatch, toy_folder: Path) -> None:
    policies: set[int] = set()
    of = Guided.of.__func__  # type: ignore[attr-defined]
    spied = classmethod(lambda cls, policy, *rest, **how: (policies.add(id(policy)), of(cls, policy, *rest, **how))[1])
    monkeypatch.setattr(Guided, "of", spied)
    _, rows = finished(toy_folder, "runs/a", "algorithm.kl.kind=off", "training.updates=1")
    assert len(policies) == 1 and "kl" not in rows[0]
    finished(toy_folder, "runs/b", "training.updates=1")
    assert len(policies) == 3


@pytest.mark.parametrize("family", ["mar", "harmon"])
def test_adapters_of_other_families_are_published_as_their_tensors(
    toy_folder: Path, tmp_path: Path, family: str
) -> None:
    policy = toy_run.speaking(getattr(tiny_mar, family)())
    start = {name: value.clone() for name, value in policy.transformer.named_parameters()}
    prompts = ["0", "1", "2", "3"] if family == "mar" else ["a dog", "a red dog", "an apple", "a red apple"]
    toy_run.prepare(tmp_path / family, policy, prompts)
    run, rows = finished(
        tmp_path / family, "runs/a", *LORA, "training.updates=2", "algorithm.kl.reference=adapter_off",
        "algorithm.scope=unknown", "algorithm.selection.mode=delta",
    )  # fmt: skip
    trained = parameters(tmp_path / family, run)
    moved = {name for name in trained if not torch.equal(trained[name], start[name])}
    assert rows[-1]["kl"] > 0 and trained.keys() == start.keys()
    prefix = "mar." if family == "harmon" else ""
    assert moved and all(name.startswith(prefix) and "diffloss" not in name for name in moved)


def test_a_target_that_is_not_there_is_refused() -> None:
    recipe = toy_run.recipe("training.lora.targets=[q_proj]")
    with pytest.raises(InputError, match=r"'q_proj' \(training\.lora\.targets\)"):
        Learner(recipe, toy.policy(), torch.device("cpu"))
