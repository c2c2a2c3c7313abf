"""The embedded server: started once, reused by every process, replaced when it died, stopped by its process id."""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import httpx
import psutil
import pytest
from tests.flows.conftest import ROOT

from weighbridge.errors import OrchestrationError
from weighbridge.flows.processes import ProcessMark, end, mark
from weighbridge.flows.server import ServerInfo, default_home, ensure_server, stop_server, where_is


def test_it_is_up_with_its_ui_and_found_again(home: Path, server: ServerInfo) -> None:
    assert where_is(home) == server
    assert ensure_server(home) == server
    assert "<html" in httpx.get(server.ui_url, trust_env=False, follow_redirects=True).text
    settings = httpx.get(f"{server.ui_url}/ui-settings", trust_env=False).json()
    assert settings["api_url"] == "/api"


def test_it_listens_on_loopback_only_and_its_database_on_no_port_at_all(server: ServerInfo) -> None:
    listening = {
        process: {c.laddr.ip for c in psutil.Process(process).net_connections("inet") if c.status == "LISTEN"}
        for process in (server.pid, server.postgres_pid)
    }
    assert listening == {server.pid: {"127.0.0.1"}, server.postgres_pid: set()}


def test_its_state_is_all_in_its_home_and_its_settings_are_its_own(home: Path, server: ServerInfo) -> None:
    environment = psutil.Process(server.pid).environ()
    assert environment["PREFECT_HOME"].startswith(str(home))
    assert environment["PREFECT_PROFILES_PATH"].startswith(str(home))
    assert environment["PREFECT_API_DATABASE_CONNECTION_URL"].startswith("postgresql")
    assert environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert "PREFECT_API_URL" not in environment


def test_it_outlives_who_started_it(server: ServerInfo) -> None:
    leads_a_session_of_its_own = os.getsid(server.pid) == server.pid
    assert leads_a_session_of_its_own
    assert os.getsid(server.postgres_pid) != os.getsid(0)


@pytest.fixture
def other_home() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="weighbridge-test-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(400)
def test_processes_that_start_it_at_once_get_one_server_and_stop_ends_it_and_its_database(
    other_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import json, sys; from dataclasses import asdict; from pathlib import Path;"
        "from weighbridge.flows.server import ensure_server;"
        "print(json.dumps(asdict(ensure_server(Path(sys.argv[1])))))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-W", "ignore", "-c", code, str(other_home)]
    try:
        starters = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(3)]
        said = [starter.communicate(timeout=240)[0] for starter in starters]
        found = {ServerInfo(**json.loads(line)) for line in said}
        assert len(found) == 1
        first = found.pop()

        victim = psutil.Process(first.pid)
        victim.kill()  # as an out-of-memory killer would; PostgreSQL goes on
        psutil.wait_procs([victim], timeout=10)
        assert where_is(other_home) is None
        second = ensure_server(other_home)
        assert second.pid != first.pid
        taken = [c for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == httpx.URL(first.api_url).port]
        # Hosts that were connected find it where it was, unless somebody took the port in between.
        assert second.api_url == first.api_url or any(c.pid != second.pid for c in taken)

        assert stop_server(other_home)
        assert not second.process.is_alive()
        assert not second.postgres.is_alive()
        assert where_is(other_home) is None
        assert not stop_server(other_home)
    finally:
        stop_server(other_home)


def test_a_record_of_a_process_id_that_was_used_again_marks_no_server(tmp_path: Path) -> None:
    ourselves = mark(os.getpid())
    info = ServerInfo(
        api_url="http://127.0.0.1:1/api",
        ui_url="http://127.0.0.1:1",
        pid=ourselves.pid,
        created=ourselves.created - 3600,
        postgres_pid=ourselves.pid,
        postgres_created=ourselves.created - 3600,
        node=platform.node(),
    )
    (tmp_path / "server.json").write_text(json.dumps(asdict(info)))
    assert where_is(tmp_path) is None
    assert not stop_server(tmp_path)  # and we are still here to say so
    assert not end(ProcessMark(ourselves.pid, ourselves.created - 3600))

    (tmp_path / "server.json").write_text(json.dumps(asdict(replace(info, node="another-machine"))))
    with pytest.raises(OrchestrationError, match="another-machine"):
        where_is(tmp_path)


@pytest.mark.parametrize("torn", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff\xfe"])
def test_a_torn_record_marks_no_server(tmp_path: Path, torn: bytes) -> None:
    (tmp_path / "server.json").write_bytes(torn)
    assert where_is(tmp_path) is None


def test_the_home_is_of_this_machine_unless_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WEIGHBRIDGE_HOME", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_home() == tmp_path / "weighbridge" / platform.node()
    monkeypatch.setenv("WEIGHBRIDGE_HOME", str(tmp_path / "mine"))
    assert default_home() == tmp_path / "mine"
