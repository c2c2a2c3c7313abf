"""Many versions in one trainer process: whether a push, the trainer's memory or a host's grows with their number.
python -m benchmarks.long_run [--versions 500] [--hosts 1] [--json]

A tiny model, so that what is measured is what a version costs whatever its size: flows, steps, records, the store."""

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from tests.fleet.fleet import Fleet, left_running, logging_refusals, until

from weighbridge.flows.connection import connected
from weighbridge.flows.server import ensure_server, stop_server

TENTHS = 10


def measure(home: Path, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each tenth of the versions: medians of seconds and CPU seconds a push, and memory at its end, MB."""
    with logging_refusals():
        server = ensure_server(home)
    rows: list[dict[str, Any]] = []
    try:
        with Fleet(folder, home, hosts=options.hosts) as fleet:
            fleet.trainer.warm()
            trainer = psutil.Process()
            hosts = [psutil.Process(group.process.pid) for group in fleet.groups if group.process is not None]
            seconds, spent, version = [], [], 0
            for version in range(1, options.versions + 1):
                weights, began, cpu = fleet.train(), time.perf_counter(), time.process_time()
                assert fleet.trainer.push(weights).version == version
                seconds.append(time.perf_counter() - began)
                spent.append(time.process_time() - cpu)
                if version % (options.versions // TENTHS) == 0:
                    gc.collect()
                    rows.append(
                        {
                            "versions": version,
                            "push": statistics.median(seconds),
                            "trainer CPU": statistics.median(spent),
                            "trainer MB": _resident(trainer),
                            "trainer threads": trainer.num_threads(),
                            "host MB": max((_resident(host) for host in hosts), default=0.0),
                            "load": os.getloadavg()[0],
                        }
                    )
                    sys.stderr.write(json.dumps(rows[-1]) + "\n")
                    seconds, spent = [], []
            assert fleet.all_serve()
            with connected(server.api_url) as client:
                until(lambda: not left_running(client), what="the end of all runs")
    finally:
        stop_server(home)
    return rows


def _resident(process: psutil.Process) -> float:
    said = process.memory_info()
    return float(said.rss - said.shared) / 1e6


def main() -> None:
    """Prints a line for each tenth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=500)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    home, folder = (Path(tempfile.mkdtemp(prefix="weighbridge-fleet-")) for _ in range(2))
    try:
        rows = measure(home, folder, options)
    finally:
        for made in (home, folder):
            shutil.rmtree(made, ignore_errors=True)
    if options.json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    sys.stdout.write("  ".join(rows[0]) + "\n")
    for row in rows:
        sys.stdout.write("  ".join(f"{value:.3f}".rjust(len(name)) for name, value in row.items()) + "\n")


if __name__ == "__main__":
    main()
