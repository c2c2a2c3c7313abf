"""Anchors: a second form of a version, proven, made by anybody at any time, taken only by those who are far behind."""

from pathlib import Path

import pytest
from tests.faults.faulty_store import Fault, FaultyStore, Killed
from tests.faults.virtual_clock import VirtualClock
from tests.replica.runs import SHAPES, SmallRun, flip, tensors_of, versions_in

from weighbridge.errors import DigestMismatch, ManifestCorrupt, ReplicaError, ShardCorrupt, StoreError, VersionRetired
from weighbridge.storage.anchor import is_due, make_anchor
from weighbridge.storage.anchor_sources import anchor_from_folder, anchor_from_store, held_version
from weighbridge.storage.audit.audit import audit
from weighbridge.storage.checkout import checkout
from weighbridge.storage.leftovers import find_leftovers
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.manifest import anchor_key, retired_key, shard_key
from weighbridge.storage.replica import bring_up, open_replica, verify_folder
from weighbridge.values import Manifest, PartKey


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    """A run of six versions, one of them empty."""
    run = SmallRun(tmp_path / "run")
    for _ in range(3):
        run.push()
    run.push_nothing()
    run.push("mask")
    run.push(changed=900)
    return run


def anchor(run: SmallRun, tmp_path: Path, version: int, *, base: bool = True) -> Manifest:
    spool = tmp_path / "anchor-spool"
    made = anchor_from_store(run.lineage, version, base=run.base if base else None, spool=spool)
    assert [p for p in spool.rglob("*") if p.is_file()] == []
    return made


def collect(run: SmallRun, manifest: Manifest) -> None:
    """What gc does to a version's delta, or to an anchor."""
    run.store.create(retired_key(manifest), b"{}")
    for shard in manifest.shards:
        run.store.delete(shard_key(manifest.version, shard))


def anchor_bytes_read(store: FaultyStore) -> list[str]:
    return [call[1] for call in store.calls if call[0] == "get_range" and "/anchor-" in call[1]]


@pytest.mark.parametrize("version", [0, 1, 4, 6])
def test_from_an_anchor_on_every_version_is_rebuilt_bit_for_bit_without_the_base(
    run: SmallRun, tmp_path: Path, version: int
) -> None:
    made = anchor(run, tmp_path, version)
    assert made.state_digest == run.lineage.manifest(version).state_digest
    assert {row.codec for row in made.rows} == {"full"} and len(made.rows) == len(SHAPES)
    for later in range(version, 7):
        out = tmp_path / f"out-{later}"
        checkout(later, out, lineage=Lineage(run.store), base=None)
        assert later in versions_in(run, out)
        assert (out / "tokenizer" / "vocab.txt").read_text() == "a b c"
    if version:
        with pytest.raises(ReplicaError, match="base folder"):
            checkout(version - 1, tmp_path / "no", lineage=Lineage(run.store), base=None)


def test_an_anchor_is_made_from_an_older_anchor_when_deltas_before_it_are_gone(run: SmallRun, tmp_path: Path) -> None:
    anchor(run, tmp_path, 2)
    for version in (1, 2):
        collect(run, run.lineage.manifest(version))
    made = anchor(run, tmp_path, 6, base=False)
    assert made.version == 6
    assert run.lineage.anchors() == (2, 6)
    with pytest.raises(VersionRetired):
        anchor(run, tmp_path, 1)


def test_a_running_hosts_replica_is_source_enough_and_another_version_is_refused(run: SmallRun, tmp_path: Path) -> None:
    replica = tmp_path / "replica"
    with open_replica(replica, store=run.store, base=run.base) as owned:
        owned.apply(owned.plan_and_fetch(3))
        owned.switch()
        held = held_version(replica)
        assert held is not None and held[0] == 3
        anchor_from_folder(run.lineage, 3, held[1], spool=tmp_path / "spool")
        before = {info.key for info in run.store.list("")}
        with pytest.raises(DigestMismatch, match="not the bytes of version 6"):
            anchor_from_folder(run.lineage, 6, held[1], spool=tmp_path / "spool")
    assert {info.key for info in run.store.list("")} == before
    checkout(3, tmp_path / "out", lineage=Lineage(run.store), base=None)
    assert versions_in(run, tmp_path / "out") == {3, 4}


def test_a_maker_that_dies_at_any_store_call_leaves_nothing_that_readers_see_and_the_next_one_makes_it(
    run: SmallRun, tmp_path: Path
) -> None:
    calls = 0
    while True:
        store = FaultyStore(run.store, Fault("*", "kill before", skip=calls, times=1 << 30))
        dying = Lineage(store)
        try:
            anchor_from_store(dying, 6, base=run.base, spool=tmp_path / "spool")
            break
        except Killed:
            pass
        checkout(6, tmp_path / f"out-{calls}", lineage=Lineage(run.store), base=run.base)
        assert versions_in(run, tmp_path / f"out-{calls}") == {6}
        calls += 1
    assert calls > 10
    checkout(6, tmp_path / "out", lineage=Lineage(run.store), base=None)
    assert versions_in(run, tmp_path / "out") == {6}
    assert audit(run.store).ok and audit(run.store).anchors == 1
    orphans = list(find_leftovers(run.store, Lineage(run.store), grace_seconds=-1))
    assert orphans and all("/anchor-" in o.key or o.kind != "orphan shard" for o in orphans)
    anchor_id = run.lineage.anchor(6).commit_id
    assert not any(anchor_id in o.key for o in orphans)


