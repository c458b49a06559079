"""The command line: one line on stderr, the documented exit code, nothing half-written."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from rich.console import Console

from mar_grpo import cli
from mar_grpo.launch import processes
from mar_grpo.progress import View, parse


def commands(group: Any, *path: str) -> Iterator[tuple[list[str], Any]]:
    """Every command and group of the CLI with the words that lead to it."""
    yield list(path), group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, *path, name)


COMMANDS = list(commands(typer.main.get_command(cli.app)))


def call(*arguments: str) -> int:
    """Exit code of `mar-grpo ARGUMENTS`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["mar-grpo", *arguments])
        try:
            cli.main()
        except SystemExit as stopped:
            return int(stopped.code or 0)
    return 0


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[" ".join(["mar-grpo", *path]) for path, _ in COMMANDS])
def test_help_of_every_command(path: list[str], command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*path, "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(["mar-grpo", *path, "["]) in lines[0]
    assert (command.help.splitlines()[0].split()[0]) in lines[2]
    assert all(option in " ".join(lines) for parameter in command.params for option in getattr(parameter, "opts", []))
    assert command.rich_markup_mode is None, "brackets in its help are read as markup"


def test_help_on_a_terminal_with_colours() -> None:
    """What a terminal is for typer and rich is decided when they are imported, hence a process of its own."""
    code = (
        "import sys; from tests.unit.test_cli import COMMANDS, call; "
        "sys.exit(max(call(*path, '--help') for path, _ in COMMANDS))"
    )
    colours = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "80"}
    told = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | colours, capture_output=True, text=True, check=False
    )
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.count("Usage: ") == len(COMMANDS)
    assert "s3://BUCKET[/PREFIX]" in told.stdout
    assert max(map(len, told.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--recipe", "no-such-recipe"], "no such recipe (no-such-recipe)"),
        (["--set", "training.updatez=3"], "training.updatez"),
        (["--set", "training.group_size=1"], "training.group_size"),
        (["--set", "sampling.noise_level=0"], "noise_level"),
        (["--set", "updates"], "key.sub=value"),
        (["--set", "rewards.components={templates/strict: 1.0}"], "templates"),
    ],
)
def test_a_wrong_recipe_is_one_line_and_exit_2(
    arguments: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("run", *arguments, "--work", str(tmp_path / "work")) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert len(errors.splitlines()) == 1
    assert named in errors
    assert not (tmp_path / "work").exists()


def test_a_second_run_beside_the_first_is_one_line_and_exit_75(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with processes.locked(tmp_path):
        assert call("run", "--work", str(tmp_path)) == 75
    errors = capsys.readouterr().err
    assert "another run" in errors
    assert len(errors.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_recipe_show_is_a_recipe_with_every_default(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call("recipe", "show", "emoji", "--set", "seed=7") == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text)["seed"] == 7
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert call("recipe", "show", str(path)) == 0
    assert capsys.readouterr().out == text


def test_prompts_are_written_with_their_documents(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    counts = ["--set", "data.train_prompts=12", "--set", "data.evaluation_prompts=12"]
    assert call("prompts", "build", "--store", str(tmp_path), *counts) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all("#" in line for line in lines)
    document = tmp_path / "prompts" / "evaluation.json"
    assert document.exists()
    assert call("prompts", "inspect", str(document), "--examples", "2") == 0
    assert call("prompts", "verify", str(document)) == 0
    shard = next((tmp_path / "prompts" / "evaluation").glob("*.tar"))
    shard.write_bytes(shard.read_bytes()[:1024])
    assert call("prompts", "verify", str(document)) == 2


def test_a_terminal_sees_steps_and_a_pipe_sees_json() -> None:
    events: list[dict[str, Any]] = [
        {"event": "step", "step": "grpo_training", "state": "started"},
        {"event": "progress", "step": "grpo_training", "done": 3, "total": 6, "reward/heatmap/graded": 0.51234},
        {"event": "step", "step": "grpo_training", "state": "done", "seconds": 12.0, "text": "6 updates"},
        {"event": "note", "text": "[a note]"},
    ]
    for terminal in (True, False):
        out = io.StringIO()
        with View(Console(file=out, force_terminal=terminal, width=120)) as view:
            for event in events:
                view.show(event)
        lines = [line for line in out.getvalue().splitlines() if line.strip()]
        if terminal:
            assert any("✓ grpo_training" in line and "12.0 s" in line and "6 updates" in line for line in _plain(lines))
            assert any("[a note]" in line for line in _plain(lines))
        else:
            assert [parse(line) for line in lines] == events


def _plain(lines: list[str]) -> list[str]:
    return [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in lines]
