"""Proves the history's segments against what they repeat, as the walk over the manifests goes on. Must not know how a
manifest is proven."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from weighbridge.errors import CorruptData, ObjectMissing, StoreError
from weighbridge.storage.audit.report import Audit
from weighbridge.storage.history.segment_file import segment_of
from weighbridge.storage.history.segments import Segment
from weighbridge.storage.stores.contract import Store

T = TypeVar("T")


class SegmentsProof(Generic[T]):
    """Takes each version's own words in turn, and holds a segment against them once it has all of its versions."""

    def __init__(
        self, store: Store, segments: Iterable[Segment], table_of: Callable[[Sequence[T]], Any], audit: Audit
    ) -> None:
        self._store = store
        self._table_of = table_of
        self._audit = audit
        self._left = deque(sorted(segments, key=lambda s: (s.last, -s.first, s.edition)))
        self._kept: deque[tuple[int, T]] = deque()
        self._needed = self._first_needed()

    def take(self, version: int, words: T) -> None:
        """What a version says, in the order of versions."""
        if version >= self._needed:
            self._kept.append((version, words))
        while self._left and self._left[0].last == version:
            segment = self._left.popleft()
            said = [told for number, told in self._kept if number >= segment.first]
            found = read_segment(self._store, segment, self._audit)
            if found is not None:
                compare(segment, found, self._table_of(said), self._audit)
            self._needed = self._first_needed()
        while self._kept and self._kept[0][0] < self._needed:
            self._kept.popleft()

    def _first_needed(self) -> float:
        return min((segment.first for segment in self._left), default=float("inf"))

    def end(self, reached: int) -> None:
        """After the last version that could be proven: what segments say beyond it, nobody says any more."""
        for segment in self._left:
            self._audit.found(
                segment.key, f"it tells of versions up to {segment.last}, and the manifests are proven up to {reached}"
            )


def read_segment(store: Store, segment: Segment, audit: Audit) -> Any:
    """A segment's table, if its bytes are those that its name promises; else None, and a finding."""
    try:
        data = store.get(segment.key)
    except ObjectMissing:  # a compactor put it into a longer one since it was listed
        return None
    except StoreError as error:
        audit.found(segment.key, f"it cannot be read: {error}")
        return None
    audit.segments += 1
    audit.nbytes += len(data)
    if not segment.is_whole(data):
        audit.found(segment.key, "its bytes are not those that its name promises; `weighbridge compact --mend` it")
        return None
    try:
        return segment_of(segment, data).read()
    except CorruptData as error:
        audit.found(segment.key, str(error))
        return None


def compare(segment: Segment, found: Any, expected: Any, audit: Audit) -> None:
    """Holds what a segment says against its sources."""
    if found is not None and not found.equals(expected):
        audit.found(segment.key, f"it says something else than its sources: {_difference(expected, found)}")


def _difference(expected: Any, found: Any) -> str:
    if not expected.schema.equals(found.schema):
        return f"its columns are {', '.join(found.schema.names)}"
    if expected.num_rows != found.num_rows:
        return f"{found.num_rows} rows for {expected.num_rows}"
    for name in expected.schema.names:
        pairs = zip(expected.column(name), found.column(name), strict=True)
        row = next((number for number, (one, other) in enumerate(pairs) if not one.equals(other)), None)
        if row is not None:
            return f"{name} of version {expected.column('version')[row]}"
    return "what is null in it"
