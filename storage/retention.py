"""Which versions are kept, and what may be collected: decided from one listing of a root. Must not know how it is
collected. docs/OPERATIONS.md has the rules in words."""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weighbridge.errors import CorruptData, ManifestCorrupt, UsageError, VersionUnknown
from weighbridge.storage.kept import kept_names
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.manifest import SHARD_NAME
from weighbridge.storage.records import SERVED, head_of, read_record, record_hosts
from weighbridge.storage.shard_proof import bytes_flaw, sizes_flaw
from weighbridge.storage.store_time import store_now_ns
from weighbridge.storage.stores.contract import ObjectInfo, Store
from weighbridge.values import HostRecord

GRACE_SECONDS = 86_400.0
_OBJECT = re.compile(r"versions/(?P<version>[0-9]{12})/(?P<name>[^/]+)")
_LOOKED_AT = 64


@dataclass(frozen=True, slots=True)
class Form:
    """One form of a version, its delta or its anchor, as a listing shows it."""

    version: int
    is_anchor: bool

    def __str__(self) -> str:
        return f"{'anchor of ' if self.is_anchor else ''}version {self.version}"


@dataclass(slots=True)
class Stock:
    """What a root holds, from `listed`, all objects under its versions: for each form the shards that are listed under
    it (those of dead attempts too), with their bytes; which forms are marked, and which of these have all their shards
    nevertheless. `damaged` says of anchors that ought to stand what is wrong with them, `unreadable` are those of them
    whose own manifest is."""

    head: int
    listed: Sequence[ObjectInfo] = field(default=(), repr=False)
    shards: dict[Form, dict[str, int]] = field(default_factory=dict)
    marked: set[Form] = field(default_factory=set)
    spared: set[Form] = field(default_factory=set)
    anchors: set[int] = field(default_factory=set)
    damaged: dict[int, str] = field(default_factory=dict)
    unreadable: set[int] = field(default_factory=set)

    def stands(self, form: Form) -> bool:
        """Whether a form can still be fetched: nobody marked it, or its shards were spared."""
        return form not in self.marked or form in self.spared


@dataclass(frozen=True, slots=True)
class Keeping:
    """What stays: the versions that can be rebuilt, each for its `reasons`, and the forms that takes."""

    reasons: Mapping[int, tuple[str, ...]]
    needed: frozenset[Form]

    @property
    def ways(self) -> dict[Form, int]:
        """What stays only since it leads to a version that is kept: to which one, the first of them."""
        kept = sorted(self.reasons)
        leading = (form for form in self.needed if form.is_anchor or form.version not in self.reasons)
        ordered = sorted(leading, key=lambda form: (form.version, form.is_anchor))
        places = ((form, bisect_left(kept, form.version)) for form in ordered)
        return {form: kept[place] for form, place in places if place < len(kept)}


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What a collection would do: `marks` are written first, then the shards of all `forms` go, `nbytes` in all.

    `forms` that were marked before are those whose shards an earlier collection could not delete. `damaged` are anchors
    that nothing was let go for, each with what is wrong with it.
    """

    keeping: Keeping
    marks: tuple[Form, ...]
    forms: tuple[Form, ...]
    nbytes: int
    damaged: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A version to keep: why, and from which version on all deltas up to it must stand."""

    version: int
    why: str
    since: int


def take_stock(lineage: Lineage) -> Stock:
    """Lists a root's versions. What stands above the head is nobody's to collect, and left out."""
    stock = Stock(lineage.head())
    stock.listed = tuple(lineage.store.list("versions"))
    for info in stock.listed:
        found = _OBJECT.fullmatch(info.key)
        if found is None or int(found["version"]) > stock.head:
            continue
        version, name = int(found["version"]), found["name"]
        if shard := SHARD_NAME.fullmatch(name):
            stock.shards.setdefault(Form(version, shard["anchor"] is not None), {})[name] = info.nbytes
        elif name in ("retired", "anchor-retired"):
            stock.marked.add(Form(version, name == "anchor-retired"))
        elif name == "anchor.arrow":
            stock.anchors.add(version)
    for form in stock.marked & stock.shards.keys():
        if _is_whole(lineage, form, stock.shards[form]):
            stock.spared.add(form)
    for version in sorted(stock.anchors):
        if stock.stands(Form(version, True)):
            _prove_listed(lineage, stock, version)
    return stock


