"""A fleet on this machine for tests and benchmarks: a base, a store, hosts in processes of their own, a trainer in this
one, and what the server says of their runs and spends on them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from safetensors.numpy import load_file
from tests.checkpoints import Weights, state_digest_of, tiny_weights, trained, write_checkpoint
from tests.flows.small_run import FileEngine

from weighbridge import WeightSync
from weighbridge.flows import names
from weighbridge.flows.connection import connected
from weighbridge.flows.server import SERVER_SETTINGS, where_is
from weighbridge.storage.records import read_records
from weighbridge.storage.stores import open_store
from weighbridge.values import PushResult

ROOT = Path(__file__).parents[2]
SECONDS = 120.0
UNENDED = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
_PAGE = 200


def until(true: Any, *, seconds: float = SECONDS, what: str) -> None:
    """Waits for what other processes do."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.05)


class HostGroup:
    """One process with one host or several."""

    def __init__(self, fleet: "Fleet", hosts: Sequence[str]) -> None:
        self._fleet, self.hosts = fleet, tuple(hosts)
        self.engines = {host: FileEngine(fleet.folder / host / "engine") for host in hosts}
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        fleet = self._fleet
        command = [sys.executable, "-m", "tests.fleet.hosts", fleet.store_url, str(fleet.base), str(fleet.folder)]
        environment = {**os.environ, **fleet.environment, "OMP_NUM_THREADS": "1"}
        inherited = environment.get("PYTHONPATH", "").split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, inherited)])
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [*command, str(fleet.home), *self.hosts], cwd=ROOT, env=environment, stdout=log, stderr=log
            )

    @property
    def log_path(self) -> Path:
        return self._fleet.folder / f"{self.hosts[0]}.log"

    def is_ready(self) -> bool:
        """Whether all of its hosts are connected."""
        assert self.process is not None
        assert self.process.poll() is None, self.log_path.read_text()[-4000:]
        return all(self._said(host) == (self.process.pid, True) for host in self.hosts)

    def _said(self, host: str) -> tuple[int, bool]:
        path = self._fleet.folder / host / "ready.json"
        said = json.loads(path.read_text()) if path.exists() else {"pid": 0, "connected": False}
        return said["pid"], said["connected"]

    def order(self, **orders: str) -> None:
        for engine in self.engines.values():
            engine.order(**orders)

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(30)

    def end(self) -> None:
        """Ends it however it stands: stopped, or hanging in an engine."""
        if self.process is not None and self.process.poll() is None:
            self.kill()


class Fleet:
    """Hosts `<tag>-00`, ... of one training run, `each` in a process; `trainer` pushes to all of them."""

    def __init__(
        self,
        folder: Path,
        home: Path,
        *,
        hosts: int,
        each: int = 1,
        store_url: str | None = None,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self.folder, self.home = folder, home
        self.environment = dict(environment or {})
        self.store_url = store_url or str(folder / "store")
        self.run_id = f"fleet-{uuid.uuid4().hex[:8]}"
        self.weights: Weights = tiny_weights()
        self.base = write_checkpoint(folder / "base", self.weights)
        self.names = [f"{self.run_id}-{number:02d}" for number in range(hosts)]
        self._step = 0
        wanted = {"home": home, "run": self.run_id, "spool": folder, **settings}
        self.trainer = WeightSync(self.store_url, self.base, self.names, **wanted)
        _ = self.trainer.version  # claims the store, which hosts look for
        self.groups: list[HostGroup] = []
        try:
            for start in range(0, hosts, each):
                self.groups.append(HostGroup(self, self.names[start : start + each]))
            until(lambda: all(group.is_ready() for group in self.groups), what="every host connected", seconds=300)
        except BaseException:
            self.close()
            raise

    def train(self) -> Weights:
        """The weights after one more step."""
        self._step += 1
        self.weights = trained(self.weights, self._step)
        return self.weights

    def serves(self, host: str) -> bool:
        """Whether a host's engine would load exactly the weights of the last step."""
        path = self.folder / host / "replica" / "current" / "model.safetensors"
        return state_digest_of(load_file(path)) == state_digest_of(self.weights)

    def all_serve(self) -> bool:
        """Whether all hosts would."""
        return all(self.serves(host) for host in self.names)

    def group(self, number: int) -> HostGroup:
        return self.groups[number]

    def close(self) -> None:
        """Ends the trainer and the hosts."""
        for group in self.groups:
            group.order()
        try:
            self.trainer.__exit__(RuntimeError, None, None)
        finally:
            for group in self.groups:
                group.end()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Left:
    """What the server has as neither waiting nor ended."""

    flow_runs: Sequence[str]
    task_runs: Sequence[str]

    def __bool__(self) -> bool:
        return bool(self.flow_runs or self.task_runs)


def left_running(client: SyncPrefectClient) -> Left:
    """All flow runs and task runs of the server that are under way, as far as it knows."""
    flow_runs = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=UNENDED))), limit=_PAGE
    )
    task_runs = client.read_task_runs(
        task_run_filter=TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=UNENDED))), limit=_PAGE
    )
    return Left(
        [f"{run.name} {run.state_name}" for run in flow_runs], [f"{run.name} {run.state_name}" for run in task_runs]
    )


