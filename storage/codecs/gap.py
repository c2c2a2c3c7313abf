"""The codec `gap`: where elements changed, as gaps, and by how much, as steps. Any element width.

A gap counts the unchanged elements since the last changed one: bytes of 255 add 255 each, the byte below 255 that
follows ends it. A step is coded as in `elements`, zigzag less one, in a byte; 255 says that the whole code stands in
`wide<width>`, as byte planes. docs/FORMAT.md has the streams to the bit. Must not know shards or manifests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weighbridge.errors import PayloadCorrupt, UsageError
from weighbridge.storage.codecs import kernels, streams
from weighbridge.storage.codecs.contract import Bytes, Codec, Decoder, Encoder, PartInput, PartShape, Patch
from weighbridge.storage.codecs.elements import Element, count_elements, element
from weighbridge.storage.codecs.growing import Growing
from weighbridge.values import item_bytes

_STREAMS = ("extents", "gaps", "steps", "wide2", "wide4", "wide8")
_WIDE_WIDTHS = (2, 4, 8)


class GapEncoder(Encoder):
    """Gathers the gaps and steps of a shard's parts."""

    def __init__(self) -> None:
        self._gaps = Growing(np.uint8)
        self._steps = Growing(np.uint8)
        self._wide = {width: Growing(np.uint64) for width in (1, *_WIDE_WIDTHS)}
        self._extents: list[tuple[int, int, int]] = []
        self._element = element("U8")
        self._start = (0, 0, 0)
        self._first, self._last = 0, -1
        self._open = False

    def begin(self, *, dtype: str, nbytes: int) -> None:
        """See Encoder."""
        self._close()
        if nbytes % item_bytes(dtype):
            raise UsageError(f"a part of {nbytes} bytes holds no whole number of {dtype}")
        self._element = element(dtype)
        self._start = self._used()
        self._first, self._last = 0, -1
        self._open = True

    def feed(self, *, old: Bytes, new: Bytes) -> int:
        """See Encoder."""
        count = new.size // self._element.width
        behind = self._first + count - self._last
        before = self._steps.used
        wide = self._wide[self._element.width]
        into = (self._gaps.room(count + behind // 255 + 1), self._steps.room(count), wide.room(count))
        state = np.array([self._last, self._gaps.used, self._steps.used, wide.used], np.int64)
        kernels.scan_gaps(old, new, self._element, self._first, state, into)
        self._last, self._gaps.used, self._steps.used, wide.used = (int(value) for value in state)
        self._first += count
        return self._steps.used - before

    def finish(self) -> Mapping[str, bytes]:
        """See Encoder."""
        self._close()
        out = {
            "extents": streams.compress(np.array(self._extents, "<u4")),
            "gaps": streams.compress(self._gaps.filled()),
            "steps": streams.compress(self._steps.filled()),
        }
        for width in _WIDE_WIDTHS:
            codes = self._wide[width].filled().astype(f"<u{width}").view(np.uint8)
            out[f"wide{width}"] = streams.compress(streams.to_planes(codes, width))
        return out

    def _used(self) -> tuple[int, int, int]:
        return self._steps.used, self._gaps.used, self._wide[self._element.width].used

    def _close(self) -> None:
        if self._open:
            steps, gaps, wide = (end - start for end, start in zip(self._used(), self._start, strict=True))
            self._extents.append((steps, gaps, wide))
        self._open = False


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Where a part's entries lie in the shard's streams."""

    element: Element
    nbytes: int
    gaps: slice
    steps: slice
    wide: slice


class GapDecoder(Decoder):
    """The decompressed streams, and each part's stretch of them."""

    def __init__(self, data: Mapping[str, memoryview], parts: Sequence[PartShape]) -> None:
        extents, gaps, steps, *wide = streams.take(data, _STREAMS)
        counts = streams.decompress(extents, 12 * len(parts)).view("<u4").reshape(-1, 3).astype(np.int64)
        self._stretches, used = _lay_out(counts, parts)
        self._gaps = streams.decompress(gaps, used["gaps"])
        self._steps = streams.decompress(steps, used["steps"])
        self._wide: dict[int, npt.NDArray[np.uint64]] = {1: np.empty(0, np.uint64)}
        for width, stream in zip(_WIDE_WIDTHS, wide, strict=True):
            planes = streams.decompress(stream, used[f"wide{width}"] * width)
            self._wide[width] = streams.from_planes(planes, width).view(f"<u{width}").astype(np.uint64)

    def decode(self, index: int, old: Bytes) -> Patch:
        """See Decoder."""
        at = self._stretches[index]
        if old.size != at.nbytes:
            raise PayloadCorrupt(f"gap: a part of {old.size} bytes where {at.nbytes} are declared; nothing was written")
        wide = self._wide[at.element.width][at.wide]
        return kernels.read_gaps(old, at.element, self._gaps[at.gaps], self._steps[at.steps], wide)


def _lay_out(counts: npt.NDArray[np.int64], parts: Sequence[PartShape]) -> tuple[tuple[_Stretch, ...], dict[str, int]]:
    """Each part's stretch, and each stream's size. Raises PayloadCorrupt for counts that no part can have."""
    used = dict.fromkeys(("gaps", "steps", "wide1", "wide2", "wide4", "wide8"), 0)
    stretches = []
    for (steps, gaps, wide), part in zip(counts.tolist(), parts, strict=True):
        elements, unit = count_elements(part), element(part.dtype)
        if not (steps <= elements and steps <= gaps <= steps + elements // 255 and wide <= steps):
            raise PayloadCorrupt("gap: counts that a part of this size cannot have; nothing was written")
        where = {"gaps": gaps, "steps": steps, f"wide{unit.width}": wide}
        places = {name: slice(used[name], used[name] + size) for name, size in where.items()}
        used.update({name: place.stop for name, place in places.items()})
        stretches.append(_Stretch(unit, part.nbytes, places["gaps"], places["steps"], places[f"wide{unit.width}"]))
    if used["wide1"]:
        raise PayloadCorrupt("gap: wide steps in bytes; nothing was written")
    return tuple(stretches), used


class GapCodec(Codec):
    """See the module."""

    name = "gap"

    def encoder(self, parts: Sequence[PartInput]) -> Encoder:
        """See Codec."""
        return GapEncoder()

    def decoder(self, streams: Mapping[str, memoryview], parts: Sequence[PartShape]) -> Decoder:
        """See Codec."""
        return GapDecoder(streams, parts)
