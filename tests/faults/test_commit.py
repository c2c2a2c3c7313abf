"""A commit under every fault that a store can have: one winner, known to itself, or an honest "unknown"."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.faulty_store import Action, Fault, FaultyStore, Verb
from tests.faults.virtual_clock import VirtualClock

from weighbridge.errors import (
    CommitStateUnknown,
    ObjectExists,
    ObjectMissing,
    StoreError,
    StoreRefused,
    StoreUnfit,
)
from weighbridge.storage.commit import put_if_absent
from weighbridge.storage.stores import Store, open_store
from weighbridge.storage.stores.probe import probe

KEY = "versions/000000000001/manifest.arrow"
FOREVER = 10**9


@pytest.fixture
def inner(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "root"))


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.mark.parametrize("action", ["lose", "before", "delay"])
@pytest.mark.parametrize("verb", ["create", "get"])
@pytest.mark.parametrize("times", [1, 3])
def test_passing_faults_do_not_change_who_wins(
    inner: Store, clock: VirtualClock, verb: Verb, action: Action, times: int
) -> None:
    faulty = FaultyStore(inner, Fault(verb, action, times=times, seconds=2.0), clock=clock)
    assert put_if_absent(faulty, KEY, b"ours", clock=clock)
    assert inner.get(KEY) == b"ours"
    late = FaultyStore(inner, Fault(verb, action, times=times, seconds=2.0), clock=clock)
    assert not put_if_absent(late, KEY, b"theirs", clock=clock)
    assert inner.get(KEY) == b"ours"


@pytest.mark.parametrize("first", ["lose", "before"])
@pytest.mark.parametrize("read", ["before", "flip", "truncate"])
def test_a_lost_reply_is_recognised_as_our_own_commit_whatever_the_read_back_does_first(
    inner: Store, clock: VirtualClock, first: Action, read: Action
) -> None:
    faulty = FaultyStore(inner, Fault("create", first), Fault("get", read), clock=clock)
    assert put_if_absent(faulty, KEY, b"ours", clock=clock)
    assert inner.get(KEY) == b"ours"


def test_two_read_backs_that_were_cut_off_at_the_same_place_do_not_make_our_commit_anothers(
    inner: Store, clock: VirtualClock
) -> None:
    faulty = FaultyStore(inner, Fault("create", "lose"), Fault("get", "truncate", times=2), clock=clock)
    assert put_if_absent(faulty, KEY, b"ours", clock=clock)
    assert inner.get(KEY) == b"ours"


@pytest.mark.parametrize("read", ["before", "flip", "truncate"])
def test_a_winner_is_recognised_whatever_the_read_back_does_first(
    inner: Store, clock: VirtualClock, read: Action
) -> None:
    inner.create(KEY, b"theirs")
    faulty = FaultyStore(inner, Fault("get", read), clock=clock)
    assert not put_if_absent(faulty, KEY, b"ours", clock=clock)
    assert inner.get(KEY) == b"theirs"


def test_a_winner_that_slips_in_after_a_lost_request_is_recognised(inner: Store, clock: VirtualClock) -> None:
    class SlipIn(FaultyStore):
        def create(self, key: str, data: bytes) -> None:
            try:
                super().create(key, data)
            except StoreError as lost:
                if not isinstance(lost, ObjectExists):
                    inner.create(key, b"theirs")
                raise

    assert not put_if_absent(SlipIn(inner, Fault("create", "before")), KEY, b"ours", clock=clock)
    assert inner.get(KEY) == b"theirs"


def test_unreadable_until_the_deadline_is_unknown_and_names_the_key(inner: Store, clock: VirtualClock) -> None:
    faulty = FaultyStore(inner, Fault("create", "lose"), Fault("get", "before", times=FOREVER))
    with pytest.raises(CommitStateUnknown, match=KEY):
        put_if_absent(faulty, KEY, b"ours", clock=clock, deadline_seconds=30)
    assert 15 < clock.monotonic() <= 30
    assert put_if_absent(inner, KEY, b"ours", clock=clock), "settling it later finds our own"


def test_a_request_that_may_still_land_is_unknown_not_failed(inner: Store, clock: VirtualClock) -> None:
    faulty = FaultyStore(inner, Fault("create", "before", times=FOREVER))
    with pytest.raises(CommitStateUnknown, match="may yet appear"):
        put_if_absent(faulty, KEY, b"ours", clock=clock, deadline_seconds=30)


@pytest.mark.parametrize("action", ["full", "denied"])
def test_a_refusal_is_certain_and_told_at_once(inner: Store, clock: VirtualClock, action: Action) -> None:
    faulty = FaultyStore(inner, Fault("create", action))
    with pytest.raises(StoreRefused):
        put_if_absent(faulty, KEY, b"ours", clock=clock)
    assert clock.slept == []
    with pytest.raises(ObjectMissing):
        inner.get(KEY)
    assert put_if_absent(faulty, KEY, b"ours", clock=clock), "and goes on once there is room"


def test_a_refusal_after_a_lost_reply_still_finds_our_commit(inner: Store, clock: VirtualClock) -> None:
    faulty = FaultyStore(inner, Fault("create", "lose"), Fault("create", "denied"), Fault("get", "before"))
    assert put_if_absent(faulty, KEY, b"ours", clock=clock)


def test_a_refusal_after_a_request_that_may_still_land_is_unknown(inner: Store, clock: VirtualClock) -> None:
    faulty = FaultyStore(inner, Fault("create", "before"), Fault("create", "denied"))
    with pytest.raises(CommitStateUnknown):
        put_if_absent(faulty, KEY, b"ours", clock=clock)


def test_every_short_script_of_faults_ends_in_the_truth(tmp_path: Path) -> None:
    """All scripts of three faults over creates and reads, against a store that is empty or taken."""
    creates: tuple[Action, ...] = ("before", "lose", "full", "delay")
    reads: tuple[Action, ...] = ("before", "flip", "truncate", "delay")
    for number, (taken, (one, two), read) in enumerate(scripts(creates, reads)):
        inner = open_store(str(tmp_path / str(number)))
        if taken:
            inner.create(KEY, b"theirs")
        clock = VirtualClock()
        faults = [Fault("create", one), Fault("create", two, seconds=9), Fault("get", read, seconds=9)]
        try:
            won = put_if_absent(FaultyStore(inner, *faults, clock=clock), KEY, b"ours", clock=clock)
        except CommitStateUnknown:
            continue
        except StoreRefused:
            assert not won_anyway(inner), (taken, one, two, read)
            continue
        assert won == won_anyway(inner), (taken, one, two, read)


def scripts(
    creates: tuple[Action, ...], reads: tuple[Action, ...]
) -> Iterator[tuple[bool, tuple[Action, Action], Action]]:
    return itertools.product((False, True), itertools.product(creates, creates), reads)


def won_anyway(store: Store) -> bool:
    try:
        return store.get(KEY) == b"ours"
    except ObjectMissing:
        return False


# the probe


class Overwriting(FaultyStore):
    """A server that accepts the condition and ignores it."""

    def create(self, key: str, data: bytes) -> None:
        self.inner.put(key, data)


class Forgetting(FaultyStore):
    """A server that says yes and keeps something else."""

    def create(self, key: str, data: bytes) -> None:
        self.inner.create(key, data[:-1] + b"?" if data[-1:] != b"?" else data[:-1] + b"!")


@pytest.mark.parametrize("kind", [Overwriting, Forgetting])
def test_the_probe_refuses_a_store_by_name_and_cleans_up(inner: Store, kind: type[FaultyStore]) -> None:
    with pytest.raises(StoreUnfit, match=inner.url):
        probe(kind(inner), clock=VirtualClock())
    assert list(inner.list("")) == []


@pytest.mark.parametrize("action", ["lose", "before"])
@pytest.mark.parametrize("verb", ["create", "get", "delete"])
def test_the_probe_does_not_blame_a_store_for_a_lost_reply(
    inner: Store, clock: VirtualClock, verb: Verb, action: Action
) -> None:
    probe(FaultyStore(inner, Fault(verb, action)), clock=clock)


def test_the_probe_ends_at_its_deadline(inner: Store, clock: VirtualClock) -> None:
    with pytest.raises(StoreError, match="could not be asked"):
        probe(FaultyStore(inner, Fault("*", "before", times=FOREVER)), clock=clock, deadline_seconds=20)
    assert clock.monotonic() <= 20


def test_the_probe_tells_a_refusal_at_once(inner: Store, clock: VirtualClock) -> None:
    with pytest.raises(StoreRefused):
        probe(FaultyStore(inner, Fault("create", "denied")), clock=clock)
    assert clock.slept == []
