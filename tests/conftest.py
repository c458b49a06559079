"""Fixtures shared by all tests: stores on a folder and on a real S3 server (SeaweedFS)."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: files of tests run beside each other, one a core

import hypothesis
import pytest

from mar_grpo.launch import object_store
from mar_grpo.store import Store

hypothesis.settings.register_profile("house", deadline=None)  # tests assert behaviour, never wall time
hypothesis.settings.load_profile("house")
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored under nohup, and then by every process a test starts


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server for this test session. The AWS variables that lead to its bucket."""
    before = dict(os.environ)
    with object_store.serve(tmp_path_factory.mktemp("seaweed")):
        variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        inside = dict(os.environ)
        os.environ.clear()
        os.environ.update(before)  # tests that do not ask for S3 do not see it
        yield variables
        os.environ.update(inside)


@pytest.fixture
def s3_environment(seaweed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """This test's process sees the session's server through the standard AWS variables, and no other."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in seaweed.items():
        monkeypatch.setenv(name, value)
    return seaweed


@pytest.fixture
def s3_store(s3_environment: dict[str, str]) -> Store:
    """An empty place in the bucket of the session's server."""
    return Store(f"s3://{object_store.BUCKET}/{secrets.token_hex(8)}", retry_seconds=10)


@pytest.fixture
def file_store(tmp_path: Path) -> Store:
    """An empty folder."""
    return Store(tmp_path / "store", retry_seconds=2)


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest) -> Store:
    """The same test on a folder and on S3."""
    return request.getfixturevalue(f"{request.param}_store")