def _prove_listed(lineage: Lineage, stock: Stock, version: int) -> None:
    """Whether an anchor opens, and all that it names is there; notes what is wrong with it."""
    form = Form(version, True)
    try:
        anchor = lineage.anchor(version)
        flaw = sizes_flaw(lineage.store, anchor, listed=stock.shards.get(form, {}))
    except (ManifestCorrupt, VersionUnknown) as error:
        stock.damaged[version] = str(error)
        stock.unreadable.add(version)
        return
    if flaw is not None and lineage.is_marked(anchor):  # by another collection, since it was listed
        stock.marked.add(form)
        stock.spared.discard(form)
    elif flaw is not None:
        stock.damaged[version] = flaw


def plan_gc(
    lineage: Lineage,
    *,
    keep: int,
    grace_seconds: float = GRACE_SECONDS,
    stock: Stock | None = None,
    proofs: dict[int, str | None] | None = None,
) -> GcPlan:
    """What may go: every form that no kept version's way needs.

    Kept are the last `keep` versions, named ones, and for each host that wrote a record in the last `grace_seconds`
    (by the store's own time) those from what it may patch up to the head, with every delta in between. A version's way
    is the newest anchor at or below it that stands whole, or the base, and all deltas after it. An anchor for which
    something may go is read to its last byte first; one that does not prove is in `damaged`, and counts as none. What
    is in `proofs` (by version: what is wrong with its anchor, or None) is not read again; what is read is added. With
    a `stock` nothing is listed but names and hosts.

    Raises UsageError for a `keep` below 1, CorruptData when a name cannot be read, StoreError.
    """
    if keep < 1:
        raise UsageError(f"gc keeps at least one version, not {keep}. Nothing was collected.")
    stock = take_stock(lineage) if stock is None else stock
    wanted = wanted_versions(lineage, stock.head, keep=keep, grace_seconds=grace_seconds)
    proofs = {} if proofs is None else proofs
    keeping = what_is_kept(stock, wanted)
    gone = _what_may_go(stock, keeping)
    while _prove_relied_on(lineage, stock, wanted, keeping, gone, proofs):
        keeping = what_is_kept(stock, wanted)
        gone = _what_may_go(stock, keeping)
    nbytes = sum(sum(stock.shards[form].values()) for form in gone)
    marks = tuple(form for form in gone if form not in stock.marked)
    return GcPlan(keeping, marks, tuple(gone), nbytes, dict(stock.damaged))


def _what_may_go(stock: Stock, keeping: Keeping) -> list[Form]:
    collectable = stock.anchors - stock.unreadable
    held = [f for f in stock.shards if (f.version in collectable if f.is_anchor else f.version > 0)]
    return sorted((f for f in held if f not in keeping.needed), key=lambda f: (f.version, f.is_anchor))


def _prove_relied_on(
    lineage: Lineage,
    stock: Stock,
    wanted: Sequence[Wanted],
    keeping: Keeping,
    gone: Sequence[Form],
    proofs: dict[int, str | None],
) -> bool:
    """Reads the anchors without which something that may go would be needed; whether one was found damaged."""
    found = False
    for version in sorted(form.version for form in keeping.needed if form.is_anchor):
        if version in stock.damaged:
            continue
        without = replace(stock, damaged={**stock.damaged, version: "not proven"})
        if what_is_kept(without, wanted).needed.isdisjoint(gone):
            continue
        if version not in proofs:
            proofs[version] = bytes_flaw(lineage.store, lineage.anchor(version))
        flaw = proofs[version]
        if flaw is not None:
            stock.damaged[version] = flaw
            found = True
    return found


