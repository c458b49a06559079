"""Every byte that comes in or goes out: atomic publish, pinned ranged reads, digests, bounded retries.

A store is a root URI (`file:///folder` or `s3://bucket/prefix`) with slash-separated keys below it. Rules:

- a key holds a complete object or nothing; a write is read back (size and sha256) before it counts;
- a read that takes several requests pins the version (etag), so a replaced object is an error, never a mix;
- the sha256 is the identity; the etag names one version at one place and is worth nothing elsewhere;
- transient trouble is retried with growing, jittered pauses; no attempt starts later than `retry_seconds` after the
  first, and one attempt waits at most 15 s for an answer.

Errors: InputError for a missing object or bucket, refused keys, a wrong digest, a replaced object; RetryableError when
the store stays unreachable or full.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from mar_grpo.errors import InputError, MarGrpoError, RetryableError
from mar_grpo.transports import (
    CutShort,
    LocalFiles,
    OutOfRange,
    PartFile,
    Replaced,
    S3Objects,
    error_code,
    explain_local,
    is_transient,
    one_line,
)

BLOCK_BYTES = 8 * 2**20
_jitter = random.SystemRandom()  # the operating system's randomness: the global generators are never touched
T = TypeVar("T")


class FileEntry(BaseModel):
    """One stored object: where it is and what is in it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str
    bytes: int
    sha256: str
    etag: str


