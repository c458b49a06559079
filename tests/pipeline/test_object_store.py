"""The embedded S3 server: keeps data between starts, one process a folder, ends with whoever started it."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mar_grpo.errors import InputError, RetryableError
from mar_grpo.launch import object_store
from mar_grpo.launch.object_store import serve
from mar_grpo.store import Store

SERVE = """
import sys, time
from pathlib import Path
from mar_grpo.launch.object_store import serve
with serve(Path(sys.argv[1])) as store:
    store.write_bytes("held", b"held by a process that is killed")
    print("ready", flush=True)
    time.sleep(60)
"""


def servers_on(folder: Path) -> list[int]:
    """Process ids of servers whose data lie in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"-dir={folder / 'data'}".encode() in command:
            found.append(int(process.name))
    return found


def test_server_keeps_data_and_keys_and_leaves_nothing_running(tmp_path: Path) -> None:
    before = dict(os.environ)
    with serve(tmp_path) as store:
        assert store.uri() == "s3://mar-grpo"
        store.write_bytes("a/b", b"kept")
        assert servers_on(tmp_path)
        beside = pytest.raises(RetryableError, match=f"another run .process {os.getpid()}. uses this folder")
        with beside, serve(tmp_path):
            raise AssertionError("two servers on one folder")
        os.environ["AWS_SECRET_ACCESS_KEY"] = "wrong"
        with pytest.raises(InputError, match="refused"):
            Store("s3://mar-grpo").read_bytes("a/b")
        with pytest.raises(InputError, match="bucket"):
            Store("s3://other-bucket").write_bytes("a", b"never written")
    assert dict(os.environ) == before
    assert not servers_on(tmp_path)
    assert stat.S_IMODE((tmp_path / "credentials.json").stat().st_mode) == 0o600
    with serve(tmp_path) as store:
        assert store.read_bytes("a/b") == b"kept"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_server_ends_with_its_process_and_the_next_one_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    process.wait(20)
    deadline = time.monotonic() + 10
    while servers_on(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not servers_on(tmp_path)
    with serve(tmp_path) as store:
        assert store.read_bytes("held") == b"held by a process that is killed"


def test_a_port_taken_in_between_means_another_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    free_ports = object_store._free_ports
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()

        def ports(count: int) -> list[int]:
            found = free_ports(count)
            if not asked:
                found[-2] = other.getsockname()[1]  # the one for S3
            asked.append(found)
            return found

        monkeypatch.setattr(object_store, "_free_ports", ports)
        with serve(tmp_path) as store:
            store.preflight()
    assert len(asked) == 2


def test_a_server_that_cannot_start_is_one_error_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "filerldb2").write_text("a file where a folder belongs")
    with (
        pytest.raises(RetryableError, match=r"not ready in time; it last said: .+server\.log"),
        serve(tmp_path, timeout_seconds=3),
    ):
        raise AssertionError("served without its tables")
    assert not servers_on(tmp_path)
