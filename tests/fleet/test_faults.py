"""What happens to a fleet of real processes: whatever dies, stops or is cut off in mid-sync, every host comes to serve
exactly the last version, the trainer goes on, and no run and no step of one is left Running at the server."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.fleet.fleet import Fleet, HostGroup, goes_on, push, until

from weighbridge.errors import OrchestrationError
from weighbridge.flows.server import ServerInfo, ensure_server, where_is

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, home: Path, server: ServerInfo) -> Iterator[Fleet]:
    """Three hosts, of which two are enough, so that nobody waits for one that a test has stopped."""
    with Fleet(tmp_path_factory.mktemp("fleet"), home, hosts=3, policy=0.6) as fleet:
        fleet.trainer.warm()
        yield fleet


@pytest.fixture
def fleet(shared: Fleet) -> Iterator[Fleet]:
    yield shared
    for group in shared.groups:
        group.order()


def is_at(group: HostGroup, verb: str) -> bool:
    return all(engine.calls[-1:] == [verb] for engine in group.engines.values())


def kill_server(home: Path) -> None:
    info = where_is(home)
    assert info is not None
    process = psutil.Process(info.pid)
    process.kill()
    psutil.wait_procs([process], timeout=30)
    until(lambda: where_is(home) is None, what="the end of the server")


@pytest.mark.parametrize("back", ["while the hosts are at work", "once they are done"])
def test_the_server_is_killed_in_mid_rollout_and_started_again(fleet: Fleet, home: Path, back: str) -> None:
    for group in fleet.groups:
        group.order(hang="reload")
    version = fleet.trainer.version + 1
    outcome = push(fleet, fleet.train())
    until(lambda: all(is_at(group, f"reload {version}") for group in fleet.groups), what="every host in its reload")
    kill_server(home)
    if back == "while the hosts are at work":
        ensure_server(home)
    for group in fleet.groups:
        group.order()
    until(fleet.all_serve, what="the version on every host")
    ensure_server(home)
    failure = outcome.exception(timeout=120)
    assert failure is None or (isinstance(failure, OrchestrationError) and "stands" in str(failure)), failure
    goes_on(fleet, home)


def test_the_server_is_killed_in_mid_publish_and_started_again(fleet: Fleet, home: Path) -> None:
    version = fleet.trainer.version
    begun, go = threading.Event(), threading.Event()

    def source() -> Iterator[tuple[str, Any]]:
        for pair in fleet.train().items():
            begun.set()
            assert go.wait(120)
            yield pair

    outcome = push(fleet, source())
    assert begun.wait(120)
    kill_server(home)
    ensure_server(home)
    go.set()
    failure = outcome.exception(timeout=120)
    assert failure is None or isinstance(failure, OrchestrationError), failure
    assert fleet.trainer.version - version in (0, 1)
    goes_on(fleet, home)


def test_a_host_is_stopped_in_mid_sync_and_continued_versions_later(fleet: Fleet, home: Path) -> None:
    stopped, *others = fleet.groups
    stopped.order(hang="reload")
    version = fleet.trainer.version + 1
    outcome = push(fleet, fleet.train())
    until(lambda: is_at(stopped, f"reload {version}"), what="the host in its reload")
    stopped.send(signal.SIGSTOP)
    stopped.order()
    assert outcome.result(timeout=120).version == version, "two of three are enough"
    assert all(fleet.serves(host) for group in others for host in group.hosts)
    assert fleet.trainer.push(fleet.train()).version == version + 1
    assert not any(fleet.serves(host) for host in stopped.hosts)
    stopped.send(signal.SIGCONT)
    until(fleet.all_serve, what="the newest version on the host that was stopped")
    goes_on(fleet, home)


def test_a_host_is_killed_in_mid_sync_and_started_again(fleet: Fleet, home: Path) -> None:
    killed, *others = fleet.groups
    killed.order(hang="reload")
    version = fleet.trainer.version + 1
    outcome = push(fleet, fleet.train())
    until(lambda: is_at(killed, f"reload {version}"), what="the host in its reload")
    killed.kill()
    killed.order()
    assert outcome.result(timeout=120).version == version
    assert all(fleet.serves(host) for group in others for host in group.hosts)
    killed.start()
    until(fleet.all_serve, what="the version on the host that was killed")
    goes_on(fleet, home)
