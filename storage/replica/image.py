"""A set of tensors' bytes that can be patched part by part: in memory (a publisher's snapshot) or in the files of an HF
folder (a host's copy). Must not know versions, deltas or digests: what is right to write is decided by whoever calls.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from weighbridge.errors import CheckpointError, PayloadCorrupt
from weighbridge.storage.checkpoint import Checkpoint
from weighbridge.storage.codecs.contract import Bytes, Patch
from weighbridge.storage.codecs.kernels import scatter
from weighbridge.storage.localdisk import Disk
from weighbridge.storage.parts import cut
from weighbridge.storage.replica.scratch import Scratch
from weighbridge.values import Part, PartKey, TensorSpec

_BLOCK_BYTES = 64 << 10
"""A multiple of 64 elements of any width: patches ascend by such blocks, so a stretch of them is a slice of a patch."""

_GAP_BYTES = 4 << 20
"""Stretches with less than this between them are written as one; so a part has few of them."""


class Image(ABC):
    """Tensors' bytes, addressed by part. Different parts may be read and scattered in different threads at once."""

    specs: Mapping[str, TensorSpec]
    """Every tensor, sorted by name."""

    parts: Mapping[PartKey, Part]
    """Every part of every tensor, sorted."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self.specs = {spec.name: spec for spec in sorted(specs, key=lambda spec: spec.name)}
        self.parts = {part.key: part for spec in self.specs.values() for part in cut(spec)}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs.values())

    def holds(self, name: str) -> bool:
        """Whether a tensor's bytes are here: of a share of a model only some are."""
        return name in self.specs

    @abstractmethod
    def view(self, key: PartKey) -> Bytes:
        """A part's bytes as a read-only array, without a copy; it shows later scatters too."""

    @abstractmethod
    def read(self, key: PartKey, scratch: Bytes) -> Bytes:
        """Copies a part's bytes to the front of `scratch`, which must be large enough, and returns that stretch."""

    def peek(self, key: PartKey, scratch: Bytes) -> Bytes:
        """A part's bytes, not to be written: where they lie if that is memory, else in `scratch`."""
        return self.read(key, scratch)

    @abstractmethod
    def scatter(self, key: PartKey, patches: Sequence[Patch]) -> None:
        """Writes patches into a part, one after the other. Doing it again changes nothing.

        Raises PayloadCorrupt, before it writes, for a position outside the part.
        """


class MemoryImage(Image):
    """Tensors in memory: one writable, contiguous uint8 array each, which this image owns from then on."""

    def __init__(self, tensors: Mapping[str, tuple[TensorSpec, Bytes]]) -> None:
        super().__init__(spec for spec, _ in tensors.values())
        self._tensors = {name: data for name, (_, data) in tensors.items()}

    def holds(self, name: str) -> bool:
        """See Image."""
        return name in self._tensors

    def view(self, key: PartKey) -> Bytes:
        """See Image."""
        shown = self._stretch(key)[:]
        shown.flags.writeable = False
        return shown

    def read(self, key: PartKey, scratch: Bytes) -> Bytes:
        """See Image."""
        stretch = self._stretch(key)
        into = scratch[: stretch.size]
        into[:] = stretch
        return into

    def peek(self, key: PartKey, scratch: Bytes) -> Bytes:
        """See Image."""
        return self.view(key)

    def scatter(self, key: PartKey, patches: Sequence[Patch]) -> None:
        """See Image."""
        stretch = self._stretch(key)
        for patch in patches:
            scatter(stretch, patch)

    def _stretch(self, key: PartKey) -> Bytes:
        return self._tensors[key.tensor][key.offset : key.offset + self.parts[key].nbytes]


class ShareImage(MemoryImage):
    """Tensors in memory, of which only those are there that were put in: a rank's share of a snapshot. Thread-safe."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        Image.__init__(self, specs)
        self._tensors: dict[str, Bytes] = {}

    def put(self, name: str, data: Bytes) -> None:
        """Takes in a tensor's bytes, which this image owns from then on."""
        self._tensors[name] = data

    def keep_only(self, names: Container[str]) -> None:
        """Lets go of all other tensors."""
        self._tensors = {name: data for name, data in self._tensors.items() if name in names}


