"""The two places bytes can lie: a folder (`file://`) and an S3 bucket (`s3://`). Raw single attempts, no retries.

Both classes have the same methods, take keys relative to their root and raise what the operating system or botocore
raises; `store.Store` adds retries, verification and messages. Neither object may be used in a forked child.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from fsspec.asyn import sync

from mar_grpo.errors import InputError, MarGrpoError, RetryableError

PART_SUFFIX = ".part"  # unfinished local files are `.NAME.RANDOM.part`; `list` never shows them


class Replaced(Exception):
    """The object is no longer the version (etag) the caller pinned."""


class OutOfRange(Exception):
    """The object ends before the range asked for."""


class CutShort(OSError):
    """Fewer bytes arrived than were promised. Worth a retry."""


class LocalFiles:
    """Files under one folder. A file appears under its name only when it is complete (temp name, fsync, rename)."""

    place = "this machine's disk"

    def __init__(self, root: str) -> None:
        self.root = Path(root)

    def make_root(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)

    def root_exists(self) -> bool:
        return True  # a missing folder is a missing file: folders are made when something is written

    def stat(self, key: str) -> tuple[int, str]:
        """Size in bytes and etag. Raises FileNotFoundError."""
        path = self.root / key
        if path.is_dir():
            raise FileNotFoundError(errno.ENOENT, "is a folder, not a file", str(path))
        return _identity(os.stat(path))

    def read(self, key: str, start: int, length: int, etag: str | None) -> bytes:
        """Bytes [start, start + length). Raises Replaced, OutOfRange, FileNotFoundError."""
        with open(self.root / key, "rb") as file:
            size, before = _identity(os.fstat(file.fileno()))
            if etag is not None and before != etag:
                raise Replaced(key)
            if start + length > size:
                raise OutOfRange(f"it has {size} bytes, {length} were asked for from byte {start} on")
            file.seek(start)
            data = file.read(length)
            if _identity(os.fstat(file.fileno()))[1] != before:
                raise Replaced(key)
        return data

    def write(self, key: str, source: bytes | Path) -> None:
        """Publish `source` (bytes, or the content of a local file) as `key`. Leaves nothing when it fails."""
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with PartFile(path) as part:
            if isinstance(source, Path):
                with open(source, "rb") as file:
                    shutil.copyfileobj(file, part.file, 8 * 2**20)
            else:
                part.file.write(source)

    def delete(self, key: str) -> None:
        (self.root / key).unlink(missing_ok=True)

    def list(self, prefix: str) -> Sequence[str]:
        """Keys of all files below the folder `prefix`, sorted."""
        found = []
        for folder, _, names in os.walk(self.root / prefix):
            found += [
                (Path(folder) / name).relative_to(self.root).as_posix()
                for name in names
                if not (name.startswith(".") and name.endswith(PART_SUFFIX))
            ]
        return sorted(found)


class PartFile:
    """Context manager: a file that gets its name only when the block ends without an error.

    Attributes: file: open binary file to write to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.part = path.with_name(f".{path.name[:180]}.{secrets.token_hex(8)}{PART_SUFFIX}")

    def __enter__(self) -> Self:
        self.file = os.fdopen(os.open(self.part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), "wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with self.file:  # closes also when flush or fsync fails (disk full)
                if kind is None:
                    self.file.flush()
                    os.fsync(self.file.fileno())
            if kind is None:
                os.replace(self.part, self.path)
                _sync_folder(self.path.parent)
        finally:
            self.part.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _identity(stat: os.stat_result) -> tuple[int, str]:
    """Size and etag; a rename over the file changes the inode, a write in place the time."""
    return stat.st_size, f"{stat.st_mtime_ns:x}-{stat.st_size:x}-{stat.st_ino:x}"


@functools.lru_cache(maxsize=8)
def _connect(process: int, timeout_seconds: float, variables: tuple[tuple[str, str], ...]) -> Any:
    """An s3fs file system of our own, shared by the stores of one process with the same AWS variables (0.4 s to make).

    The arguments that are not used in the body say whom it may be shared with: s3fs does not survive a fork.
    """
    import s3fs

    files = s3fs.S3FileSystem(
        skip_instance_cache=True,
        use_listings_cache=False,
        max_concurrency=4,  # of 50 MiB parts each
        config_kwargs={
            "connect_timeout": min(5.0, timeout_seconds),
            "read_timeout": min(15.0, timeout_seconds),
            "retries": {"total_max_attempts": 1},
            "request_checksum_calculation": "when_required",  # not every S3 knows trailers; we read back instead
            "response_checksum_validation": "when_required",
        },
    )
    files.retries = 1  # the store above retries: one bounded layer instead of three
    return files


class S3Objects:
    """Objects of one bucket below one prefix. Endpoint, region and keys come from the standard AWS variables."""

    page_keys = 1000  # of a listing; the most that S3 gives

    def __init__(self, root: str, timeout_seconds: float) -> None:
        self.bucket, _, prefix = root.partition("/")
        self.prefix = f"{prefix}/" if prefix else ""
        variables = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_")))
        self._files = _connect(os.getpid(), timeout_seconds, variables)
        self._bucket_seen = False

    @property
    def place(self) -> str:
        configured = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        return configured or "the default AWS endpoint (AWS_ENDPOINT_URL is not set)"

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return self._files.call_s3(method, Bucket=self.bucket, **arguments)

    def make_root(self) -> None:
        try:
            self._call("head_bucket")
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):  # another process was faster
                self._call("create_bucket")

    def root_exists(self) -> bool:
        try:
            self._call("head_bucket")
        except FileNotFoundError:
            return False
        except PermissionError:
            return True  # keys that may use objects need not be allowed to look at the bucket
        return True

    def stat(self, key: str) -> tuple[int, str]:
        head = self._call("head_object", Key=self.prefix + key)
        return int(head["ContentLength"]), head["ETag"].strip('"')

    def read(self, key: str, start: int, length: int, etag: str | None) -> bytes:
        return sync(self._files.loop, self._read, key, start, length, etag)

    async def _read(self, key: str, start: int, length: int, etag: str | None) -> bytes:
        pin = {"IfMatch": f'"{etag}"'} if etag is not None else {}
        try:
            answer = await self._files._call_s3(
                "get_object",
                Bucket=self.bucket,
                Key=self.prefix + key,
                Range=f"bytes={start}-{start + length - 1}",
                **pin,
            )
        except OSError as error:
            if error_code(error) in ("PreconditionFailed", "412"):
                raise Replaced(key) from error
            if error_code(error) in ("InvalidRange", "416"):
                raise OutOfRange(f"it ends before byte {start}") from error
            raise
        body = answer["Body"]
        try:
            if etag is not None and answer["ETag"].strip('"') != etag:  # a server that ignores If-Match
                raise Replaced(key)
            if answer["ContentLength"] != length:
                raise OutOfRange(f"it has {answer['ContentLength']} bytes from byte {start} on, not {length}")
            data = await body.read()
        finally:
            body.close()
        if len(data) != length:
            raise CutShort(errno.EIO, f"{len(data)} bytes arrived, {length} were promised")
        return data

    def write(self, key: str, source: bytes | Path) -> None:
        if not self._bucket_seen:  # SeaweedFS makes a missing bucket on the first write: a misspelt name must not pass
            if not self.root_exists():
                raise FileNotFoundError(errno.ENOENT, "no such bucket", self.bucket)
            self._bucket_seen = True
        target = f"{self.bucket}/{self.prefix}{key}"
        if isinstance(source, Path):
            self._files.put_file(str(source), target)
        else:
            self._files.pipe_file(target, source)

    def delete(self, key: str) -> None:
        self._call("delete_object", Key=self.prefix + key)

    def list(self, prefix: str) -> Sequence[str]:
        folder = self.prefix + (f"{prefix}/" if prefix else "")
        found: list[str] = []
        more: dict[str, str] = {}
        while True:
            page = self._call("list_objects_v2", Prefix=folder, MaxKeys=self.page_keys, **more)
            found += [item["Key"] for item in page.get("Contents", []) if not item["Key"].endswith("/")]
            if not page.get("IsTruncated"):
                return sorted(key.removeprefix(self.prefix) for key in found)
            more = {"ContinuationToken": page["NextContinuationToken"]}


