"""The codec `gap`: where elements changed, as gaps, and by how much, as steps. Any element width.

A gap counts the unchanged elements since the last changed one: bytes of 255 add 255 each, the byte below 255 that
follows ends it. A step is coded as in `elements`, zigzag less one, in a byte; 255 says that the whole code stands in
`wide<width>`, as byte planes. docs/FORMAT.md has the streams to the bit. Must not know shards or manifests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weighbridge.errors import PayloadCorrupt
from weighbridge.storage.codecs import kernels, streams
from weighbridge.storage.codecs.contract import (
    Bytes,
    Codec,
    Decoder,
    Encoder,
    PartDecoder,
    PartShape,
    Patch,
    Sample,
)
from weighbridge.storage.codecs.elements import Element, count_elements, element, whole_elements
from weighbridge.storage.codecs.growing import Growing
from weighbridge.storage.codecs.kernels.gaps import BEYOND_END, LEFT_OVER, read_gaps
from weighbridge.storage.codecs.kernels.memory import UNITS

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
        whole_elements(dtype, nbytes)
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
        counts = streams.numbers(extents, 3 * len(parts)).reshape(-1, 3)
        self._stretches, used = _lay_out(counts, parts)
        self._gaps = streams.decompress(gaps, used["gaps"])
        self._steps = streams.decompress(steps, used["steps"])
        self._wide: dict[int, npt.NDArray[np.uint64]] = {1: np.empty(0, np.uint64)}
        for width, stream in zip(_WIDE_WIDTHS, wide, strict=True):
            planes = streams.decompress(stream, used[f"wide{width}"] * width)
            self._wide[width] = streams.from_planes(planes, width).view(f"<u{width}").astype(np.uint64)

    def part(self, index: int) -> PartDecoder:
        """See Decoder."""
        at = self._stretches[index]
        wide = self._wide[at.element.width][at.wide]
        return GapPartDecoder(at, self._gaps[at.gaps], self._steps[at.steps], wide)


class GapPartDecoder(PartDecoder):
    """Walks a part's gaps and steps."""

    def __init__(self, at: _Stretch, gaps: Bytes, steps: Bytes, wide: npt.NDArray[np.uint64]) -> None:
        self._at = at
        self._streams = kernels.fixed(gaps), kernels.fixed(steps), kernels.fixed(wide)
        self._positions = np.empty(steps.size, np.uint32)
        self._values = np.empty(steps.size * at.element.width, np.uint8)
        self._state = np.array([-1, 0, 0, 0, 0], np.int64)
        self._first = 0

    def feed(self, old: Bytes, new: Bytes) -> None:
        """See PartDecoder."""
        unit = self._at.element
        if old.size != new.size:
            raise ValueError("old and new bytes differ in size")
        new[:] = old
        error = read_gaps(
            kernels.fixed(old),
            self._first,
            UNITS[unit.width],
            unit.sign,
            unit.mask,
            self._state,
            self._streams,
            self._positions,
            self._values,
            new,
        )
        kernels.refuse("gap", error)
        self._first += old.size // unit.width

    def finish(self) -> Patch:
        """See PartDecoder."""
        gaps, steps, wide = self._streams
        if self._first * self._at.element.width != self._at.nbytes:
            raise PayloadCorrupt("gap: a part of another size than declared; nothing was written")
        _, gap_end, step_end, wide_end, _ = (int(value) for value in self._state)
        if step_end < steps.size:
            kernels.refuse("gap", BEYOND_END)
        if gap_end < gaps.size or wide_end < wide.size:
            kernels.refuse("gap", LEFT_OVER)
        return Patch(self._at.element.width, self._positions, self._values)


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

    def encoder(self, samples: Sequence[Sample]) -> Encoder:
        """See Codec."""
        return GapEncoder()

    def decoder(self, streams: Mapping[str, memoryview], parts: Sequence[PartShape]) -> Decoder:
        """See Codec."""
        return GapDecoder(streams, parts)
