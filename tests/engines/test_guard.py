"""A host that dies in a cut over leaves its guard behind. The engine here is a folder of files moved by real commands;
the host is a real process that kills itself."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.flows.conftest import until

from weighbridge.errors import EngineError
from weighbridge.tasks.engines.guard import MARK_NAME, guarded
from weighbridge.tasks.engines.spec import EngineSpec

_ENGINE = """
import sys
from pathlib import Path
from weighbridge.tasks.engines.none import NoEngine

class FileEngine(NoEngine):
    name = "files"
    def __init__(self, url):
        self.folder = Path(url)
    def checksum(self, *, seconds):
        return None

    def read_version(self, *, seconds):
        return int((self.folder / "version").read_text())
    def resume(self, *, seconds):
        (self.folder / "state").write_text("running")
"""

_HOST = """
import os, signal, sys
from pathlib import Path
from weighbridge.tasks.engines.guard import guarded
from weighbridge.tasks.engines.spec import EngineSpec

kind, folder, fate = sys.argv[1:]
with guarded(EngineSpec(kind, url=folder), Path(folder)) as guard:
    guard.pausing(4 if fate != "unknown" else None, seconds=60)
    (Path(folder) / "state").write_text("paused")
    if fate == "loading":
        guard.loading()
    if fate == "settled":
        guard.settled(resumed=False)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the engine's and the replica's; its adapter can be imported from it, here and in children."""
    (tmp_path / "file_engine.py").write_text(_ENGINE)
    (tmp_path / "version").write_text("4")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def die(engine: Path, fate: str) -> None:
    """A host that dies in its cut over, and the end of its guard."""
    host = [sys.executable, "-c", _HOST, "file_engine:FileEngine", str(engine), fate]
    assert subprocess.run(host, check=False, timeout=60).returncode == -9
    with guarded(EngineSpec("file_engine:FileEngine", url=str(engine)), engine):
        pass  # the next guard is ready only once the one before it has ended


def test_an_engine_that_still_proves_the_old_version_is_resumed(engine: Path) -> None:
    die(engine, "paused")
    assert (engine / "state").read_text() == "running"
    assert not (engine / MARK_NAME).exists()


@pytest.mark.parametrize("fate", ["loading", "unknown"])
def test_an_engine_whose_weights_are_not_known_is_left_paused_and_marked(engine: Path, fate: str) -> None:
    die(engine, fate)
    assert (engine / "state").read_text() == "paused"
    assert json.loads((engine / MARK_NAME).read_text())["previous"] == (None if fate == "unknown" else 4)


def test_an_engine_that_says_another_version_is_left_paused_and_marked(engine: Path) -> None:
    (engine / "version").write_text("5")
    die(engine, "paused")
    assert (engine / "state").read_text() == "paused"
    assert "version 5" in json.loads((engine / MARK_NAME).read_text())["why"]


def test_an_engine_that_its_host_left_paused_on_purpose_is_left_alone(engine: Path) -> None:
    die(engine, "settled")
    assert (engine / "state").read_text() == "paused"
    assert not (engine / MARK_NAME).exists()


def test_a_mark_goes_when_the_engine_was_resumed_on_known_weights(engine: Path) -> None:
    die(engine, "loading")
    with guarded(EngineSpec("file_engine:FileEngine", url=str(engine)), engine) as guard:
        assert guard is not None
        assert guard.marked()
        guard.pausing(None, seconds=60)
        guard.settled(resumed=True)
        assert not guard.marked()


def test_a_guard_that_has_gone_is_noticed_before_the_pause(engine: Path) -> None:
    with guarded(EngineSpec("file_engine:FileEngine", url=str(engine)), engine) as guard:
        assert guard is not None
        guard._process.kill()
        guard._process.wait()
        with pytest.raises(EngineError, match="not paused"):
            for _ in range(20):  # the first line may still fit into the broken pipe
                guard.pausing(4, seconds=60)
                time.sleep(0.01)


def test_a_guard_that_goes_in_the_middle_does_not_end_the_cut_over(engine: Path) -> None:
    with guarded(EngineSpec("file_engine:FileEngine", url=str(engine)), engine) as guard:
        assert guard is not None
        guard.pausing(4, seconds=60)
        guard._process.kill()
        guard._process.wait()
        for _ in range(20):
            guard.loading()
            guard.settled(resumed=True)


@pytest.mark.parametrize("previous", [4, None])
def test_a_host_that_hangs_loses_its_turn_and_its_engine_is_resumed_or_marked(
    engine: Path, previous: int | None
) -> None:
    (engine / "state").write_text("paused")
    with guarded(EngineSpec("file_engine:FileEngine", url=str(engine)), engine) as guard:
        assert guard is not None
        guard.pausing(previous, seconds=-4.9)  # less its grace: a tenth of a second
        until(lambda: (engine / "state").read_text() == "running" or guard.marked())
        if previous is None:
            assert guard.marked()
            assert guard.loading(), "a load mends what is not known"
            guard.settled(resumed=True)
            assert not guard.marked()
        else:
            assert (engine / "state").read_text() == "running"
            assert not guard.loading()
            guard.settled(resumed=True)
        guard.pausing(4, seconds=60)
        assert guard.loading(), "the next cut over is its own"
        guard.settled(resumed=True)


def test_a_host_that_hangs_in_the_reload_leaves_it_paused_and_marked_until_it_ends_well(engine: Path) -> None:
    with guarded(EngineSpec("file_engine:FileEngine", url=str(engine)), engine) as guard:
        assert guard is not None
        guard.pausing(4, seconds=-2.45)  # twice that, less the grace
        assert guard.loading()
        until(guard.marked)
        assert not (engine / "state").exists()
        guard.settled(resumed=True)
        assert not guard.marked()


def test_an_engine_that_is_never_paused_has_no_guard(tmp_path: Path) -> None:
    with guarded(EngineSpec("none"), tmp_path) as guard:
        assert guard is None
