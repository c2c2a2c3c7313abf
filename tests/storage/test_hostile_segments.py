"""Segments of the history as somebody would make them who can write to the store: under right names, since a name only
says what the bytes are. Readers go round them, in bounds; the audit and the compactor name them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.property.hostile import bounded, damaged, many, refused
from tests.storage.long_runs import LongRun

from weighbridge.errors import CorruptData
from weighbridge.storage.audit.audit import audit
from weighbridge.storage.digests import chain_digest
from weighbridge.storage.history import compact as compacting
from weighbridge.storage.history import segment_file, segments
from weighbridge.storage.history.alarms import alarms
from weighbridge.storage.history.compact import compact
from weighbridge.storage.history.questions import blame, diff, hosts, log, show, status
from weighbridge.storage.history.reader import History
from weighbridge.storage.history.segment_file import segment_of
from weighbridge.storage.history.segments import Kind, Segment, list_segments
from weighbridge.storage.history.stats import stats
from weighbridge.storage.history.tables import to_parquet
from weighbridge.storage.stores import open_store

ROWS = 1 << 11


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "BLOCK", 4)
    monkeypatch.setattr(compacting, "RECORDS_BEHIND", 4)


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> LongRun:
    """Versions 0 to 12 with two hosts, compacted in blocks of four."""
    store = open_store(str(tmp_path_factory.mktemp("grown") / "root"))
    run = LongRun(store, tensors=4, hosts=("a", "b")).grow(12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "BLOCK", 4)
        patch.setattr(compacting, "RECORDS_BEHIND", 4)
        assert not compact(store).faults
    return run


@pytest.fixture
def run(grown: LongRun, tmp_path: Path) -> LongRun:
    shutil.copytree(grown.store.url, tmp_path / "root")
    return grown.on(open_store(str(tmp_path / "root")))


def asked(history: History) -> list[object]:
    """Every question there is."""
    return [
        list(log(history)), [show(history, v) for v in (0, 2, 12)], diff(history, 0, 12), status(history),
        hosts(history),
        [blame(history, key.tensor) for key in history.index.keys], stats(history), history.records(version=2),
        sum(table.num_rows for table in history.parts()),
        alarms(history, status(history), unchanged=3, allowed_staleness=1),
    ]  # fmt: skip


def first_segment(run: LongRun, kind: Kind) -> Segment:
    return min(list_segments(run.store, kind), key=lambda s: s.span)


def forged(run: LongRun, kind: Kind, data: bytes) -> Segment:
    """Other bytes in place of a segment, under the name that they have."""
    old = first_segment(run, kind)
    new = Segment(kind, *old.span, old.edition, chain_digest(data), len(data))
    run.store.delete(old.key)
    run.store.put(new.key, data)
    return new


def table_of(run: LongRun, kind: Kind) -> Any:
    return pq.read_table(pa.BufferReader(run.store.get(first_segment(run, kind).key)))


def with_column(table: Any, name: str, values: Any) -> Any:
    place = table.schema.get_field_index(name)
    return table.set_column(place, table.schema.field(name), values)


def parquet(table: Any, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, store_schema=False, compression="zstd", **options)
    return bytes(sink.getvalue())


def repeated(table: Any, rows: int) -> Any:
    return table.take(pa.array([n % table.num_rows for n in range(rows)]))


def long_texts(run: LongRun) -> tuple[Kind, bytes]:
    """Four texts that unpack to 160 MiB."""
    table = table_of(run, "versions")
    labels = pa.array(['{"a":"' + "x" * (40 << 20) + '"}'] * table.num_rows)
    return "versions", parquet(with_column(table, "labels", labels), use_dictionary=False)


def one_text_for_all(run: LongRun) -> tuple[Kind, bytes]:
    """A text of 256 KiB which stands in every row of 2048: half a GiB. On disk it is one, and a run of numbers."""
    many_rows = repeated(table_of(run, "records"), ROWS)
    error = pa.DictionaryArray.from_arrays(pa.array([0] * ROWS, pa.int32()), pa.array(["x" * (1 << 18)]))
    place = many_rows.schema.get_field_index("error")
    return "records", parquet(many_rows.set_column(place, "error", error))


def key_of_a_map_for_all(run: LongRun) -> tuple[Kind, bytes]:
    """The same within the map of seconds."""
    table = repeated(table_of(run, "records"), ROWS)
    keys = pa.array(["x" * (1 << 18)] * 4).dictionary_encode().take(pa.array([0] * ROWS))
    whole = pa.MapArray.from_arrays(pa.array(range(ROWS + 1), pa.int32()), keys, pa.array([1.0] * ROWS))
    return "records", parquet(table.set_column(table.schema.get_field_index("seconds"), "seconds", whole))


def endless_list(run: LongRun) -> tuple[Kind, bytes]:
    """Shapes of 16 Mi zeros each: in runs they take no room."""
    table = table_of(run, "parts")
    row = pa.array([0], pa.int64()).take(pa.array([0] * (1 << 24)))
    offsets = pa.array([0] + [1 << 24] * table.num_rows, pa.int32())
    return "parts", parquet(with_column(table, "shape", pa.ListArray.from_arrays(offsets, row)))


def claimed(number: int, instead: int) -> tuple[bytes, bytes]:
    """Two numbers as Thrift writes them, as long as each other."""

    def varint(value: int) -> bytes:
        value, made = value << 1, b""
        while value > 127:
            made, value = made + bytes([value & 127 | 128]), value >> 7
        return made + bytes([value])

    told, lie = varint(number), varint(instead)
    assert len(told) == len(lie)
    return told, lie


def lying_page(run: LongRun) -> tuple[Kind, bytes]:
    """A page that claims to unpack to 128 MiB, under a footer which claims what is true."""
    table = table_of(run, "versions")
    data = parquet(
        with_column(table, "labels", pa.array(['{"a":"' + "x" * 400_000 + '"}'] * table.num_rows)), use_dictionary=False
    )
    texts = 4 * (4 + len('{"a":""}') + 400_000)
    for nbytes in range(texts, texts + 16):  # and so many more for levels
        told, lie = claimed(nbytes, (1 << 27) - 1)
        if told in data:
            return "versions", data.replace(told, lie, 1)
    raise AssertionError("the page's header is another than it was")


def lying_rows(run: LongRun) -> tuple[Kind, bytes]:
    """A footer that claims a million rows wherever there are four times ten thousand."""
    table = repeated(table_of(run, "records"), 40_000)
    told, lie = claimed(40_000, 1_000_000)
    data = parquet(table, row_group_size=40_000)
    return "records", data[: len(data) // 2] + data[len(data) // 2 :].replace(told, lie)


def lying_values(run: LongRun) -> tuple[Kind, bytes]:
    """Pages that claim a million values each, under a footer which claims what is true."""
    told, lie = claimed(20_000, 1_000_000)  # Arrow begins a new page after so many rows
    data = parquet(repeated(table_of(run, "records"), 40_000))
    end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    assert told in data[:end]
    return "records", data[:end].replace(told, lie) + data[end:]


BOMBS = (lying_values, long_texts, one_text_for_all, key_of_a_map_for_all, endless_list, lying_page, lying_rows)


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_gone_round_in_bounds_and_named(run: LongRun, bomb: Callable[[LongRun], tuple[Kind, bytes]]) -> None:
    for segment in list_segments(run.store, "versions"):
        if segment.first:  # so that every question has to read more than segments
            run.store.delete(segment.key)
    right = asked(History(run.store))
    kind, data = bomb(run)
    assert len(data) < 3 << 20
    segment = forged(run, kind, data)
    history = History(run.store)
    with bounded(more_bytes=128 << 20):
        answers = asked(history)
    assert answers == right
    assert [segment.key in str(fault) for fault in history.faults] == [True]
    with bounded(more_bytes=128 << 20):
        assert segment.key in [finding.key for finding in audit(run.store).findings]
        done = compact(run.store, mend=True)
    assert segment.key in done.removed
    assert asked(History(run.store)) == right


def test_a_segment_of_any_size_is_not_read_whole(run: LongRun, monkeypatch: pytest.MonkeyPatch) -> None:
    right = asked(History(run.store))
    monkeypatch.setattr(segment_file, "MOST_SMALL_BYTES", 1000)
    history = History(run.store)
    assert asked(history) == right
    assert history.faults and all("bytes" in str(fault) for fault in history.faults)


FALSE: dict[str, tuple[Kind, str, Callable[[Any], Any]]] = {
    "labels that are no JSON": ("versions", "labels", lambda c: pa.array(["{"] * len(c))),
    "labels nested deep": ("versions", "labels", lambda c: pa.array(["[" * 10_000] * len(c))),
    "labels that are a list": ("versions", "labels", lambda c: pa.array(["[]"] * len(c))),
    "a label that is a list": ("versions", "labels", lambda c: pa.array(['{"a": []}'] * len(c))),
    "no labels": ("versions", "labels", lambda c: pa.array([None] * len(c), pa.string())),
    "no numbers": ("versions", "changed", lambda c: pa.array([None] * len(c), pa.int64())),
    "another version": ("versions", "version", lambda c: pc.add(c, 100)),
    "a version twice": ("versions", "version", lambda c: pa.array([1] * len(c), pa.int64())),
    "no Unicode": ("versions", "writer", lambda c: pa.array([b"\xff\xfe"] * len(c)).view(pa.string())),
    "a part of another version": ("parts", "version", lambda c: pc.add(c, 1000)),
    "no tensor": ("parts", "tensor", lambda c: pa.array([None] * len(c), pa.string())),
    "a host that is a path": ("records", "host", lambda c: pa.array(["../x"] * len(c))),
    "an escape for a host": ("records", "host", lambda c: pa.array(["\x1b[2J"] * len(c))),
    "no seconds": ("records", "seconds", lambda c: pa.array([None] * len(c), c.type)),
    "seconds without a number": ("records", "seconds", lambda c: pa.array([[("pause", None)]] * len(c), c.type)),
    "endless seconds": ("records", "seconds", lambda c: pa.array([[("pause", float("nan"))]] * len(c), c.type)),
    "a record of another head": ("records", "head", lambda c: pc.add(c, 1000)),
}


@pytest.mark.parametrize("false", FALSE)
def test_what_no_segment_says_is_gone_round_and_named(run: LongRun, false: str) -> None:
    right = asked(History(run.store))
    kind, name, change = FALSE[false]
    table = table_of(run, kind)
    segment = forged(run, kind, to_parquet(kind, with_column(table, name, change(table.column(name))), {}))
    history = History(run.store)
    assert asked(history) == right
    assert [segment.key in str(fault) for fault in history.faults] == [True]
    assert segment.key in [finding.key for finding in audit(run.store).findings]


@pytest.mark.parametrize("kind", ["versions", "parts", "records"])
@many
@given(data=st.data())
def test_a_damaged_segment_under_a_right_name_is_refused_or_read(
    grown: LongRun, kind: Kind, data: st.DataObject
) -> None:
    segment = first_segment(grown, kind)
    made = data.draw(damaged(grown.store.get(segment.key)))
    with bounded():
        refused(lambda: segment_of(segment, made).read(), CorruptData)


LISTS = """
from tests.fuzz import TARGETS
from weighbridge.errors import CorruptData
target, seed = TARGETS["segment-parts"][0]()
refused = 0
for place in range(len(seed) - 8 - int.from_bytes(seed[-8:-4], "little"), len(seed) - 8):
    for count in range(8) if seed[place] & 15 == 6 else ():  # a list of 64-bit numbers, as levels are counted in
        try:
            target(seed[:place] + bytes([count << 4 | 6]) + seed[place + 1:])
        except CorruptData:
            refused += 1
print("refused", refused)
"""


def test_levels_that_are_miscounted_in_a_footer_do_not_end_the_process() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ended = subprocess.run([sys.executable, "-c", LISTS], capture_output=True, text=True, env=environment, timeout=120)
    assert ended.returncode == 0 and int(ended.stdout.split()[-1]) > 20, ended.stderr[-500:]
