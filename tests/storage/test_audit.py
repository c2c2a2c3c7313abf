"""The audit: a sound root passes, and whatever is done to one of its objects is found and named."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.faults.faulty_store import Fault, FaultyStore, flipped
from tests.storage.long_runs import LongRun
from tests.storage.manifests import opened, sealed

from weighbridge.errors import CorruptData, LineageError
from weighbridge.storage.audit import audit as auditing
from weighbridge.storage.audit import stretches
from weighbridge.storage.audit.audit import audit
from weighbridge.storage.digests import chain_digest
from weighbridge.storage.history import compact as compacting
from weighbridge.storage.history import segments
from weighbridge.storage.history.compact import compact
from weighbridge.storage.history.segments import Segment, list_segments
from weighbridge.storage.history.tables import to_parquet
from weighbridge.storage.manifest import manifest_key
from weighbridge.storage.records import record_key, write_record
from weighbridge.storage.sealed_json import seal
from weighbridge.storage.stores import Store, open_store
from weighbridge.storage.stores.contract import MOST_SMALL_BYTES


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "BLOCK", 2)
    monkeypatch.setattr(segments, "GROWTH", 2)
    monkeypatch.setattr(compacting, "RECORDS_BEHIND", 2)


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> LongRun:
    store = open_store(str(tmp_path_factory.mktemp("grown") / "root"))
    return LongRun(store, tensors=3, hosts=("a",), shards=True).grow(6)


@pytest.fixture
def run(grown: LongRun, tmp_path: Path) -> LongRun:
    """Versions 0 to 6 with a shard each, a host that served all of them, compacted; a mark and a kept version."""
    shutil.copytree(grown.store.url, tmp_path / "root")
    run = grown.on(open_store(str(tmp_path / "root")))
    compact(run.store)
    return run


def first(store: Store, *, chain: bool = False) -> str:
    """The key of the first finding; "" when there is none."""
    findings = audit(store, chain=chain).findings
    return findings[0].key if findings else ""


def keys(store: Store) -> list[str]:
    return [info.key for info in store.list("")]


def test_a_sound_root_is_proven_whole(run: LongRun) -> None:
    found = audit(run.store)
    assert (found.ok, found.notes, found.head) == (True, [], 6)
    assert (found.manifests, found.shards, found.records) == (7, 7, 6)
    assert found.segments == len([key for key in keys(run.store) if key.startswith("history/")])
    assert found.nbytes == sum(info.nbytes for info in run.store.list("") if info.key != "run.json")
    found.demand()


def test_the_chain_alone_reads_no_shard_and_no_record(run: LongRun) -> None:
    watched = FaultyStore(run.store)
    found = audit(watched, chain=True)
    assert (found.ok, found.manifests) == (True, 7)
    assert all(
        key.startswith(("history/", "run.json")) or key.endswith("arrow") for v, key in watched.calls if v == "get"
    )
    assert not [verb for verb, _ in watched.calls if verb == "get_range"]


@pytest.fixture
def in_stretches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Long chains begin at four versions; holds whether the stretches of each audit were all found sound."""
    monkeypatch.setattr(stretches, "LEAST", 3)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    sound: list[bool] = []
    monkeypatch.setattr(
        auditing, "prove_in_stretches", lambda *told: sound.append(stretches.prove_in_stretches(*told)) or sound[-1]
    )
    return sound


def test_a_long_chain_is_proven_in_stretches_by_several_processes(run: LongRun, in_stretches: list[bool]) -> None:
    found = audit(run.store, chain=True)
    assert (found.ok, in_stretches) == (True, [True])
    alone = FaultyStore(run.store)  # not a directory, so walked over in one piece
    one_walk = audit(alone, chain=True)
    assert in_stretches == [True, False]
    assert (found.manifests, found.segments, found.nbytes) == (one_walk.manifests, one_walk.segments, one_walk.nbytes)


def test_whatever_is_wrong_in_a_stretch_is_named_as_ever(run: LongRun, in_stretches: list[bool]) -> None:
    parts, versions = (list_segments(run.store, kind) for kind in ("parts", "versions"))
    for key in (manifest_key(1), manifest_key(5), max(parts, key=lambda s: s.last).key, versions[0].key):
        whole = run.store.get(key)
        run.store.put(key, whole[:-300] + bytes([whole[-300] ^ 1]) + whole[-299:])
        assert first(run.store, chain=True) == key
        run.store.put(key, whole)
    assert in_stretches == [False] * 4


