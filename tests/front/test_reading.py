"""A run as Python reads it, and its figures as people see them."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from tests.storage.long_runs import ELEMENTS, STEP_NS, LongRun

import weighbridge
from weighbridge.cli import main
from weighbridge.errors import LineageError
from weighbridge.storage.history.reader import History
from weighbridge.storage.history.stats import stats
from weighbridge.storage.records import write_record
from weighbridge.storage.stores import open_store


@pytest.fixture
def run(tmp_path: Path) -> LongRun:
    return LongRun(open_store(str(tmp_path / "root")), tensors=4, hosts=("a", "b")).grow(3)


def test_a_run_opened_by_its_url_gives_its_history_as_arrow_tables(run: LongRun) -> None:
    opened = weighbridge.open_run(run.store.url)
    assert opened.run_id == "long-run"
    history = opened.history()
    assert history.versions().column("version").to_pylist() == [0, 1, 2, 3]
    assert history.records().column("host").to_pylist() == ["a", "b"] * 3
    parts = pa.concat_tables(history.parts())
    assert set(parts.column("tensor").to_pylist()) == set(run.names)
    assert parts.num_rows == 3 * 4


def test_a_root_without_a_run_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(LineageError, match="holds no run"):
        weighbridge.open_run(str(tmp_path))


def test_the_figures_of_a_version_follow_from_its_manifest_and_its_hosts(run: LongRun) -> None:
    run.publish([])
    for seconds, outcome in ((1.0, "served"), (3.0, "served"), (9.0, "failed")):
        record = run.record("c", outcome=outcome)
        record.seconds.update(pause=seconds)  # type: ignore[attr-defined]
        write_record(run.store, record)
    *_, third, empty = stats(History(run.store))
    changed = sum(c for c in next(History(run.store).parts(3, 3)).column("changed").to_pylist())
    assert (third.version, third.changed, third.tensors, third.hosts) == (3, changed, 4, 2)
    assert third.density == changed / (4 * ELEMENTS)
    assert (third.wire_bytes, third.ratio) == (100, 4 * ELEMENTS * 2 / 100)
    assert third.step_seconds == STEP_NS / 1e9
    assert (empty.changed, empty.density, empty.ratio, empty.bytes_per_change) == (0, 0.0, 0.0, 0.0)
    assert (empty.hosts, empty.pause_seconds, empty.fetch_seconds) == (2, 2.0, 0.2)
    assert [s.version for s in stats(History(run.store), limit=2)] == [3, 4]
    assert stats(History(run.store), limit=2)[0].step_seconds == STEP_NS / 1e9


def test_the_figures_are_shown_as_a_table_as_json_and_as_a_chart(
    run: LongRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> list[str]:
        with pytest.raises(SystemExit) as ended:
            main(["stats", "--store", run.store.url, *words])
        assert ended.value.code == 0
        return capsys.readouterr().out.splitlines()

    assert [line.split("\t")[0] for line in said()] == ["version", "1", "2", "3"]
    assert [json.loads(line)["version"] for line in said("--json", "-n", "2")] == [2, 3]
    pytest.importorskip("matplotlib")
    said("--png", str(tmp_path / "chart.png"))
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
