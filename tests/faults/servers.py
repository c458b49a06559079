"""Things to break: an S3 server to kill or fill, and a line to a server to cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import threading
from pathlib import Path


class Server:
    """A SeaweedFS of the test's own, without keys, to be killed, filled or started again."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        names = [f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")]
        with_sockets = [socket.create_server(("127.0.0.1", 0)) for _ in names]
        self.ports = {name: one.getsockname()[1] for name, one in zip(names, with_sockets, strict=True)}
        for one in with_sockets:
            one.close()
        program = shutil.which("weed", path=sysconfig.get_path("scripts")) or "weed"
        self.command = [program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", *options]
        self.command += ["-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=4"]
        self.command += ["-master.volumeSizeLimitMB=64", "-master.raftHashicorp", "-master.electionTimeout=1s"]
        self.command += [f"-{name}={port}" for name, port in self.ports.items()]

    def start(self) -> None:
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, start_new_session=True)

    def kill(self) -> None:
        """End it at once, as a power cut would."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for port in self.ports.values():  # a killed server leaves its Unix sockets behind
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)


class Line:
    """A TCP line to a server that can be cut: `cuts` answers are dropped after `after_bytes` bytes."""

    def __init__(self, port: int) -> None:
        self.port, self.cuts, self.after_bytes, self.made = port, 0, 0, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:  # closed at the end of the test
                return
            server = socket.create_connection(("127.0.0.1", self.port))
            threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        passed = 0
        try:
            while data := source.recv(65536):
                passed += len(data)
                if is_answer and self.cuts and passed > self.after_bytes:
                    self.cuts -= 1
                    self.made += 1
                    break
                target.sendall(data)
        except OSError:
            pass  # the other thread closed it
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
