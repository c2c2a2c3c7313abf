"""The embedded server: Prefect's own, with its UI, on an embedded PostgreSQL; started once for a home folder and
reused by every process of the machine. Must not know flows, hosts or versions, nor touch the user's profile."""

import contextlib
import fcntl
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from weighbridge.errors import OrchestrationError
from weighbridge.flows.postgres import start_postgres
from weighbridge.flows.processes import ProcessMark, end, mark

_LOCK_SECONDS = 240.0
_START_SECONDS = 180.0
_PORT_TRIES = 3
_DATABASE = "prefect"

# They belong to the server we start. The batch sizes keep its recorder from writing row by row, and events are handed
# on but not kept, which is a fifth of what a version costs it; the UI's relative address lets it find its API on any
# port; retention keeps 22 kB a task run from adding up.
SERVER_SETTINGS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_UI_API_URL": "/api",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TRIGGERS_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": str(14 * 86400),
    "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P2D",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A running embedded server. `created` is when its process was, in seconds since the epoch."""

    api_url: str
    ui_url: str
    pid: int
    created: float
    postgres_pid: int
    postgres_created: float
    node: str

    @property
    def process(self) -> ProcessMark:
        """Prefect's server process."""
        return ProcessMark(self.pid, self.created)

    @property
    def postgres(self) -> ProcessMark:
        """PostgreSQL's postmaster."""
        return ProcessMark(self.postgres_pid, self.postgres_created)


def default_home() -> Path:
    """$WEIGHBRIDGE_HOME, else a folder of this machine's own under the user's state folder (homes may be shared)."""
    if chosen := os.environ.get("WEIGHBRIDGE_HOME"):
        return Path(chosen).expanduser().absolute()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser().absolute() / "weighbridge" / (platform.node() or "localhost")


def where_is(home: Path | None = None) -> ServerInfo | None:
    """The home's running server, or None when there is none. Never starts one."""
    info = _read_record(home or default_home())
    return info if info is not None and info.process.is_alive() and info.postgres.is_alive() else None


def ensure_server(home: Path | None = None) -> ServerInfo:
    """The home's server, started when none runs; safe to call from several processes at once.

    It listens on 127.0.0.1 only, keeps its state in the home, and outlives the caller. Raises OrchestrationError when
    it does not come up.
    """
    folder = home or default_home()
    if (info := where_is(folder)) is not None and is_healthy(info.api_url):
        return info
    with _locked(folder):
        if (info := where_is(folder)) is not None and _wait_healthy(info.api_url, info.process):
            return info
        last = _read_record(folder)
        if last is not None:
            _end_both(last)
        return _start(folder, last)


def stop_server(home: Path | None = None) -> bool:
    """Stops the home's server and its PostgreSQL, by process id. False when neither ran."""
    folder = home or default_home()
    if not folder.is_dir():
        return False
    with _locked(folder):
        info = _read_record(folder)
        return info is not None and _end_both(info)  # the record stays: it keeps the port for the next start


def is_healthy(api_url: str, *, timeout_seconds: float = 2.0) -> bool:
    """Whether a Prefect API answers its health check."""
    try:
        # trust_env off: a proxy in the environment has no business between two processes of one machine.
        with httpx.Client(trust_env=not _is_loopback(api_url), timeout=timeout_seconds) as client:
            return client.get(f"{api_url}/health").status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _is_loopback(api_url: str) -> bool:
    return httpx.URL(api_url).host in ("127.0.0.1", "localhost", "::1")


