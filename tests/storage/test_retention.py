"""Retention: what is kept can be rebuilt after any collection, whatever fails or comes in between; manifests stay."""

import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.faults.faulty_store import Fault, FaultyStore, Killed
from tests.faults.virtual_clock import VirtualClock
from tests.replica.runs import SmallRun, flip, versions_in
from tests.storage.test_records import record as some_record

from weighbridge.errors import CorruptData, LineageError, StoreError, UsageError, VersionRetired, VersionUnknown
from weighbridge.storage.anchor_sources import anchor_from_store
from weighbridge.storage.audit.audit import audit
from weighbridge.storage.checkout import checkout
from weighbridge.storage.gc import GcResult, run_gc
from weighbridge.storage.kept import keep, kept_names, release
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.manifest import anchor_key, manifest_key, shard_key
from weighbridge.storage.records import record_key, write_record
from weighbridge.storage.replica import bring_up, open_replica
from weighbridge.storage.retention import plan_gc, watermarks
from weighbridge.storage.stores.contract import ObjectInfo, Store

DAY = 86_400.0


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    """Ten versions; 1, 4, 7 and 10 are empty."""
    run = SmallRun(tmp_path / "run")
    for version in range(10):
        run.push("mask", changed=3) if version % 3 else run.push_nothing()
    return run


def anchor(run: SmallRun, tmp_path: Path, *versions: int) -> None:
    for version in versions:
        anchor_from_store(Lineage(run.store), version, base=run.base, spool=tmp_path / "anchoring")


def gc(run: SmallRun, *, keep: int = 3, store: Store | None = None, grace_seconds: float = DAY) -> GcResult:
    return run_gc(Lineage(store or run.store), keep=keep, clock=VirtualClock(), grace_seconds=grace_seconds)


def rebuildable(run: SmallRun, tmp_path: Path, asked: Iterable[int] | None = None) -> set[int]:
    """The versions (all, or those asked for) that can be rebuilt, each shown to be so byte for byte."""
    found = set()
    for version in range(run.head + 1) if asked is None else asked:
        out = tmp_path / f"out-{version}-{time.monotonic_ns()}"
        try:
            checkout(
                version, out, lineage=Lineage(run.store), base=run.base, disk=LocalDisk("process"), clock=VirtualClock()
            )
        except VersionRetired:
            assert not out.exists()
            continue
        assert version in versions_in(run, out)
        found.add(version)
    return found


def shards_of(run: SmallRun) -> set[str]:
    return {info.key for info in run.store.list("versions") if info.key.endswith(".safetensors")}


def host_record(
    run: SmallRun, host: str, version: int, from_version: int, *, days_ago: float = 0, **changes: object
) -> None:
    record = replace(
        some_record(), run_id="run-1", host=host, version=version, from_version=from_version, head=run.head,
        state_digest=run.lineage.manifest(version).state_digest, **changes,  # type: ignore[arg-type]
    )  # fmt: skip
    write_record(run.store, record)
    then = time.time() - days_ago * DAY
    os.utime(Path(run.store.url) / record_key(record), (then, then))


def test_without_an_anchor_nothing_may_go(run: SmallRun, tmp_path: Path) -> None:
    result = gc(run, keep=1)
    assert result.plan.forms == () and rebuildable(run, tmp_path) == set(range(11))


def test_the_last_versions_and_their_whole_ways_stay_and_all_manifests(run: SmallRun, tmp_path: Path) -> None:
    anchor(run, tmp_path, 2, 6, 9)
    plan = plan_gc(run.lineage, keep=3)
    before = shards_of(run)
    assert shards_of(run) == before, "a plan changes nothing"
    result = gc(run, keep=3)
    assert result.plan == plan and result.failures == [] and result.spared == []
    assert before - shards_of(run) and result.deleted_objects == len(before - shards_of(run)) + 1  # and a hint
    assert rebuildable(run, tmp_path) == {0, 1, 6, 7, 8, 9, 10}
    assert run.lineage.anchors() == (6, 9)
    assert {manifest_key(v) for v in range(11)} <= {info.key for info in run.store.list("versions")}
    assert audit(run.store).ok
    again = gc(run, keep=3)
    assert again.plan.forms == () and again.deleted_objects == 0


