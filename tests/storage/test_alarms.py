"""What the history raises an alarm about."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoints import trained
from tests.storage.long_runs import LongRun
from tests.storage.publishing import Run, assert_sound, push

from weighbridge.storage.codecs import PartInput, encode_shard
from weighbridge.storage.history.alarms import Alarm, alarms
from weighbridge.storage.history.questions import status
from weighbridge.storage.history.reader import History
from weighbridge.storage.records import write_record
from weighbridge.storage.stores import open_store
from weighbridge.values import PartKey


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


# --- what a version says of itself


def encoded(old: "np.ndarray[Any, Any]", new: "np.ndarray[Any, Any]", dtype: str) -> int:
    part = PartInput(PartKey("w", 0), dtype, old.view(np.uint8), new.view(np.uint8))
    shard = encode_shard([part], digest_kind="xxh3-128")
    return shard.parts[0].nonfinite if shard.parts else 0


@pytest.mark.parametrize(
    ("dtype", "width", "finite", "none"),
    [
        ("BF16", 2, [0x0000, 0x8000, 0x7F7F, 0xFF7F, 0x0001], [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81]),
        ("F16", 2, [0x7BFF, 0xFBFF, 0x0001], [0x7C00, 0xFC00, 0x7E01]),
        ("F32", 4, [0x7F7FFFFF, 0x80000000], [0x7F800000, 0xFFC00001]),
        ("F64", 8, [0x7FEFFFFFFFFFFFFF, 1], [0x7FF0000000000000, 0xFFF8000000000001]),
        ("F8_E4M3", 1, [0x7E, 0xFE, 0x00], [0x7F, 0xFF]),
        ("F8_E5M2", 1, [0x7B, 0xFB], [0x7C, 0xFD]),
        ("I32", 4, [0x7F800000, 0x7FC00000], []),
    ],
)
def test_elements_that_turn_nan_or_infinite_are_counted_and_those_that_were_so_are_not(
    dtype: str, width: int, finite: list[int], none: list[int]
) -> None:
    unit = np.dtype(f"u{width}")
    good = np.array(finite * 40000, unit)
    assert encoded(np.roll(good, 1), good, dtype) == 0
    if not none:
        return
    for pattern in none:
        bad = good.copy()
        bad[[3, 70000, good.size - 1]] = pattern
        assert encoded(good, bad, dtype) == 3
        again = bad.copy()
        again[5] ^= 1
        assert encoded(bad, again, dtype) == 0, "they were none before"


def test_a_version_names_what_turned_none_and_what_should_not_have_changed_and_is_published_as_it_is(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    publisher = run.open(trainable=("layers.*", "embed.*"))
    good = trained(run.base_weights, 1, only=("layers.0.norm.weight",))
    good["layers.0.norm.weight"] = np.nan_to_num(good["layers.0.norm.weight"])
    assert push(publisher, good, {"step": 1}).labels == {"step": 1}
    bad = {name: array.copy() for name, array in good.items()}
    bad["layers.0.norm.weight"][:3] = [np.nan, np.inf, -np.inf]
    bad["mask"][0] = not bad["mask"][0]
    manifest = push(publisher, bad, {"step": 2})
    assert manifest.labels == {
        "step": 2,
        "alarm.nonfinite": 3,
        "alarm.nonfinite_in": "layers.0.norm.weight (3)",
        "alarm.frozen": 1,
        "alarm.frozen_in": "mask",
    }
    history = History(run.store)
    found = alarms(history, status(history), unchanged=3, allowed_staleness=None)
    assert [(alarm.kind, alarm.version) for alarm in found] == [("nonfinite", 2), ("frozen", 2)]
    assert "layers.0.norm.weight (3)" in found[0].what and "mask" in found[1].what
    assert_sound(run, {0: run.base_weights, 1: good, 2: bad})
