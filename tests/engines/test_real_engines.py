"""Real vLLM and SGLang servers follow versions, under load and under faults. One start serves many cases, in this
file's order; those that kill it come last."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tests.engines.real import PROMPTS, Fleet, Reference, Server, host_of, make_model, requests_all_along, sync

from weighbridge.errors import EngineError, UsageError
from weighbridge.storage.replica import Replica, open_replica
from weighbridge.tasks.cutover import CutOverFailed
from weighbridge.tasks.engines.choose import open_engine
from weighbridge.tasks.engines.contract import Engine
from weighbridge.tasks.engines.control import EngineDenied
from weighbridge.tasks.engines.guard import guarded
from weighbridge.tasks.engines.spec import EngineSpec
from weighbridge.tasks.host_attempt import Host, HostAttempt

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(kind)


@pytest.fixture(scope="module")
def fleet(kind: str, folder: Path) -> Fleet:
    return Fleet(folder / "trainer", make_model(kind, folder / "base", "--seed", "3"))


@pytest.fixture(scope="module")
def replica(fleet: Fleet, folder: Path) -> Iterator[Replica]:
    with open_replica(folder / "replica", store=fleet.run.store, base=fleet.run.base) as replica:
        yield replica


@pytest.fixture(scope="module")
def server(kind: str, replica: Replica, folder: Path) -> Iterator[Server]:
    server = Server(kind, replica.current, folder / "server.log")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def host(fleet: Fleet, replica: Replica, server: Server) -> Host:
    return host_of(fleet, replica, adapter(server))


@pytest.fixture(scope="module")
def reference(kind: str) -> Iterator[Reference]:
    reference = Reference(kind)
    yield reference
    reference.stop()


def adapter(server: Server) -> Engine:
    return open_engine(EngineSpec(server.kind, url=server.url))


def assert_serves(server: Server, reference: Reference, replica: Replica, version: int) -> None:
    """Token for token what `transformers` makes of the proven folder, under the right number."""
    assert replica.version == version
    assert adapter(server).read_version(seconds=10) == version
    assert [server.generate(prompt) for prompt in PROMPTS] == reference.tokens(replica.current)


def test_five_versions_arrive_while_clients_keep_asking(
    fleet: Fleet, host: Host, replica: Replica, server: Server, reference: Reference
) -> None:
    host.engine.check(seconds=30)
    seen = []
    with requests_all_along(server) as outcomes:
        for version in range(1, 6):
            assert fleet.step() == version
            attempt = sync(host, version)
            assert 0 < attempt.seconds["pause"] < 30
            assert_serves(server, reference, replica, version)
            seen.append([server.generate(prompt) for prompt in PROMPTS])
    assert [error for error in outcomes if isinstance(error, Exception)] == []
    assert len(outcomes) > 5
    assert len({str(tokens) for tokens in seen}) > 1, "no version changed a token: the test proves nothing"


def test_an_empty_version_changes_the_number_and_reloads_nothing(
    fleet: Fleet, host: Host, replica: Replica, server: Server, reference: Reference
) -> None:
    version = fleet.step(scale=0.0)
    attempt = sync(host, version)
    assert "reload" not in attempt.seconds
    assert_serves(server, reference, replica, version)


@pytest.mark.parametrize("fault", ["truncated", "missing tensor", "wrong shape", "NaN"])
def test_a_checkpoint_changed_after_it_was_proven_is_noticed_before_the_reload(
    fleet: Fleet, host: Host, replica: Replica, server: Server, reference: Reference, fault: str
) -> None:
    before, version = replica.version, fleet.step()
    with (
        meddled(host, "switch", lambda folder: spoil(folder / "model.safetensors", fault)),
        pytest.raises(CutOverFailed) as failed,
    ):
        sync(host, version)
    assert failed.value.served == before
    assert_serves(server, reference, replica, before)
    sync(host, version)
    assert_serves(server, reference, replica, version)


def test_a_server_that_hangs_fails_the_host_by_name_and_serves_again(
    fleet: Fleet, host: Host, replica: Replica, server: Server, reference: Reference
) -> None:
    version = fleet.step()
    host.engine_seconds = 5.0
    server.signal(signal.SIGSTOP)
    try:
        with pytest.raises(EngineError, match="did not answer within"):
            sync(host, version)
    finally:
        server.signal(signal.SIGCONT)
        host.engine_seconds = 60.0
    bring(host, version)
    assert_serves(server, reference, replica, version)


_DIES_PAUSED = """
import os, signal, sys
from pathlib import Path
from weighbridge.tasks.engines.choose import open_engine
from weighbridge.tasks.engines.guard import guarded
from weighbridge.tasks.engines.spec import EngineSpec

kind, url, folder, stage = sys.argv[1:]
spec = EngineSpec(kind, url=url)
with guarded(spec, Path(folder)) as guard:
    engine = open_engine(spec)
    guard.pausing(engine.read_version(seconds=10), seconds=60)
    engine.pause(seconds=30)
    if stage == "loading":
        guard.loading()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_host_killed_while_its_engine_is_paused_leaves_it_serving_the_old_version(
    replica: Replica, server: Server, reference: Reference, folder: Path
) -> None:
    assert not die(server, folder, "paused")
    assert_serves(server, reference, replica, replica.version)


