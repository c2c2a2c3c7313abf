import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient
from tests.flows.small_run import FileEngine, SmallRun

from weighbridge import logs
from weighbridge.flows.connection import connected
from weighbridge.flows.context import using_store
from weighbridge.flows.server import ServerInfo, ensure_server, stop_server

ROOT = Path(__file__).parents[2]


def until(true: Callable[[], object], *, seconds: float = 30.0, what: str = "it") -> None:
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
    logs.configure()
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

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(30)


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
                host.end(signal.SIGKILL)
