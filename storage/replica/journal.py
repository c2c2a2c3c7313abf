"""The journal: patches that are proven and about to be written into one copy, so that a crash in the middle of writing
is healed by writing them again. Must not know how they were made.

A frame is: u64 size of its JSON, u64 size of its data, the JSON padded with blanks to 8 bytes, the data's pieces padded
with zeros likewise, xxh3-128 of all that. The first frame says whose journal it is, one frame a part follows, the last
counts the parts and digests the frames' digests. The file gets its name only once it is whole and synced.
"""

import json
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from weighbridge.storage.codecs.contract import Patch
from weighbridge.storage.digests import Buffer
from weighbridge.storage.localdisk import Disk
from weighbridge.storage.replica.patching import Proven
from weighbridge.values import PartKey

_HEAD = struct.Struct("<QQ")
_DIGEST_BYTES = 16
_FORMAT = 1
_UNFINISHED = ".unfinished"


@dataclass(frozen=True, slots=True)
class JournalHead:
    """Whose journal it is, in which boot it was written, and between which versions it leads.

    `manifest` is the digest of the target version's manifest.
    """

    replica_id: str
    copy: str
    boot_id: str
    start: int
    target: int
    manifest: str


class JournalWriter:
    """Writes a journal frame by frame. One thread at a time."""

    def __init__(self, path: Path, head: JournalHead, *, disk: Disk) -> None:
        self._path = path
        self._unfinished = path.with_name(path.name + _UNFINISHED)
        self._disk = disk
        self._frames = xxhash.xxh3_128()
        self._parts = 0
        disk.unlink(self._unfinished)
        disk.unlink(path)
        self._frame({"format": _FORMAT, **asdict(head)}, [])

    def add(self, proven: Proven) -> None:
        """Adds one part's patches."""
        pieces: list[Buffer] = []
        sizes: list[tuple[int, int, int]] = []  # width, positions (-1: all), bytes of the values
        for patch in proven.patches:
            positions = -1 if patch.positions is None else patch.positions.size
            sizes.append((patch.width, positions, patch.values.nbytes))
            if patch.positions is not None:
                pieces.append(_raw(patch.positions))
            pieces.append(_raw(patch.values))
        key = proven.key
        self._frame(
            {"part": [key.tensor, key.offset, proven.before.hex(), proven.after.hex()], "patches": sizes}, pieces
        )
        self._parts += 1

    def seal(self) -> None:
        """Finishes the journal: from now on a crash is healed by it."""
        self._frame({"parts": self._parts, "frames": self._frames.hexdigest()}, [])
        self._disk.sync(self._unfinished)
        self._disk.rename(self._unfinished, self._path)

    def discard(self) -> None:
        """Removes what was written."""
        self._disk.unlink(self._unfinished)

    def _frame(self, fields: Mapping[str, Any], pieces: Sequence[Buffer]) -> None:
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        body: list[Buffer] = []
        for piece in pieces:
            nbytes = memoryview(piece).nbytes
            body += [piece, bytes(-nbytes % 8)]
        head = _HEAD.pack(len(text), sum(memoryview(piece).nbytes for piece in body))
        hasher = xxhash.xxh3_128()
        for piece in (head, text, *body):
            hasher.update(piece)
        self._frames.update(hasher.digest())
        self._disk.append(self._unfinished, [head, text, *body, hasher.digest()])


@dataclass(frozen=True, slots=True)
class Journal:
    """A whole journal: every frame has its digest. `parts` map their patches from the file and copy nothing."""

    head: JournalHead
    parts: tuple[Proven, ...]


def drop_journal(path: Path, *, disk: Disk) -> None:
    """Removes a journal, finished or not."""
    disk.unlink(path.with_name(path.name + _UNFINISHED))
    disk.unlink(path)


def read_journal(path: Path) -> Journal | None:
    """The journal at `path`, or None when there is none or a byte of it is not as it was written."""
    try:
        return _read(path)
    except (
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        RecursionError,
    ):  # its digests fit, and yet it is no journal
        return None


def _read(path: Path) -> Journal | None:
    try:
        with path.open("rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (FileNotFoundError, ValueError):  # ValueError: an empty file cannot be mapped
        return None
    frames = xxhash.xxh3_128()
    head: JournalHead | None = None
    parts: list[Proven] = []
    for fields, data, digest in _frames(view):
        if head is None:
            if fields.pop("format", None) != _FORMAT:
                return None
            head = JournalHead(**fields)
        elif "frames" in fields:
            return Journal(head, tuple(parts)) if fields["frames"] == frames.hexdigest() else None
        else:
            tensor, offset, before, after = fields["part"]
            patches = tuple(_patches(data, fields["patches"]))
            parts.append(Proven(PartKey(tensor, offset), bytes.fromhex(before), bytes.fromhex(after), patches))
        frames.update(digest)
    return None


def _frames(view: memoryview) -> Iterator[tuple[dict[str, Any], memoryview, bytes]]:
    """Frames as long as they are whole."""
    at = 0
    while at + _HEAD.size <= len(view):
        text_bytes, data_bytes = _HEAD.unpack_from(view, at)
        text = at + _HEAD.size
        data = text + text_bytes
        end = data + data_bytes
        if end + _DIGEST_BYTES > len(view):
            return
        digest = bytes(view[end : end + _DIGEST_BYTES])
        if xxhash.xxh3_128_digest(view[at:end]) != digest:
            return
        yield json.loads(bytes(view[text:data])), view[data:end], digest
        at = end + _DIGEST_BYTES


def _patches(data: memoryview, sizes: Sequence[Sequence[int]]) -> Iterator[Patch]:
    at = 0
    for width, count, value_bytes in sizes:
        if width not in (1, 2, 4, 8) or count < -1 or (value_bytes != count * width if count >= 0 else value_bytes < 0):
            raise ValueError("a patch whose positions and values do not go together")
        if at + _padded(4 * max(count, 0)) + value_bytes > len(data):
            raise ValueError("a patch that is longer than its frame")
        positions = None
        if count >= 0:
            positions = np.frombuffer(data[at : at + 4 * count], np.uint32)
            at += _padded(4 * count)
        yield Patch(width, positions, np.frombuffer(data[at : at + value_bytes], np.uint8))
        at += _padded(value_bytes)


def _padded(nbytes: int) -> int:
    return nbytes + -nbytes % 8


def _raw(array: "np.ndarray[Any, Any]") -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data
