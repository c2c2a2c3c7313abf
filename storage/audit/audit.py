"""The audit itself: the chain with its segments, then each version's shards and anchor, the hosts' records, and what
else lies in the root. Only reads."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress

import numpy as np

from weighbridge.errors import CorruptData, LineageError, ManifestCorrupt, ObjectMissing, StoreError
from weighbridge.storage.audit.chain import Proven, prove_chain
from weighbridge.storage.audit.report import Audit
from weighbridge.storage.audit.segments import compare, read_segment
from weighbridge.storage.audit.stretches import prove_in_stretches
from weighbridge.storage.history.fetching import fetch_all
from weighbridge.storage.history.segments import Segment, list_segments, parse_key
from weighbridge.storage.history.tables import RECORDS, records_table, table_records
from weighbridge.storage.lineage import RUN_KEY, Lineage
from weighbridge.storage.manifest import (
    anchor_hint_key,
    anchor_key,
    manifest_key,
    open_bytes,
    retired_key,
    shard_key,
    version_folder,
)
from weighbridge.storage.records import SERVED, head_of, parse_record, record_key
from weighbridge.storage.replica.parallel import in_parallel
from weighbridge.storage.sealed_json import MOST_SEALED_BYTES, unseal
from weighbridge.storage.shard_proof import has_digest
from weighbridge.storage.signing import Trust
from weighbridge.storage.stores.contract import Store
from weighbridge.storage.stores.probe import PROBE_FOLDER
from weighbridge.values import HostRecord, Manifest, ShardInfo

_THREADS = 4
_SEALED = re.compile(r"versions/[0-9]{12}/(anchor-)?retired|kept/[^/]+")
_NEIGHBOURS = re.compile(r"weight_v[0-9]{6,}/|delta-[0-9]{8,}/|(deltas|anchors)/step_[0-9]{6,}\.")
_HINT = re.compile(r"anchors/(?P<version>[0-9]{12})")
_HINT_BYTES = 32


def audit(store: Store, *, chain: bool = False, trust: Trust | None = None) -> Audit:
    """Reads everything that a root holds, and proves it or says what breaks first. `chain` reads the manifests and the
    segments alone. With `trust` every version must be signed by one of its keys.

    Raises LineageError for a root without a run, StoreError when the store cannot even be listed.
    """
    lineage = Lineage(store, trust=trust)
    found = Audit(head=-1)
    try:
        _ = lineage.run
    except LineageError as error:
        if not any(info.key == RUN_KEY for info in store.list("")):
            raise
        found.found(RUN_KEY, str(error))
        return found
    beside = None if chain else _Beside(store, found)  # which lists what is there before the head is looked for
    found.head = lineage.head()
    if found.head < 0:
        found.found(manifest_key(0), "it is missing: the root is claimed, and holds no version")
    if beside is None:
        if not prove_in_stretches(lineage, found):
            prove_chain(lineage, found, _let_pass)
        for segment in list_segments(store, "records"):
            read_segment(store, segment, found)
        return found
    reached = prove_chain(lineage, found, beside.take)
    beside.shards()
    _Records(store, lineage, found, beside.states).prove(beside.keys)
    beside.rest(reached)
    return found


def _let_pass(_: Proven) -> None:
    """The chain alone."""


class _Beside:
    """What lies beside the manifests."""

    def __init__(self, store: Store, found: Audit) -> None:
        self._store = store
        self._found = found
        self.keys = {info.key: info.nbytes for info in store.list("")}
        self.states: dict[int, str] = {}
        self._shards: list[tuple[str, ShardInfo, str, str]] = []
        self._known = {RUN_KEY}
        self._unread_anchors: set[str] = set()

    def take(self, proven: Proven) -> None:
        """Notes a version's shards, and proves its anchor while its state is at hand."""
        head = proven.head
        self.states[head.version] = head.state_digest
        self._known.add(manifest_key(head.version))
        self._expect(head)
        key = anchor_key(head.version)
        if key in self.keys:
            self._known.add(key)
            try:
                self._anchor(key, proven)
            except (CorruptData, StoreError) as error:
                self._found.found(key, str(error))
                self._unread_anchors.add(version_folder(head.version))

    def shards(self) -> None:
        """Reads all shards."""
        for wrong in in_parallel(self._read, self._shards, threads=_THREADS):
            if wrong is not None:
                self._found.found(*wrong)

    def rest(self, reached: int) -> None:
        """Proves marks and names, and says what nothing proves."""
        strangers: dict[str, int] = defaultdict(int)
        for key in sorted(self.keys.keys() - self._known):
            if parse_key(key) is not None or key.startswith("hosts/"):
                continue
            if _SEALED.fullmatch(key):
                self._sealed(key)
            elif not self._is_hint(key):
                strangers[self._stranger(key, reached)] += 1
        self._found.notes += [f"{count} {what}" for what, count in sorted(strangers.items())]

    def _expect(self, manifest: Manifest) -> None:
        """Shards that must be there: those of versions that stood when the root was listed, unless marked."""
        marked = retired_key(manifest)
        for shard in manifest.shards:
            key = shard_key(manifest.version, shard)
            self._known.add(key)
            if key in self.keys or (marked not in self.keys and manifest_key(manifest.version) in self.keys):
                self._shards.append((key, shard, manifest.digest_kind, marked))

    def _anchor(self, key: str, proven: Proven) -> None:
        data = self._store.get(key)
        opened = open_bytes(data, where=key)
        head, of = opened.head, proven.head
        if (head.kind, head.run_id, head.version, head.state_digest) != (
            "anchor",
            of.run_id,
            of.version,
            of.state_digest,
        ):
            raise ManifestCorrupt("it is not of this version")
        change = proven.index.change(opened)
        everything = np.arange(len(proven.index.keys), dtype=np.int32)
        if not np.array_equal(np.sort(change.numbers), everything) or not np.array_equal(
            proven.state.digests(change.numbers), change.after
        ):
            raise ManifestCorrupt("its parts are not this version's state")
        self._found.anchors += 1
        self._found.nbytes += len(data)
        self._expect(head)
        hint = anchor_hint_key(head.version)
        if hint in self.keys:
            self._known.add(hint)
            if self.keys[hint] != _HINT_BYTES or self._store.get(hint) != head.commit_id.encode():
                self._found.found(hint, f"it does not name the anchor that stands under {key}")

    def _read(self, shard: tuple[str, ShardInfo, str, str]) -> tuple[str, str] | None:
        key, info, kind, marked = shard
        if key not in self.keys:
            return key, "it is missing, and no mark says that it was collected"
        if self.keys[key] != info.nbytes:
            return key, f"it has {self.keys[key]} bytes, and its manifest says {info.nbytes}"
        try:
            is_right = has_digest(self._store, key, info, kind)
        except ObjectMissing:  # gone since it was listed
            with suppress(ObjectMissing):
                self._store.size(marked)
                return None
            return key, "it is missing, and no mark says that it was collected"
        except StoreError as error:
            return key, f"it cannot be read: {error}"
        if not is_right:
            return key, "its bytes do not have the digest that its manifest names"
        self._found.shards += 1
        self._found.nbytes += info.nbytes
        return None

    def _sealed(self, key: str) -> None:
        try:
            unseal(self._store.get(key, most=MOST_SEALED_BYTES))
            self._found.marks += 1
        except (ValueError, StoreError) as error:
            self._found.found(key, f"it is not as it was written: {error}")

    def _is_hint(self, key: str) -> bool:
        """A hint whose anchor is gone is nobody's fault; what it says, nobody reads."""
        return _HINT.fullmatch(key) is not None and self.keys[key] == _HINT_BYTES

    def _stranger(self, key: str, reached: int) -> str:
        folder, _, rest = key.partition("/")
        if _NEIGHBOURS.match(key):
            return "objects of neighbours' layouts (`weighbridge verify --layout`)"
        if folder == PROBE_FOLDER:
            return "objects of probes that were cut short"
        version = rest.partition("/")[0]
        if folder == "versions" and version.isdecimal() and int(version) > reached:
            return "objects above the last version that is proven: attempts under way, or dead"
        parent, _, name = key.rpartition("/")
        if parent in self._unread_anchors and name.startswith("anchor-"):
            return "shards of an anchor whose manifest cannot be read, or of attempts at it: nothing proves them"
        if folder == "versions":
            return "objects that dead attempts left beside committed versions (`weighbridge gc` collects them)"
        return f"objects under {folder}/ that weighbridge did not write" if rest else f"object {key}, not weighbridge's"


