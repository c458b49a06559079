"""What the store does when things go wrong: every fault ends in one clear error, and never in half an object."""

from __future__ import annotations

import errno
import os
import resource
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mar_grpo import store as store_module
from mar_grpo.errors import InputError, RetryableError
from mar_grpo.launch import object_store
from mar_grpo.store import Store
from mar_grpo.transports import LocalFiles, PartFile
from tests.faults.servers import Line, Server

BIG = 2 * 2**20
BUCKET = object_store.BUCKET


@pytest.fixture
def line(s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    """A line to the session's server that this test's stores use."""
    line = Line(int(s3_environment["AWS_ENDPOINT_URL"].rpartition(":")[2]))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{line.listener.getsockname()[1]}")
    yield line
    line.listener.close()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "BLOCK_BYTES", 1000)


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    """No file of this process may grow beyond 1 MiB: the kernel refuses the write, as a quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def files_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


# no room


@pytest.mark.usefixtures("file_size_limit")
def test_no_room_for_an_object(file_store: Store) -> None:
    file_store.write_bytes("key", b"old")
    with pytest.raises(RetryableError, match=r"no room to write.*store/key.*free disk space"):
        file_store.write_bytes("key", bytes(BIG))
    assert file_store.read_bytes("key") == b"old"
    assert files_below(Path(file_store.root)) == ["key"]


@pytest.mark.usefixtures("file_size_limit")
def test_no_room_for_a_download(s3_store: Store, tmp_path: Path) -> None:
    s3_store.write_bytes("key", bytes(BIG))
    with pytest.raises(RetryableError, match=r"no room to write.*out/file"):
        s3_store.get_file("key", tmp_path / "out" / "file")
    assert files_below(tmp_path / "out") == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_only_at_fsync(
    file_store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    file_store.write_bytes("key", b"old")
    real = os.fsync

    def full(descriptor: int) -> None:
        real(descriptor)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RetryableError, match=r"no room to write.*store/key"):
        file_store.write_bytes("key", b"new")
    with pytest.raises(RetryableError, match=r"no room to write.*copy"):
        file_store.get_file("key", tmp_path / "copy")
    assert file_store.read_bytes("key") == b"old"
    assert files_below(tmp_path) == ["key"]


def test_a_full_s3_server(start_server: Callable[..., Server]) -> None:
    start_server("-volume.minFreeSpace=100")  # 100 % must stay free: every volume is read-only
    Store(f"s3://{BUCKET}", retry_seconds=30).make_root()
    store = Store(f"s3://{BUCKET}", retry_seconds=2)
    with pytest.raises(RetryableError, match=r"could not write for 2 s.*s3://mar-grpo/key.*has room"):
        store.write_bytes("key", b"data")
    assert store.list() == []


# interrupted


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path, interruption: type[BaseException]) -> None:
    target = tmp_path / "key"
    target.write_bytes(b"old")
    with pytest.raises(interruption), PartFile(target) as part:
        part.file.write(b"half")
        part.file.flush()
        raise interruption
    assert target.read_bytes() == b"old"
    assert files_below(tmp_path) == ["key"]


WRITE_FOR_EVER = """
import sys
from mar_grpo.store import Store
store = Store(sys.argv[1])
number = 0
while True:
    number += 1
    store.write_bytes("key", bytes([number % 256]) * 4_000_000)
    print(number, flush=True)
