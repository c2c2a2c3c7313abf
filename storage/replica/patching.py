"""Verify before write: a part's old bytes go to scratch, deltas are decoded over it in turn, and only a scratch that
has the digest of the last one gives patches to write. Must not know where they go, nor what to do about a mismatch.
"""

import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from weighbridge.errors import DigestMismatch
from weighbridge.storage.codecs import ShardDecoder, open_shard
from weighbridge.storage.codecs.contract import Bytes, PartShape, Patch
from weighbridge.storage.codecs.kernels import scatter
from weighbridge.storage.replica.image import Image
from weighbridge.storage.replica.parallel import in_parallel
from weighbridge.storage.replica.scratch import Scratch
from weighbridge.values import Manifest, PartKey, PartRow, ShardInfo

PathOf = Callable[[Manifest, ShardInfo], Path]
"""Where a shard lies on the local disk, right by its digest; fetches it if it must."""


@dataclass(frozen=True, slots=True)
class Step:
    """One delta's change of one part: its manifest row, and the row's place among those of its shard."""

    row: PartRow
    index: int
    shard: ShardDecoder


@dataclass(frozen=True, slots=True)
class Proven:
    """Patches that, written in turn, take a part from the digest `before` to `after`: decoded, and shown to do so."""

    key: PartKey
    before: bytes
    after: bytes
    patches: tuple[Patch, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the patches take."""
        return sum(_patch_bytes(patch) for patch in self.patches)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a row is found: which manifest of the path, which row of it, and the row's index within its shard."""

    manifest: int
    row: PartRow
    index: int


class Deltas:
    """Deltas of successive versions, oldest first, with their shards at hand. Thread-safe.

    A shard is mapped and opened when a part first needs it, and closed after the last part that does, so memory holds
    the shards in use and no more; `keys` is in the order that keeps them few. A part that is asked for again opens its
    shards again.
    """

    def __init__(self, manifests: Sequence[Manifest], path_of: PathOf) -> None:
        self.manifests = tuple(manifests)
        self._path_of = path_of
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], _OpenShard] = {}
        self._waiting: dict[tuple[int, int], int] = {}
        places: dict[PartKey, list[_Place]] = {}
        for number, manifest in enumerate(self.manifests):
            counted: dict[int, int] = {}
            for row in manifest.rows:
                index = counted.get(row.shard, 0)
                counted[row.shard] = index + 1
                places.setdefault(row.key, []).append(_Place(number, row, index))
            self._waiting |= {(number, shard): rows for shard, rows in counted.items()}
        self._places = places
        self.keys: tuple[PartKey, ...] = tuple(places)
        """Every part that any of the deltas changes."""

    def rows(self, key: PartKey) -> tuple[PartRow, ...]:
        """The rows that change a part, oldest first."""
        return tuple(place.row for place in self._places[key])

    @property
    def after(self) -> Mapping[PartKey, bytes]:
        """The digest of every changed part once all deltas are applied."""
        return MappingProxyType({key: places[-1].row.after for key, places in self._places.items()})

    @contextmanager
    def steps(self, key: PartKey) -> Iterator[tuple[Step, ...]]:
        """The steps of one part, decodable until the context ends. Raises ShardCorrupt, PayloadCorrupt."""
        places = self._places[key]
        taken: list[_OpenShard] = []
        try:
            taken.extend(self._take(place.manifest, place.row.shard) for place in places)
            yield tuple(Step(p.row, p.index, shard.decoder()) for p, shard in zip(places, taken, strict=True))
        finally:
            for place in places[: len(taken)]:
                self._give_back(place.manifest, place.row.shard)

    def close(self) -> None:
        """Closes what is still open, after a failure. No part may be in use."""
        with self._lock:
            for shard in self._open.values():
                shard.close()
            self._open.clear()

    def _take(self, number: int, shard: int) -> "_OpenShard":
        with self._lock:
            opened = self._open.get((number, shard))
            if opened is None:
                manifest = self.manifests[number]
                rows = [row for row in manifest.rows if row.shard == shard]
                opened = _OpenShard(partial(self._path_of, manifest, manifest.shards[shard]), rows)
                self._open[number, shard] = opened
            opened.users += 1
            return opened

    def _give_back(self, number: int, shard: int) -> None:
        with self._lock:
            opened = self._open[number, shard]
            opened.users -= 1
            self._waiting[number, shard] -= 1
            if opened.users == 0 and self._waiting[number, shard] <= 0:
                del self._open[number, shard]
                opened.close()


