"""The compactor and the readers of what it makes: the same answers with and without segments, whatever happens."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.faulty_store import Fault, FaultyStore, Killed, flipped
from tests.storage.long_runs import LongRun

from weighbridge.storage.history import compact as compacting
from weighbridge.storage.history import segments
from weighbridge.storage.history.compact import compact
from weighbridge.storage.history.questions import blame, diff, hosts, log, show, status
from weighbridge.storage.history.reader import History
from weighbridge.storage.history.segments import list_segments
from weighbridge.storage.manifest import manifest_key
from weighbridge.storage.records import record_key, write_record
from weighbridge.storage.stores import Store, open_store

BLOCK, GROWTH, BEHIND = 4, 2, 4


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "BLOCK", BLOCK)
    monkeypatch.setattr(segments, "GROWTH", GROWTH)
    monkeypatch.setattr(compacting, "RECORDS_BEHIND", BEHIND)


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> LongRun:
    """Versions 0 to 21, of which two hosts served each."""
    store = open_store(str(tmp_path_factory.mktemp("grown") / "root"))
    return LongRun(store, tensors=5, share=0.6, hosts=("a", "b")).grow(21)


@pytest.fixture
def run(grown: LongRun, tmp_path: Path) -> LongRun:
    """A copy of that run for one test alone."""
    shutil.copytree(grown.store.url, tmp_path / "root")
    return grown.on(open_store(str(tmp_path / "root")))


def spans(store: Store, kind: segments.Kind) -> list[tuple[int, int]]:
    return sorted({s.span for s in list_segments(store, kind)})


ANSWERS: dict[str, Callable[[History], object]] = {
    "log": lambda h: list(log(h)),
    "last of the log": lambda h: list(log(h, limit=3)),
    "middle of the versions": lambda h: h.versions(3, 13),
    "show": lambda h: [show(h, version) for version in (0, 7, 21)],
    "diff": lambda h: [diff(h, *span) for span in ((0, 21), (0, 1), (2, 13), (9, 21))],
    "blame": lambda h: [blame(h, key.tensor) for key in h.index.keys],
    "hosts": hosts,
    "status": status,
    "records": lambda h: [h.records(version=version) for version in (1, 9, 21)],
}


@pytest.mark.parametrize("question", ANSWERS)
def test_the_answer_is_the_same_with_segments_as_without(run: LongRun, question: str) -> None:
    before = ANSWERS[question](History(run.store))
    assert before
    assert compact(run.store).faults == []
    assert spans(run.store, "parts")
    assert ANSWERS[question](History(run.store)) == before
    run.grow(3)
    after = ANSWERS[question](History(run.store))
    compact(run.store)
    assert ANSWERS[question](History(run.store)) == after


def test_all_whole_blocks_are_compacted_and_put_together(run: LongRun) -> None:
    compact(run.store)
    assert spans(run.store, "versions") == [(0, 15), (16, 19)]
    assert spans(run.store, "parts") == [(0, 15), (16, 19)]
    assert spans(run.store, "records") == [(0, 15)]  # those of the newest versions may not be all there yet


def test_compacting_again_does_nothing_until_there_is_something_to_do(run: LongRun) -> None:
    compact(run.store)
    again = compact(run.store)
    assert (again.written, again.removed) == ([], [])
    run.grow(2)
    third = compact(run.store)
    assert [key.split("-")[0] for key in third.written] == [
        f"history/{kind}/{first:012d}" for kind, first in (("parts", 20), ("versions", 20), ("records", 16))
    ] + [f"history/{kind}/{16:012d}" for kind in ("parts", "versions")]


def test_what_a_compactor_that_died_left_is_removed_by_the_next(run: LongRun) -> None:
    with pytest.raises(Killed):
        compact(FaultyStore(run.store, Fault("delete", "kill before")))
    assert len(spans(run.store, "parts")) > 2
    assert compact(run.store).written == []
    assert spans(run.store, "parts") == [(0, 15), (16, 19)]


def test_compactors_of_the_same_history_write_the_same_objects(run: LongRun, tmp_path: Path) -> None:
    compact(run.store)
    first = {info.key: run.store.get(info.key) for info in run.store.list("history")}
    for key in first:
        run.store.delete(key)
    compact(run.store)
    assert {info.key: run.store.get(info.key) for info in run.store.list("history")} == first


def test_readers_need_only_what_is_not_compacted(run: LongRun) -> None:
    compact(run.store)
    watched = FaultyStore(run.store)
    history = History(watched)
    list(log(history)), hosts(history), status(history), list(history.parts())
    got = [key for verb, key in watched.calls if verb == "get" and not key.startswith("history/")]
    base = {manifest_key(0), "run.json"}  # version 0 tells which tensors there are
    assert {key for key in got if not key.startswith("hosts/")} - base == {manifest_key(20), manifest_key(21)}
    assert all(int(key.split("/")[2][:12]) >= 16 for key in got if key.startswith("hosts/"))


def test_a_reader_finds_its_way_when_its_segments_are_put_together_meanwhile(run: LongRun) -> None:
    expected = [line.version for line in log(History(run.store))]
    with pytest.raises(Killed):  # which leaves the short ones
        compact(FaultyStore(run.store, Fault("delete", "kill before")))
    for kind in ("parts", "versions"):
        for one in list_segments(run.store, kind):
            if one.last - one.first >= BLOCK:
                run.store.delete(one.key)
    slow = History(run.store)
    assert slow.segments("versions") and slow.segments("parts")
    compact(run.store)
    assert [line.version for line in log(slow)] == expected
    assert sum(table.num_rows for table in slow.parts()) == 21 * 3
    assert slow.faults == []


def test_a_record_that_came_late_is_taken_up_by_the_next_compaction(run: LongRun) -> None:
    compact(run.store)
    late = run.record("c", version=2, outcome="failed", head=2)
    write_record(run.store, late)
    compact(run.store)
    assert late in hosts(History(run.store))
    assert show(History(run.store), 2).hosts[-1] == late
    assert compact(run.store).written == []


def test_a_corrupt_record_is_named_left_out_and_taken_up_when_it_is_restored(run: LongRun) -> None:
    victim = next(r for r in hosts(History(run.store)) if r.version == 5)
    whole = run.store.get(record_key(victim))
    run.store.put(record_key(victim), flipped(whole))
    faults = compact(run.store).faults
    assert [str(fault).split()[0] for fault in faults] == [record_key(victim)]
    history = History(run.store)
    assert len(hosts(history)) == 2 * 21 - 1
    assert compact(run.store).written == []
    run.store.put(record_key(victim), whole)
    assert compact(run.store).faults == []
    assert victim in hosts(History(run.store))


def test_a_corrupt_record_in_the_tail_is_named_by_status_which_goes_on(run: LongRun) -> None:
    victim = next(r for r in hosts(History(run.store)) if (r.version, r.host) == (21, "b"))
    run.store.put(record_key(victim), b"{}")
    history = History(run.store)
    assert [(line.host, line.version) for line in status(history)] == [("a", 21), ("b", 20)]
    assert [str(fault).split()[0] for fault in history.faults] == [record_key(victim)]


def test_a_corrupt_manifest_is_named_and_only_it_is_missing(run: LongRun) -> None:
    run.store.put(manifest_key(9), flipped(run.store.get(manifest_key(9))))
    faults = compact(run.store).faults
    assert any(manifest_key(9) in str(fault) for fault in faults)
    assert (8, 11) not in spans(run.store, "parts")
    assert (12, 15) in spans(run.store, "parts")
    history = History(run.store)
    assert [line.version for line in log(history)] == [v for v in range(21, -1, -1) if v != 9]
    assert len(history.faults) == 1
    assert [h.version for h in status(history)] == [21, 21]


def test_a_broken_chain_is_not_compacted(run: LongRun) -> None:
    other = LongRun(open_store(f"{run.store.url}-other"), tensors=5)
    other.random.seed(99)
    other.grow(21)
    run.store.put(manifest_key(9), other.store.get(manifest_key(9)))
    faults = compact(run.store).faults
    assert any(manifest_key(9) in str(fault) and "does not follow" in str(fault) for fault in faults)
    assert (8, 11) not in spans(run.store, "parts")


def test_a_corrupt_segment_is_read_around_named_and_mended(run: LongRun) -> None:
    expected = {question: ask(History(run.store)) for question, ask in ANSWERS.items()}
    compact(run.store)
    corrupt = {info.key for info in run.store.list("history")}
    for key in corrupt:
        run.store.put(key, b"garbage" + run.store.get(key)[7:-7] + b"garbage")
    for question, ask in ANSWERS.items():
        history = History(run.store)
        assert ask(history) == expected[question]
        assert bool(history.faults) != (question == "status")  # which needs none of these
    assert compact(run.store).faults
    mended = compact(run.store, mend=True)
    assert corrupt <= set(mended.removed)
    assert mended.faults == []
    history = History(run.store)
    assert [ask(history) for ask in ANSWERS.values()] == list(expected.values())
    assert history.faults == []


def test_whatever_byte_of_a_segment_changes_the_answer_is_right_or_the_segment_is_named(run: LongRun) -> None:
    expected = list(log(History(run.store)))
    compact(run.store)
    (one, _) = sorted(list_segments(run.store, "versions"), key=lambda s: s.first)
    whole = run.store.get(one.key)
    named = 0
    for place in range(0, len(whole), 257):
        run.store.put(one.key, whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        history = History(run.store)
        assert list(log(history)) == expected, place
        named += [str(fault).split()[0] for fault in history.faults] == [one.key]
    assert named > 3