class Store:
    """Objects below one root.

    Args:
        uri: `file:///folder`, `s3://bucket[/prefix]` or a plain path. S3 takes endpoint, region and keys from the
            standard AWS environment (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, roles, profiles).
        retry_seconds: how long one request is retried before RetryableError.

    Connections belong to the process that made them; after a fork or unpickling the store connects anew.
    """

    def __init__(self, uri: str | os.PathLike[str], *, retry_seconds: float = 20.0) -> None:
        scheme, root = _split_scheme(os.fspath(uri))
        self.scheme = scheme
        self.root = root
        self.retry_seconds = retry_seconds
        self._connection: tuple[int, LocalFiles | S3Objects] | None = None

    def __repr__(self) -> str:
        return f"Store({self.uri()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.uri(), self.retry_seconds)

    def uri(self, key: str = "") -> str:
        """Full URI of a key; of the root without one."""
        return f"{self.scheme}://{self.root}" + (f"{'' if self.root == '/' else '/'}{_checked(key)}" if key else "")

    def key(self, uri: str) -> str:
        """Key of a full URI inside this store. InputError if it lies elsewhere."""
        root = self.uri("x")[:-1]
        if not uri.startswith(root):
            raise InputError("the URI does not lie in this store", where=f"{uri}, store {self.uri()}")
        return _checked(uri.removeprefix(root))

    # reading

    def read_bytes(self, key: str, *, sha256: str | None = None) -> bytes:
        """Whole object; checked against `sha256` when given."""
        data = b"".join(self.blocks(key))
        self._check_digest(key, hashlib.sha256(data).hexdigest(), sha256)
        return data

    def read_json(self, key: str, *, sha256: str | None = None) -> Any:
        """Object as JSON. InputError when it is not UTF-8 JSON of finite numbers."""
        return parse_json(self.read_bytes(key, sha256=sha256), where=self.uri(key))

    def read_range(self, key: str, start: int, length: int, etag: str | None = None) -> bytes:
        """Exactly `length` bytes from byte `start` on, of the version `etag` if given (InputError if replaced)."""
        if start < 0 or length < 0:
            raise InputError(f"a range of {length} bytes from byte {start} on makes no sense", where=self.uri(key))
        if length == 0:
            return b""
        return self._attempt("read", key, lambda: self._transport().read(key, start, length, etag))

    def stat(self, key: str) -> tuple[int, str]:
        """Size in bytes and etag."""
        return self._attempt("read", key, lambda: self._transport().stat(key))

    def exists(self, key: str) -> bool:
        """Whether the key holds an object. A missing bucket or refused keys are an InputError, not False."""

        def look() -> bool:
            try:
                self._transport().stat(key)
            except (FileNotFoundError, NotADirectoryError):
                if not self._transport().root_exists():
                    raise
                return False
            return True

        return self._attempt("look for", key, look)

    def list(self, prefix: str = "") -> Sequence[str]:
        """Sorted keys of all objects in the folder `prefix`, at any depth."""
        folder = prefix.strip("/")
        return self._attempt("list", folder or None, lambda: self._transport().list(folder))

    def entry(self, key: str) -> FileEntry:
        """Read the object through and describe it."""
        size, etag = self.stat(key)
        digest = hashlib.sha256()
        for block in self.blocks(key, (size, etag)):
            digest.update(block)
        return FileEntry(uri=self.uri(key), bytes=size, sha256=digest.hexdigest(), etag=etag)

    def get_file(self, key: str, local: str | os.PathLike[str], *, sha256: str | None = None) -> Path:
        """Copy an object to a local file, which appears only when it is complete and its digest is right."""
        target = Path(local)
        digest = hashlib.sha256()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with PartFile(target) as part:
                for block in self.blocks(key):
                    digest.update(block)
                    part.file.write(block)
                self._check_digest(key, digest.hexdigest(), sha256)
        except OSError as error:
            raise explain_local("write", str(target), error) from error
        return target

    def get_folder(self, prefix: str, local: str | os.PathLike[str]) -> Sequence[Path]:
        """Copy every object of the folder `prefix` below `local`. InputError when there is none."""
        keys = self.list(prefix)
        if not keys:
            raise InputError("the folder is empty or does not exist", where=self.uri(prefix))
        below = prefix.strip("/")
        return [self.get_file(key, Path(local) / (key[len(below) + 1 :] if below else key)) for key in keys]

    # writing

    def write_bytes(self, key: str, data: bytes) -> FileEntry:
        """Publish bytes under a key, replacing what was there in one step."""
        return self._publish(key, data, hashlib.sha256(data).hexdigest())

    def write_json(self, key: str, data: Any) -> FileEntry:
        """Publish canonical JSON (sorted keys, finite numbers)."""
        return self.write_bytes(key, canonical_json(data, where=self.uri(key)))

    def put_file(self, local: str | os.PathLike[str], key: str) -> FileEntry:
        """Publish a local file under a key."""
        source = Path(local)
        try:
            with open(source, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise explain_local("read", str(source), error) from error
        return self._publish(key, source, digest)

    def put_folder(self, local: str | os.PathLike[str], prefix: str) -> Sequence[FileEntry]:
        """Publish every file below a local folder under `prefix/`. One entry per file, sorted by path."""
        folder = Path(local)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if not files:
            raise InputError("the folder holds no files", where=str(folder))
        head = f"{prefix.strip('/')}/" if prefix else ""
        return [self.put_file(path, head + path.relative_to(folder).as_posix()) for path in files]

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens when there is none."""
        self._attempt("delete", key, lambda: self._transport().delete(key))

    def write_pointer(self, key: str, target: FileEntry) -> FileEntry:
        """Publish a pointer to `target` after the target has been read back whole."""
        store, target_key = store_for(target.uri)
        found = store.entry(target_key)
        if (found.bytes, found.sha256) != (target.bytes, target.sha256):
            raise InputError(
                f"a pointer cannot be written: the target holds {found.bytes} bytes with sha256 {found.sha256}, "
                f"not {target.bytes} bytes with {target.sha256}",
                where=target.uri,
                hint="write the target again",
            )
        return self.write_json(key, target.model_dump())

    def read_pointer(self, key: str) -> FileEntry:
        """The target of a pointer; its content is not read."""
        try:
            return FileEntry.model_validate(self.read_json(key))
        except ValidationError as error:
            raise InputError("the object is not a pointer", where=self.uri(key)) from error

    # the root

    def make_root(self) -> None:
        """Make the bucket (or folder) when it does not exist."""
        self._attempt("make the root", None, lambda: self._transport().make_root())

    def preflight(self) -> None:
        """Write, read, list and delete one small object with the identity this process has."""
        key = f"preflight/{secrets.token_hex(8)}"
        data = secrets.token_bytes(64)
        entry = self.write_bytes(key, data)
        try:
            self.read_bytes(key, sha256=entry.sha256)
            if key not in self.list("preflight"):
                raise InputError("an object that was just written is not listed", where=self.uri(key))
        finally:
            self.delete(key)

    # machinery

    def _transport(self) -> LocalFiles | S3Objects:
        process = os.getpid()
        if self._connection is None or self._connection[0] != process:
            made = LocalFiles(self.root) if self.scheme == "file" else S3Objects(self.root, self.retry_seconds)
            self._connection = (process, made)
        return self._connection[1]

    def blocks(self, key: str, version: tuple[int, str] | None = None) -> Iterator[bytes]:
        """The object in pieces of BLOCK_BYTES, all of one version: (size, etag), as `stat` gives it."""
        size, etag = version or self.stat(key)
        for start in range(0, size, BLOCK_BYTES):
            yield self.read_range(key, start, min(BLOCK_BYTES, size - start), etag)

    def _publish(self, key: str, source: bytes | Path, sha256: str) -> FileEntry:
        def write_and_read_back() -> FileEntry:
            self._transport().write(key, source)
            found = self.entry(key)
            if found.sha256 != sha256:
                raise CutShort(errno.EIO, f"the store gives back other bytes than were written ({found.bytes} bytes)")
            return found

        return self._attempt("write", key, write_and_read_back)

    def _check_digest(self, key: str, found: str, expected: str | None) -> None:
        if expected is not None and found != expected:
            raise InputError(
                f"the content is not the expected one: sha256 {found}, expected {expected}",
                where=self.uri(key),
                hint="the object was changed or cut; publish it again or correct the reference",
            )

    def _attempt(self, verb: str, key: str | None, operation: Callable[[], T]) -> T:
        where = self.uri() if key is None else self.uri(_checked(key))
        deadline = time.monotonic() + self.retry_seconds
        pause = 0.1
        while True:
            try:
                return operation()
            except MarGrpoError:
                raise
            except Exception as error:
                if not is_transient(error):
                    raise self._explain(verb, where, error) from error
                wait = pause * _jitter.uniform(0.5, 1.5)
                if time.monotonic() + wait > deadline:
                    raise RetryableError(
                        f"could not {verb} for {self.retry_seconds:g} s: {one_line(error)}",
                        where=f"{where} at {self._transport().place}",
                        hint="check that the store runs, has room and can be reached, then run the same command again",
                    ) from error
                time.sleep(wait)
                pause = min(1.6 * pause, 2.0)

    def _explain(self, verb: str, where: str, error: Exception) -> Exception:
        """The message for an error that a retry would not mend."""
        if isinstance(error, Replaced):
            return InputError(
                "the object was replaced while it was read",
                where=where,
                hint="nothing was mixed; run again with the new version, and never write to inputs in use",
            )
        if isinstance(error, OutOfRange):
            return InputError(f"the object is too short: {error}", where=where, hint="it was cut or replaced")
        if self.scheme == "file":
            return explain_local(verb, where, error) if isinstance(error, OSError) else error
        place = self._transport().place
        if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
            return InputError(
                f"the store refused to {verb}: {one_line(error)}",
                where=f"{where} at {place}",
                hint="check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN) and the key's rights",
            )
        if isinstance(error, FileNotFoundError):
            if error_code(error) == "NoSuchBucket" or not self._attempt(
                "look for the bucket", None, self._transport().root_exists
            ):
                return InputError(
                    "the bucket does not exist", where=f"{where} at {place}", hint="make it or correct it"
                )
            return InputError("the object does not exist", where=f"{where} at {place}", hint="check the URI")
        if isinstance(error, OSError) or type(error).__module__.startswith("botocore"):
            return InputError(f"the store refused to {verb}: {one_line(error)}", where=f"{where} at {place}")
        if isinstance(error, ValueError):  # botocore on an endpoint or region that is no such thing
            return InputError(f"the store is not set up: {error}", where=where, hint="check AWS_ENDPOINT_URL")
        return error


def _rebuild(uri: str, retry_seconds: float) -> Store:
    return Store(uri, retry_seconds=retry_seconds)


def _checked(key: str) -> str:
    parts = key.split("/")
    if not all(parts) or any(part in (".", "..") for part in parts) or "\x00" in key:
        raise InputError("a key is a relative path without empty parts, '.' or '..'", where=repr(key))
    return key


def _split_scheme(uri: str) -> tuple[str, str]:
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return "file", os.path.abspath(uri)
    if scheme == "file":
        if not rest.startswith("/"):
            raise InputError("a file URI has three slashes", where=uri, hint="write file:///folder or a plain path")
        return "file", os.path.normpath("/" + rest.lstrip("/"))
    if scheme != "s3":
        raise InputError(
            f"unknown scheme {scheme}://", where=uri, hint="use s3://bucket/prefix, file:///folder or a path"
        )
    if not rest.strip("/"):
        raise InputError("the URI names no bucket", where=uri)
    return "s3", rest.strip("/")


def store_for(uri: str, *, retry_seconds: float = 20.0) -> tuple[Store, str]:
    """The store and key of one object's full URI (or plain path)."""
    scheme, rest = _split_scheme(uri)
    root, _, key = rest.rpartition("/") if scheme == "file" else rest.partition("/")
    if not key:
        raise InputError("the URI names no object", where=uri)
    return Store(f"{scheme}://{root or '/'}", retry_seconds=retry_seconds), _checked(key)


def read_uri(uri: str, *, sha256: str | None = None) -> bytes:
    """Whole object at a full URI (or plain path); checked against `sha256` when given."""
    store, key = store_for(uri)
    return store.read_bytes(key, sha256=sha256)


def canonical_json(data: Any, *, where: str = "") -> bytes:
    """JSON with sorted keys, no spaces, UTF-8 and finite numbers only: equal data give equal bytes."""
    try:
        return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InputError(f"cannot be written as JSON: {error}", where=where) from error


def parse_json(data: bytes, *, where: str) -> Any:
    """JSON of finite numbers. InputError with line and column when it is not."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a number JSON knows")

    try:
        return json.loads(data.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:  # also UnicodeDecodeError and JSONDecodeError
        raise InputError(f"not valid JSON: {error}", where=where) from error