def test_stretches_that_are_sound_but_do_not_follow_each_other_are_a_break(
    grown: LongRun, tmp_path: Path, in_stretches: list[bool]
) -> None:
    run = grown.on(open_store(str(tmp_path / "root")))
    shutil.copytree(grown.store.url, tmp_path / "root")
    twin = LongRun(open_store(str(tmp_path / "twin")), tensors=3, shards=True)
    twin.random.seed(11)
    twin.grow(6)
    for version in (4, 5, 6):
        run.store.put(manifest_key(version), twin.store.get(manifest_key(version)))
    assert first(run.store, chain=True) == manifest_key(4)
    assert in_stretches == [False]


def test_whatever_byte_of_whatever_object_changes_it_is_named(run: LongRun) -> None:
    for number, key in enumerate(keys(run.store)):
        whole = run.store.get(key)
        for place in {(number * 7919) % len(whole), len(whole) - 1 - number % 9}:
            run.store.put(key, whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            assert first(run.store) == key, place
        run.store.put(key, whole)
    assert audit(run.store).ok


def test_an_object_cut_short_or_made_longer_is_named(run: LongRun) -> None:
    for number, key in enumerate(keys(run.store)):
        whole = run.store.get(key)
        run.store.put(key, (whole[:-1], whole + b"\0", b"x")[number % 3])
        assert first(run.store) == key
        run.store.put(key, whole)


def test_a_lost_manifest_or_shard_is_named(run: LongRun) -> None:
    for key in [manifest_key(v) for v in range(6)] + [key for key in keys(run.store) if key.endswith(".safetensors")]:
        whole = run.store.get(key)
        run.store.delete(key)
        assert first(run.store) == key
        run.store.put(key, whole)


def test_lost_newest_manifests_are_known_by_the_history_and_by_hosts(run: LongRun) -> None:
    run.store.delete(manifest_key(6))
    found = audit(run.store)
    (record,) = [key for key in keys(run.store) if key.startswith("hosts/a/000000000006-")]
    assert [finding.key for finding in found.findings] == [record]
    assert "never published" in found.findings[0].what
    run.store.delete(manifest_key(5))
    told = {finding.key for finding in audit(run.store).findings}
    assert {s.key for kind in ("parts", "versions") for s in list_segments(run.store, kind) if s.last == 5} < told


def test_shards_that_were_collected_are_explained_by_their_mark(run: LongRun) -> None:
    (shard,) = [key for key in keys(run.store) if key.startswith("versions/000000000003/") and "safetensors" in key]
    run.store.create("versions/000000000003/retired", seal({"by": "c" * 32, "created_ns": 1}))
    assert audit(run.store).ok
    run.store.delete(shard)
    assert audit(run.store).ok
    run.store.put("versions/000000000003/retired", flipped(run.store.get("versions/000000000003/retired")))
    assert first(run.store) == "versions/000000000003/retired"


def resealed(store: Store, version: int, change: Callable[[dict[str, str]], None], **columns: list[object]) -> None:
    """A manifest put in place of another, with a right digest of its own."""
    batch, metadata = opened(store.get(manifest_key(version)))
    change(metadata)
    for name, values in columns.items():
        place = batch.schema.get_field_index(name)
        batch = batch.set_column(place, batch.schema.field(place), pa.array(values, batch.schema.field(place).type))
    store.put(manifest_key(version), sealed(batch, metadata))


def test_a_forged_manifest_with_a_digest_of_its_own_breaks_the_chain_at_its_child(run: LongRun) -> None:
    resealed(run.store, 3, lambda metadata: metadata.update(created_ns="5"))
    for chain in (True, False):
        assert first(run.store, chain=chain) == manifest_key(4)


def test_a_forged_head_is_found_by_its_state_by_the_history_or_by_its_hosts(run: LongRun) -> None:
    batch, _ = opened(run.store.get(manifest_key(6)))
    other = [b"\7" * 16] * batch.num_rows
    resealed(run.store, 6, lambda _: None, after=other)
    assert first(run.store) == manifest_key(6)
    resealed(run.store, 6, lambda m: m.update(state_digest="ab" * 32), after=batch.column("after").to_pylist())
    assert first(run.store) == manifest_key(6)
    resealed(run.store, 6, lambda m: m.update(state_digest=run.manifests[6].state_digest), before=other)
    assert "start from other bytes" in audit(run.store).findings[0].what
    resealed(run.store, 6, lambda _: None, before=batch.column("before").to_pylist(), tensor_digest=other)
    assert "two digests for one tensor" in audit(run.store).findings[0].what


def test_a_version_served_but_never_published_is_found(run: LongRun) -> None:
    false = run.record("a", version=9, head=9)
    write_record(run.store, false)
    found = audit(run.store)
    assert [finding.key for finding in found.findings] == [record_key(false)]
    assert "version 9, which was never published" in found.findings[0].what
    with pytest.raises(CorruptData, match="served version 9"):
        found.demand()


def test_nobody_is_accused_for_a_version_above_the_break(run: LongRun) -> None:
    run.store.put(manifest_key(1), flipped(run.store.get(manifest_key(1))))
    found = audit(run.store)
    assert manifest_key(1) in [finding.key for finding in found.findings]
    assert not [finding for finding in found.findings if finding.key.startswith("hosts/")]


def test_a_version_served_in_another_state_and_a_record_of_another_run_are_found(run: LongRun) -> None:
    other = replace(run.record("a", version=5), state_digest="ab" * 32)
    write_record(run.store, other)
    foreign = replace(run.record("b", version=5), run_id="another")
    write_record(run.store, foreign)
    found = {finding.key: finding.what for finding in audit(run.store).findings}
    assert found.keys() == {record_key(other), record_key(foreign)}
    assert "another state" in found[record_key(other)]
    assert "of run another" in found[record_key(foreign)]


def test_a_record_that_is_gone_is_found_by_the_segment_that_has_it(run: LongRun) -> None:
    run.store.delete(next(key for key in keys(run.store) if key.startswith("hosts/a/000000000001-")))
    assert first(run.store).startswith("history/records/000000000000-")


def test_a_record_that_came_late_is_no_break(run: LongRun) -> None:
    write_record(run.store, replace(run.record("a", version=1), head=1))
    assert audit(run.store).ok


@pytest.mark.parametrize("kind", ["versions", "parts", "records"])
def test_a_segment_that_says_something_else_under_a_right_name_is_found(run: LongRun, kind: segments.Kind) -> None:
    segment = min(list_segments(run.store, kind), key=lambda s: s.span)
    table = pq.read_table(pa.BufferReader(run.store.get(segment.key)))
    name = {"versions": "wire_bytes", "parts": "changed", "records": "repaired"}[kind]
    place = table.schema.get_field_index(name)
    values = table.column(name).to_pylist()
    lies = table.set_column(place, name, pa.array([*values[:-1], values[-1] + 1], pa.int64()))
    fewer = [table.slice(1)] if kind != "records" else []  # the others may have come late
    for false in (lies, table.drop_columns([name]), *fewer):
        data = to_parquet(kind, false.replace_schema_metadata(None), {})
        forged = Segment(kind, *segment.span, segment.edition, chain_digest(data))
        run.store.put(forged.key, data)
        assert first(run.store) == forged.key
        run.store.delete(forged.key)


def test_what_nothing_proves_is_told_and_is_no_break(run: LongRun) -> None:
    for key in ("notes.txt", "versions/000000000007/x-00000.safetensors", "versions/000000000002/x-00000.safetensors"):
        run.store.put(key, b"x")
    run.store.put("probe/1", b"x")
    found = audit(run.store)
    assert found.ok
    assert len(found.notes) == 4


def test_an_audit_beside_a_trainer_a_host_and_a_compactor_finds_nothing(run: LongRun) -> None:
    class Busy(FaultyStore):
        """Goes on publishing, serving and compacting while it is read."""

        def get(self, key: str, *, most: int = MOST_SMALL_BYTES) -> bytes:
            if key == manifest_key(0) and run.head == 6:
                run.grow(2)
                compact(run.store)
            return super().get(key, most=most)

        def folders_after(self, prefix: str, name: str):  # type: ignore[no-untyped-def]
            if prefix == "versions" and run.head == 8:
                run.grow(1)
            return super().folders_after(prefix, name)

    found = audit(Busy(run.store))
    assert (found.ok, found.findings) == (True, [])


def test_a_bit_that_flips_on_the_way_is_no_break(run: LongRun) -> None:
    assert audit(FaultyStore(run.store, Fault("get", "flip", manifest_key(3)))).ok


def test_a_root_without_a_run_is_an_error_and_one_without_versions_a_break(tmp_path: Path, run: LongRun) -> None:
    store = open_store(str(tmp_path / "empty"))
    with pytest.raises(LineageError, match="holds no run"):
        audit(store)
    store.put("run.json", run.store.get("run.json"))
    assert first(store) == manifest_key(0)
