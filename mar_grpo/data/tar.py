"""WebDataset tars read as they come: members, samples, and where each sample lies, with no more than a block in memory.

Common readers end silently where a tar was cut between two members; these do not. Plain headers are read here (tarfile
takes five times as long), long names, pax headers and whatever looks damaged are left to tarfile.
"""

from __future__ import annotations

import contextlib
import io
import re
import tarfile
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from mar_grpo.errors import InputError

UNIT = tarfile.BLOCKSIZE  # headers and contents start at multiples of 512 bytes
_END_BYTES = 2 * UNIT  # a tar ends with at least two blocks of zeros
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")
_MOST_EXTENSION_BYTES = 2**20
_EXTENDING = (b"x", b"g", b"L", b"K", b"X")  # headers that say something about the header after them


class DamagedTar(InputError):
    """The archive is cut, damaged, or no WebDataset tar."""


class Member(NamedTuple):
    """One file of a tar, KEY.EXTENSION: offsets of its header and its content, and how long that is, in bytes."""

    key: str
    extension: str
    start: int
    offset: int
    size: int


def members(blocks: Iterable[bytes], *, name: str, whole: bool = True) -> Iterator[Member]:
    """Every member in order, then the proof that the archive ends where its writer did.

    Args:
        blocks: the bytes of the tar in pieces of any size; only the piece in use is kept.
        name: of the tar, for messages.
        whole: False for a stretch of whole members out of a tar, which has no end mark.

    Errors: InputError that names the tar and the sample where it was cut, in a member or between two, where it is
    damaged, or where a member is no plain file.
    """
    window = _Window(blocks)
    position, key = 0, ""
    while header := window.at(position, UNIT):
        if len(header) < UNIT:
            raise DamagedTar("the shard is cut: a header is not whole", where=place(name, key, "after "))
        if not any(header):
            break
        try:
            full, size, offset = _plain(header, position) or _other(window, position)
        except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
            raise DamagedTar(f"the shard is cut or damaged: {error}", where=place(name, key, "after ")) from error
        if not full:
            position = offset
            continue
        named = _NAME.fullmatch(full) if size >= 0 else None
        if named is None:
            text = f"the member {full!r} is no plain file called KEY.EXTENSION"
            raise DamagedTar(text, where=place(name, key, "after "))
        key, extension = named.groups()
        yield Member(key, extension, position, offset, size)
        position = offset + -size // UNIT * -UNIT
        if not window.reaches(position):
            raise DamagedTar("the shard is cut or damaged: unexpected end of data", where=place(name, key))
    if whole:
        _check_end(window, position, name, key)


def parse_tar(data: bytes, *, name: str, whole: bool = True) -> list[tuple[str, dict[str, bytes]]]:
    """Members of a WebDataset tar by sample: [(key, {extension: bytes})].

    Errors: as `members`; InputError when a sample occurs twice or its members do not follow each other.
    """
    samples: dict[str, dict[str, bytes]] = {}
    last = ""
    for member in members([data], name=name, whole=whole):
        parts = samples.setdefault(member.key, {})
        _check_new(member, parts, last, name)
        parts[member.extension] = data[member.offset : member.offset + member.size]
        last = member.key
    return list(samples.items())


