"""SGLang asked to pull versions itself, where the server has the route; a stand-in answers as the real one does."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from weighbridge.errors import EngineError, UsageError
from weighbridge.settings import load_settings
from weighbridge.tasks.engines.choose import open_engine
from weighbridge.tasks.engines.contract import Engine
from weighbridge.tasks.engines.guard import guarded
from weighbridge.tasks.engines.spec import EngineSpec, Pulls


@contextmanager
def server(into: Path, *, has_route: bool, holds: int | None = None, fails: bool = False) -> Iterator[tuple[str, Any]]:
    """A server that knows two routes; its orders are listed. It ends up at `holds`, or where it was told to go."""
    orders: list[tuple[str, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            orders.append((self.path, order))
            if self.path == "/pull_weights" and not has_route:
                self.send_error(404)
                return
            if self.path == "/pull_weights" and not fails:
                mark = into / ".weight_sync" / "state.json"
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.write_text(json.dumps({"version": f"{holds or order['target_version']:06d}"}))
            answer = json.dumps({"success": not (fails and self.path == "/pull_weights"), "message": "said"}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *words: object) -> None:
            """Nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", orders
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def engine(url: str, into: Path) -> Engine:
    return open_engine(EngineSpec("sglang", url=url, pulls=Pulls("/shared/run-7", into)))


@pytest.mark.parametrize(
    ("has_route", "holds", "loads"), [(True, None, "into"), (False, None, "replica"), (True, 9, "replica")]
)
def test_the_server_pulls_where_it_can_and_loads_the_replica_where_it_holds_another_version(
    has_route: bool, holds: int | None, loads: str, tmp_path: Path
) -> None:
    with server(tmp_path / "into", has_route=has_route, holds=holds) as (url, orders):
        engine(url, tmp_path / "into").reload(tmp_path / "replica", 7, seconds=30)
    assert [route for route, _ in orders] == ["/pull_weights", "/update_weights_from_disk"]
    asked = {"local_checkpoint_dir": str(tmp_path / "into"), "source_dir": "/shared/run-7", "target_version": 7}
    assert orders[0][1] == asked
    assert orders[1][1]["model_path"] == str(tmp_path / loads)
    assert orders[1][1]["weight_version"] == "7"


def test_a_pull_that_fails_is_a_reload_that_fails(tmp_path: Path) -> None:
    with server(tmp_path / "into", has_route=True, fails=True) as (url, orders):
        with pytest.raises(EngineError, match="did not pull version 7: said"):
            engine(url, tmp_path / "into").reload(tmp_path / "replica", 7, seconds=30)
        assert [route for route, _ in orders] == ["/pull_weights"]


def test_pulling_is_for_sglang_and_needs_both_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sglang = {"engine": "sglang", "engine_url": "http://127.0.0.1:1"}
    both = {"engine_pull_from": "/shared", "engine_pull_into": "/local"}
    assert load_settings({**sglang, **both}).engine_spec.pulls == Pulls("/shared", Path("/local"))
    for wrong in ({**sglang, "engine_pull_from": "/shared"}, {**both, "engine": "none"}):
        with pytest.raises(UsageError, match="go together"):
            load_settings(wrong)


def test_the_guard_of_such_an_engine_starts_and_pulls_nothing(tmp_path: Path) -> None:
    with server(tmp_path / "into", has_route=True) as (url, orders):
        spec = EngineSpec("sglang", url=url, pulls=Pulls("/shared/run-7", tmp_path / "into"))
        with guarded(spec, tmp_path) as guard:
            assert guard is not None
        assert not orders
