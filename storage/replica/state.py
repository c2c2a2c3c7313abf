"""What one copy of a replica is known to hold, as a value and as its sealed file. Must not know how it got there, nor
whether the files still say the same: `survey` only looks, `examine.py` judges."""

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.replica.sealed import read_sealed, seal
from weighbridge.storage.state import state_digest
from weighbridge.values import PartKey

_FORMAT = 1
_MARK_DIGEST = "xxh3-128"


@dataclass(frozen=True, slots=True)
class FileMark:
    """How a file of a copy must look: size, the time of change that we set ourselves, and a digest (hex xxh3-128) of
    the bytes that no part covers: a weight file's first `head` bytes, or all of any other file."""

    nbytes: int
    mtime_ns: int
    head: int
    digest: str


@dataclass(frozen=True)
class CopyState:
    """One copy's state. Dirty means that its bytes may be those of `version` or of `dirty_to`, or a mix.

    `manifest` is the digest of the version's manifest, `boot_id` the boot in which it was written, `files` every file
    of the folder by relative name, `parts` the digest of every part at `version`.
    """

    replica_id: str
    copy: str
    version: int
    manifest: str
    dirty_to: int | None
    durability: str
    boot_id: str
    files: Mapping[str, FileMark]
    parts: Mapping[PartKey, bytes]

    @cached_property
    def state_digest(self) -> str:
        """The digest of the whole state at `version`."""
        return state_digest(self.parts)

    @property
    def clean(self) -> bool:
        """Whether the copy holds exactly `version`."""
        return self.dirty_to is None

    def to_bytes(self) -> bytes:
        """The state file's bytes."""
        return seal(
            {
                "format": _FORMAT,
                "replica_id": self.replica_id,
                "copy": self.copy,
                "version": self.version,
                "manifest": self.manifest,
                "dirty_to": self.dirty_to,
                "durability": self.durability,
                "boot_id": self.boot_id,
                "files": {name: [f.nbytes, f.mtime_ns, f.head, f.digest] for name, f in self.files.items()},
                "parts": [[k.tensor, k.offset, base64.b64encode(d).decode()] for k, d in self.parts.items()],
            }
        )


def read_state(path: Path, *, replica_id: str, copy: str) -> CopyState | None:
    """The state of a replica's copy, or None when it is missing, garbage, or another replica's."""
    fields: dict[str, Any] | None = read_sealed(path)
    if fields is None or (fields.pop("format", None), fields.get("replica_id"), fields.get("copy")) != (
        _FORMAT,
        replica_id,
        copy,
    ):
        return None
    try:
        fields["files"] = {name: FileMark(*mark) for name, mark in fields["files"].items()}
        fields["parts"] = {PartKey(name, at): base64.b64decode(digest) for name, at, digest in fields["parts"]}
        return CopyState(**fields)
    except (AttributeError, KeyError, TypeError, ValueError):  # sealed, and yet nothing that we write
        return None


def mark_file(path: Path, *, head: int | None) -> FileMark:
    """How a file looks now. `head` is where a weight file's tensors begin; None digests the whole file."""
    status = path.stat()
    with path.open("rb") as file:
        data = file.read(status.st_size if head is None else head)
    return FileMark(status.st_size, status.st_mtime_ns, len(data), digest_bytes(_MARK_DIGEST, data).hex())


def touched(folder: Path, files: Mapping[str, FileMark], names: Iterable[str]) -> list[str]:
    """Those of the files that are missing or whose size or time is not the one we left."""
    found = []
    for name in names:
        try:
            status = (folder / name).stat()
        except OSError:
            found.append(name)
            continue
        if (status.st_size, status.st_mtime_ns) != (files[name].nbytes, files[name].mtime_ns):
            found.append(name)
    return found


def listed(folder: Path) -> set[str]:
    """Relative names of all files under a folder, links included."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or path.is_file()}