def damage(run: SmallRun, version: int, how: str) -> str:
    """Damages an anchor; what is damaged."""
    root, shard = Path(run.store.url), Lineage(run.store).anchor(version).shards[0]
    key = anchor_key(version) if how == "manifest" else shard_key(version, shard)
    if how == "missing":
        (root / key).unlink()
    elif how == "short":
        (root / key).write_bytes((root / key).read_bytes()[:-1])
    else:
        flip(root / key, (root / key).stat().st_size // 2)
    return key


@pytest.mark.parametrize("how", ["manifest", "missing", "short", "flipped"])
def test_nothing_goes_for_the_sake_of_a_damaged_anchor_and_it_is_named(run: SmallRun, tmp_path: Path, how: str) -> None:
    anchor(run, tmp_path, 3, 9)
    key = damage(run, 9, how)
    before = shards_of(run)
    plan = plan_gc(run.lineage, keep=2)
    assert shards_of(run) == before and key in plan.damaged[9]
    result = gc(run, keep=2)
    assert [key in failure for failure in result.failures] == [True], result.failures
    assert set(result.plan.keeping.reasons) == {9, 10} == {9, 10} & rebuildable(run, tmp_path)
    assert {5, 6, 8, 9} <= {form.version for form in result.plan.keeping.needed}
    assert not any(info.key.endswith("9/anchor-retired") for info in run.store.list("versions"))


@pytest.mark.parametrize("how", ["manifest", "missing", "flipped"])
def test_what_a_damaged_anchor_would_need_stays_even_when_no_other_way_is_left(
    run: SmallRun, tmp_path: Path, how: str
) -> None:
    anchor(run, tmp_path, 6)
    gc(run, keep=3)
    damage(run, 6, how)
    before = shards_of(run)
    assert gc(run, keep=3).deleted_objects == 0 and shards_of(run) == before


def test_an_anchor_is_read_only_when_something_goes_for_its_sake_and_once(run: SmallRun, tmp_path: Path) -> None:
    anchor(run, tmp_path, 6, 9)
    store = FaultyStore(run.store)
    gc(run, keep=3, store=store)
    read = [call[1] for call in store.calls if call[0] == "get_range"]
    assert len(read) == len(set(read)) > 0
    store.calls.clear()
    gc(run, keep=3, store=store)
    assert [call for call in store.calls if call[0] == "get_range"] == []


def test_named_versions_stay_until_they_are_released(run: SmallRun, tmp_path: Path) -> None:
    anchor(run, tmp_path, 2, 6, 9)
    keep(run.lineage, 4, "best", clock=VirtualClock())
    keep(run.lineage, 4, "best", clock=VirtualClock())
    with pytest.raises(UsageError, match="keeps version 4 already"):
        keep(run.lineage, 5, "best", clock=VirtualClock())
    with pytest.raises(VersionUnknown):
        keep(run.lineage, 11, "future", clock=VirtualClock())
    gc(run, keep=1)
    assert rebuildable(run, tmp_path) == {0, 1, 2, 3, 4, 9, 10}
    assert [(k.name, k.version) for k in kept_names(run.store)] == [("best", 4)]
    with pytest.raises(VersionRetired, match="cannot be kept"):
        keep(run.lineage, 8, "late", clock=VirtualClock())
    release(run.store, "best")
    with pytest.raises(LineageError, match="keeps nothing"):
        release(run.store, "best")
    gc(run, keep=1)
    assert rebuildable(run, tmp_path) == {0, 1, 9, 10}


def test_a_name_that_cannot_be_read_stops_the_collection(run: SmallRun, tmp_path: Path) -> None:
    anchor(run, tmp_path, 9)
    run.store.put("kept/best", b'{"name": "best", "version": 4}')
    before = shards_of(run)
    with pytest.raises(CorruptData, match="Nothing was collected"):
        gc(run, keep=1)
    assert shards_of(run) == before


def test_what_a_live_host_may_still_fetch_stays_and_a_host_that_is_gone_holds_nothing(
    run: SmallRun, tmp_path: Path
) -> None:
    anchor(run, tmp_path, 2, 6, 9)
    host_record(run, "alive", 7, 4)
    host_record(run, "gone", 2, 1, days_ago=2)
    host_record(run, "missed", 10, -1, outcome="missed", by="rollout")
    assert watermarks(run.store, grace_seconds=DAY) == {"alive": 4}
    replica = tmp_path / "replica"
    bring_up(replica, store=run.store, base=run.base, version=4)
    gc(run, keep=1)
    assert rebuildable(run, tmp_path) == set(range(11))
    store = FaultyStore(run.store)
    bring_up(replica, store=store, base=None)
    assert not [call for call in store.calls if call[0] == "get_range" and "/anchor-" in call[1]]
    assert versions_in(run, replica / "current") == {9, 10}


def test_a_failing_host_holds_what_it_serves_and_an_unreadable_record_everything(run: SmallRun, tmp_path: Path) -> None:
    host_record(run, "red", 5, 3, days_ago=3)
    host_record(run, "red", 8, 5, outcome="failed", attempt="ab" * 16)
    assert watermarks(run.store, grace_seconds=DAY) == {"red": 3}
    host_record(run, "torn", 5, 4)
    torn = next(Path(run.store.url, "hosts", "torn").iterdir())
    torn.write_bytes(b"{")
    assert watermarks(run.store, grace_seconds=DAY)["torn"] == 0


def test_a_collection_that_dies_at_any_store_call_is_finished_by_the_next(run: SmallRun, tmp_path: Path) -> None:
    anchor(run, tmp_path, 6, 9)
    calls = 0
    while True:
        try:
            gc(run, keep=3, store=FaultyStore(run.store, Fault("*", "kill before", skip=calls, times=1 << 30)))
            break
        except Killed:
            calls += 1
        if calls % 16 == 0:
            assert rebuildable(run, tmp_path, range(6, 11)) == set(range(6, 11))
    assert calls > 20
    assert rebuildable(run, tmp_path) == {0, 1, 6, 7, 8, 9, 10}
    assert gc(run, keep=3).plan.forms == () and audit(run.store).ok


def test_what_cannot_be_deleted_is_told_and_goes_the_next_time(run: SmallRun, tmp_path: Path) -> None:
    anchor(run, tmp_path, 9)
    store = FaultyStore(
        run.store, Fault("delete", "denied", key="*000000000002/*"), Fault("create", "full", key="*5/retired")
    )
    result = gc(run, keep=1, store=store)
    assert len(result.failures) == 2
    assert [form.version for form in result.collected] == [3, 6, 8, 9], "neither the one in part nor the unmarked one"
    with pytest.raises(StoreError, match="2 things undone"):
        result.demand()
    assert gc(run, keep=1).failures == [] and gc(run, keep=1).plan.forms == ()
    assert {int(key.split("/")[1]) for key in shards_of(run)} == {0, 9}, "small files, and the anchor"


def test_versions_are_listed_once_a_collection(run: SmallRun, tmp_path: Path) -> None:
    anchor(run, tmp_path, 6, 9)
    store = FaultyStore(run.store)
    assert gc(run, keep=1, store=store).collected
    assert [key for verb, key in store.calls if verb == "list" and key in ("", "versions")] == ["versions"]


def test_a_plan_says_what_stays_only_to_lead_to_a_kept_version(run: SmallRun, tmp_path: Path) -> None:
    anchor(run, tmp_path, 6, 9)
    keep(run.lineage, 8, "best", clock=VirtualClock())
    ways = {str(form): version for form, version in plan_gc(run.lineage, keep=1).keeping.ways.items()}
    assert ways == {"anchor of version 6": 8, "version 7": 8, "anchor of version 9": 10}


class Meanwhile(FaultyStore):
    """Somebody does something just before the first mark is written, or just after."""

    def __init__(self, run: SmallRun, before: bool, action: object) -> None:
        super().__init__(run.store)
        self._before, self._action = before, action

    def create(self, key: str, data: bytes) -> None:
        if not self._before:
            super().create(key, data)
        if key.endswith("retired") and self._action is not None:
            action, self._action = self._action, None
            action()  # type: ignore[operator]
        if self._before:
            super().create(key, data)


def test_a_version_that_is_named_while_it_is_marked_is_spared_or_not_kept_but_never_half(
    run: SmallRun, tmp_path: Path
) -> None:
    anchor(run, tmp_path, 9)

    def name_it() -> None:
        keep(Lineage(run.store), 4, "best", clock=VirtualClock())

    result = gc(run, keep=1, store=Meanwhile(run, True, name_it))
    assert [str(form) for form in result.spared] == ["version 2", "version 3"]
    assert 4 in rebuildable(run, tmp_path)
    gc(run, keep=1)
    assert 4 in rebuildable(run, tmp_path), "a mark whose shards were spared says nothing to the next collection"
    release(run.store, "best")
    gc(run, keep=1)
    assert rebuildable(run, tmp_path) == {0, 1, 9, 10}


def test_who_names_a_version_after_its_mark_is_told_that_it_is_not_kept(run: SmallRun, tmp_path: Path) -> None:
    anchor(run, tmp_path, 9)

    def name_it() -> None:
        with pytest.raises(VersionRetired, match="Nothing was kept"):
            keep(Lineage(run.store), 4, "best", clock=VirtualClock())

    assert gc(run, keep=1, store=Meanwhile(run, False, name_it)).spared == []
    assert kept_names(run.store) == []


def test_a_host_that_loses_the_race_goes_round_by_an_anchor_and_one_that_asks_for_what_is_gone_is_told(
    run: SmallRun, tmp_path: Path
) -> None:
    replica = tmp_path / "replica"
    bring_up(replica, store=run.store, base=run.base, version=1)

    lock = threading.Lock()

    class Racing(FaultyStore):
        def get_range(self, key: str, start: int, length: int) -> bytes:
            with lock:
                if not run.lineage.anchors():
                    anchor(run, tmp_path, 9)
                    gc(run, keep=1)
            return super().get_range(key, start, length)

    bring_up(replica, store=Racing(run.store), base=run.base)
    assert versions_in(run, replica / "current") == {9, 10}
    with open_replica(replica, store=run.store, base=run.base) as owned, pytest.raises(VersionRetired, match="ask for"):
        owned.plan_and_fetch(5, rollback=True)


def test_a_trainer_that_publishes_meanwhile_loses_nothing(run: SmallRun, tmp_path: Path) -> None:
    anchor(run, tmp_path, 9)
    pushed: list[int] = []

    class Busy(FaultyStore):
        def delete(self, key: str) -> None:
            if len(pushed) < 3:
                pushed.append(run.push("mask"))
            super().delete(key)

    gc(run, keep=1, store=Busy(run.store))
    assert {9, 10, *pushed} <= rebuildable(run, tmp_path)


def test_the_stores_clock_alone_says_who_is_alive(run: SmallRun) -> None:
    class Ahead(FaultyStore):
        """A store two days ahead of this machine."""

        def list(self, prefix: str) -> Iterator[ObjectInfo]:
            for info in super().list(prefix):
                yield replace(info, modified_ns=info.modified_ns + int(2 * DAY * 1e9))

    host_record(run, "alive", 7, 4)
    assert watermarks(Ahead(run.store), grace_seconds=DAY) == {"alive": 4}


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_after_any_collection_every_kept_version_is_rebuilt_bit_for_bit(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Versions, anchors, names, hosts and collections in any order, some of which lose replies or deletes."""
    tmp_path = tmp_path_factory.mktemp("any")
    run = SmallRun(tmp_path / "run")
    for step in range(data.draw(st.integers(4, 10))):
        deed = data.draw(st.sampled_from(["push", "push", "empty", "anchor", "keep", "release", "host", "gc"]))
        some = data.draw(st.integers(0, run.head))
        if deed == "push":
            run.push("mask", changed=2)
        elif deed == "empty":
            run.push_nothing()
        elif deed == "host":
            host_record(run, f"host-{some % 2}", run.head, some, attempt=f"{step:032x}")
        elif deed == "release" and (names := kept_names(run.store)):
            release(run.store, names[0].name)
        elif deed == "gc":
            fault = data.draw(st.sampled_from(["lose", "before", "denied"]))
            verb = data.draw(st.sampled_from(["delete", "create"]))
            store = FaultyStore(run.store, Fault(verb, fault, key="versions/*", skip=data.draw(st.integers(0, 4))))
            result = gc(run, keep=data.draw(st.integers(1, 3)), store=store)
            assert set(result.plan.keeping.reasons) == rebuildable(run, tmp_path, result.plan.keeping.reasons)
        elif deed in ("anchor", "keep"):
            try:
                anchor(run, tmp_path, some) if deed == "anchor" else keep(
                    Lineage(run.store), some, f"n{step}", clock=VirtualClock()
                )
            except VersionRetired:
                continue
    kept = {k.version for k in kept_names(run.store)} | {run.head}
    result = gc(run, keep=1)
    assert kept <= set(result.plan.keeping.reasons)
    assert set(result.plan.keeping.reasons) == rebuildable(run, tmp_path, result.plan.keeping.reasons)
    assert audit(run.store).ok
