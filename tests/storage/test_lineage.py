"""A run's versions as a reader sees them, over stores that are half written, foreign, or broken."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.faults.faulty_store import Fault, FaultyStore
from tests.storage.manifests import some_base, some_manifest

from weighbridge.errors import LineageError, ManifestCorrupt, StoreError, VersionUnknown
from weighbridge.storage import lineage as module
from weighbridge.storage.lineage import RUN_KEY, Lineage, RunInfo, parse_run
from weighbridge.storage.manifest import manifest_key, to_bytes, version_folder
from weighbridge.storage.sealed_json import seal, unseal
from weighbridge.storage.stores import Store, open_store
from weighbridge.values import Manifest

RUN = RunInfo("run-1", "xxh3-128", some_base().state_digest, 1_700_000_000_000_000_000)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "root"))


def put(store: Store, manifest: Manifest) -> Manifest:
    data, filled = to_bytes(manifest)
    store.put(manifest_key(manifest.version), data)
    return filled


def chain_of(store: Store, head: int, *, run: RunInfo = RUN) -> list[Manifest]:
    """A root with versions 0 to `head`."""
    store.put(RUN_KEY, run.to_bytes())
    made = [put(store, some_base(run_id="run-1"))]
    while len(made) <= head:
        made.append(
            put(
                store,
                some_manifest(
                    run_id="run-1",
                    version=len(made),
                    parent=len(made) - 1,
                    parent_digest=made[-1].digest,
                    commit_id=f"{len(made):032x}",
                ),
            )
        )
    return made


# --- run.json


def test_a_run_comes_back_as_it_was_written() -> None:
    assert parse_run(RUN.to_bytes(), "here") == RUN


def test_run_json_has_the_fields_of_the_format() -> None:
    assert json.loads(RUN.to_bytes()) == {
        "format": 1,
        "run_id": "run-1",
        "digest_kind": "xxh3-128",
        "base_digest": "cd" * 32,
        "created_ns": 1_700_000_000_000_000_000,
        "digest": RUN.to_bytes()[-66:-2].decode(),
    }


def resealed(**changes: object) -> bytes:
    return seal({**unseal(RUN.to_bytes()), **changes})


def test_every_byte_of_run_json_is_proven() -> None:
    whole = RUN.to_bytes()
    for place in range(len(whole)):
        with pytest.raises(LineageError):
            parse_run(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :], "here")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"7",
        b"\xff",
        b"{}",
        b"[" * 100_000,
        RUN.to_bytes()[:-1],
        RUN.to_bytes().replace(b'"format": 1,', b'"format": 1, "format": 1,'),
        resealed(format=2),
        resealed(format=True),
        resealed(digest_kind="md5"),
        resealed(digest_kind=[]),
        resealed(run_id="../run"),
        resealed(run_id=7),
        resealed(base_digest="CD" * 32),
        resealed(base_digest="cd" * 31),
        resealed(base_digest=None),
        resealed(created_ns="yesterday"),
        resealed(created_ns=1e300),
        resealed(created_ns=1.5),
    ],
)
def test_a_run_that_no_writer_describes_is_refused(data: bytes) -> None:
    with pytest.raises(LineageError, match=r"here/run\.json"):
        parse_run(data, "here")


def test_every_truncation_of_run_json_is_refused() -> None:
    for length in range(len(RUN.to_bytes())):
        with pytest.raises(LineageError):
            parse_run(RUN.to_bytes()[:length], "here")


def test_a_root_that_nobody_claimed_says_so(store: Store) -> None:
    with pytest.raises(LineageError, match="holds no run"):
        _ = Lineage(store).run


def test_the_run_of_a_root_is_read_once(store: Store) -> None:
    chain_of(store, 0)
    faulty = FaultyStore(store)
    lineage = Lineage(faulty)
    assert lineage.run == lineage.run == RUN
    assert faulty.calls == [("get", RUN_KEY)]


# --- the head


def test_a_root_without_versions_has_no_head(store: Store) -> None:
    assert Lineage(store).head() == -1
    store.put(RUN_KEY, RUN.to_bytes())
    assert Lineage(store).head() == -1


@pytest.mark.parametrize("head", [0, 1, 3])
def test_the_head_is_the_newest_version_with_a_manifest(store: Store, head: int) -> None:
    chain_of(store, head)
    assert Lineage(store).head() == head


def test_folders_of_dead_attempts_above_the_head_are_not_versions(store: Store) -> None:
    chain_of(store, 2)
    for version in (2, 3, 4, 1000):
        store.put(f"{version_folder(version)}/{'a' * 32}-00000.safetensors", b"left behind")
    assert Lineage(store).head() == 2


def test_names_that_are_no_versions_do_not_confuse_the_head(store: Store) -> None:
    chain_of(store, 1)
    for name in ("notes", "1.5", "-7", "000000000009x", "\u0663", "9" * 30):
        store.put(f"versions/{name}/something", b"x")
    assert Lineage(store).head() == 1


def test_a_head_that_moves_is_seen_at_the_next_question(store: Store) -> None:
    made = chain_of(store, 1)
    lineage = Lineage(store)
    assert lineage.head() == 1
    put(store, some_manifest(run_id="run-1", version=2, parent=1, parent_digest=made[1].digest))
    assert lineage.head() == 2


def test_a_known_head_is_asked_for_with_one_call(store: Store) -> None:
    chain_of(store, 3)
    faulty = FaultyStore(store)
    lineage = Lineage(faulty)
    lineage.head()
    faulty.calls.clear()
    assert lineage.head() == 3
    assert faulty.calls == [("size", manifest_key(4))]


def test_a_store_that_fails_is_not_a_store_without_versions(store: Store) -> None:
    chain_of(store, 1)
    for verb in ("folders", "size"):
        with pytest.raises(StoreError, match="scripted"):
            Lineage(FaultyStore(store, Fault(verb, "before"))).head()  # type: ignore[arg-type]


# --- manifests and the chain


def test_a_manifest_is_read_once_and_kept(store: Store) -> None:
    made = chain_of(store, 2)
    faulty = FaultyStore(store)
    lineage = Lineage(faulty)
    assert [lineage.manifest(v) for v in (2, 2, 1, 1)] == [made[2], made[2], made[1], made[1]]
    assert [key for verb, key in faulty.calls if key != RUN_KEY] == [manifest_key(2), manifest_key(1)]


def test_memory_holds_a_bounded_number_of_manifests(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT_MANIFESTS", 3)
    made = chain_of(store, 10)
    lineage = Lineage(store)
    assert list(lineage.walk(0, 10)) == made[1:]
    assert len(lineage._seen) == 3


def test_many_threads_read_more_versions_than_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT_MANIFESTS", 2)
    made = chain_of(store, 5)
    lineage, start = Lineage(store), threading.Barrier(4)

    def read(seed: int) -> bool:
        start.wait(20)
        return all(lineage.manifest(v) == made[v] for n in range(50) for v in [(n * seed + n // 3) % 6])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, (1, 2, 5, 7)))


def test_a_version_that_was_never_published_is_unknown(store: Store) -> None:
    chain_of(store, 2)
    with pytest.raises(VersionUnknown, match="no version 3; its head is 2"):
        Lineage(store).manifest(3)


def test_the_chain_between_two_versions_comes_oldest_first(store: Store) -> None:
    made = chain_of(store, 4)
    lineage = Lineage(store)
    assert lineage.chain(0, 4) == tuple(made[1:])
    assert lineage.chain(2, 3) == (made[3],)
    assert lineage.chain(4, 4) == ()


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_version_that_names_another_parent_breaks_the_chain(store: Store, version: int) -> None:
    made = chain_of(store, 3)
    put(store, replace(made[version], parent_digest="ef" * 32))
    lineage = Lineage(store)
    with pytest.raises(ManifestCorrupt, match="chain is broken"):
        lineage.chain(0, 3)
    if version < 3:
        assert lineage.chain(version + 1, 3) == tuple(made[version + 2 :])


def test_a_version_whose_bytes_were_exchanged_for_another_valid_manifest_breaks_the_chain_above_it(
    store: Store,
) -> None:
    made = chain_of(store, 2)
    put(store, replace(made[1], labels={"forged": True}))
    with pytest.raises(ManifestCorrupt, match="000000000002"):
        Lineage(store).chain(0, 2)


def test_a_version_that_is_missing_in_the_middle_is_unknown(store: Store) -> None:
    chain_of(store, 3)
    store.delete(manifest_key(2))
    seen: list[int] = []
    with pytest.raises(VersionUnknown, match="no version 2"):
        seen.extend(m.version for m in Lineage(store).walk(0, 3))
    assert seen == [1]


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": "run-2"},
        {"version": 2, "parent": 1},
        {"parent": 5},
        {"digest_kind": "blake3", "rows": (), "shards": ()},
        {"kind": "anchor", "rows": (), "shards": ()},
        {"kind": "base", "parent_digest": "", "rows": ()},
    ],
)
def test_a_manifest_that_stands_where_another_belongs_is_refused(store: Store, changes: dict[str, object]) -> None:
    made = chain_of(store, 0)
    data, _ = to_bytes(
        replace(
            some_manifest(run_id="run-1", version=1, parent=0, parent_digest=made[0].digest),
            **changes,  # type: ignore[arg-type]
        )
    )
    store.put(manifest_key(1), data)
    with pytest.raises(ManifestCorrupt, match="not of"):
        Lineage(store).manifest(1)


def test_a_version_zero_of_another_base_than_the_run_names_is_refused(store: Store) -> None:
    chain_of(store, 0, run=replace(RUN, base_digest="12" * 32))
    with pytest.raises(ManifestCorrupt, match="another base"):
        Lineage(store).manifest(0)


def test_a_damaged_manifest_is_not_kept(store: Store) -> None:
    made = chain_of(store, 1)
    lineage = Lineage(FaultyStore(store, Fault("get", "flip", manifest_key(1), times=2)))
    with pytest.raises(ManifestCorrupt, match=manifest_key(1)):
        lineage.manifest(1)
    assert lineage.manifest(1) == made[1]


# --- retired


def test_a_version_is_retired_once_its_mark_stands(store: Store) -> None:
    made = chain_of(store, 2)
    store.create(f"{version_folder(1)}/retired", b"1")
    lineage = Lineage(store)
    assert [lineage.is_retired(v) for v in range(4)] == [False, True, False, False]
    assert lineage.chain(0, 2) == tuple(made[1:])  # its manifest stays as chain and history
    assert lineage.head() == 2


def test_whether_a_version_is_committed_is_asked_of_the_store(store: Store) -> None:
    made = chain_of(store, 1)
    lineage = Lineage(store)
    assert [lineage.is_committed(v) for v in range(3)] == [True, True, False]
    put(store, some_manifest(run_id="run-1", version=2, parent=1, parent_digest=made[1].digest))
    assert lineage.is_committed(2)


def test_walking_a_long_chain_reads_as_it_goes(store: Store) -> None:
    chain_of(store, 5)
    faulty = FaultyStore(store)
    walk: Iterator[Manifest] = Lineage(faulty).walk(0, 5)
    next(walk)
    assert sum(verb == "get" and key != RUN_KEY for verb, key in faulty.calls) == 2


def test_a_bit_that_flipped_on_the_way_is_read_once_more(store: Store) -> None:
    made = chain_of(store, 1)
    lineage = Lineage(FaultyStore(store, Fault("get", "flip", manifest_key(1))))
    assert lineage.manifest(1) == made[1]


def test_the_head_is_found_from_a_version_that_is_known_without_listing_what_is_below(store: Store) -> None:
    chain_of(store, 4)
    assert Lineage(store, floor=2).head() == 4
    assert Lineage(store, floor=4).head() == 4
    assert Lineage(store, floor=-1).head() == 4
