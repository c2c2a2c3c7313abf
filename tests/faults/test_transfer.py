"""Shards up and down under every fault: the right file, synced, under its final name, or no file and an error."""

import errno
import os
from pathlib import Path

import pytest
from tests.faults.faulty_store import Action, Fault, FaultyStore, Killed, Verb
from tests.faults.virtual_clock import VirtualClock

from weighbridge.errors import DiskFull, ObjectMissing, ShardCorrupt, StoreError, StoreRefused
from weighbridge.storage import transfer
from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.stores import Store, open_store
from weighbridge.storage.transfer import fetch_object, upload_file
from weighbridge.values import ShardInfo

KEY = "versions/000000000001/abc-00000.safetensors"
FOREVER = 10**9
DATA = bytes(range(251)) * 100
INFO = ShardInfo("abc-00000.safetensors", len(DATA), digest_bytes("xxh3-128", DATA))


@pytest.fixture
def inner(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "root"))


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "host" / "cache" / INFO.name


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "RANGE_BYTES", 1000)  # 26 ranges


def fetch(store: Store, target: Path, clock: VirtualClock, *, info: ShardInfo = INFO, **options: object) -> None:
    fetch_object(store, KEY, target, info=info, digest_kind="xxh3-128", clock=clock, **options)  # type: ignore[arg-type]


def left(target: Path) -> list[str]:
    return sorted(p.name for p in target.parent.iterdir()) if target.parent.exists() else []


@pytest.mark.parametrize("action", ["lose", "before", "truncate", "flip", "delay"])
@pytest.mark.parametrize("skip", [0, 7, 25])
def test_a_fault_in_one_range_costs_no_more_than_another_try(
    inner: Store, target: Path, clock: VirtualClock, action: Action, skip: int
) -> None:
    inner.put(KEY, DATA)
    faulty = FaultyStore(inner, Fault("get_range", action, skip=skip, seconds=3), clock=clock)
    fetch(faulty, target, clock)
    assert target.read_bytes() == DATA
    assert left(target) == [INFO.name]


@pytest.mark.parametrize("action", ["before", "flip"])
def test_a_shard_of_one_range_is_retried_too(inner: Store, target: Path, clock: VirtualClock, action: Action) -> None:
    inner.put(KEY, DATA[:900])
    info = ShardInfo("s", 900, digest_bytes("xxh3-128", DATA[:900]))
    fetch(FaultyStore(inner, Fault("get_range", action)), target, clock, info=info)
    assert target.read_bytes() == DATA[:900]


def test_an_empty_shard_is_a_file(inner: Store, target: Path, clock: VirtualClock) -> None:
    inner.put(KEY, b"")
    fetch(inner, target, clock, info=ShardInfo("s", 0, digest_bytes("xxh3-128", b"")))
    assert target.read_bytes() == b""


def test_a_killed_fetch_is_resumed_where_it_stopped(inner: Store, target: Path, clock: VirtualClock) -> None:
    inner.put(KEY, DATA)
    with pytest.raises(Killed):
        fetch(FaultyStore(inner, Fault("get_range", "kill before", skip=10)), target, clock)
    assert left(target) == [INFO.name + ".part"]
    again = FaultyStore(inner)
    fetch(again, target, clock)
    assert target.read_bytes() == DATA
    assert left(target) == [INFO.name]
    assert 0 < len(again.calls) <= 20, "the ranges that had arrived are not fetched again"


@pytest.mark.parametrize("rest", [b"\0" * 3000, DATA[:999] + b"?", DATA + b"more", b""])
def test_a_part_file_of_other_bytes_does_not_spoil_the_shard(
    inner: Store, target: Path, clock: VirtualClock, rest: bytes
) -> None:
    inner.put(KEY, DATA)
    target.parent.mkdir(parents=True)
    target.with_name(INFO.name + ".part").write_bytes(rest)
    fetch(inner, target, clock)
    assert target.read_bytes() == DATA
    assert left(target) == [INFO.name]


def test_a_right_file_is_kept_and_nothing_is_fetched(inner: Store, target: Path, clock: VirtualClock) -> None:
    target.parent.mkdir(parents=True)
    target.write_bytes(DATA)
    store = FaultyStore(inner)
    fetch(store, target, clock)
    assert store.calls == []


def test_a_wrong_file_of_the_right_size_is_replaced(inner: Store, target: Path, clock: VirtualClock) -> None:
    inner.put(KEY, DATA)
    target.parent.mkdir(parents=True)
    target.write_bytes(DATA[:-1] + b"?")
    fetch(inner, target, clock)
    assert target.read_bytes() == DATA


def test_a_shard_that_is_damaged_in_the_store_is_corrupt_and_never_appears(
    inner: Store, target: Path, clock: VirtualClock
) -> None:
    inner.put(KEY, DATA[:-1] + b"?")
    store = FaultyStore(inner)
    with pytest.raises(ShardCorrupt, match="3 times"):
        fetch(store, target, clock)
    assert len(store.calls) == 3 * 26
    assert left(target) == []