def test_a_host_killed_in_the_reload_leaves_it_paused_and_the_next_one_settles_it(
    fleet: Fleet, replica: Replica, server: Server, reference: Reference, folder: Path
) -> None:
    assert die(server, folder, "loading")
    again = host_of(fleet, replica, adapter(server))
    again.engine_in_doubt = True  # as the mark says
    bring(again, replica.version)
    assert_serves(server, reference, replica, replica.version)


def die(server: Server, folder: Path, stage: str) -> bool:
    """A host that dies in its cut over; waits for its guard's end, and says whether that left a mark."""
    host = [sys.executable, "-c", _DIES_PAUSED, server.kind, server.url, str(folder), stage]
    assert subprocess.run(host, check=False, timeout=120).returncode == -9
    with guarded(EngineSpec(server.kind, url=server.url), folder) as guard:
        assert guard is not None
        marked = guard.marked()
        if marked:
            guard.settled(resumed=True)  # for the tests that follow
        return marked


@pytest.mark.parametrize("step", ["apply", "switch"])
def test_an_engine_that_its_supervisor_restarts_at_any_step_serves_a_proven_version(
    fleet: Fleet, host: Host, replica: Replica, server: Server, reference: Reference, step: str
) -> None:
    version = fleet.step()

    def restart(_: Path) -> None:
        server.kill()
        server.start()
        host.engine = adapter(server)

    with meddled(host, step, restart), contextlib.suppress(EngineError):
        sync(host, version)
    bring(host, version)
    assert_serves(server, reference, replica, version)


def test_a_file_truncated_under_a_paused_engine_ends_in_the_old_weights_or_a_failed_host(
    fleet: Fleet, host: Host, replica: Replica, server: Server, reference: Reference
) -> None:
    before, version = replica.version, fleet.step()
    with (
        meddled(host, "after switch", lambda folder: spoil(folder / "model.safetensors", "truncated")),
        pytest.raises(CutOverFailed) as failed,
    ):
        sync(host, version)
    if server.kind == "sglang":  # its process ends, and says nothing wrong any more
        assert failed.value.served is None
        server.kill()
        server.start()
        host.engine = adapter(server)
    else:
        assert failed.value.served == before
        assert [server.generate(prompt) for prompt in PROMPTS] == reference.tokens(replica.current)
    replica.scrub()
    bring(host, version)
    assert_serves(server, reference, replica, version)


def test_a_dead_server_fails_the_host_by_name(fleet: Fleet, host: Host, server: Server) -> None:
    version = fleet.step()
    server.kill()
    with pytest.raises(EngineError, match="could not be asked"):
        sync(host, version)


def test_a_server_that_cannot_be_cut_over_is_refused_at_the_start(
    kind: str, server: Server, replica: Replica, folder: Path
) -> None:
    keys = ("--api-key", "right")
    plain = Server(kind, replica.current, folder / "plain.log", keys, {"VLLM_SERVER_DEV_MODE": "0"})
    plain.start()
    try:
        right, wrong = (EngineSpec(kind, url=plain.url, api_key=key) for key in ("right", "wrong"))
        if kind == "vllm":
            with pytest.raises(UsageError, match="VLLM_SERVER_DEV_MODE=1"):
                open_engine(right).check(seconds=10)
        else:
            open_engine(right).check(seconds=10)
            with pytest.raises(EngineDenied, match="does not take the key"):
                open_engine(wrong).check(seconds=10)
    finally:
        plain.kill()


def bring(host: Host, version: int) -> None:
    """What a later attempt does: the steps that are still to do."""
    if host.replica.version != version:
        sync(host, version)
    else:
        HostAttempt(host, version).cut_over()


class Meddled:
    """A replica whose files, or whose engine, somebody touches at a step: after the apply, at or after the switch."""

    def __init__(self, replica: Any, at: str, meddle: Callable[[Path], None]) -> None:
        self._replica, self._at, self._meddle = replica, at, meddle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)

    def apply(self, fetched: Any) -> Any:
        applied = self._replica.apply(fetched)
        if self._at == "apply":
            self._meddle(self._replica.current)
        return applied

    def switch(self) -> int:
        if self._at == "switch":
            copies = (self._replica.current.parent / "copies").iterdir()
            self._meddle(next(copy for copy in copies if copy != self._replica.current.resolve()))
        version = int(self._replica.switch())
        if self._at == "after switch":
            self._meddle(self._replica.current)
        return version


@contextlib.contextmanager
def meddled(host: Host, at: str, meddle: Callable[[Path], None]) -> Iterator[None]:
    """For a while, somebody meddles."""
    replica = host.replica
    host.replica = Meddled(replica, at, meddle)
    try:
        yield
    finally:
        host.replica = replica


def spoil(file: Path, fault: str) -> None:
    """What a person or a disk may do to a checkpoint."""
    if fault == "truncated":
        with file.open("rb+") as data:
            data.truncate(file.stat().st_size // 2)
        return
    tensors = load_file(file)
    name = sorted(tensors)[0]
    if fault == "missing tensor":
        del tensors[name]
    elif fault == "wrong shape":
        tensors[name] = tensors[name][:1].contiguous()
    else:
        tensors[name][:] = float(np.nan)
    save_file(tensors, file, metadata={"format": "pt"})
