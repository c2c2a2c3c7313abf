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
from weighbridge.storage.history.tables import VERSIONS, Change, PartIndex, version_row
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
    walk = _Walk(lineage, audit)
    for version, (key, data) in enumerate(
        fetch_all(lineage.store, (manifest_key(version) for version in range(audit.head + 1)))
    ):
        try:
            on_proven(walk.step(version, key, data))
        except CorruptData as error:
            audit.broke(key, _without(key, str(error)))
            break
        except StoreError as error:
            audit.broke(key, f"it cannot be read: {error}")
            break
    walk.end()
    return walk.reached


class _Walk:
    def __init__(self, lineage: Lineage, audit: Audit) -> None:
        self.reached = -1
        self._lineage = lineage
        self._audit = audit
        self._parent = ""
        self._index: PartIndex | None = None
        self._state: RollingState | None = None
        self._single: Any = None
        self._versions = SegmentsProof(lineage.store, "versions", _versions, audit)
        self._parts: SegmentsProof[Change | None] = SegmentsProof(lineage.store, "parts", self._table, audit)

    def step(self, version: int, key: str, data: bytes | StoreError) -> Proven:
        """Proves the next version. Raises ManifestCorrupt, StoreError."""
        if isinstance(data, ObjectMissing):
            raise ManifestCorrupt(f"it is missing, and newer versions stand up to {self._audit.head}")
        if isinstance(data, StoreError):
            raise data
        opened = self._open(key, data)
        head = opened.head
        self._lineage.check(head, version)
        if head.parent_digest != self._parent:
            raise ManifestCorrupt("it names another parent than the version before it: the chain is broken here")
        index, state = self._advance(opened)
        if state.hexdigest() != head.state_digest:
            raise ManifestCorrupt("it claims another state than its rows lead to")
        self._parent, self.reached = head.digest, version
        self._audit.manifests += 1
        self._audit.nbytes += len(data)
        self._versions.take(version, version_row(head, opened.rows))
        return Proven(head, index, state)

    def end(self) -> None:
        """After the last step."""
        self._versions.end(self.reached)
        self._parts.end(self.reached)

    def _open(self, key: str, data: bytes) -> OpenManifest:
        try:
            return open_bytes(data, where=key, trust=self._lineage.trust)
        except ManifestCorrupt:  # a bit may have flipped on the way; one that did in the store did so twice
            return open_bytes(self._lineage.store.get(key), where=key, trust=self._lineage.trust)

    def _advance(self, opened: OpenManifest) -> tuple[PartIndex, RollingState]:
        if self._index is None or self._state is None:
            self._index = PartIndex(opened)
            self._state = RollingState(self._index.keys, self._index.digests)
            self._single = np.array([self._index.parts_of[key.tensor] == 1 for key in self._index.keys])
            self._parts.take(0, None)
            return self._index, self._state
        change = self._index.change(opened)
        if not np.array_equal(self._state.digests(change.numbers), change.before):
            raise ManifestCorrupt("its rows start from other bytes than the version before it ends with")
        alone = self._single[change.numbers]
        if not np.array_equal(change.after[alone], change.whole[alone]):
            raise ManifestCorrupt("it names two digests for one tensor")
        self._state.replace(change.numbers, change.after)
        self._parts.take(change.version, change.detached())
        return self._index, self._state

    def _table(self, changes: Sequence[Change | None]) -> Any:
        assert self._index is not None
        return self._index.table([change for change in changes if change is not None])


def _versions(rows: Sequence[dict[str, Any]]) -> Any:
    return pa.Table.from_pylist(list(rows), schema=VERSIONS)


def _without(key: str, text: str) -> str:
    return text.removeprefix(f"{key}: ").removeprefix(f"{key} ")
