"""How `weighbridge host` starts: before its trainer too."""

import threading
from pathlib import Path

import pytest
from tests.replica.runs import SmallRun

from weighbridge.cli.host import _run_of
from weighbridge.storage.lineage import RunInfo
from weighbridge.storage.stores import open_store
from weighbridge.storage.stores.hooks import Hooks


def test_a_host_may_be_there_before_its_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()
    found: list[RunInfo] = []
    real = threading.Event()
    monkeypatch.setattr("weighbridge.cli.host.time.sleep", lambda seconds: (waits.set(), real.wait(0.01)))
    store = open_store(str(tmp_path / "store"))
    host = threading.Thread(target=lambda: found.append(_run_of(store, Hooks(), every_seconds=1)))
    host.start()
    assert waits.wait(90) and not found
    SmallRun(tmp_path)
    host.join(90)
    assert [run.run_id for run in found] == ["run-1"]
