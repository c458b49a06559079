"""The same picture for the same prompt and seed, in any batch and on any number of processes; whole or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from mar_grpo.errors import InputError
from mar_grpo.models.checkpoint import save_policy
from mar_grpo.models.invariant import BatchInvariant
from mar_grpo.models.policy import Policy
from mar_grpo.rollout import SamplingConfig
from mar_grpo.sampling import sample
from mar_grpo.training.distributed import Processes
from tests.unit import test_harmon, tiny, toy
from tests.unit.test_cli import call

WORDS = ("a photo of two red apples", "a dog", "two apples", "a circle and a dog")
FLOW = SamplingConfig(ar_steps=4, diffusion_steps=3, guidance_scale=3.0)
RESPACED = SamplingConfig(ar_steps=4, diffusion_steps="ddim5", guidance_scale=3.0, guidance_schedule="linear")
FAMILIES: dict[str, tuple[Callable[[], Policy], tuple[str, ...], SamplingConfig]] = {
    "nova": (toy.policy, WORDS, FLOW),
    "mar": (tiny.mar_policy, ("goldfish", "0", "2", "4"), RESPACED),
    "harmon": (test_harmon.make, WORDS, RESPACED),
}


def drawn(
    policy: Policy, out: Path, prompts: tuple[str, ...], sampling: SamplingConfig, seeds: range = range(2)
) -> dict[str, bytes]:
    sample(policy, prompts, seeds, out, sampling, checkpoint="c0ffee", group=Processes())
    return contents(out)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_batch_changes_no_byte(family: str, tmp_path: Path) -> None:
    make, prompts, sampling = FAMILIES[family]
    policy = make()
    one, *others = (
        drawn(policy, tmp_path / str(size), prompts, sampling.model_copy(update={"batch_size": size}))
        for size in (1, 3, 8)
    )
    assert len(one) == 8 + 2
    assert all(other == one for other in others)
    assert len({data for name, data in one.items() if name.startswith("images/")}) == 8


def test_prompt_and_seed_are_all_that_counts(tmp_path: Path) -> None:
    policy = toy.policy()
    few = drawn(policy, tmp_path / "few", WORDS[2:3], FLOW, range(1, 2))
    many = drawn(policy, tmp_path / "many", WORDS, FLOW)
    assert few["images/0.png"] == many["images/5.png"]


def test_a_line_for_each_image(tmp_path: Path) -> None:
    made = drawn(toy.policy(), tmp_path / "out", (*WORDS[:2], WORDS[0]), FLOW, range(5, 8))
    rows = [json.loads(line) for line in made["samples.jsonl"].decode().splitlines()]
    assert [(row["prompt"], row["seed"]) for row in rows] == [(p, seed) for p in WORDS[:2] for seed in (5, 6, 7)]
    for row in rows:
        assert row["sha256"] == hashlib.sha256(made[row["file"]]).hexdigest()
        assert row["checkpoint"] == "c0ffee"
        assert row["settings"] == FLOW.model_dump(mode="json", exclude={"batch_size"})
    first = np.asarray(Image.open(tmp_path / "out" / rows[0]["file"]))
    sheet = np.asarray(Image.open(tmp_path / "out/contact_sheet.png"))
    side = first.shape[0]
    assert sheet.shape == (2 * (side + 4) + 4, 3 * (side + 4) + 4, 3)
    assert np.array_equal(sheet[4 : 4 + side, 4 : 4 + side], first)


def test_whole_or_not_at_all(tmp_path: Path) -> None:
    policy = tiny.mar_policy()
    with pytest.raises(InputError, match="zebra"):
        drawn(policy, tmp_path / "out", ("0", "1", "zebra"), RESPACED.model_copy(update={"batch_size": 2}))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        drawn(toy.policy(), tmp_path / "out", WORDS, FLOW)
    assert contents(tmp_path) == {"out/mine.txt": b"mine"}


def test_processes_change_no_byte(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The command, on one process and on two; outside a terminal it says how far it is in JSON lines."""
    save_policy(toy.policy(), tmp_path / "checkpoint")
    (tmp_path / "prompts.json").write_text(json.dumps(WORDS[:3]))
    settings = {"ar_steps": 3, "diffusion_steps": 2, "batch_size": 2}
    overrides = [part for name, value in settings.items() for part in ("--set", f"evaluation_sampling.{name}={value}")]
    for processes in ("1", "2"):
        assert not call(
            "sample", "--checkpoint", str(tmp_path / "checkpoint"), "--prompts", str(tmp_path / "prompts.json"),
            "--out", str(tmp_path / processes), "--count", "2", "--processes", processes, *overrides,
            "--work", str(tmp_path / "work"),
        )  # fmt: skip
    one, two = contents(tmp_path / "1"), contents(tmp_path / "2")
    assert len(one) == 6 + 2
    assert one == two
    events = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [event["done"] for event in events if event["event"] == "progress"] == [2, 4, 6, 4, 6]


@pytest.mark.parametrize("function", [F.silu, torch.sigmoid, torch.rsqrt, lambda x: F.linear(x, WEIGHT, WEIGHT[0])])
def test_invariant_functions_are_the_functions(function: Callable[[torch.Tensor], Any]) -> None:
    x = torch.rand(7, 3, 24, generator=torch.Generator().manual_seed(1)) + 0.01
    plain = function(x)
    with BatchInvariant():
        torch.testing.assert_close(function(x), plain)
        assert torch.equal(torch.cat([function(row[None]) for row in x]), function(x))


WEIGHT = torch.randn(24, 24, generator=torch.Generator().manual_seed(2))
