"""A fleet on one machine: how long a trivial version takes to all hosts, how soon they begin, and what it costs the
server. python -m benchmarks.fleet [--hosts 8] [--each 1] [--pushes 20] [--sqlite] [--json]

Hosts are processes (`--each` of them in one), the trainer is this one, and the server is the embedded one, on
PostgreSQL; with --sqlite it is one on SQLite, otherwise set the same."""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from tests.fleet.fleet import (
    REFUSALS,
    Fleet,
    ServerLoad,
    left_running,
    logging_refusals,
    refusals,
    start_seconds,
    until,
)

from weighbridge.errors import OrchestrationError, SyncIncomplete
from weighbridge.flows.connection import connected
from weighbridge.flows.processes import end, mark
from weighbridge.flows.server import SERVER_SETTINGS, ensure_server, is_healthy, stop_server


@contextlib.contextmanager
def embedded(home: Path) -> Iterator[tuple[str, list[int]]]:
    """The embedded server: its API, and the processes whose cost is counted."""
    with logging_refusals():
        server = ensure_server(home)
    try:
        yield server.api_url, [server.pid, server.postgres_pid]
    finally:
        stop_server(home)


@contextlib.contextmanager
def on_sqlite(home: Path) -> Iterator[tuple[str, list[int]]]:
    """The same server on SQLite."""
    port = int(os.environ["PREFECT_API_URL"].rsplit(":", 1)[1].removesuffix("/api"))
    url = f"sqlite+aiosqlite:///{home}/prefect.db"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    settings = {"PREFECT_HOME": str(home), "PREFECT_API_DATABASE_CONNECTION_URL": url}
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with open(home / "server.log", "ab") as log:
        process = subprocess.Popen(
            command, env={**inherited, **SERVER_SETTINGS, **REFUSALS, **settings}, stdout=log, stderr=log
        )
    marked = mark(process.pid)
    try:
        until(lambda: is_healthy(os.environ["PREFECT_API_URL"]), what="a server on SQLite")
        yield os.environ["PREFECT_API_URL"], [process.pid]
    finally:
        end(marked)


def measure(home: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Pushes so many versions and says what they took: medians and the slowest, seconds."""
    serving = on_sqlite if options.sqlite else embedded
    with serving(home) as (api_url, processes):
        started = time.perf_counter()
        with Fleet(folder, home, hosts=options.hosts, each=options.each) as fleet:
            up = time.perf_counter() - started
            fleet.trainer.warm()
            fleet.trainer.push(fleet.train())  # what is done once is behind us
            refused, load, began = refusals(home), ServerLoad(processes), time.perf_counter()
            whole, starts, publishing, incomplete = [], [], [], 0
            with connected(api_url) as client:
                for version in range(2, options.pushes + 2):
                    weights, pushed = fleet.train(), time.perf_counter()
                    try:
                        result = fleet.trainer.push(weights)
                        publishing.append(result.seconds["gather"] + result.seconds["commit"])
                    except (SyncIncomplete, OrchestrationError):
                        incomplete += 1
                    whole.append(time.perf_counter() - pushed)
                    starts += start_seconds(client, fleet, version)
                wall = time.perf_counter() - began
                server_seconds, database_seconds = load.seconds
                until(lambda: not left_running(client), what="the end of all runs")
                assert fleet.all_serve()
            resident = sum(_resident(group.process.pid) for group in fleet.groups if group.process is not None)
        versions = len(whole)
        return {
            "hosts": options.hosts,
            "processes": len(fleet.groups),
            "database": "SQLite" if options.sqlite else "PostgreSQL",
            "versions": versions,
            "incomplete": incomplete,
            "answered 503": refusals(home) - refused,
            "hosts up": up,
            "publish, median": statistics.median(publishing),
            "whole sync, median": statistics.median(whole),
            "whole sync, slowest": max(whole),
            "dispatch to start, median": statistics.median(starts),
            "dispatch to start, 95 of 100": statistics.quantiles(starts, n=20)[-1],
            "dispatch to start, slowest": max(starts),
            "server CPU a version": server_seconds / versions,
            "database CPU a version": database_seconds / versions,
            "server and database busy": (server_seconds + database_seconds) / wall,
            "MB a host": resident / options.hosts / 1e6,
            "load average after": os.getloadavg()[0],
        }


def _resident(pid: int) -> int:
    said = psutil.Process(pid).memory_info()
    return int(said.rss - said.shared)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--each", type=int, default=1, help="hosts in a process")
    parser.add_argument("--pushes", type=int, default=20)
    parser.add_argument("--sqlite", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.sqlite and "PREFECT_API_URL" not in os.environ:  # Prefect reads it once, at its import
        from tests.stores.servers import free_ports

        (port,) = free_ports(1)
        environment = {**os.environ, "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
        sys.exit(subprocess.call([sys.executable, "-m", "benchmarks.fleet", *sys.argv[1:]], env=environment))
    home, folder = (Path(tempfile.mkdtemp(prefix="weighbridge-fleet-")) for _ in range(2))
    try:
        figures = measure(home, folder, options)
    finally:
        for made in (home, folder):
            shutil.rmtree(made, ignore_errors=True)
    if options.json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    for name, figure in figures.items():
        sys.stdout.write(f"{name:30} {figure:.3f}\n" if isinstance(figure, float) else f"{name:30} {figure}\n")


if __name__ == "__main__":
    main()
