"""The command engine against real commands."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from weighbridge.errors import EngineError, UsageError
from weighbridge.tasks.engines.command import CommandEngine


def test_path_and_version_reach_the_command_as_arguments_and_as_environment(tmp_path: Path) -> None:
    folder = tmp_path / "a folder; touch pwned $(id)"
    said = tmp_path / "said"
    code = "import os, sys; open(sys.argv[1], 'w').write('|'.join([*sys.argv[2:], os.environ['WEIGHBRIDGE_VERSION']]))"
    engine = CommandEngine([sys.executable, "-c", code, str(said), "{path}", "--at={version}"])
    engine.reload(folder, 12, seconds=20)
    assert said.read_text() == f"{folder}|--at=12|12"


def test_a_command_line_is_split_as_a_shell_would_and_runs_without_one(tmp_path: Path) -> None:
    said = tmp_path / "said"
    CommandEngine(f"cp /dev/null '{said}'").reload(tmp_path, 1, seconds=20)
    assert said.exists()
    with pytest.raises(EngineError, match=r"ended with"):
        CommandEngine("test a = b && true").reload(tmp_path, 1, seconds=20)


def test_a_failing_command_is_an_error_with_its_code_and_the_end_of_its_output(tmp_path: Path) -> None:
    engine = CommandEngine(["sh", "-c", "seq 100000; echo no such model >&2; exit 7"])
    with pytest.raises(EngineError, match=r"reload command ended with 7") as caught:
        engine.reload(tmp_path, 1, seconds=20)
    assert str(caught.value).endswith("no such model")
    assert len(str(caught.value)) < 2500


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    engine = CommandEngine(["sh", "-c", f"sleep 60 & echo $! > {noted}; wait"])
    begun = time.monotonic()
    with pytest.raises(EngineError, match=r"did not end within 3 s and was killed"):
        engine.reload(tmp_path, 1, seconds=3)
    assert time.monotonic() - begun < 30
    child = int(noted.read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        # The kill was sent, and the kernel takes its time; who inherits the child may leave it a zombie.
        while psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() - begun < 30
            time.sleep(0.02)


def test_a_daemon_that_the_command_leaves_behind_holds_nobody_up(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    begun = time.monotonic()
    CommandEngine(["sh", "-c", f"sleep 30 & echo $! > {noted}"]).reload(tmp_path, 1, seconds=20)
    assert time.monotonic() - begun < 10
    os.kill(int(noted.read_text()), signal.SIGKILL)


def test_a_command_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"/no/such/thing"):
        CommandEngine("/no/such/thing {path}").reload(tmp_path, 1, seconds=5)


@pytest.mark.parametrize("command", ["", "reload {folder}", "reload {path", "reload 'unclosed", "reload {}"])
def test_a_command_that_cannot_be_one_is_refused_at_once(command: str) -> None:
    with pytest.raises(UsageError):
        CommandEngine(command)


def test_braces_that_stand_for_themselves_are_doubled(tmp_path: Path) -> None:
    said = tmp_path / "said"
    CommandEngine(["sh", "-c", f"echo '{{{{\"v\": {{version}}}}}}' > {said}"]).reload(tmp_path, 3, seconds=5)
    assert said.read_text() == '{"v": 3}\n'


def test_verbs_without_a_command_are_skipped_and_the_version_is_then_not_known(tmp_path: Path) -> None:
    engine = CommandEngine("true")
    engine.pause(seconds=1)
    engine.flush(seconds=1)
    engine.resume(seconds=1)
    engine.probe(seconds=1)
    assert engine.read_version(seconds=1) is None


def test_the_version_is_what_the_engine_prints(tmp_path: Path) -> None:
    kept = tmp_path / "v"
    engine = CommandEngine(
        "true", set_version=["sh", "-c", f"echo {{version}} > {kept}"], read_version=["cat", str(kept)]
    )
    engine.set_version(41, seconds=5)
    assert engine.read_version(seconds=5) == 41
    kept.write_text("unknown")
    with pytest.raises(EngineError, match=r"printed 'unknown', not a version"):
        engine.read_version(seconds=5)