def test_of_two_makers_one_anchor_stands_and_the_other_leaves_nothing(run: SmallRun, tmp_path: Path) -> None:
    class Slow(FaultyStore):
        def create(self, key: str, data: bytes) -> None:
            if key == anchor_key(6) and not run.lineage.anchors():
                anchor(run, tmp_path / "other", 6)
            super().create(key, data)

    made = anchor_from_store(Lineage(Slow(run.store)), 6, base=run.base, spool=tmp_path / "spool")
    standing = run.lineage.anchor(6)
    assert made == standing
    names = {info.key.rpartition("/")[2] for info in run.store.list("versions/000000000006") if "/anchor-" in info.key}
    assert names == {shard.name for shard in standing.shards}
    assert anchor(run, tmp_path, 6) == standing


def test_a_live_host_never_downloads_an_anchor_and_asks_for_none(run: SmallRun, tmp_path: Path) -> None:
    replica = tmp_path / "replica"
    bring_up(replica, store=run.store, base=run.base)
    anchor(run, tmp_path, 6)
    run.push("mask", changed=3)
    anchor(run, tmp_path, 7)
    store = FaultyStore(run.store)
    bring_up(replica, store=store, base=run.base)
    assert anchor_bytes_read(store) == []
    assert [call for call in store.calls if call[0] == "list" and call[1] == "anchors"] == []


@pytest.mark.parametrize("copies", [1, 2])
def test_a_replica_far_behind_takes_an_anchor_and_current_never_leads_to_a_version_on_the_way(
    run: SmallRun, tmp_path: Path, copies: int
) -> None:
    replica = tmp_path / "replica"
    bring_up(replica, store=run.store, base=run.base, version=1, copies=copies)
    for _ in range(4):
        run.push(changed=4000)  # heavier than an anchor
    anchor(run, tmp_path, 9)
    seen: set[int] = set()

    class Watching(LocalDisk):
        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            if (replica / "current").exists():
                seen.update(versions_in(run, replica / "current") or {-1})

    store = FaultyStore(run.store)
    result = bring_up(replica, store=store, base=run.base, copies=copies, disk=Watching())
    assert result.version == 10 and versions_in(run, replica / "current") == {10}
    assert anchor_bytes_read(store)
    assert seen <= {1, 10}
    assert verify_folder(replica, run.lineage).ok
    assert not list((replica / "spool").rglob("anchor-*")), "an anchor's shards weigh as much as the model"
    run.push("mask")
    run.push("mask")
    store.calls.clear()
    for _ in range(2):
        bring_up(replica, store=store, base=run.base, copies=copies)
    assert anchor_bytes_read(store) == [] and versions_in(run, replica / "current") == {12}


def test_a_fresh_replica_without_a_base_is_seeded_from_an_anchor_and_may_stay_at_an_older_version(
    run: SmallRun, tmp_path: Path
) -> None:
    anchor(run, tmp_path, 2)
    anchor(run, tmp_path, 5)
    result = bring_up(tmp_path / "new", store=run.store, base=None)
    assert (result.version, versions_in(run, tmp_path / "new" / "current")) == (6, {6})
    result = bring_up(tmp_path / "old", store=run.store, base=None, version=3)
    assert versions_in(run, tmp_path / "old" / "current") == {3, 4} and result.version == 3
    with pytest.raises(ReplicaError, match="no anchor up to version 1"):
        bring_up(tmp_path / "older", store=run.store, base=None, version=1)


def test_a_damaged_anchor_costs_a_detour_and_a_damaged_delta_is_passed_by_an_anchor(
    run: SmallRun, tmp_path: Path
) -> None:
    for _ in range(4):
        run.push(changed=4000)
    made = anchor(run, tmp_path, 9)
    root = Path(run.store.url)
    flip(root / shard_key(9, made.shards[0]), made.shards[0].nbytes - 1)
    bring_up(tmp_path / "a", store=run.store, base=run.base)
    assert versions_in(run, tmp_path / "a" / "current") == {10}

    flip(run.shard_path(2), run.shard_path(2).stat().st_size - 1)
    with pytest.raises(ShardCorrupt):
        bring_up(tmp_path / "b", store=run.store, base=run.base)
    anchor_from_folder(run.lineage, 5, _checked_out(run, tmp_path), spool=tmp_path / "spool")
    bring_up(tmp_path / "b", store=run.store, base=run.base)
    assert versions_in(run, tmp_path / "b" / "current") == {10}


def _checked_out(run: SmallRun, tmp_path: Path) -> Path:
    """Version 5 as a folder, from the test's own bytes."""
    shard = run.shard_path(2)
    flip(shard, shard.stat().st_size - 1)
    checkout(5, tmp_path / "five", lineage=Lineage(run.store), base=run.base)
    flip(shard, shard.stat().st_size - 1)
    assert versions_in(run, tmp_path / "five") == {5}
    return tmp_path / "five"


