"""Proves the chain: every manifest by its own digest, its parent and the state that its rows lead to, and the segments
that repeat them. Must not know shards, records, or anything else beside the manifests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from weighbridge.errors import CorruptData, ManifestCorrupt, ObjectMissing, StoreError
from weighbridge.storage.audit.report import Audit
from weighbridge.storage.audit.segments import SegmentsProof
from weighbridge.storage.history.fetching import fetch_all
from weighbridge.storage.history.segments import Segment, list_segments
from weighbridge.storage.history.tables import VERSIONS, Change, Digests, PartIndex, version_row
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.manifest import OpenManifest, manifest_key, open_bytes
from weighbridge.storage.state import RollingState
from weighbridge.values import Manifest


@dataclass(frozen=True, slots=True)
class Proven:
    """One version of the chain as it stands proven, with the state after it."""

    head: Manifest
    index: PartIndex
    state: RollingState


def prove_chain(lineage: Lineage, audit: Audit, on_proven: Callable[[Proven], object]) -> int:
    """Walks over all manifests from version 0 on; `on_proven` is called after each. Returns the last version that could
    be proven: the head, unless there is a finding."""
    versions = SegmentsProof(lineage.store, list_segments(lineage.store, "versions"), version_rows, audit)
    walk = Walk(lineage, audit, list_segments(lineage.store, "parts"), versions.take)
    walk.go(0, audit.head, on_proven)
    versions.end(walk.reached)
    return walk.reached


def version_rows(rows: Sequence[dict[str, Any]]) -> Any:
    """What some versions say of themselves, as a table."""
    return pa.Table.from_pylist(list(rows), schema=VERSIONS)


class Walk:
    """Goes over successive manifests, and over the segments of `parts` that repeat them; `on_row` gets what each
    version says of itself."""

    def __init__(
        self,
        lineage: Lineage,
        audit: Audit,
        parts: Sequence[Segment],
        on_row: Callable[[int, dict[str, Any]], object],
    ) -> None:
        self.reached = -1
        self.parent = ""
        """The digest of the manifest that was proven last."""
        self._lineage = lineage
        self._audit = audit
        self._index: PartIndex | None = None
        self._state: RollingState | None = None
        self._single: Any = None
        self._on_row = on_row
        self._parts: SegmentsProof[Change | None] = SegmentsProof(lineage.store, parts, self._table, audit)

    def begin(self, index: PartIndex, digests: Digests, parent: str) -> None:
        """Before a walk that does not begin with version 0: the state there, and the digest of its manifest."""
        self._index, self.parent = index, parent
        self._state = RollingState(index.keys, digests)
        self._single = np.array([index.parts_of[key.tensor] == 1 for key in index.keys])

    def go(self, first: int, last: int, on_proven: Callable[[Proven], object]) -> None:
        """Proves the versions `first` to `last`; `on_proven` is called after each. Ends at the first break, which is
        the audit's first finding then."""
        keys = (manifest_key(version) for version in range(first, last + 1))
        for version, (key, data) in enumerate(fetch_all(self._lineage.store, keys), first):
            try:
                on_proven(self.step(version, key, data))
            except CorruptData as error:
                self._audit.broke(key, str(error))
                break
            except StoreError as error:
                self._audit.broke(key, f"it cannot be read: {error}")
                break
        self._parts.end(self.reached)

    def step(self, version: int, key: str, data: bytes | StoreError) -> Proven:
        """Proves the next version. Raises ManifestCorrupt, StoreError."""
        if isinstance(data, ObjectMissing):
            raise ManifestCorrupt(f"it is missing, and newer versions stand up to {self._audit.head}")
        if isinstance(data, StoreError):
            raise data
        opened = self._open(key, data)
        head = opened.head
        self._lineage.check(head, version)
        if head.parent_digest != self.parent:
            raise ManifestCorrupt("it names another parent than the version before it: the chain is broken here")
        index, state = self._advance(opened)
        if state.hexdigest() != head.state_digest:
            raise ManifestCorrupt("it claims another state than its rows lead to")
        self.parent, self.reached = head.digest, version
        self._audit.manifests += 1
        self._audit.nbytes += len(data)
        self._on_row(version, version_row(head, opened.rows))
        return Proven(head, index, state)

    def _open(self, key: str, data: bytes) -> OpenManifest:
        try:
            return open_bytes(data, where=key, trust=self._lineage.trust)
        except ManifestCorrupt:  # a bit may have flipped on the way; one that did in the store did so twice
            return open_bytes(self._lineage.store.get(key), where=key, trust=self._lineage.trust)

    def _advance(self, opened: OpenManifest) -> tuple[PartIndex, RollingState]:
        if self._index is None or self._state is None:
            index = PartIndex(opened)
            self.begin(index, index.digests, "")
            assert self._state is not None
            self._parts.take(0, None)
            return index, self._state
        change = self._index.change(opened)
        if self._state.digests(change.numbers).tobytes() != change.before.tobytes():
            raise ManifestCorrupt("its rows start from other bytes than the version before it ends with")
        if change.after.tobytes() != change.whole.tobytes() and self._are_two(change):
            raise ManifestCorrupt("it names two digests for one tensor")
        self._state.replace(change.numbers, change.after)
        self._parts.take(change.version, change.detached())
        return self._index, self._state

    def _are_two(self, change: Change) -> bool:
        """Whether a tensor of one part has another digest than its part."""
        alone = self._single[change.numbers]
        return not np.array_equal(change.after[alone], change.whole[alone])

    def _table(self, changes: Sequence[Change | None]) -> Any:
        assert self._index is not None
        return self._index.table([change for change in changes if change is not None])
