"""Trainers' own ways to push: the examples as written, the callback's events, and hosts that fall behind."""

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.checkpoints import tiny_weights, trained, write_checkpoint

from weighbridge import PushResult, WeightSync
from weighbridge.errors import UsageError
from weighbridge.flows.server import ServerInfo
from weighbridge.pending import Backlog, PendingPush
from weighbridge.storage.checkout import checkout
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.stores import open_store
from weighbridge.trainers import PushCallback

ROOT = Path(__file__).parents[2]


def run_example(name: str, folder: Path, home: Path) -> str:
    environment = {**os.environ, "WEIGHBRIDGE_HOME": str(home), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    )
    said = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), str(folder / "store"), str(folder / "base")],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr[-4000:]
    return said.stdout


def test_the_plain_loop_publishes_a_version_a_step(tmp_path: Path, server: ServerInfo, home: Path) -> None:
    said = run_example("plain_loop.py", tmp_path, home)
    assert "step 2: version 3 on its way" in said
    lineage = Lineage(open_store(str(tmp_path / "store")))
    assert [lineage.manifest(version).labels["step"] for version in (1, 2, 3)] == [0, 1, 2]


@pytest.mark.fleet
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_transformers_trainer_publishes_a_version_a_step(tmp_path: Path, server: ServerInfo, home: Path) -> None:
    said = run_example("transformers_trainer.py", tmp_path, home)
    assert "version 4 stands for step 4" in said
    store = open_store(str(tmp_path / "store"))
    assert Lineage(store).head() == 4
    checkout(4, tmp_path / "head", lineage=Lineage(store), base=tmp_path / "base")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("base", "head"))
    assert before.keys() == after.keys()
    assert any(not before[name].equal(after[name]) for name in before)


@pytest.fixture
def sync(tmp_path: Path, server: ServerInfo, home: Path) -> Iterator[WeightSync]:
    base = write_checkpoint(tmp_path / "base", tiny_weights())
    with WeightSync(tmp_path / "store", base, home=home) as opened:
        yield opened


def test_the_callback_pushes_every_nth_step_and_leaves_other_events_alone(sync: WeightSync) -> None:
    callback = PushCallback(sync, every_steps=2, export=lambda model: model.state)
    model, control = SimpleNamespace(state=tiny_weights()), object()
    callback.on_train_begin(None, SimpleNamespace(global_step=0), control, model=model)
    for step in range(1, 6):
        state = SimpleNamespace(global_step=step)
        model.state = trained(model.state, step)
        callback.on_substep_end(None, state, control, model=model)
        callback.on_step_end(None, state, control, model=model)
        assert callback.on_log(None, state, control, logs={}) is None
    callback.on_train_end(None, SimpleNamespace(global_step=5), control, model=model)
    assert callback.version == sync.version == 2
    with pytest.raises(AttributeError):
        _ = callback.never_heard_of


def test_a_wrapped_model_is_pushed_under_its_own_names(sync: WeightSync) -> None:
    wrapped = SimpleNamespace(module=trained(tiny_weights(), 1))
    callback = PushCallback(sync, wait=True)
    callback.on_step_end(None, SimpleNamespace(global_step=1), None, model=wrapped)
    assert callback.version == 1


# Hosts that fall behind


def pending(version: int) -> tuple[PendingPush, "Future[Any]"]:
    outcome: Future[Any] = Future()
    return PendingPush(version, outcome), outcome


def result_of(version: int) -> PushResult:
    return PushResult(version, 0.0, 0, 0, 0, {}, "complete")


@pytest.mark.parametrize(("allowed", "waits_for"), [(0, [1, 2, 3]), (1, [1, 2]), (2, [1]), (3, []), (None, [])])
def test_a_push_waits_for_hosts_that_are_further_behind_than_allowed(allowed: int | None, waits_for: list[int]) -> None:
    backlog, open_pushes = Backlog(allowed), {}
    for version in (1, 2, 3):
        push, open_pushes[version] = pending(version)
        backlog.add(push)
    passed = threading.Event()

    def make_room() -> None:
        backlog.make_room(4)
        passed.set()

    thread = threading.Thread(target=make_room)
    thread.start()
    for version in waits_for:
        assert not passed.wait(0.05)
        open_pushes[version].set_result(result_of(version))
    assert passed.wait(60)
    thread.join()


def test_a_push_that_failed_unheard_is_logged_and_holds_up_nobody(caplog: pytest.LogCaptureFixture) -> None:
    backlog = Backlog(0)
    push, outcome = pending(1)
    outcome.set_exception(ValueError("hosts were away"))
    backlog.add(push)
    backlog.make_room(2)
    assert "hosts were away" in caplog.text
    assert isinstance(push.unheard, ValueError)


def test_hosts_join_and_leave_between_pushes_and_are_named_once(sync: WeightSync) -> None:
    sync.hosts = ["a", "b"]
    assert sync.hosts == ("a", "b")
    with pytest.raises(UsageError, match="named twice"):
        sync.hosts = ["a", "a"]
    assert sync.hosts == ("a", "b")
    sync.hosts = []
    assert sync.push(trained(tiny_weights(), 1)).outcome == "published"