def test_a_part_is_made_again_from_the_one_shard_of_an_anchor_that_holds_it(run: SmallRun, tmp_path: Path) -> None:
    made = make_anchor(
        run.lineage, 6, _parts_of(run, 6), spool=tmp_path / "spool", disk=LocalDisk("process"),
        clock=VirtualClock(), shard_bytes=4000,
    )  # fmt: skip
    assert len(made.shards) > 2
    for version in (1, 2, 3, 5, 6):
        collect(run, run.lineage.manifest(version))
    run.push("mask")
    bring_up(tmp_path / "r", store=run.store, base=None, copies=1)
    path = next((tmp_path / "r" / "copies" / "a").glob("*.safetensors"))
    data = path.read_bytes()
    flip(path, data.index(run.versions[7]["embed.weight"].tobytes()) + 5)
    store = FaultyStore(run.store)
    with open_replica(tmp_path / "r", store=store, base=None, copies=1) as opened:
        assert (opened.recovery.how, opened.recovery.repaired) == ("repaired", 1)
    holding = next(row.shard for row in made.rows if row.key == PartKey("embed.weight", 0))
    assert set(anchor_bytes_read(store)) == {shard_key(6, made.shards[holding])}
    assert tensors_of(tmp_path / "r" / "current")["embed.weight"] == run.versions[7]["embed.weight"].tobytes()


def _parts_of(run: SmallRun, version: int):  # type: ignore[no-untyped-def]
    return lambda key: run.versions[version][key.tensor]


def test_an_anchor_pays_once_the_deltas_weigh_more_or_are_many(run: SmallRun, tmp_path: Path) -> None:
    assert not is_due(run.lineage, 0, every_versions=1)
    assert not is_due(run.lineage, 2) and is_due(run.lineage, 2, every_versions=2)
    assert not is_due(run.lineage, 2, every_versions=3)
    weight = anchor(run, tmp_path, 2).wire_bytes
    assert not is_due(run.lineage, 2, every_versions=1)
    total, version = sum(run.lineage.manifest(v).wire_bytes for v in range(3, 7)), 6
    while total <= weight:
        assert not is_due(run.lineage, version)
        version = run.push(changed=3000)
        total += run.lineage.manifest(version).wire_bytes
    assert is_due(run.lineage, version)


@pytest.mark.parametrize("how", ["manifest", "missing", "flipped"])
def test_an_anchor_that_stands_damaged_is_told_and_never_taken_for_made(
    run: SmallRun, tmp_path: Path, how: str
) -> None:
    made = anchor(run, tmp_path, 4)
    root, key = Path(run.store.url), anchor_key(4) if how == "manifest" else shard_key(4, made.shards[0])
    if how == "missing":
        (root / key).unlink()
    else:
        flip(root / key, (root / key).stat().st_size // 2)
    before = {info.key for info in run.store.list("")}
    damaged = ManifestCorrupt if how == "manifest" else ShardCorrupt
    with pytest.raises(damaged, match="newer version") as told:
        anchor_from_store(Lineage(run.store), 4, base=run.base, spool=tmp_path / "spool")
    assert key in str(told.value)
    assert {info.key for info in run.store.list("")} == before


def test_an_audit_sends_nobody_to_gc_with_the_shards_of_an_anchor_that_cannot_be_read(
    run: SmallRun, tmp_path: Path
) -> None:
    anchor(run, tmp_path, 4)
    flip(Path(run.store.url) / anchor_key(4), 100)
    found = audit(run.store)
    assert not found.ok
    assert any("shards of an anchor whose manifest" in note for note in found.notes), found.notes
    assert not any("gc" in note or "dead attempts" in note for note in found.notes)


@pytest.mark.parametrize("how", ["manifest", "missing"])
def test_a_damaged_anchor_is_not_counted_when_the_next_is_due(run: SmallRun, tmp_path: Path, how: str) -> None:
    made = anchor(run, tmp_path, 4)
    assert not is_due(run.lineage, 6, every_versions=3)
    root = Path(run.store.url)
    if how == "missing":
        (root / shard_key(4, made.shards[0])).unlink()
    else:
        flip(root / anchor_key(4), 100)
    assert is_due(Lineage(run.store), 6, every_versions=3)


def test_an_anchor_that_was_collected_is_not_made_again(run: SmallRun, tmp_path: Path) -> None:
    collect(run, anchor(run, tmp_path, 2))
    with pytest.raises(VersionRetired, match="newer version"):
        anchor(run, tmp_path, 2)


def test_a_store_that_fails_leaves_no_shards_behind(run: SmallRun, tmp_path: Path) -> None:
    class Full(FaultyStore):
        def create(self, key: str, data: bytes) -> None:
            from weighbridge.errors import StoreRefused

            raise StoreRefused("no room.")

    before = {info.key for info in run.store.list("versions")}
    with pytest.raises(StoreError):
        anchor_from_store(Lineage(Full(run.store)), 6, base=run.base, spool=tmp_path / "spool")
    assert {info.key for info in run.store.list("versions")} == before
