"""Fixtures of the tests that train: a store with a small checkpoint and prompts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit import toy_run


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("toy")
    toy_run.prepare(made)
    return made


@pytest.fixture
def toy_folder(prepared: Path, tmp_path: Path) -> Iterator[Path]:
    """A store with checkpoint and prompts of its own; what is referenced stays in the first one.

    Training sets threads and denormals for the whole process; other tests get them back.
    """
    (tmp_path / "store").mkdir()
    shutil.copy(prepared / "references.json", tmp_path)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
