"""`anchor`, `gc`, `keep`, `release`: what a person types, on a small run, in this process."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
from tests.checkpoints import trained
from tests.storage.publishing import Run, push

from weighbridge.cli import host, main
from weighbridge.settings import load_settings

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Six versions."""
    run = Run(tmp_path)
    publisher, weights = run.open(), run.base_weights
    for seed in range(1, 7):
        weights = trained(weights, seed, only=("mask",))
        push(publisher, weights)
    return run


@pytest.fixture
def say(run: Run, capsys: pytest.CaptureFixture[str]) -> Say:
    def said(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*map(str, words), "--store", run.store.url])
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return said


def test_old_versions_go_once_an_anchor_stands_and_named_ones_stay(run: Run, say: Say, tmp_path: Path) -> None:
    assert say("anchor", "--if-due", "--base", run.base)[:2] == (0, "no anchor of version 6 is due\n")
    code, out, _ = say("anchor", 4, "--base", run.base, "--json")
    assert code == 0 and json.loads(out)["made"] is True
    code, out, _ = say("anchor", 4, "--base", run.base)
    assert code == 0 and out.startswith("anchor of version 4 stands already, whole: ")
    assert say("keep", 2, "best")[:2] == (0, "version 2 is kept as best\n")
    assert say("names")[1] == "name\tversion\nbest\t2\n"

    code, out, _ = say("gc", "--keep", 2, "--dry-run")
    assert code == 0 and "would collect version 3" in out and "keeps version 2: kept as best" in out
    assert "keeps version 1: it leads to version 2\nkeeps anchor of version 4: it leads to version 5\n" in out
    before = run.objects()
    assert say("gc", "--keep", 2, "--dry-run", "--json")[0] == 0 and run.objects() == before
    code, out, _ = say("gc", "--keep", 2, "--json")
    assert code == 0
    gone = json.loads(out)
    assert gone["collected"] == ["version 3", "version 4"] and gone["failures"] == [] and gone["kept"] == [2, 5, 6]

    lines = {line["version"]: line for line in map(json.loads, say("log", "--json")[1].splitlines())}
    assert [v for v in lines if lines[v]["retired"]] == [4, 3] and [v for v in lines if lines[v]["has_anchor"]] == [4]
    assert "retired anchor" in next(line for line in say("log")[1].splitlines() if line.startswith("4\t"))
    assert "retired anchor" in next(line for line in say("stats")[1].splitlines() if line.startswith("4\t"))
    assert ", retired, has an anchor" in say("show", 4)[1] and "retired" not in say("show", 5)[1]

    for version in (2, 5, 6):
        assert say("checkout", version, tmp_path / f"out-{version}", "--base", run.base)[0] == 0
    assert say("checkout", 5, tmp_path / "baseless")[0] == 0
    code, _, err = say("checkout", 3, tmp_path / "out-3", "--base", run.base)
    assert code == 8 and "is retired" in err
    assert say("release", "best")[0] == 0 and say("release", "best")[0] == 8
    assert json.loads(say("gc", "--keep", 1, "--json")[1])["kept"] == [6]


def test_gc_that_leaves_something_undone_says_what_and_fails(run: Run, say: Say) -> None:
    say("anchor", 4, "--base", run.base)
    (shard,) = (run.folder / "root/versions/000000000004").glob("anchor-*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    code, out, err = say("gc", "--keep", 2)
    assert code == 9 and "not yet: the anchor of version 4 is damaged" in out and "left 1 thing undone" in err


@pytest.mark.parametrize("command", [("log",), ("stats",), ("hosts",), ("blame", "mask")])
def test_a_limit_below_one_is_refused(say: Say, command: tuple[str, ...]) -> None:
    for limit in (0, -4):
        code, out, err = say(*command, "-n", limit)
        assert (code, out) == (2, "") and f"-n {limit} asks for nothing" in err


def test_two_hosts_of_one_name_on_one_machine_are_refused(
    run: Run, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHBRIDGE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WEIGHBRIDGE_LOCK_DEADLINE", "0.1")
    with host._only_one(load_settings({"name": "rollout-0"}), run.store):
        code, _, err = say("host", "--name", "rollout-0", "--replica", tmp_path / "R", "--base", run.base)
    assert code == 11 and "the host name rollout-0 at " in err and "give this one a name of its own" in err
    assert not (tmp_path / "R").exists()


def test_gc_without_a_number_and_one_shorter_than_hosts_may_lag_are_refused(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = say("gc")
    assert code == 2 and "--keep" in err
    monkeypatch.setenv("WEIGHBRIDGE_ALLOWED_STALENESS", "5")
    code, _, err = say("gc", "--keep", 5)
    assert code == 2 and "allowed_staleness" in err


def test_events_stay_off_standard_output_whatever_set_structlog_up_before(run: Run, say: Say) -> None:
    before, configured = structlog.get_config(), structlog.is_configured()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory())
    try:
        code, out, _ = say("anchor", 4, "--base", run.base, "--json")
    finally:
        structlog.configure(**before) if configured else structlog.reset_defaults()
    assert code == 0 and json.loads(out)["made"] is True


def test_an_event_is_printed_once_beside_what_libraries_print(run: Run, say: Say) -> None:
    heard: list[logging.LogRecord] = []
    beside = logging.Handler()
    beside.emit = heard.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(beside)
    try:
        assert say("keep", 2, "best")[0] == 0
    finally:
        logging.getLogger().removeHandler(beside)
    assert not [record for record in heard if record.name.startswith("weighbridge")]


def test_a_replica_is_anchored_as_it_stands(run: Run, say: Say, tmp_path: Path) -> None:
    assert say("pull", "--replica", tmp_path / "R", "--base", run.base, "--version", 3)[0] == 0
    code, out, _ = say("anchor", "--replica", tmp_path / "R")
    assert code == 0 and out.startswith("anchor of version 3")
    assert say("anchor", "--replica", tmp_path / "nothing")[0] == 2
