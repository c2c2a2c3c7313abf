"""Garbage collection: marks what nobody needs, looks once more what is kept, and deletes its shards; never a manifest.
May be cut short or run beside anything at any moment: the next one finishes it."""

import uuid
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import structlog

from weighbridge.errors import CorruptData, ManifestCorrupt, StoreError, VersionUnknown, what_happened
from weighbridge.storage.anchor import list_anchor
from weighbridge.storage.clock import Clock
from weighbridge.storage.commit import put_if_absent
from weighbridge.storage.leftovers import collect, find_leftovers
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.manifest import anchor_hint_key, retired_key, shard_key
from weighbridge.storage.retention import (
    GRACE_SECONDS,
    Form,
    GcPlan,
    Stock,
    plan_gc,
    take_stock,
)
from weighbridge.storage.sealed_json import seal
from weighbridge.values import Manifest

log = structlog.get_logger("weighbridge.retention")


@dataclass(slots=True)
class GcResult:
    """What a collection did: `collected` are the forms whose shards are all gone now. `failures` say what could not be
    marked or deleted, in words; the next one tries it again.

    `spared` were marked and are needed after all, since somebody named a version meanwhile.
    """

    plan: GcPlan
    deleted_objects: int = 0
    deleted_bytes: int = 0
    leftovers: int = 0
    collected: list[Form] = field(default_factory=list)
    spared: list[Form] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def demand(self) -> None:
        """Raises CorruptData when an anchor is damaged, StoreError when the store failed; what went, went."""
        if not self.failures:
            return
        kind = StoreError if len(self.failures) > len(self.plan.damaged) else CorruptData
        undone = "1 thing" if len(self.failures) == 1 else f"{len(self.failures)} things"
        raise kind(f"gc left {undone} undone, and named it all. What is kept can be rebuilt; the next gc tries again.")


def run_gc(lineage: Lineage, *, keep: int, clock: Clock, grace_seconds: float = GRACE_SECONDS) -> GcResult:
    """Collects what `plan_gc` lets go, and what dead attempts left. Failures of single objects are told, not raised.

    Raises like `plan_gc`; whatever happens, every version that is kept can be rebuilt.
    """
    proofs: dict[int, str | None] = {}
    stock = take_stock(lineage)
    plan = plan_gc(lineage, keep=keep, grace_seconds=grace_seconds, stock=stock, proofs=proofs)
    result = GcResult(plan)
    work = _Collection(lineage, clock, result)
    work.distrust(plan.damaged)
    fresh = set(plan.marks)
    due = [form for form in plan.forms if form not in fresh or work.mark(form)]
    needed = frozenset[Form]()
    if due:
        # What is needed by names and hosts as they are once the marks stand. `kept.keep` looks for marks after its name
        # stands, so of one who names a version and one who collects it, one sees the other. Versions need no second
        # listing: what was published since stands on the head, which is kept, and what we marked still stands whole.
        now = plan_gc(lineage, keep=keep, grace_seconds=grace_seconds, stock=stock, proofs=proofs)
        needed = now.keeping.needed
        work.distrust(now.damaged)
    for form in due:
        if form in needed:
            result.spared.append(form)
            log.warning("spared, since somebody needs it after all", what=str(form))
        elif work.delete(form):
            result.collected.append(form)
    work.sweep(stock, grace_seconds)
    work.list_anchors(stock, gone={form for form in due if form not in needed})
    log.info(
        "gc done",
        kept=len(plan.keeping.reasons),
        collected=len(result.collected),
        deleted_bytes=result.deleted_bytes,
        leftovers=result.leftovers,
        failures=len(result.failures),
    )
    return result


def distrusted(version: int, flaw: str) -> str:
    """What a person is told of a damaged anchor."""
    return (
        f"the anchor of version {version} is damaged: {what_happened(flaw)}. Nothing was let go for its sake; make an "
        "anchor of a newer version (`weighbridge anchor`)"
    )


class _Collection:
    def __init__(self, lineage: Lineage, clock: Clock, result: GcResult) -> None:
        self._lineage, self._clock, self._result = lineage, clock, result
        self._by = uuid.uuid4().hex
        self._distrusted: set[int] = set()

    def distrust(self, damaged: Mapping[int, str]) -> None:
        """Says which anchors are damaged, each once."""
        for version in sorted(damaged.keys() - self._distrusted):
            self._distrusted.add(version)
            self._failed(distrusted(version, damaged[version]))

    def mark(self, form: Form) -> bool:
        """Writes the mark of a form; whether its shards may go now."""
        try:
            manifest = self._manifest(form)
            if not manifest.shards:  # an empty version: what is listed there is a dead attempt's
                return False
            data = seal({"by": self._by, "created_ns": self._clock.now_ns()})
            put_if_absent(self._lineage.store, retired_key(manifest), data, clock=self._clock)
        except (StoreError, ManifestCorrupt, VersionUnknown) as error:
            self._failed(f"{form} was not marked: {what_happened(error)}")
            return False
        return True

    def delete(self, form: Form) -> bool:
        """Deletes the shards that a form's manifest names, and nothing else; whether all of them are gone."""
        try:
            manifest = self._manifest(form)
        except (StoreError, ManifestCorrupt, VersionUnknown) as error:
            self._failed(f"{form} was not collected: {what_happened(error)}")
            return False
        self._lineage.forget_shards(manifest)
        gone = [self._delete(shard_key(form.version, shard), shard.nbytes) for shard in manifest.shards]
        if form.is_anchor:
            gone.append(self._delete(anchor_hint_key(form.version), 0))
        return all(gone)

    def sweep(self, stock: Stock, grace_seconds: float) -> None:
        """Removes what dead attempts left."""
        store, listed = self._lineage.store, stock.listed
        try:
            for leftover in find_leftovers(store, self._lineage, grace_seconds=grace_seconds, listed=listed):
                collect(self._lineage.store, leftover)
                self._result.leftovers += 1
                self._result.deleted_bytes += leftover.nbytes
        except StoreError as error:
            self._failed(f"leftovers were not all removed: {what_happened(error)}")

    def list_anchors(self, stock: Stock, *, gone: Set[Form]) -> None:
        """Lists the anchors that stand and that their makers could not list any more."""
        try:
            for version in sorted(stock.anchors - set(self._lineage.anchors())):
                form = Form(version, True)
                if stock.stands(form) and form not in gone:
                    list_anchor(self._lineage, self._lineage.anchor(version), self._clock)
        except (StoreError, ManifestCorrupt) as error:
            self._failed(f"anchors were not all listed: {what_happened(error)}")

    def _manifest(self, form: Form) -> Manifest:
        return self._lineage.anchor(form.version) if form.is_anchor else self._lineage.manifest(form.version)

    def _delete(self, key: str, nbytes: int) -> bool:
        try:
            self._lineage.store.delete(key)
        except StoreError as error:
            self._failed(f"{key} was not deleted: {what_happened(error)}")
            return False
        self._result.deleted_objects += 1
        self._result.deleted_bytes += nbytes
        return True

    def _failed(self, what: str) -> None:
        log.warning("gc goes on", failure=what)
        self._result.failures.append(what)