class FolderImage(Image):
    """Tensors in the weight files of an HF folder, written through a disk and in place; not synced.

    Writes go by pwrite and never through a mapping: on a full disk a mapping of shared or sparse blocks kills the
    process, where pwrite says DiskFull.
    """

    def __init__(self, checkpoint: Checkpoint, disk: Disk) -> None:
        super().__init__(place.spec for place in checkpoint.tensors.values())
        self.checkpoint = checkpoint
        self._disk = disk
        self._scratch = Scratch()

    def path(self, key: PartKey) -> Path:
        """The file that holds a part."""
        return self.checkpoint.folder / self.checkpoint.tensors[key.tensor].file

    def view(self, key: PartKey) -> Bytes:
        """See Image."""
        return self.checkpoint.view(key.tensor)[key.offset : key.offset + self.parts[key].nbytes]

    def read(self, key: PartKey, scratch: Bytes) -> Bytes:
        """See Image. Raises CheckpointError when the file has become too short."""
        into = scratch[: self.parts[key].nbytes]
        self._read(self.path(key), self._start(key), into)
        return into

    def scatter(self, key: PartKey, patches: Sequence[Patch]) -> None:
        """See Image. Reads, patches and writes only the stretches that hold a changed element."""
        part, path, start = self.parts[key], self.path(key), self._start(key)
        for first, end in _touched(part.nbytes, patches):
            into = self._scratch.take(end - first)
            whole = first == 0 and end == part.nbytes
            if not (whole and any(patch.positions is None for patch in patches)):
                self._read(path, start + first, into)
            for patch in patches:
                scatter(into, patch if whole else _within(patch, first, end))
            self._disk.pwrite(path, start + first, into.data)

    def write(self, key: PartKey, data: Bytes) -> None:
        """Replaces all of a part's bytes."""
        if data.size != self.parts[key].nbytes:
            raise ValueError(f"{key} has {self.parts[key].nbytes} bytes, not {data.size}")
        self._disk.pwrite(self.path(key), self._start(key), data.data)

    def _start(self, key: PartKey) -> int:
        return self.checkpoint.tensors[key.tensor].start + key.offset

    def _read(self, path: Path, offset: int, into: Bytes) -> None:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            left = into.data
            while left:
                got = os.preadv(file, [left], offset)
                if not got:
                    raise CheckpointError(f"{path} ends before byte {offset + len(left)}: it was cut off.")
                left, offset = left[got:], offset + got
        finally:
            os.close(file)


def _touched(nbytes: int, patches: Sequence[Patch]) -> list[tuple[int, int]]:
    """Stretches of bytes, whole blocks, that hold every position of the patches."""
    if nbytes == 0 or not patches:
        return []
    if any(patch.positions is None for patch in patches):
        return [(0, nbytes)]
    hit = np.zeros(-(-nbytes // _BLOCK_BYTES), np.bool_)
    for patch in patches:
        assert patch.positions is not None
        if patch.positions.size == 0:
            continue
        if int(patch.positions.max()) >= nbytes // patch.width:
            raise PayloadCorrupt(f"a patch writes beyond the {nbytes} bytes of its part; nothing was written from it")
        hit[patch.positions // np.uint32(_BLOCK_BYTES // patch.width)] = True
    stretches: list[tuple[int, int]] = []
    for block in np.flatnonzero(hit).tolist():
        first, end = block * _BLOCK_BYTES, min((block + 1) * _BLOCK_BYTES, nbytes)
        if stretches and first - stretches[-1][1] < _GAP_BYTES:
            stretches[-1] = (stretches[-1][0], end)
        else:
            stretches.append((first, end))
    return stretches


def _within(patch: Patch, first: int, end: int) -> Patch:
    """The elements of a sparse patch that lie in a stretch of whole blocks, counted from its first byte."""
    assert patch.positions is not None
    low, high = first // patch.width, end // patch.width
    # Positions ascend by blocks of 64 and a stretch starts and ends at one, so a binary search finds its ends.
    begin, stop = np.searchsorted(patch.positions, np.array([low, high], np.uint32)).tolist()
    values = patch.values[begin * patch.width : stop * patch.width]
    return Patch(patch.width, patch.positions[begin:stop] - np.uint32(low), values)
