import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient
from tests.flows.small_run import FileEngine, SmallRun

from weighbridge.flows.connection import connected
from weighbridge.flows.context import using_store
from weighbridge.flows.server import ServerInfo, ensure_server, stop_server
from weighbridge.flows.worker import WorkerOptions, serve_host
from weighbridge.storage.replica import open_replica
from weighbridge.tasks.host import Host, HostReplica

ROOT = Path(__file__).parents[2]


def until(true: Callable[[], object], *, seconds: float = 90.0, what: str = "it") -> None:
    """Waits for something that another process does; fails when it does not."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    # Not under pytest's own folder, whose permissions it tightens at every session, under a running PostgreSQL.
    folder = Path(tempfile.mkdtemp(prefix="weighbridge-test-"))
    try:
        yield folder
    finally:
        stop_server(folder)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def server(home: Path) -> Iterator[ServerInfo]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PREFECT_API_URL", raising=False)
        yield ensure_server(home)


@pytest.fixture
def client(server: ServerInfo) -> Iterator[SyncPrefectClient]:
    with connected(server.api_url) as found:
        yield found


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    small = SmallRun(tmp_path, f"run-{uuid.uuid4().hex[:8]}")
    with using_store(small.run_id, small.store):
        yield small


class HostProcess:
    """A host that runs in a process of its own; names are unique, so that tests share one server."""

    def __init__(self, name: str, run: SmallRun, folder: Path, home: Path) -> None:
        self.name, self._run, self.folder, self._home = name, run, folder, home
        self.engine = FileEngine(folder / "engine")
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.flows.host_process", self.name, self._run.store_url]
        command += [str(self._run.base), str(self.folder), str(self._home)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    @property
    def ready(self) -> dict[str, object]:
        path = self.folder / "ready.json"
        said: dict[str, object] = json.loads(path.read_text()) if path.exists() else {}
        assert self.process is not None
        return said if said.get("pid") == self.process.pid else {}

    @property
    def current(self) -> Path:
        return self.folder / "replica" / "current"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def wait_ready(self, *, connected: bool = True) -> None:
        until(lambda: self.ready.get("connected") is connected, seconds=90, what=f"{self.name} ready")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(30)


class LocalHost:
    """A host that is served by a thread of this process: as real, and seconds faster to start."""

    def __init__(self, name: str, run: SmallRun, folder: Path, options: WorkerOptions) -> None:
        self.name, self._run, self.folder, self._options = name, run, folder, options
        self.engine = FileEngine(folder / "engine")
        self.wrap: Callable[[HostReplica], HostReplica] = lambda replica: replica
        self.host: Host | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> "LocalHost":
        self._stop, self._up = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, name=self.name)
        self._thread.start()
        assert self._up.wait(120)  # kernels may have to be compiled first
        return self

    def wait_ready(self, *, connected: bool = True) -> "LocalHost":
        path = self._options.ready_file
        assert path is not None
        until(
            lambda: path.exists() and json.loads(path.read_text())["connected"] is connected, what="ready", seconds=60
        )
        return self

    def _serve(self) -> None:
        with open_replica(
            self.folder / "replica", store=self._run.store, base=self._run.base, durability="process", threads=1
        ) as replica:
            self.host = Host(
                name=self.name,
                run_id=self._run.run_id,
                store=self._run.store,
                replica=self.wrap(replica),
                engine=self.engine,
                engine_seconds=20.0,
            )
            self._up.set()
            serve_host(self.host, options=self._options, stop=self._stop)

    @property
    def version(self) -> int:
        assert self.host is not None
        return self.host.replica.version

    @property
    def current(self) -> Path:
        return self.folder / "replica" / "current"

    def stop(self) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join(60)
            assert not self._thread.is_alive()
            self._thread = None


@pytest.fixture
def local_host(run: SmallRun, tmp_path: Path, home: Path) -> Iterator[Callable[..., LocalHost]]:
    made: list[LocalHost] = []

    def make(**options: Any) -> LocalHost:
        name = f"host-{uuid.uuid4().hex[:8]}"
        folder = tmp_path / name
        folder.mkdir()
        patient = WorkerOptions(
            home=home, follow_seconds=0.5, patience_seconds=3600.0, ready_file=folder / "ready.json"
        )
        made.append(LocalHost(name, run, folder, replace(patient, **options)))
        return made[-1]

    try:
        yield make
    finally:
        for host in made:
            host.engine.order()
            host.stop()


@pytest.fixture
def new_host(run: SmallRun, tmp_path: Path, home: Path) -> Iterator[Callable[..., HostProcess]]:
    started: list[HostProcess] = []

    def start(*, home: Path = home) -> HostProcess:
        name = f"host-{uuid.uuid4().hex[:8]}"
        folder = tmp_path / name
        folder.mkdir()
        started.append(HostProcess(name, run, folder, home))
        return started[-1]

    try:
        yield start
    finally:
        for host in started:
            if host.process is not None and host.process.poll() is None:
                host.kill()
