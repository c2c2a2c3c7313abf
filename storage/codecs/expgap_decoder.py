"""Decodes the parts of one dtype for `expgap`. Whatever a payload says is checked against the parts' sizes first."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from weighbridge.errors import PayloadCorrupt
from weighbridge.storage.codecs import kernels, streams
from weighbridge.storage.codecs.contract import Bytes, PartDecoder, PartShape, Patch
from weighbridge.storage.codecs.elements import Element, count_elements, element
from weighbridge.storage.codecs.kernels import class_walk
from weighbridge.storage.codecs.kernels import classes as k
from weighbridge.storage.codecs.kernels.memory import UNITS
from weighbridge.storage.codecs.windows import Window

Table = npt.NDArray[np.int64]

_STREAMS = ("extents", "gaps", "low", "steps", "wide")
_MAX_SHIFT = 28


class GroupDecoder:
    """The decompressed streams of one dtype, and where each part's stretch of each class begins."""

    def __init__(self, dtype: str, data: Mapping[str, memoryview], parts: Sequence[PartShape]) -> None:
        self.element = element(dtype)
        if not self.element.exponent_bits:
            _refuse("a dtype without exponents")
        self.parts = tuple(parts)
        extents, gaps, low, steps, wide = streams.take(data, _STREAMS)
        head = _Extents(extents, self.element, self.parts)
        self.window = head.window.for_kernels(self.element)
        gap_sizes, step_sizes, wide_sizes = head.content_sizes()
        self.gaps = kernels.fixed(_frames(gaps, head.frames[0], gap_sizes))
        self.steps = kernels.fixed(_frames(steps, head.frames[1], step_sizes))
        self.wide = kernels.fixed(_wide(wide, head.frames[2], wide_sizes, self.element.width))
        low_sizes = head.low_sizes()
        if len(low) != sum(low_sizes):
            _refuse("low bits of another size than their classes need")
        self.low = kernels.fixed(np.concatenate([np.frombuffer(low, np.uint8), np.zeros(8, np.uint8)]))
        self.streams = (
            self.gaps,
            self.low,
            self.steps,
            self.wide.view(np.uint8),
            UNITS[1],
            UNITS[2],
            UNITS[4],
            UNITS[8],
        )
        self._tables = head.tables(gap_sizes, low_sizes, step_sizes, wide_sizes)

    def part(self, index: int) -> PartDecoder:
        """A decoder of the index-th part of this dtype."""
        return ExpGapPartDecoder(self, self.parts[index], self._tables[index].copy())


class ExpGapPartDecoder(PartDecoder):
    """Walks a part's classes side by side."""

    def __init__(self, group: GroupDecoder, part: PartShape, table: Table) -> None:
        self._group, self._part, self._table = group, part, table
        symbols = int((table[:, k.SYMBOL_END] - table[:, k.SYMBOL]).sum())
        self._positions = np.empty(symbols, np.uint32)
        self._queue = np.empty(8 * k.QUEUE * len(table), np.uint8)
        self._as_bytes = self._positions.view(np.uint8)
        self._values = np.empty(symbols * group.element.width, np.uint8)
        self._scratch = np.empty(k.SCRATCH, np.uint8)
        self._order = (group.element.sign, group.element.mask)
        self._first = self._used = 0

    def feed(self, old: Bytes, new: Bytes) -> None:
        """See PartDecoder."""
        group, unit = self._group, self._group.element
        if old.size != new.size:
            raise ValueError("old and new bytes differ in size")
        used = class_walk.read_classes(
            kernels.fixed(old),
            self._first,
            UNITS[unit.width],
            self._order,
            group.window,
            self._table,
            self._scratch,
            group.streams,
            self._queue,
            self._as_bytes,
            self._values,
            self._used,
            new,
        )
        if used < 0:
            kernels.refuse("expgap", -used)
        self._first += old.size // unit.width
        self._used = used

    def finish(self) -> Patch:
        """See PartDecoder."""
        width = self._group.element.width
        if self._first * width != self._part.nbytes:
            _refuse("a part of another size than declared")
        kernels.refuse("expgap", class_walk.end_classes(self._table))
        return Patch(width, self._positions[: self._used], self._values[: self._used * width])


