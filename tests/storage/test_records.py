"""Hosts' records: there and back, what is refused, and what they say together."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import blake3
import pytest
from tests.faults.faulty_store import Fault, FaultyStore

from weighbridge.errors import CorruptData, StoreError, UsageError
from weighbridge.storage.records import host_outcome, latest, outcome_of, read_records, record_key, write_record
from weighbridge.storage.sealed_json import seal, unseal
from weighbridge.storage.stores import Store, open_store
from weighbridge.values import HostOutcome, HostRecord


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "root"))


def record(host: str = "a", outcome: str = "served", *, ended: int = 1, version: int = 3, **changes: Any) -> HostRecord:
    made = HostRecord(
        run_id="run-1",
        host=host,
        version=version,
        attempt=f"{ended:032x}",
        outcome=outcome,
        stage="resumed",
        from_version=2,
        state_digest="ab" * 32,
        started_ns=0,
        ended_ns=ended,
        fetched_bytes=10,
        repaired=0,
        seconds={"fetch": 0.5, "pause": 1},
        engine="none",
    )
    return replace(made, **changes)


# --- there and back


def test_a_record_comes_back_as_it_was_written(store: Store) -> None:
    written = record(error="the engine said: größer 💥", repaired=2, by="pull", engine="vllm")
    write_record(store, written)
    assert read_records(store) == [written]


def test_a_record_stands_under_host_head_version_and_attempt(store: Store) -> None:
    write_record(store, record("rollout-0", version=12, ended=255))
    write_record(store, record("rollout-0", version=12, ended=1, head=40))
    assert [i.key for i in store.list("")] == [
        "hosts/rollout-0/000000000012-000000000012-000000000000000000000000000000ff",
        "hosts/rollout-0/000000000040-000000000012-00000000000000000000000000000001",
    ]


def test_a_writer_that_knew_of_no_newer_version_knew_of_its_own() -> None:
    assert [record(version=12, **known).head for known in ({}, {"head": 3}, {"head": 12}, {"head": 40})] == [
        12,
        12,
        12,
        40,
    ]


def test_a_record_of_an_older_version_is_found_whatever_the_head_was(store: Store) -> None:
    late = record(version=2, ended=7, head=900)
    for written in (record(version=1, ended=1, head=1), record(version=2, ended=2), late, record(version=900, ended=9)):
        write_record(store, written)
    assert read_records(store, version=2) == [record(version=2, ended=2), late]


def test_writing_a_record_again_changes_nothing(store: Store) -> None:
    faulty = FaultyStore(store, Fault("put", "lose"))
    with pytest.raises(StoreError):
        write_record(faulty, record())
    write_record(faulty, record())
    assert read_records(store) == [record()]


def test_an_error_text_that_is_no_unicode_does_not_make_a_record_unreadable(store: Store) -> None:
    write_record(store, record(error="cannot read /data/\udcff.bin"))
    assert read_records(store)[0].error == "cannot read /data/?.bin"


def test_records_are_read_by_host_by_version_or_all(store: Store) -> None:
    made = [record(h, version=v, ended=e) for h in ("a", "b") for v, e in ((1, 10), (2, 30), (2, 20))]
    for written in made:
        write_record(store, written)
    by_time = sorted(made, key=lambda r: (r.host, r.version, r.ended_ns))
    assert read_records(store) == by_time
    assert read_records(store, host="b") == by_time[3:]
    assert read_records(store, version=2) == [by_time[n] for n in (1, 2, 4, 5)]
    assert read_records(store, host="a", version=1) == by_time[:1]
    assert read_records(store, host="c") == []
    assert read_records(store, version=9) == []


def test_only_records_of_the_version_that_is_asked_for_are_fetched(store: Store) -> None:
    for version in range(5):
        write_record(store, record(version=version))
    faulty = FaultyStore(store)
    read_records(faulty, version=3)
    assert sum(verb == "get" for verb, _ in faulty.calls) == 1


def test_an_attempt_that_looks_like_a_version_is_not_taken_for_one(store: Store) -> None:
    write_record(store, record(version=1, attempt="000000000002-x"))
    assert read_records(store, version=2) == []


def test_a_host_whose_name_cannot_stand_in_a_key_is_refused(store: Store) -> None:
    for name in ("", "../a", "a/b", ".a"):
        with pytest.raises(UsageError):
            record_key(record(name))
        with pytest.raises(UsageError):
            read_records(store, host=name)


# --- what no host writes


@pytest.mark.parametrize(
    "change",
    [
        {"outcome": None},
        {"ended_ns": "late"},
        {"ended_ns": 1.5},
        {"ended_ns": True},
        {"version": "3"},
        {"version": 4},
        {"host": "b"},
        {"attempt": "f" * 32},
        {"seconds": []},
        {"seconds": {"fetch": "long"}},
        {"seconds": {"fetch": None}},
        {"fetched_bytes": None},
        {"more": 1},
        {"head": "3"},
        {"head": 4},
        {"run_id": ["run-1"]},
        {"error": None},
    ],
)
def test_a_record_that_no_host_writes_is_refused(store: Store, change: dict[str, object]) -> None:
    key = record_key(record())
    store.put(key, seal(asdict(record()) | change))
    with pytest.raises(CorruptData, match=key):
        read_records(store)


@pytest.mark.parametrize("data", [b"x", b"[]", b"null", b"{}", b"\xff", b"[" * 100_000, b'{"a":1,"a":1}'])
def test_what_is_no_record_is_refused(store: Store, data: bytes) -> None:
    store.put(record_key(record()), data)
    with pytest.raises(CorruptData, match="hosts/a/"):
        read_records(store)


def test_every_truncation_of_a_record_is_refused(store: Store) -> None:
    key = record_key(record())
    write_record(store, record())
    whole = store.get(key)
    for length in range(1, len(whole), 7):
        store.put(key, whole[:length])
        with pytest.raises(CorruptData):
            read_records(store)


def test_every_byte_of_a_record_is_proven(store: Store) -> None:
    key = record_key(record())
    write_record(store, record(error="größer"))
    whole = store.get(key)
    for place in range(len(whole)):
        for bit in (1, 32):
            store.put(key, whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            with pytest.raises(CorruptData, match=key):
                read_records(store)


def test_a_record_that_was_garbled_on_the_way_only_is_read(store: Store) -> None:
    write_record(store, record())
    assert read_records(FaultyStore(store, Fault("get", "flip"))) == [record()]


def test_a_corrupt_record_is_named_and_does_not_keep_the_others_from_being_read(store: Store) -> None:
    for host in ("a", "b", "c"):
        write_record(store, record(host))
    store.put(record_key(record("b")), b"{}")
    named: list[CorruptData] = []
    assert read_records(store, on_corrupt=named.append) == [record("a"), record("c")]
    assert [str(fault).split()[0] for fault in named] == [record_key(record("b"))]


def test_a_sealed_object_carries_its_fields_and_the_digest_of_its_own_bytes() -> None:
    data = seal({"a": 1, "b": "ü"})
    digest = blake3.blake3(data[:-66] + b"0" * 64 + b'"}').hexdigest()
    assert data == f'{{"a": 1, "b": "ü", "digest": "{digest}"}}'.encode()
    assert unseal(data) == {"a": 1, "b": "ü"}


# --- what they say together


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], "published"),
        ([record("a")], "complete"),
        ([record("a"), record("b")], "complete"),
        ([record("a", "superseded")], "complete"),
        ([record("a"), record("b", "superseded")], "complete"),
        ([record("a", "failed")], "partial"),
        ([record("a", "missed")], "partial"),
        ([record("a"), record("b", "failed")], "partial"),
        ([record("a"), record("b", "missed")], "partial"),
        ([record("a", "failed", ended=1), record("a", ended=2)], "healed"),
        ([record("a", "missed", ended=1), record("a", ended=2)], "healed"),
        ([record("a", ended=1), record("a", "failed", ended=2)], "healed"),  # it did serve, whatever came later
        ([record("a", ended=1), record("a", "missed", ended=2)], "healed"),
        ([record("a", ended=1), record("a", ended=2)], "complete"),
        ([record("a", "failed", ended=1), record("a", "failed", ended=2)], "partial"),
        ([record("a", "failed", ended=1), record("a", "superseded", ended=2)], "healed"),
        ([record("a", "superseded", ended=1), record("a", "failed", ended=2)], "partial"),
        ([record("a", "failed", ended=1), record("a", ended=2), record("b", "failed")], "partial"),
        ([record("a", "failed", ended=1), record("a", ended=2), record("b")], "healed"),
        ([record("a", "never heard of")], "partial"),
    ],
)
def test_the_outcome_of_a_version_follows_from_its_records(records: list[HostRecord], expected: str) -> None:
    assert outcome_of(records) == expected
    assert outcome_of(records[::-1]) == expected


def test_the_record_that_counts_is_one_that_served_else_the_last() -> None:
    served = record("a", ended=2)
    last = record("b", "superseded", ended=9)
    found = latest(
        [record("a", "failed", ended=3), served, record("a", "failed", ended=1), last, record("b", "failed")]
    )
    assert found == {"a": served, "b": last}
    assert latest([]) == {}


def test_a_host_that_failed_serves_what_it_served_before() -> None:
    assert host_outcome(record()) == HostOutcome("a", "served", 3, {"fetch": 0.5, "pause": 1})
    failed = record(outcome="failed", error="no room")
    assert host_outcome(failed) == HostOutcome("a", "failed", 2, {"fetch": 0.5, "pause": 1}, "no room")