def wanted_versions(lineage: Lineage, head: int, *, keep: int, grace_seconds: float) -> list[Wanted]:
    """The versions to keep, by number, by name, and for the hosts. Raises like `plan_gc`."""
    oldest = max(0, head - keep + 1)
    wanted = [Wanted(version, f"one of the last {keep}", oldest) for version in range(oldest, head + 1)]
    named = (kept for kept in kept_names(lineage.store) if kept.version <= head)
    wanted += [Wanted(kept.version, f"kept as {kept.name}", kept.version) for kept in named]
    for host, mark in watermarks(lineage.store, grace_seconds=grace_seconds).items():
        first = min(mark, head)
        wanted += [Wanted(version, f"host {host} may fetch it", first) for version in range(first, head + 1)]
    return wanted


def what_is_kept(stock: Stock, wanted: Sequence[Wanted]) -> Keeping:
    """The forms that wanted versions need. One to which no whole way leads any more is not kept: it is lost already;
    but if only damaged anchors are in its way, what it would need stays, and so do they."""
    starts = way_starts(stock)
    edges = [0] * (stock.head + 2)  # +1 where a stretch of needed deltas begins, -1 behind its end
    needed: set[Form] = set()
    reasons: dict[int, tuple[str, ...]] = {}
    for version, why, since in ((w.version, w.why, w.since) for w in wanted):
        start = starts[version]
        if start is None:
            continue
        if start == 0 or start not in stock.damaged:
            reasons[version] = (*reasons.get(version, ()), why)
        if start in stock.anchors:
            needed.add(Form(start, True))
        needed.update(Form(damaged, True) for damaged in stock.damaged if start <= damaged <= version)
        edges[min(start, since) + 1] += 1
        edges[version + 1] -= 1
    stretches = 0
    for version in range(1, stock.head + 1):
        stretches += edges[version]
        if stretches and stock.stands(Form(version, False)):
            needed.add(Form(version, False))
    return Keeping(reasons, frozenset(needed))


def way_starts(stock: Stock) -> list[int | None]:
    """For each version where its way begins: the newest anchor at or below it that stands whole, else the base (0),
    else a damaged anchor that no whole delta leads past; None when a delta in between is gone."""
    starts: list[int | None] = []
    for version in range(stock.head + 1):
        anchor, delta = Form(version, True), Form(version, False)
        stands = version in stock.anchors and stock.stands(anchor) and anchor in stock.shards
        if stands and version not in stock.damaged:
            starts.append(version)
        elif version == 0:
            starts.append(0)
        else:
            start = starts[-1] if stock.stands(delta) else None
            starts.append(version if start is None and version in stock.damaged else start)
    return starts


def _is_whole(lineage: Lineage, form: Form, listed: Mapping[str, int]) -> bool:
    """Whether all shards that a marked form's manifest names are there."""
    try:
        manifest = lineage.anchor(form.version) if form.is_anchor else lineage.manifest(form.version)
    except (ManifestCorrupt, VersionUnknown):
        return False
    return all(shard.name in listed for shard in manifest.shards)


def watermarks(store: Store, *, grace_seconds: float) -> dict[str, int]:
    """For each live host the oldest version that it may patch, by its records: what it served before what it serves.

    Live is a host that wrote a record in the last `grace_seconds`, by the store's own time. A record that cannot be
    read makes its host hold everything, rather than nothing.
    """
    now = store_now_ns(store)
    found = {}
    for host in record_hosts(store):
        infos = sorted(store.list(f"hosts/{host}"), key=lambda info: info.modified_ns, reverse=True)
        if infos and (now - infos[0].modified_ns) / 1e9 <= grace_seconds:
            own = list(_own(store, infos[:_LOOKED_AT]))
            if own:
                found[host] = max(0, min(own))
    return found


def _own(store: Store, newest: Iterable[ObjectInfo]) -> Iterator[int]:
    """What a host's newest records say that it holds, back to the last one that served."""
    for info in newest:
        if head_of(info.key) < 0:
            continue
        try:
            record = read_record(store, info.key)
        except CorruptData:
            yield 0
            return
        if record.by != "rollout":
            yield _oldest_held(record)
            if record.outcome == SERVED:
                return


def _oldest_held(record: HostRecord) -> int:
    return record.from_version if record.outcome != SERVED else min(record.version, max(record.from_version, 0))
