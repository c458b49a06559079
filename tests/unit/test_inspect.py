"""`mar-grpo checkpoint inspect` and `convert`: what they print, and that conversion changes no bit."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from mar_grpo.models.checkpoint import load_policy, save_policy
from mar_grpo.models.export import published_tensors
from mar_grpo.models.inspect import Description, describe, show
from tests.unit import tiny, tiny_mar
from tests.unit.test_cli import call


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    made = {"nova": tiny.policy(), "mar": tiny_mar.mar(), "harmon": tiny_mar.harmon()}
    return {name: save_policy(policy, root / name) for name, policy in made.items()}


def parts(description: Description) -> dict[str, tuple[int, str, bool]]:
    return {part.name: (part.parameters, part.sha256, part.trained) for part in description.parts}


def test_every_tensor_is_in_one_part(places: dict[str, Path], tmp_path: Path) -> None:
    for family, names in {
        "nova": {"transformer", "transformer, diffusion head", "transformer, not trained", "vae", "text_encoder"},
        "mar": {"mar", "mar, diffusion head", "vae"},
        "harmon": {"llm", "mar", "mar, diffusion head", "mar, not trained", "proj_in", "proj_out", "vae"},
    }.items():
        description = describe(str(places[family]), tmp_path)
        stored = published_tensors(load_policy(places[family]))
        assert {part.name for part in description.parts} == names
        for part in stored:
            found = sum(row.parameters for row in description.parts if row.name.split(",")[0] == part)
            assert found == sum(tensor.numel() for tensor in stored[part].values())
        trained = {row.name for row in description.parts if row.trained}
        assert trained == {"nova": {"transformer"}, "mar": {"mar"}, "harmon": {"mar"}}[family]
        assert {row.dtype for row in description.parts} == {"float32"}


def test_a_table_on_a_terminal_and_json_lines_elsewhere(
    places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("checkpoint", "inspect", str(places["harmon"]), "--work", str(tmp_path)) == 0
    head, *rows = map(json.loads, capsys.readouterr().out.splitlines())
    assert head["family"] == "Harmon" and head["configuration"]["llm"]["hidden_size"] == 16
    assert {"name", "parameters", "bytes", "dtype", "sha256", "trained"} == rows[0].keys()

    screen = io.StringIO()
    show(describe(str(places["harmon"]), tmp_path), Console(file=screen, force_terminal=True, width=120, no_color=True))
    shown = screen.getvalue()
    assert "llm.hidden_size" in shown and "diffusion head" in shown and f"{rows[0]['parameters']:,}" in shown


@pytest.mark.parametrize("family", ["nova", "mar", "harmon"])
def test_conversion_there_and_back_changes_no_bit(
    places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    start = parts(describe(str(places[family]), tmp_path))
    work = ["--work", str(tmp_path / "work")]
    published, ours = tmp_path / "published", tmp_path / "ours"
    convert = ["checkpoint", "convert"]
    assert call(*convert, str(places[family]), str(published), "--layout", "published", *work) == 0
    assert call(*convert, str(published), ours.as_uri(), *work) == 0
    document = capsys.readouterr().out.splitlines()[-1]
    assert document.endswith("/ours/checkpoint.json")
    for place in (str(published), document, str(ours)):
        assert parts(describe(place, tmp_path / "cache")) == start
    assert call(*convert, document, str(tmp_path / "half"), "--dtype", "bfloat16", *work) == 0
    assert {part.dtype for part in describe(str(tmp_path / "half"), tmp_path).parts} == {"bfloat16"}
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []

    assert call(*convert, str(published), str(ours), *work) == 2
    assert "there is something already" in capsys.readouterr().err


def test_a_torch_file_and_a_fine_tuned_mar(
    places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = ["--work", str(tmp_path / "work")]
    file = tmp_path / "tuned.pth"
    torch.save(published_tensors(tiny_mar.harmon(1))["mar"], file)
    out = tmp_path / "whole"
    assert call("checkpoint", "convert", str(file), str(out), "--with", str(places["harmon"]), *work) == 0
    description, base = parts(describe(str(out), tmp_path)), parts(describe(str(places["harmon"]), tmp_path))
    assert description["mar"] != base["mar"] and description["llm"] == base["llm"]

    assert call("checkpoint", "convert", str(out), str(tmp_path / "harmon.pth"), *work) == 0
    content = torch.load(tmp_path / "harmon.pth", weights_only=True)
    assert {name.split(".")[0] for name in content} == {"llm", "mar", "proj_in", "proj_out"}
    capsys.readouterr()
    assert call("checkpoint", "inspect", str(tmp_path / "harmon.pth"), *work) == 2
    assert "none of the published" in capsys.readouterr().err
    assert call("checkpoint", "convert", str(places["nova"]), str(tmp_path / "nova.pth"), *work) == 2
    assert "a NOVA checkpoint is a folder" in capsys.readouterr().err