class _OpenShard:
    """A mapped shard and its decoder, made by the first part that needs it while others wait for it."""

    def __init__(self, path: Callable[[], Path], rows: Sequence[PartRow]) -> None:
        self.users = 0
        self._path, self._rows = path, rows
        self._lock = threading.Lock()
        self._decoder: ShardDecoder | None = None

    def decoder(self) -> ShardDecoder:
        with self._lock:
            if self._decoder is None:
                shapes = [(row.codec, PartShape(row.dtype, row.nbytes)) for row in self._rows]
                with self._path().open("rb") as file:
                    self._decoder = open_shard(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)), shapes)
            return self._decoder

    def close(self) -> None:
        self._decoder = None  # the mapping goes with the last array that shows it


def prove(
    image: Image, deltas: Deltas, *, digest_kind: str, threads: int = 1, keys: Iterable[PartKey] | None = None
) -> Iterator[Proven]:
    """Proves every part that the deltas change (or those of `keys`) against the image's bytes, and writes nothing.

    Parts come in any order; what is not taken is not decoded ahead by more than the threads in flight. Raises
    DigestMismatch or PayloadCorrupt, naming the part, when a part's bytes or a delta are not right.
    """
    scratch = Scratch()
    try:
        yield from in_parallel(
            lambda key: prove_part(image, deltas, key, digest_kind=digest_kind, scratch=scratch),
            deltas.keys if keys is None else keys,
            threads=threads,
        )
    finally:
        deltas.close()


def prove_part(image: Image, deltas: Deltas, key: PartKey, *, digest_kind: str, scratch: Scratch) -> Proven:
    """Proves one part; see `prove`. Patches are never more bytes than the part: then they become one with all of it."""
    nbytes = image.parts[key].nbytes
    with deltas.steps(key) as steps:
        if len(steps) == 1:
            part = image.peek(key, scratch.take(nbytes))
            patch, digest = steps[0].shard.decode_digested(steps[0].index, part, digest_kind=digest_kind)
            patches = [patch]
            _check(steps[0].row, digest)
        else:
            part = image.read(key, scratch.take(nbytes))
            patches = lead(part, steps, digest_kind=digest_kind)
        first, last = steps[0].row, steps[-1].row
        if sum(map(_patch_bytes, patches)) < nbytes:
            return Proven(key, first.before, last.after, tuple(patches))
        if len(steps) == 1 and patches[0].positions is not None:
            part = image.read(key, scratch.take(nbytes))
            scatter(part, patches[0])
        elif patches[-1].positions is None:
            part = patches[-1].values
        return Proven(key, first.before, last.after, (whole(part, width=patches[-1].width),))


def lead(part: Bytes, steps: Sequence[Step], *, digest_kind: str) -> list[Patch]:
    """Decodes the steps in turn and writes them into `part`, which ends as the last version has it.

    Returns their patches. Raises PayloadCorrupt, or DigestMismatch when the end is not what the last step's row says;
    `part` is then of no use.
    """
    patches: list[Patch] = []
    for step in steps[:-1]:
        patches.append(step.shard.decode(step.index, part))
        scatter(part, patches[-1])
    last = steps[-1]
    patch, digest = last.shard.decode_digested(last.index, part, digest_kind=digest_kind)
    _check(last.row, digest)
    scatter(part, patch)
    return [*patches, patch]


def whole(part: Bytes, *, width: int = 1) -> Patch:
    """All of a part as a patch of its own bytes."""
    return Patch(width, None, part.copy())


def _check(row: PartRow, digest: bytes) -> None:
    if digest != row.after:
        raise DigestMismatch(
            f"{row.key.tensor} at byte {row.key.offset}: the deltas do not lead from the bytes here to the digest that "
            "was published. Nothing was written."
        )


def _patch_bytes(patch: Patch) -> int:
    return patch.values.nbytes + (0 if patch.positions is None else patch.positions.nbytes)
