"""Garbage collection: marks what nobody needs, looks once more what is kept, and deletes its shards; never a manifest.
May be cut short or run beside anything at any moment: the next one finishes it."""

import uuid
from dataclasses import dataclass, field

import structlog

from weighbridge.errors import ManifestCorrupt, StoreError, VersionUnknown
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
    plan_gc,
    take_stock,
)
from weighbridge.storage.sealed_json import seal
from weighbridge.values import Manifest

log = structlog.get_logger("weighbridge.retention")


@dataclass(slots=True)
class GcResult:
    """What a collection did. `failures` say what could not be deleted, in words; the next one tries it again.

    `spared` were marked and are needed after all, since somebody named a version meanwhile.
    """

    plan: GcPlan
    deleted_objects: int = 0
    deleted_bytes: int = 0
    leftovers: int = 0
    spared: list[Form] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def collected(self) -> tuple[Form, ...]:
        """What was let go: all that the plan named, but what was spared."""
        return tuple(form for form in self.plan.forms if form not in self.spared)


def run_gc(lineage: Lineage, *, keep: int, clock: Clock, grace_seconds: float = GRACE_SECONDS) -> GcResult:
    """Collects what `plan_gc` lets go, and what dead attempts left. Failures of single objects are told, not raised.

    Raises like `plan_gc`; whatever happens, every version that is kept can be rebuilt.
    """
    proofs: dict[int, str | None] = {}
    plan = plan_gc(lineage, keep=keep, grace_seconds=grace_seconds, proofs=proofs)
    result = GcResult(plan)
    work = _Collection(lineage, clock, result)
    work.distrust(plan)
    fresh = set(plan.marks)
    due = [form for form in plan.forms if form not in fresh or work.mark(form)]
    needed = frozenset[Form]()
    if due:
        # What is needed by names and hosts as they are once the marks stand. `kept.keep` looks for marks after its name
        # stands, so of one who names a version and one who collects it, one sees the other.
        now = plan_gc(lineage, keep=keep, grace_seconds=grace_seconds, proofs=proofs)
        needed = now.keeping.needed
        work.distrust(now)
    for form in due:
        if form in needed:
            result.spared.append(form)
            log.warning("spared, since somebody needs it after all", what=str(form))
        else:
            work.delete(form)
    work.sweep(grace_seconds)
    work.list_anchors()
    log.info(
        "gc done",
        kept=len(plan.keeping.reasons),
        collected=len(due) - len(result.spared),
        deleted_bytes=result.deleted_bytes,
        leftovers=result.leftovers,
        failures=len(result.failures),
    )
    return result


def distrusted(version: int, flaw: str) -> str:
    """What a person is told of a damaged anchor."""
    return (
        f"the anchor of version {version} is damaged: {flaw.rstrip('.')}. Nothing was let go for its sake; make an "
        "anchor of a newer version (`weighbridge anchor`)"
    )


class _Collection:
    def __init__(self, lineage: Lineage, clock: Clock, result: GcResult) -> None:
        self._lineage, self._clock, self._result = lineage, clock, result
        self._by = uuid.uuid4().hex
        self._distrusted: set[int] = set()

    def distrust(self, plan: GcPlan) -> None:
        """Says which anchors are damaged, each once."""
        for version in sorted(plan.damaged.keys() - self._distrusted):
            self._distrusted.add(version)
            self._failed(distrusted(version, plan.damaged[version]))

    def mark(self, form: Form) -> bool:
        """Writes the mark of a form; whether its shards may go now."""
        try:
            manifest = self._manifest(form)
            if not manifest.shards:  # an empty version: what is listed there is a dead attempt's
                return False
            data = seal({"by": self._by, "created_ns": self._clock.now_ns()})
            put_if_absent(self._lineage.store, retired_key(manifest), data, clock=self._clock)
        except (StoreError, ManifestCorrupt, VersionUnknown) as error:
            self._failed(f"{form} was not marked: {error}")
            return False
        return True

    def delete(self, form: Form) -> None:
        """Deletes the shards that a form's manifest names, and nothing else."""
        try:
            manifest = self._manifest(form)
        except (StoreError, ManifestCorrupt, VersionUnknown) as error:
            self._failed(f"{form} was not collected: {error}")
            return
        self._lineage.forget_shards(manifest)
        for shard in manifest.shards:
            self._delete(shard_key(form.version, shard), shard.nbytes)
        if form.is_anchor:
            self._delete(anchor_hint_key(form.version), 0)

    def sweep(self, grace_seconds: float) -> None:
        """Removes what dead attempts left."""
        try:
            for leftover in find_leftovers(self._lineage.store, self._lineage, grace_seconds=grace_seconds):
                collect(self._lineage.store, leftover)
                self._result.leftovers += 1
                self._result.deleted_bytes += leftover.nbytes
        except StoreError as error:
            self._failed(f"leftovers were not all removed: {error}")

    def list_anchors(self) -> None:
        """Lists the anchors that stand and that their makers could not list any more."""
        try:
            stock, listed = take_stock(self._lineage), set(self._lineage.anchors())
            for version in sorted(stock.anchors - listed):
                if stock.stands(Form(version, True)):
                    list_anchor(self._lineage, self._lineage.anchor(version), self._clock)
        except (StoreError, ManifestCorrupt) as error:
            self._failed(f"anchors were not all listed: {error}")

    def _manifest(self, form: Form) -> Manifest:
        return self._lineage.anchor(form.version) if form.is_anchor else self._lineage.manifest(form.version)

    def _delete(self, key: str, nbytes: int) -> None:
        try:
            self._lineage.store.delete(key)
        except StoreError as error:
            self._failed(f"{key} was not deleted: {error}")
            return
        self._result.deleted_objects += 1
        self._result.deleted_bytes += nbytes

    def _failed(self, what: str) -> None:
        log.warning("gc goes on", failure=what)
        self._result.failures.append(what)