def push(fleet: Fleet, source: Any) -> "Future[PushResult]":
    """A push in a thread of its own."""
    outcome: Future[PushResult] = Future()

    def work() -> None:
        try:
            outcome.set_result(fleet.trainer.push(source))
        except BaseException as failure:  # noqa: BLE001 - handed on
            outcome.set_exception(failure)

    threading.Thread(target=work, daemon=True).start()
    return outcome


def goes_on(fleet: Fleet, home: Path) -> None:
    """The next version reaches every host, and the server knows of the end of everything."""
    assert fleet.trainer.push(fleet.train()).version == fleet.trainer.version
    until(fleet.all_serve, what="the last version on every host")
    info = where_is(home)
    assert info is not None
    with connected(info.api_url) as client:
        last = left_running(client)

        def ended() -> bool:
            nonlocal last
            last = left_running(client)
            return not last

        try:
            until(ended, what="the end of every run and every step")
        except AssertionError as late:
            raise AssertionError(f"left under way: {last}") from late


def host_runs(client: SyncPrefectClient, run: str, version: int) -> Mapping[str, FlowRun]:
    """The host-sync runs of a version, by host."""
    tags = FlowRunFilterTags(all_=[names.run_tag(run), names.version_tag(version)])
    found = client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=tags), limit=_PAGE)
    return {found_run.parameters["host"]: found_run for found_run in found if "host" in found_run.parameters}


def start_seconds(client: SyncPrefectClient, fleet: Fleet, version: int) -> list[float]:
    """How long after the server had made each host's run the host's own code began, by this machine's clock."""
    runs = host_runs(client, fleet.run_id, version)
    begun = {
        record.host: record.started_ns / 1e9 for record in read_records(open_store(fleet.store_url), version=version)
    }
    return [begun[host] - run.created.timestamp() for host, run in runs.items() if run.created is not None]


class ServerLoad:
    """What processes (a server, its PostgreSQL) and their children spend, in CPU seconds since this was made."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self._begun = [_spent(process) for process in self._processes]

    @property
    def seconds(self) -> tuple[float, float]:
        """Of the first process, and of all the others."""
        first, *others = (_spent(process) - begun for process, begun in zip(self._processes, self._begun, strict=True))
        return first, sum(others)


def _spent(process: psutil.Process) -> float:
    own = process.cpu_times()
    spent = own.user + own.system + own.children_user + own.children_system  # children that ended are in these
    for child in process.children():
        with suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            spent += times.user + times.system
    return float(spent)


REFUSALS = {"PREFECT_SERVER_LOG_RETRYABLE_ERRORS": "true"}
"""With it a server's log names each request that it answered with 503."""


def refusals(home: Path) -> int:
    """How many requests the home's server has answered with 503."""
    return (home / "server.log").read_text(errors="replace").count("Encountered retryable exception in request")


@contextmanager
def logging_refusals() -> Iterator[None]:
    """Servers that are started within say in their log what they refuse."""
    before = dict(SERVER_SETTINGS)
    SERVER_SETTINGS.update(REFUSALS)
    try:
        yield
    finally:
        SERVER_SETTINGS.clear()
        SERVER_SETTINGS.update(before)
