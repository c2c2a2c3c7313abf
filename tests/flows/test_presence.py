"""One worker a queue, wherever it runs."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import WorkerStatus
from tests.flows.conftest import HostProcess, LocalHost, until
from tests.flows.small_run import SmallRun

from weighbridge.errors import NameTaken
from weighbridge.flows import names, presence
from weighbridge.flows.dispatch import dispatch, follow
from weighbridge.flows.keep_working import Work, keep_working
from weighbridge.flows.presence import Presence, queue_of

RUNS_ON = threading.Event()


@dataclass
class Server:
    """A server's list of workers; `comes` is one that reports right after we did."""

    online: set[str] = field(default_factory=set)
    offline: set[str] = field(default_factory=set)
    comes: set[str] = field(default_factory=set)
    reports: list[str] = field(default_factory=list)

    def read_work_pool(self, pool: str) -> None: ...

    def read_workers_for_work_pool(self, pool: str, *, offset: int, limit: int) -> list[SimpleNamespace]:
        listed = [(name, WorkerStatus.OFFLINE) for name in sorted(self.offline)]
        listed += [(name, WorkerStatus.ONLINE) for name in sorted(self.online)]
        return [SimpleNamespace(name=name, status=status) for name, status in listed][offset : offset + limit]

    def send_worker_heartbeat(self, pool: str, name: str, *, heartbeat_interval_seconds: float) -> None:
        self.reports.append(name)
        self.online |= {name} | self.comes
        self.comes = set()

    def request(self, method: str, path: str, *, path_params: dict[str, str]) -> None:
        assert method == "DELETE"
        self.online.discard(path_params["name"])


def take(server: Server, *, place: str = "node-1 a", seconds: float = 0.0) -> bool:
    client: Any = server
    return Presence(pool="p", queue="host-1", place=place).take(client, RUNS_ON, seconds=seconds)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "_LOOK_SECONDS", 0.01)


@pytest.mark.parametrize(
    "others",
    [set(), {"host-2 on node-1 a"}, {"host-10 on node-2 a"}, {"host-1 on node-1 a"}],
    ids=["nobody", "other hosts", "a longer name", "the process before"],
)
def test_a_queue_without_another_worker_is_taken_at_once(others: set[str]) -> None:
    server = Server(online=others, offline={"host-1 on node-7 b"})
    assert take(server)
    assert server.reports == ["host-1 on node-1 a"]


@pytest.mark.parametrize("page", [1, 200])
def test_a_queue_that_another_serves_is_refused_without_a_report(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "_PAGE", page)
    server = Server(online={"host-0 on node-1 a", "host-1 on node-2 a"})
    with pytest.raises(NameTaken, match="host-1 on node-2 a"):
        take(server)
    assert server.reports == []


def test_it_is_taken_once_the_other_is_gone() -> None:
    server = Server(online={"host-1 on node-2 a"})
    threading.Timer(0.2, server.online.clear).start()
    assert take(server, seconds=30)


def test_two_that_come_together_do_not_both_stay() -> None:
    server = Server(comes={"host-1 on node-2 a"})
    with pytest.raises(NameTaken):
        take(server)
    assert server.online == {"host-1 on node-2 a"}


def test_a_stop_ends_the_wait() -> None:
    stop, client = threading.Event(), Server(online={"host-1 on node-2 a"})
    stop.set()
    anything: Any = client
    assert not Presence(pool="p", queue="host-1", place="node-1 a").take(anything, stop, seconds=60)
    assert client.reports == []


def test_the_queue_is_told_from_the_name() -> None:
    assert queue_of(Presence(pool="p", queue="host-1", place="node on 1 a").name) == "host-1"


def test_a_second_host_of_a_name_serves_nothing_until_the_first_has_ended(
    client: SyncPrefectClient, run: SmallRun, local_host: Callable[[], LocalHost], tmp_path: Path, home: Path
) -> None:
    first = local_host()
    first.start().wait_ready()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    second = HostProcess(first.name, run, elsewhere, home)
    try:
        until(lambda: "waiting for another process of this name" in second.log, what="the second host's wait")
        version = run.push().version
        (id_,) = dispatch(client, run=run.run_id, version=version, hosts=[first.name]).values()
        follow(client, {"it": id_}, deadline_seconds=60)
        assert first.version == version
        assert second.ready == {}
        assert second.engine.calls == []
        first.stop()
        second.wait_ready()  # at once: a host that ends well gives its place up
        until(lambda: run.is_held_by(second.current), what="the version there too")
    finally:
        second.kill()


def test_a_worker_ends_with_the_error_when_its_name_stays_taken(
    client: SyncPrefectClient, local_host: Callable[[], LocalHost], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "WAIT_SECONDS", 0.5)
    first, told = local_host(), list[bool]()
    first.start().wait_ready()

    def never(_: Any) -> None:
        raise AssertionError("it touched the runs of a queue that is another's")

    work = Work(
        pool=names.HOSTS_POOL,
        queue=first.name,
        place="elsewhere",
        flows={},
        limit=1,
        order=never,
        prepare=never,
        tell=told.append,
    )
    with pytest.raises(NameTaken, match=f"'{first.name}'.*nothing was started here"):
        asyncio.run(keep_working(work, home=home, poll_seconds=1.0, stop=threading.Event()))
    assert told == []