class _Extents:
    """The stream `extents`, checked: how classes are written, the frames' sizes, each part's share of each class."""

    def __init__(self, frame: memoryview, unit: Element, parts: Sequence[PartShape]) -> None:
        most = 2 + k.MAX_CLASSES * (3 + 12 + 12 * len(parts))
        data = streams.decompress_bounded(frame, most)
        classes = int(data[0]) if data.size else 0
        if not 1 <= classes <= k.MAX_CLASSES or data.size != 2 + classes * (3 + 12 + 12 * len(parts)):
            _refuse("extents of a size that no encoder writes")
        self.window = Window(int(data[1]), classes)
        self.shift, self.bits, self.dense = data[2 : 2 + 3 * classes].reshape(classes, 3).T.astype(np.int64)
        if (self.shift > _MAX_SHIFT).any() or not np.isin(self.bits, (2, 4, 8)).all() or (self.dense > 1).any():
            _refuse("a class that no encoder writes")
        if (self.shift[self.dense == 1] > 0).any():
            _refuse("a class that no encoder writes")
        at = 2 + 3 * classes
        self.frames = data[at : at + 12 * classes].view("<u4").reshape(3, classes).astype(np.int64)
        counts = streams.from_planes(data[at + 12 * classes :], 4).view("<u4")
        self.counts = counts.reshape(3, len(parts), classes).astype(np.int64)
        elements = np.array([count_elements(part) for part in parts], np.int64)
        if (elements > k.MAX_ELEMENTS).any():
            _refuse("a part of more elements than the codec takes")
        symbols, full_gaps, wide = self.counts
        if (symbols.sum(axis=1) > elements).any() or (wide > symbols).any():
            _refuse("counts that a part of this size cannot have")
        if (full_gaps > elements[:, None] // 255).any() or full_gaps[:, self.dense == 1].any():
            _refuse("counts that a part of this size cannot have")
        # A dense class has no gaps; any other has a byte for each symbol besides those of 255.
        self.counts[1] += np.where(self.dense == 1, 0, symbols)

    def content_sizes(self) -> tuple[list[int], list[int], list[int]]:
        """Per class: its gap bytes, its bytes of symbols, its wide codes."""
        symbols, gaps, wide = self.counts.sum(axis=1)
        return gaps.tolist(), (-(-symbols * self.bits // 8)).tolist(), wide.tolist()

    def low_sizes(self) -> list[int]:
        """Per class: its bytes of low bits."""
        sizes: list[int] = (-(-self.counts[0].sum(axis=0) * self.shift // 8)).tolist()
        return sizes

    def tables(self, gaps: Sequence[int], low: Sequence[int], steps: Sequence[int], wide: Sequence[int]) -> list[Table]:
        """Per part: where it begins and ends in every class, as kernels take it."""
        classes = self.window.classes
        gap_base, low_base, step_base, wide_base = (
            np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])[:-1] for sizes in (gaps, low, steps, wide)
        )
        ends = self.counts.cumsum(axis=1)
        out = []
        for end, count in zip(ends.transpose(1, 0, 2), self.counts.transpose(1, 0, 2), strict=True):
            table = np.zeros((classes, k.COLUMNS), np.int64)
            table[:, k.SHIFT], table[:, k.BITS], table[:, k.DENSE] = self.shift, self.bits, self.dense
            table[:, k.LOW], table[:, k.STEP] = 8 * low_base, 8 * step_base
            table[:, k.SYMBOL_END], table[:, k.SYMBOL] = end[0], end[0] - count[0]
            table[:, k.GAP_END], table[:, k.GAP] = gap_base + end[1], gap_base + end[1] - count[1]
            table[:, k.WIDE_END], table[:, k.WIDE] = wide_base + end[2], wide_base + end[2] - count[2]
            table[:, k.NEXT] = -1
            out.append(table)
        return out


def _frames(data: memoryview, sizes: npt.NDArray[np.int64], contents: Sequence[int]) -> Bytes:
    """The contents of frames that lie end to end; a class without content has no frame."""
    edges = [0, *itertools.accumulate(sizes.tolist())]
    if edges[-1] != len(data):
        _refuse("frames that do not fill their stream")
    pieces = []
    for (start, end), content in zip(itertools.pairwise(edges), contents, strict=True):
        if (end > start) != (content > 0):
            _refuse("a frame where none is due, or none where one is")
        if content:
            pieces.append(streams.decompress(data[start:end], content))
    return np.concatenate(pieces) if pieces else np.empty(0, np.uint8)


def _wide(data: memoryview, sizes: npt.NDArray[np.int64], counts: Sequence[int], width: int) -> npt.NDArray[np.uint32]:
    """The wide codes of all classes, whose byte planes are framed class by class."""
    planes = _frames(data, sizes, [count * width for count in counts])
    out = np.empty(sum(counts), np.uint32)
    start = 0
    for count in counts:
        piece = planes[start * width : (start + count) * width]
        out[start : start + count] = streams.from_planes(piece, width).view(f"<u{width}")
        start += count
    return out


def _refuse(what: str) -> None:
    raise PayloadCorrupt(f"expgap: {what}; nothing was written. Fetch the shard again.")