class _Records:
    """The hosts' records, and the segments that repeat them."""

    def __init__(self, store: Store, lineage: Lineage, found: Audit, states: Mapping[int, str]) -> None:
        self._store = store
        self._run_id = lineage.run.run_id
        self._found = found
        self._states = states
        self._keys: frozenset[str] = frozenset()

    def prove(self, keys: Iterable[str]) -> None:
        """Reads all of them; `keys` are all that the root lists."""
        self._keys = frozenset(keys)
        segments = sorted(list_segments(self._store, "records"), key=lambda s: (s.last, -s.first, s.edition))
        read: dict[int, list[HostRecord]] = defaultdict(list)
        of_hosts = (key for key in sorted(self._keys) if key.startswith("hosts/"))
        for key, data in fetch_all(self._store, of_hosts, most=MOST_SEALED_BYTES):
            try:
                if isinstance(data, StoreError):
                    raise data
                record = parse_record(data, key)
            except (CorruptData, StoreError) as error:
                self._found.found(key, str(error))
                continue
            self._found.records += 1
            self._found.nbytes += len(data)
            self._judge(key, record)
            read[head_of(key)].append(record)
        for segment in segments:
            heads = sorted(head for head in read if segment.first <= head <= segment.last)
            within = [r for head in heads for r in read[head]]
            self._segment(segment, within)

    def _judge(self, key: str, record: HostRecord) -> None:
        if record.run_id != self._run_id:
            self._found.found(key, f"it is of run {record.run_id}, in the root of {self._run_id}")
        if record.outcome != SERVED:
            return
        published = self._states.get(record.version)
        if published is None and manifest_key(record.version) in self._keys:
            return  # its manifest stands, above the first break: what it published is not proven, and not disproven
        if published is None:
            self._found.found(key, f"host {record.host} served version {record.version}, which was never published")
        elif record.state_digest != published:
            self._found.found(
                key, f"host {record.host} served version {record.version} in another state than was published"
            )

    def _segment(self, segment: Segment, within: list[HostRecord]) -> None:
        """A record may have come after the segment was made, and is in its next edition; none may be gone from it."""
        table = read_segment(self._store, segment, self._found)
        if table is not None:
            held = {record_key(record) for record in table_records(table)} if table.schema.equals(RECORDS) else set()
            expected = records_table([record for record in within if record_key(record) in held])
            compare(segment, table, expected, self._found)
