"""Encodes the parts of one dtype for `expgap`: logs changes in one pass, then writes each class in its own way."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from weighbridge.errors import UsageError
from weighbridge.storage.codecs import kernels, streams
from weighbridge.storage.codecs.contract import Bytes, Sample
from weighbridge.storage.codecs.elements import NONFINITE, element
from weighbridge.storage.codecs.growing import Growing
from weighbridge.storage.codecs.kernels import class_scan
from weighbridge.storage.codecs.kernels import classes as k
from weighbridge.storage.codecs.kernels.lanes import SPAN
from weighbridge.storage.codecs.kernels.memory import UNITS
from weighbridge.storage.codecs.windows import choose_window

Table = npt.NDArray[np.int64]

_LOOKED_AT = 1 << 18  # changes by whose steps the symbols of all are chosen, at least
_DENSE = 0.4  # a class that changes more often than this gets a symbol for every member
_MEAN_GAP = 16  # what a gap's high part comes to at most on average: few symbols, and next to never 255
_ESCAPES = 0.015  # the most symbols of a class that may need an escape before it gets wider ones


_RAMP = kernels.fixed(np.repeat(np.array([255, 0], np.uint8), SPAN))


class GroupEncoder:
    """Gathers the changes of all parts of one dtype in a shard."""

    def __init__(self, dtype: str, samples: Sequence[Sample]) -> None:
        self._element = element(dtype)
        if not self._element.exponent_bits:
            raise UsageError(f"expgap has no exponents to go by in {dtype}; `gap` takes any dtype")
        self._window = choose_window(samples)
        self._for_kernels = self._window.for_kernels(self._element)
        self._log = Growing(np.uint64)
        self._ends: list[int] = []
        self._seen = np.zeros(self._window.classes, np.int64)
        self._last = np.full(self._window.classes, -1, np.int64)
        self._members = np.zeros(self._window.classes, np.int64)
        self._reached: list[Table] = []
        self._open = False
        self._bits = tuple(map(np.uint64, NONFINITE[dtype]))
        self._turned = np.zeros(1, np.int64)
        self._scratch = np.empty(k.SCRATCH, np.uint8)

    def begin(self, nbytes: int) -> None:
        """Starts the next part."""
        if nbytes % self._element.width or nbytes // self._element.width > k.MAX_ELEMENTS:
            raise UsageError(f"a part of {nbytes} bytes is too large, or holds no whole number of elements")
        self._close()
        self._open = True

    @property
    def turned(self) -> int:
        """How many elements of the chunk fed last turned NaN or infinite."""
        return int(self._turned[0])

    def feed(self, old: Bytes, new: Bytes) -> int:
        """Logs a chunk's changes and returns how many."""
        unit, count = self._element, new.size // self._element.width
        if old.size != new.size:
            raise ValueError("old and new bytes differ in size")
        found: int = class_scan.scan_classes(
            kernels.fixed(old),
            kernels.fixed(new),
            UNITS[unit.width],
            (unit.sign, unit.mask),
            self._for_kernels,
            self._seen,
            self._last,
            self._scratch,
            _RAMP,
            UNITS[2],
            self._bits,
            self._turned,
            self._log.room(count)[self._log.used :],
        )
        self._log.used += found
        return int(found)

    def finish(self) -> Mapping[str, bytes]:
        """The group's streams."""
        self._close()
        log = kernels.fixed(self._log.filled())
        table = self._plan(log)
        # In the extents: per part and class, its symbols, its gap bytes of 255, its wide codes.
        extents = np.zeros((3, len(self._ends), self._window.classes), np.int64)
        out = self._write(log, table, extents)
        head = np.array([self._window.classes, self._window.low], np.uint8).tobytes()
        head += table[:, [k.SHIFT, k.BITS, k.DENSE]].astype(np.uint8).tobytes()
        head += b"".join(np.array([len(frame) for frame in frames], "<u4").tobytes() for frames in out)
        planes = streams.to_planes(extents.astype("<u4").reshape(-1).view(np.uint8), 4)
        low = self._low[: self._low_bytes].tobytes()
        gaps, steps, wide = (b"".join(frames) for frames in out)
        return {
            "extents": streams.compress(head + planes.tobytes(), level=9),
            "gaps": gaps,
            "low": low,
            "steps": steps,
            "wide": wide,
        }

    def _close(self) -> None:
        if not self._open:
            return
        self._ends.append(self._log.used)
        self._reached.append(self._last + 1)
        self._members += self._seen
        self._seen[:], self._last[:] = 0, -1
        self._open = False

    def _plan(self, log: npt.NDArray[np.uint64]) -> Table:
        """How each class is written, and where each begins in streams that are laid out with room to spare."""
        counts, small = np.zeros(k.MAX_CLASSES, np.int64), np.zeros((k.MAX_CLASSES, 4), np.int64)
        class_scan.tally(log, max(1, log.size // _LOOKED_AT), counts, small)
        table = np.zeros((self._window.classes, k.COLUMNS), np.int64)
        reached = np.sum(self._reached, axis=0) if self._reached else np.zeros(self._window.classes, np.int64)
        gap_at = low_at = step_at = wide_at = 0
        for which, row in enumerate(table):
            count, members = int(counts[which]), int(self._members[which])
            row[k.DENSE] = int(count > _DENSE * members)
            row[k.SHIFT] = 0 if row[k.DENSE] or not count else max(0, (members // count // _MEAN_GAP).bit_length())
            two, four, _, looked = small[which].tolist()
            fitting = (bits for bits, fit in ((2, two), (4, four)) if looked - fit <= _ESCAPES * looked)
            row[k.BITS] = next(fitting, 8)
            symbols = int(reached[which]) if row[k.DENSE] else count
            row[[k.GAP, k.LOW, k.STEP, k.WIDE]] = gap_at, 8 * low_at, 8 * step_at, wide_at
            gap_at += 1  # a dense class has a byte to be written at, too
            if not row[k.DENSE]:
                gap_at += count + (int(reached[which]) >> int(row[k.SHIFT])) // 255
            low_at += -(-symbols * int(row[k.SHIFT]) // 8)
            step_at += -(-symbols * int(row[k.BITS]) // 8)
            wide_at += count
        self._low_bytes, self._low = low_at, np.zeros(low_at + 8, np.uint8)
        self._gaps = np.empty(gap_at, np.uint8)
        self._steps = np.zeros(step_at, np.uint8)
        self._wide = np.empty(wide_at, np.uint32)
        return table

    def _write(self, log: npt.NDArray[np.uint64], table: Table, extents: Table) -> tuple[list[bytes], ...]:
        """Fills the streams part by part, and compresses each class's stretch of gaps, steps and wide codes."""
        starts = table.copy()
        start = 0
        dense = table[:, k.DENSE] == 1
        for index, end in enumerate(self._ends):
            before = table.copy()
            class_scan.write_classes(
                log[start:end], table, self._gaps, self._low, self._steps, self._wide, UNITS[1], UNITS[8]
            )
            grown = table - before
            extents[:, index] = grown[:, k.SYMBOL], grown[:, k.GAP], grown[:, k.WIDE]
            extents[1, index] -= np.where(dense, 0, grown[:, k.SYMBOL])
            start = end
        width = self._element.width
        gaps, steps, wide = [], [], []
        for first, last in zip(starts, table, strict=True):
            gaps.append(streams.compress_symbols(self._gaps[first[k.GAP] : last[k.GAP]]))
            step = first[k.STEP] // 8
            steps.append(streams.compress_symbols(self._steps[step : step - (-last[k.SYMBOL] * last[k.BITS] // 8)]))
            codes = self._wide[first[k.WIDE] : last[k.WIDE]].astype(f"<u{width}").view(np.uint8)
            wide.append(streams.compress_symbols(streams.to_planes(codes, width)))
        return gaps, steps, wide
