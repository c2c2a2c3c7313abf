"""What the history raises an alarm about."""

from pathlib import Path

import pytest
from tests.storage.long_runs import LongRun

from weighbridge.storage.history.alarms import Alarm, alarms
from weighbridge.storage.history.questions import status
from weighbridge.storage.history.reader import History
from weighbridge.storage.records import write_record
from weighbridge.storage.stores import open_store


@pytest.fixture
def run(tmp_path: Path) -> LongRun:
    return LongRun(open_store(str(tmp_path / "root")), tensors=2, hosts=("a",)).grow(2)


def raised(run: LongRun, *, unchanged: int = 3, allowed_staleness: int | None = None) -> tuple[Alarm, ...]:
    history = History(run.store)
    return alarms(history, status(history), unchanged=unchanged, allowed_staleness=allowed_staleness)


def test_versions_in_a_row_without_a_changed_byte_raise_an_alarm(run: LongRun) -> None:
    for number in range(1, 9):
        run.publish([])
        found = raised(run)
        assert [(alarm.kind, alarm.version) for alarm in found] == ([("unchanged", 2 + number)] if number >= 3 else [])
        assert not found or f"the last {number} versions" in found[0].what
    run.publish([0])
    assert raised(run) == ()


def test_a_run_that_never_changed_anything_raises_it_too(tmp_path: Path) -> None:
    run = LongRun(open_store(str(tmp_path / "other")), tensors=2)
    assert raised(run) == ()
    for _ in range(3):
        run.publish([])
    (alarm,) = raised(run)
    assert "the last 3 versions" in alarm.what


def test_hosts_further_behind_than_is_allowed_raise_an_alarm_each(run: LongRun) -> None:
    write_record(run.store, run.record("late", version=1, head=1))
    write_record(run.store, run.record("never", outcome="failed"))
    run.publish([0])
    assert raised(run) == ()
    assert [(alarm.kind, alarm.host) for alarm in raised(run, allowed_staleness=1)] == [
        ("behind", "late"),
        ("behind", "never"),
    ]
    assert [alarm.host for alarm in raised(run, allowed_staleness=2)] == ["never"]
    assert [alarm.host for alarm in raised(run, allowed_staleness=0)] == ["a", "late", "never"]