def sample_starts(read: Callable[[], Iterable[bytes]], *, name: str) -> np.ndarray:
    """Where the samples of a tar start, in units of 512 bytes, uint32 [samples + 1]; the last number is their end.

    Args:
        read: gives the blocks of the tar from its beginning. Called again only to find the name of a repeated key, so
            that what is kept is 12 bytes a sample.

    Errors: as `parse_tar`.
    """
    starts, hashes = array("I"), array("q")
    extensions: set[str] = set()
    last, end = "", 0
    for member in members(read(), name=name):
        if member.key != last:
            starts.append(member.start // UNIT)
            hashes.append(hash(member.key))
            last, extensions = member.key, set()
        _check_new(member, extensions, last, name)
        extensions.add(member.extension)
        end = member.offset + member.size
    starts.append(-(-end // UNIT))
    different, times = np.unique(np.frombuffer(hashes, dtype=np.int64), return_counts=True)
    if len(different) < len(hashes):
        _refuse_repeated(read(), set(different[times > 1].tolist()), name)
    return np.frombuffer(starts, dtype=np.uint32)


def last_key(blocks: Iterable[bytes]) -> str:
    """Key of the last member whose header is whole, for a message about a cut tar."""
    last = ""
    with contextlib.suppress(InputError):  # what was found before the damage is the answer
        for member in members(blocks, name=""):
            last = member.key
    return last


def place(shard: str, key: str, word: str = "") -> str:
    """Shard and sample as messages name them."""
    return f"{shard}, {word}sample {key}" if key else shard


class _Window:
    """The piece of a stream of blocks that is being looked at."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)
        self._base, self._data = 0, b""

    def at(self, position: int, length: int) -> bytes:
        """`length` bytes from `position` on, fewer at the end. Positions never go back."""
        self._more(position, position + length)
        start = position - self._base
        return self._data[start : start + length]

    def reaches(self, position: int) -> bool:
        """Whether the stream has at least `position` bytes."""
        self._more(position, position)
        return self._base + len(self._data) >= position

    def rest(self, position: int) -> Iterator[bytes]:
        """What follows `position`, piece by piece."""
        self._more(position, position)
        yield self._data[position - self._base :]
        yield from self._blocks

    def _more(self, position: int, end: int) -> None:
        while (have := self._base + len(self._data)) < end and (block := next(self._blocks, None)) is not None:
            if position >= have:
                self._base, self._data = have, block
            else:
                self._data = self._data[position - self._base :] + block
                self._base = position


def _plain(header: bytes, position: int) -> tuple[str, int, int] | None:
    """Name, size and offset of the content behind the header of a plain file; None for tarfile to look at.

    The sum of the header's bytes is compared modulo 65,521, as zlib gives it.
    """
    if header[257:262] != b"ustar" or header[156] not in b"0\0" or header[345] or header[124] & 0x80:
        return None
    try:
        expected = int(header[148:156].strip(b" \0"), 8)
        size = int(header[124:136].strip(b" \0"), 8)
        name = header[:100].rstrip(b"\0").decode()
    except ValueError:
        return None
    found = (zlib.adler32(header) & 0xFFFF) - 1 - sum(header[148:156]) + 8 * ord(" ")
    if (found - expected) % 65521 or size < 0 or "\0" in name:
        return None
    return name, size, position + UNIT


def _other(window: _Window, position: int) -> tuple[str, int, int]:
    """As `_plain`, by tarfile: size -1 for what is no plain file, an empty name for a folder."""
    length = UNIT
    while (header := window.at(position, length)[length - UNIT :])[156:157] in _EXTENDING:
        extension = tarfile.TarInfo.frombuf(header, tarfile.ENCODING, "surrogateescape").size
        if not 0 <= extension <= _MOST_EXTENSION_BYTES:
            raise tarfile.ReadError("a header is too long")
        length += -extension // UNIT * -UNIT + UNIT
    with tarfile.open(fileobj=io.BytesIO(window.at(position, length)), mode="r:") as tar:
        member = tar.next()
    if member is None:
        raise tarfile.ReadError("a header is missing")
    if member.isdir():
        return "", 0, position + member.offset_data
    size = member.size if member.isreg() and not member.issparse() else -1
    return member.name, size, position + member.offset_data


def _check_new(member: Member, extensions: Collection[str], last: str, name: str) -> None:
    """Refuse what the sample of this member already has, and a sample that goes on after another one began."""
    if member.extension in extensions:
        text = f"the sample is there twice (a second {member.key}.{member.extension})"
        raise DamagedTar(text, where=place(name, member.key))
    if extensions and member.key != last:
        text = f"the members of the sample do not follow each other ({member.key}.{member.extension})"
        raise DamagedTar(text, where=place(name, member.key))


def _refuse_repeated(blocks: Iterable[bytes], suspects: set[int], name: str) -> None:
    """Look at the keys that have one of these hashes; `_check_new` refuses those that are really equal."""
    seen: dict[str, set[str]] = {}
    last = ""
    for member in members(blocks, name=name):
        if hash(member.key) in suspects:
            extensions = seen.setdefault(member.key, set())
            _check_new(member, extensions, last, name)
            extensions.add(member.extension)
        last = member.key


def _check_end(window: _Window, position: int, name: str, key: str) -> None:
    found = 0
    for piece in window.rest(position):
        found += len(piece)
        if piece.strip(b"\0"):
            raise DamagedTar("the shard is cut or damaged: no member follows", where=place(name, key, "after "))
    if found < _END_BYTES:
        raise DamagedTar("the shard is cut: its end mark is missing", where=place(name, key, "after "))
