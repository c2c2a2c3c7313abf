"""Which segments a history is made of: their names, and which of them a reader takes. Must not know what is in them."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from weighbridge.storage.digests import chain_digest
from weighbridge.storage.stores.contract import Store

Kind = Literal["parts", "records", "versions"]

FOLDER = "history"
BLOCK = 64
"""Versions in the smallest segment. Segments begin at multiples of their own length, so that all writers cut alike."""
GROWTH = 8
"""So many segments of one length are put together into one of the next."""

_KEY = re.compile(
    r"history/(?P<kind>parts|records|versions)/"
    r"(?P<first>[0-9]{12})-(?P<last>[0-9]{12})-(?P<edition>[0-9]{4})-(?P<digest>[0-9a-f]{64})\.parquet"
)


@dataclass(frozen=True, slots=True)
class Segment:
    """One object of the history: all that is to say of the versions `first` to `last` (of records: by their `head`).

    Its name holds the blake3 of its bytes, hex: whoever reads all of it can prove it. A later `edition` of the same
    versions has records that came late.
    """

    kind: Kind
    first: int
    last: int
    edition: int
    digest: str
    nbytes: int = 0

    @property
    def key(self) -> str:
        """Where it stands."""
        return f"{FOLDER}/{self.kind}/{self.first:012d}-{self.last:012d}-{self.edition:04d}-{self.digest}.parquet"

    @property
    def span(self) -> tuple[int, int]:
        """Its first and last version."""
        return self.first, self.last

    def is_whole(self, data: bytes) -> bool:
        """Whether bytes are those that its name promises."""
        return chain_digest(data) == self.digest


@dataclass(frozen=True, slots=True)
class Gap:
    """Versions that no segment has: they are read from where they were written."""

    first: int
    last: int


def parse_key(key: str, nbytes: int = 0) -> Segment | None:
    """The segment that a key names, or None."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    kind: Kind = match["kind"]  # type: ignore[assignment]  # the expression knows no other
    return Segment(kind, int(match["first"]), int(match["last"]), int(match["edition"]), match["digest"], nbytes)


def list_segments(store: Store, kind: Kind) -> list[Segment]:
    """All segments of a kind that stand in a store."""
    found = (parse_key(info.key, info.nbytes) for info in store.list(f"{FOLDER}/{kind}"))
    return [segment for segment in found if segment is not None]


def cover(segments: Iterable[Segment], first: int, last: int) -> Iterator[Segment | Gap]:
    """What has all versions from `first` to `last`, each once, in order: at every place the longest segment, of equal
    ones the latest edition. Segments at both ends may reach beyond."""
    best: dict[int, Segment] = {}
    for segment in sorted(segments, key=lambda s: (s.last, s.edition, s.digest)):
        best[segment.first] = segment
    starts = sorted(best)
    place = _floor(starts, best, first)
    gap_from = first
    while place <= last:
        standing = best.get(place)
        if standing is None:
            place = next((start for start in starts if start > place), last + 1)
            continue
        if gap_from < place:
            yield Gap(gap_from, place - 1)
        yield standing
        place = gap_from = standing.last + 1
    if gap_from <= last:
        yield Gap(gap_from, last)


def covered_upto(segments: Iterable[Segment]) -> int:
    """The last version of the unbroken row of segments that begins at version 0; -1 when there is none."""
    upto = -1
    for piece in cover(segments, 0, 1 << 62):
        if isinstance(piece, Gap):
            break
        upto = piece.last
    return upto


def due_blocks(segments: Iterable[Segment], upto: int) -> list[tuple[int, int]]:
    """The smallest spans, all of their versions at most `upto`, that no segment has."""
    whole = (upto + 1) // BLOCK * BLOCK - 1
    return [
        (start, start + BLOCK - 1)
        for piece in cover(segments, 0, whole)
        if isinstance(piece, Gap)
        for start in range(piece.first, piece.last + 1, BLOCK)
    ]


def due_merges(segments: Sequence[Segment]) -> Iterator[tuple[tuple[int, int], list[Segment]]]:
    """Spans that can be put together from segments of the length below, smallest first, which nothing longer has."""
    longest = {s.first: s for s in sorted(segments, key=lambda s: (s.last, s.edition, s.digest))}
    length = BLOCK * GROWTH
    upto = max((s.last for s in segments), default=-1)
    while length <= upto + 1:
        for first in sorted({start // length * length for start in longest}):  # whatever a name claims
            parts = [longest.get(start) for start in range(first, first + length, length // GROWTH)]
            if all(p is not None and p.last - p.first + 1 == length // GROWTH for p in parts):
                yield (first, first + length - 1), [p for p in parts if p is not None]
        length *= GROWTH


def superseded(segments: Sequence[Segment]) -> list[Segment]:
    """Segments that no reader takes: a longer one, or a later edition, has what they have."""
    taken = set(cover(segments, 0, max((s.last for s in segments), default=-1)))
    return [segment for segment in segments if segment not in taken]


def _floor(starts: Sequence[int], best: dict[int, Segment], first: int) -> int:
    """Where the longest segment that has `first` begins; `first` itself when none does."""
    return next((start for start in starts if start <= first <= best[start].last), first)