def test_a_shard_that_is_too_short_in_the_store_is_corrupt_at_once(
    inner: Store, target: Path, clock: VirtualClock
) -> None:
    inner.put(KEY, DATA[:-1])
    with pytest.raises(ShardCorrupt, match=f"has {len(DATA) - 1} bytes"):
        fetch(inner, target, clock)
    assert clock.slept == []
    assert not target.exists()


def test_a_missing_shard_is_told_at_once_so_that_the_host_plans_again(
    inner: Store, target: Path, clock: VirtualClock
) -> None:
    with pytest.raises(ObjectMissing):
        fetch(inner, target, clock)
    assert clock.slept == []


def test_a_refusal_is_told_at_once(inner: Store, target: Path, clock: VirtualClock) -> None:
    inner.put(KEY, DATA)
    with pytest.raises(StoreRefused):
        fetch(FaultyStore(inner, Fault("get_range", "denied", times=FOREVER)), target, clock)
    assert clock.slept == []


def test_a_store_that_never_answers_ends_at_the_deadline_and_keeps_what_arrived(
    inner: Store, target: Path, clock: VirtualClock
) -> None:
    inner.put(KEY, DATA)
    faulty = FaultyStore(inner, Fault("get_range", "before", skip=10, times=FOREVER))
    with pytest.raises(StoreError, match="until the deadline"):
        fetch(faulty, target, clock, deadline_seconds=60)
    assert clock.monotonic() <= 60
    assert left(target) == [INFO.name + ".part"]


def test_progress_adds_up_to_the_size_even_when_a_download_starts_over(
    inner: Store, target: Path, clock: VirtualClock
) -> None:
    inner.put(KEY, DATA)
    seen: list[int] = []
    fetch(FaultyStore(inner, Fault("get_range", "flip")), target, clock, progress=seen.append)
    assert sum(seen) == len(DATA)
    assert min(seen) == -len(DATA)


def test_memory_is_bounded_by_the_ranges_in_flight(inner: Store, target: Path, clock: VirtualClock) -> None:
    inner.put(KEY, DATA)
    furthest: list[int] = []

    class Watched(FaultyStore):
        def get_range(self, key: str, start: int, length: int) -> bytes:
            part = target.with_name(INFO.name + ".part")
            furthest.append(start - (part.stat().st_size if part.exists() else 0))
            return super().get_range(key, start, length)

    fetch(Watched(inner), target, clock)
    assert max(furthest) <= 8 * 1000, "ranges may not run away from the file"


def test_a_full_local_disk_gets_its_room_back(
    inner: Store, target: Path, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner.put(KEY, DATA)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DiskFull, match="last good version stays"):
            fetch(inner, target, clock)
    assert left(target) == []
    fetch(inner, target, clock)
    assert target.read_bytes() == DATA


def test_a_replica_in_memory_skips_the_syncs(
    inner: Store, target: Path, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner.put(KEY, DATA)
    monkeypatch.setattr(os, "fsync", lambda descriptor: pytest.fail("synced"))
    fetch(inner, target, clock, disk=LocalDisk("process"))
    assert target.read_bytes() == DATA


# uploads


@pytest.mark.parametrize("action", ["lose", "before", "truncate", "delay"])
@pytest.mark.parametrize("verb", ["put_file", "size"])
@pytest.mark.parametrize("times", [1, 3])
def test_an_upload_is_repeated_until_the_object_has_its_size(
    inner: Store, tmp_path: Path, clock: VirtualClock, verb: Verb, action: Action, times: int
) -> None:
    (tmp_path / "shard").write_bytes(DATA)
    seen: list[int] = []
    faulty = FaultyStore(inner, Fault(verb, action, times=times, seconds=3), clock=clock)
    upload_file(faulty, KEY, tmp_path / "shard", clock=clock, progress=seen.append)
    assert inner.get(KEY) == DATA
    assert seen == [len(DATA)]


def test_an_upload_that_is_refused_is_told_at_once(inner: Store, tmp_path: Path, clock: VirtualClock) -> None:
    (tmp_path / "shard").write_bytes(DATA)
    with pytest.raises(StoreRefused):
        upload_file(FaultyStore(inner, Fault("put_file", "full")), KEY, tmp_path / "shard", clock=clock)
    assert clock.slept == []
    assert list(inner.list("")) == []


def test_an_upload_ends_at_its_deadline(inner: Store, tmp_path: Path, clock: VirtualClock) -> None:
    (tmp_path / "shard").write_bytes(DATA)
    faulty = FaultyStore(inner, Fault("put_file", "truncate", times=FOREVER))
    with pytest.raises(StoreError, match="has 12550 there"):
        upload_file(faulty, KEY, tmp_path / "shard", clock=clock, deadline_seconds=30)
    assert clock.monotonic() <= 30