"""


def test_a_killed_writer_never_leaves_half_an_object(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    command = [sys.executable, "-c", WRITE_FOR_EVER, store.uri()]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        for _ in range(3):
            writer.stdout.readline()
        time.sleep(0.01)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    data = store.read_bytes("key")
    assert len(data) == 4_000_000
    assert len(set(data)) == 1
    assert store.list() == ["key"], "an unfinished file is never listed"


# replaced


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("other", [b"x" * 5000, b"x" * 2500, b"y" * 9000])
def test_an_object_replaced_while_it_is_read_is_never_mixed(store: Store, other: bytes) -> None:
    store.write_bytes("key", b"o" * 5000)
    blocks = store.blocks("key")
    assert next(blocks) == b"o" * 1000
    store.write_bytes("key", other)
    with pytest.raises(InputError, match=r"was replaced while it was read.*key"):
        next(blocks)


def test_a_pinned_range_of_a_replaced_object(store: Store) -> None:
    first = store.write_bytes("key", b"o" * 100)
    second = store.write_bytes("key", b"n" * 100)
    with pytest.raises(InputError, match=r"was replaced while it was read.*key"):
        store.read_range("key", 0, 10, first.etag)
    assert store.read_range("key", 0, 10, second.etag) == b"n" * 10


def test_a_file_written_in_place_is_noticed(file_store: Store) -> None:
    entry = file_store.write_bytes("key", b"o" * 100)
    with open(Path(file_store.root) / "key", "r+b") as file:
        file.write(b"n")
    with pytest.raises(InputError, match="was replaced"):
        file_store.read_range("key", 0, 100, entry.etag)


def test_a_download_of_a_replaced_object_leaves_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_blocks: None
) -> None:
    store.write_bytes("key", b"o" * 5000)
    real = Store.read_range

    def replace_after_the_first_block(self: Store, key: str, start: int, length: int, etag: str | None = None) -> bytes:
        data = real(self, key, start, length, etag)
        if start == 0:
            Store(self.uri()).delete(key)
            self._transport().write(key, b"n" * 5000)
        return data

    monkeypatch.setattr(Store, "read_range", replace_after_the_first_block)
    with pytest.raises(InputError, match="was replaced"):
        store.get_file("key", tmp_path / "out" / "file")
    assert files_below(tmp_path / "out") == []


# not there, not allowed


def test_missing_objects(store: Store, tmp_path: Path) -> None:
    store.write_bytes("key", b"1")
    for call in (store.read_bytes, store.stat, store.entry, store.read_json, store.read_pointer):
        with pytest.raises(InputError, match=r"does not exist.*/nothing"):
            call("nothing")
    with pytest.raises(InputError, match=r"does not exist.*/nothing"):
        store.get_file("nothing", tmp_path / "out" / "file")
    assert files_below(tmp_path / "out") == []


@pytest.mark.usefixtures("s3_environment")
def test_a_missing_bucket() -> None:
    store = Store(f"s3://none-{secrets.token_hex(4)}/runs", retry_seconds=5)
    for call in (
        lambda: store.read_bytes("key"),
        lambda: store.write_bytes("key", b"1"),
        lambda: store.exists("key"),
        store.preflight,
    ):
        with pytest.raises(InputError, match=r"the bucket does not exist.*s3://none-.*http://127\.0\.0\.1"):
            call()


@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
@pytest.mark.parametrize("call", ["read_bytes", "write_bytes", "list", "exists", "delete", "preflight", "make_root"])
def test_wrong_keys(s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, wrong: str, call: str) -> None:
    monkeypatch.setenv(wrong, "wrong" * 5)
    arguments = {"write_bytes": ("key", b"1"), "list": (), "preflight": (), "make_root": ()}.get(call, ("key",))
    store = Store("s3://mar-grpo/wrong", retry_seconds=5)
    start = time.monotonic()
    with pytest.raises(InputError, match=r"refused to .*s3://mar-grpo/wrong.*AWS_SECRET_ACCESS_KEY") as caught:
        getattr(store, call)(*arguments)
    assert time.monotonic() - start < 4, "keys do not become right by trying again"
    assert s3_environment["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)


def test_no_keys(s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(InputError, match=r"refused to list.*credentials.*AWS_ACCESS_KEY_ID"):
        Store("s3://mar-grpo/x").list()


def test_a_folder_that_may_not_be_written(file_store: Store) -> None:
    file_store.write_bytes("file", b"1")
    with pytest.raises(InputError, match=r"cannot write the file.*file/below"):
        file_store.write_bytes("file/below", b"2")
    with pytest.raises(InputError, match=r"cannot read the file|does not exist"):
        file_store.read_bytes("file/below")


def test_an_endpoint_that_is_none(s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:8333")
    with pytest.raises(InputError, match=r"not set up.*localhost:8333.*AWS_ENDPOINT_URL"):
        Store("s3://mar-grpo/x").list()


# not reachable


def test_a_server_that_is_not_there(s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(RetryableError, match=r"could not read for 1 s.*s3://mar-grpo/x/key.*http://127\.0\.0\.1:9"):
        Store("s3://mar-grpo/x", retry_seconds=1).read_bytes("key")
    assert time.monotonic() - start < 4, "the retries are bounded"


@pytest.mark.usefixtures("small_blocks")
def test_a_server_gone_in_mid_read_and_back(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server()
    patient = Store(f"s3://{BUCKET}", retry_seconds=40)
    patient.make_root()
    data = os.urandom(5000)
    patient.write_bytes("key", data)
    hasty = Store(f"s3://{BUCKET}", retry_seconds=1)
    blocks = hasty.blocks("key")
    first = next(blocks)
    server.kill()
    with pytest.raises(RetryableError, match=r"could not read .*s3://mar-grpo/key.*http://127\.0\.0\.1"):
        next(blocks)
    with pytest.raises(RetryableError, match=r"could not read .*s3://mar-grpo/key"):
        hasty.get_file("key", tmp_path / "out" / "file")
    assert files_below(tmp_path / "out") == []
    server.start()
    assert patient.read_bytes("key") == data, "a server that comes back within the time is only a delay"
    assert first == data[:1000]


def test_a_line_cut_in_the_middle_of_an_answer_is_only_a_delay(line: Line, tmp_path: Path) -> None:
    store = Store(f"s3://{BUCKET}/{secrets.token_hex(4)}", retry_seconds=10)
    data = os.urandom(BIG)
    entry = store.write_bytes("key", data)
    line.cuts, line.after_bytes = 2, 300_000
    assert store.read_bytes("key") == data
    assert line.made == 2
    line.cuts = 1
    assert store.get_file("key", tmp_path / "file", sha256=entry.sha256).read_bytes() == data
    assert line.made == 3


def test_a_line_that_is_always_cut_is_an_error(line: Line, tmp_path: Path) -> None:
    store = Store(f"s3://{BUCKET}/{secrets.token_hex(4)}", retry_seconds=1)
    store.write_bytes("key", os.urandom(BIG))
    line.cuts, line.after_bytes = 10**6, 300_000
    with pytest.raises(RetryableError, match=r"could not read for 1 s.*/key"):
        store.get_file("key", tmp_path / "out" / "file")
    assert line.made > 1
    assert files_below(tmp_path / "out") == []


def test_a_line_cut_after_the_upload_writes_again(line: Line) -> None:
    store = Store(f"s3://{BUCKET}/{secrets.token_hex(4)}", retry_seconds=10)
    store.preflight()
    line.cuts = 1  # the answer to the next request is lost
    entry = store.write_bytes("key", b"data")
    assert line.made == 1
    assert store.read_bytes("key", sha256=entry.sha256) == b"data"


@pytest.mark.parametrize(
    "error",
    [TimeoutError(), ConnectionResetError(errno.ECONNRESET, "reset"), OSError(errno.EIO, "i/o")],
    ids=lambda error: type(error).__name__,
)
def test_passing_trouble_is_only_a_delay(file_store: Store, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    file_store.write_bytes("key", b"data")
    real, failures = LocalFiles.read, [error, error]

    def unsteady(self: LocalFiles, key: str, start: int, length: int, etag: str | None) -> bytes:
        if failures:
            raise failures.pop()
        return real(self, key, start, length, etag)

    monkeypatch.setattr(LocalFiles, "read", unsteady)
    assert file_store.read_bytes("key") == b"data"
    assert failures == []


def test_bytes_that_come_back_different_are_an_error(file_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LocalFiles.write
    monkeypatch.setattr(LocalFiles, "write", lambda self, key, source: real(self, key, source[:-1]))
    with pytest.raises(RetryableError, match=r"gives back other bytes.*key"):
        Store(file_store.uri(), retry_seconds=0.2).write_bytes("key", b"data")


def test_an_error_in_our_own_code_is_not_hidden(file_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: LocalFiles, key: str) -> tuple[int, str]:
        raise AttributeError("a bug")

    monkeypatch.setattr(LocalFiles, "stat", broken)
    with pytest.raises(AttributeError, match="a bug"):
        file_store.stat("key")
