"""Changed tensors as frames, in payload files on a spool, uploaded from there under names that are known once all are
made. Must not know what describes them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from weighbridge.storage.peers.contract import Changed, Writing
from weighbridge.storage.peers.frames import FRAMES, checksum
from weighbridge.storage.peers.payload import row_of_bytes
from weighbridge.storage.safetensors_header import build_header
from weighbridge.storage.stores.contract import Store
from weighbridge.storage.transfer import upload_file
from weighbridge.values import TensorSpec

FILE_BYTES = 1 << 30
"""Payload files are cut when they reach this size."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor in a payload file: what it is, the bytes of its frame, the checksum of its new bytes."""

    spec: TensorSpec
    frame_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A payload file on the spool, by its number."""

    number: int
    tensors: tuple[Packed, ...]


@contextmanager
def packed(
    changed: Iterable[Changed], writing: Writing, *, encoding: str, sums_in_header: bool
) -> Iterator[list[PackedFile]]:
    """All changed tensors as files on the spool, which are gone when the context ends. `sums_in_header` puts checksums
    into the files' own metadata. Holds one file's frames at a time."""
    files: list[PackedFile] = []
    try:
        for tensors, frames in _groups(changed, writing, encoding):
            files.append(PackedFile(len(files), tensors))
            sums = {one.spec.name: one.checksum for one in tensors} if sums_in_header else {}
            specs = [row_of_bytes(one.spec.name, frame) for one, frame in zip(tensors, frames, strict=True)]
            path = writing.spool / _spool_name(files[-1])
            writing.disk.unlink(path)
            writing.disk.append(path, [build_header(specs, sums), *frames])
        yield files
    finally:
        for file in files:
            writing.disk.unlink(writing.spool / _spool_name(file))


def upload(store: Store, files: Iterable[PackedFile], writing: Writing, key_of: Callable[[PackedFile], str]) -> None:
    """Uploads packed files. Raises StoreError."""
    for file in files:
        upload_file(store, key_of(file), writing.spool / _spool_name(file), clock=writing.clock)


def files_by_tensor(files: Iterable[PackedFile], name_of: Callable[[PackedFile], str]) -> Mapping[str, str]:
    """Each tensor's file, by name."""
    return {one.spec.name: name_of(file) for file in files for one in file.tensors}


def _spool_name(file: PackedFile) -> str:
    return f"payload-{file.number:06d}"


def _groups(
    changed: Iterable[Changed], writing: Writing, encoding: str
) -> Iterator[tuple[tuple[Packed, ...], list[bytes]]]:
    tensors: list[Packed] = []
    frames: list[bytes] = []
    filled = 0
    for one in changed:
        frame = FRAMES[encoding](one.old, one.new)
        if frames and filled + len(frame) > FILE_BYTES:
            yield tuple(tensors), frames
            tensors, frames, filled = [], [], 0
        tensors.append(Packed(one.spec, len(frame), checksum(writing.checksum, one.new)))
        frames.append(frame)
        filled += len(frame)
    if frames:
        yield tuple(tensors), frames