def _start(folder: Path, last: ServerInfo | None) -> ServerInfo:
    database = start_postgres(folder / "postgres", database=_DATABASE)
    try:
        for attempt in range(_PORT_TRIES):
            # The last port first: hosts and open browser tabs find the server again after a restart.
            wished = httpx.URL(last.api_url).port if last is not None and attempt == 0 else None
            port = _free_port(wished or 0)
            process = _spawn(folder, port, database.url(_DATABASE))
            server = mark(process.pid)
            info = ServerInfo(
                api_url=f"http://127.0.0.1:{port}/api",
                ui_url=f"http://127.0.0.1:{port}",
                pid=server.pid,
                created=server.created,
                postgres_pid=database.process.pid,
                postgres_created=database.process.created,
                node=platform.node(),
            )
            # Before it is healthy: if we die now, the next caller finds and ends what we started.
            _write_record(folder, info)
            if _wait_healthy(info.api_url, server, process):
                return info
            end(server)
    except BaseException:
        end(database.process, first=signal.SIGINT)
        raise
    end(database.process, first=signal.SIGINT)
    log = _log_path(folder)
    raise OrchestrationError(
        f"the embedded Prefect server did not come up; the end of {log}:\n"
        f"{_tail(log)}\nNothing was published. Set PREFECT_API_URL to a server of your own, or try again."
    )


def _spawn(folder: Path, port: int, database_url: str) -> subprocess.Popen[bytes]:
    home = folder / "prefect"
    home.mkdir(parents=True, exist_ok=True)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    settings = {
        **SERVER_SETTINGS,
        "PREFECT_HOME": str(home),
        "PREFECT_PROFILES_PATH": str(home / "profiles.toml"),
        "PREFECT_API_DATABASE_CONNECTION_URL": database_url,
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with open(_log_path(folder), "ab") as log:
        return subprocess.Popen(
            command,
            cwd=home,
            env={**inherited, **settings},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # a Ctrl-C at the trainer's terminal is not the server's
        )


def _wait_healthy(api_url: str, server: ProcessMark, process: subprocess.Popen[bytes] | None = None) -> bool:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if is_healthy(api_url):
            return True
        if (process is not None and process.poll() is not None) or not server.is_alive():
            return False
        time.sleep(0.1)
    return False


def _end_both(info: ServerInfo) -> bool:
    ended = end(info.process, grace_seconds=8.0)
    # SIGINT is PostgreSQL's fast shutdown: it ends sessions and closes its files properly.
    return end(info.postgres, first=signal.SIGINT) or ended


def _free_port(wished: int) -> int:
    for port in (wished, 0):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return int(probe.getsockname()[1])
    raise OrchestrationError("no loopback port is free for the embedded Prefect server. Nothing was published.")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the home's lock, so that one process at a time starts or stops its server. It goes with its holder."""
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _LOCK_SECONDS
    with open(folder / "server.lock", "ab") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OrchestrationError(
                        f"another process has held {lock.name} for {_LOCK_SECONDS:.0f} s while it starts or stops the "
                        "embedded server. Nothing was published; look at server.log there, then try again."
                    ) from None
                time.sleep(0.05)
            except OSError as error:
                raise OrchestrationError(
                    f"{folder} does not support locks ({error}). Set WEIGHBRIDGE_HOME to a folder on a local disk."
                ) from error
        yield


def _record_path(folder: Path) -> Path:
    return folder / "server.json"


def _log_path(folder: Path) -> Path:
    return folder / "server.log"


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:] if log.exists() else "(empty)"


def _write_record(folder: Path, info: ServerInfo) -> None:
    path = _record_path(folder)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(asdict(info), indent=1))
    draft.replace(path)


def _read_record(folder: Path) -> ServerInfo | None:
    try:
        fields: dict[str, Any] = json.loads(_record_path(folder).read_bytes())
        info = ServerInfo(**fields)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError):
        return None  # a torn or foreign record marks no server: the next start replaces it
    if info.node != platform.node():
        raise OrchestrationError(
            f"{folder} holds the embedded server of machine {info.node!r}, and this is {platform.node()!r}. Nothing "
            "was changed; set WEIGHBRIDGE_HOME to a folder of this machine's own, or remove server.json there if that "
            "machine is gone."
        )
    return info