def error_code(error: BaseException) -> str:
    """S3 error code ("NoSuchBucket", "403", ...) that s3fs hides behind an OSError; "" when there is none."""
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


# fmt: off
_TRANSIENT_CODES = frozenset((
    "InternalError", "SlowDown", "ServiceUnavailable", "RequestTimeout", "OperationAborted", "BadDigest",
    "IncompleteBody", "XAmzContentSHA256Mismatch", "Throttling", "TooManyRequests",
    "408", "409", "429", "500", "502", "503", "504",
))
_TRANSIENT_NUMBERS = frozenset((
    errno.EIO, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.EPIPE,
))
_TRANSIENT_CLASSES = frozenset((  # of botocore and aiohttp: refused, closed, timed out, cut, an answer that is not S3
    "HTTPClientError", "ConnectionError", "ClientError", "ClientPayloadError", "IncompleteReadError",
    "ResponseParserError",
))
# fmt: on


def is_transient(error: BaseException) -> bool:
    """Whether the same call may work a moment later."""
    if isinstance(error, (TimeoutError, ConnectionError, CutShort)):
        return True
    code = error_code(error)
    if code:
        return code in _TRANSIENT_CODES
    if type(error).__module__.split(".")[0] in ("aiohttp", "botocore", "aiobotocore"):
        return any(base.__name__ in _TRANSIENT_CLASSES for base in type(error).__mro__)
    return isinstance(error, OSError) and error.errno in _TRANSIENT_NUMBERS


def explain_local(verb: str, where: str, error: OSError) -> MarGrpoError:
    """The message for an operating system error on a local path."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return RetryableError(f"no room to {verb}: {error.strerror}", where=where, hint="free disk space and run again")
    if isinstance(error, FileNotFoundError):
        return InputError("the file does not exist", where=where, hint="check the path")
    return InputError(f"cannot {verb} the file: {error.strerror or error}", where=where)


def one_line(error: BaseException) -> str:
    """The error's text without number and line breaks; its class when it has none."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return " ".join(text.split()) or type(error).__name__
