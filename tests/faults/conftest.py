"""Fixtures of the tests that break things."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.servers import Server


@pytest.fixture
def start_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*options: str) -> Server:
        folder = tmp_path / f"server{len(servers)}"
        folder.mkdir()
        server = Server(folder, *options)
        server.start()
        servers.append(server)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.ports['s3.port']}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
        return server

    yield start
    for server in servers:
        server.kill()
