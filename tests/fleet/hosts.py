"""Hosts in one process, for tests of fleets: `python -m tests.fleet.hosts STORE BASE FOLDER HOME NAME...`. Each has a
thread, a replica and an engine of its own in FOLDER/NAME, and is as real to the server as one that has a process."""

import sys
import threading
from pathlib import Path

from tests.flows.small_run import FileEngine

from weighbridge import logs
from weighbridge.flows.worker import WorkerOptions, serve_host
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.replica import open_replica
from weighbridge.storage.stores import open_store
from weighbridge.tasks.host import Host

FOLLOW_SECONDS = 2.0


def serve(name: str, store_url: str, base: Path, folder: Path, home: Path) -> None:
    """Serves one host until the process is told to stop."""
    store = open_store(store_url)
    with open_replica(folder / "replica", store=store, base=base, durability="process", threads=1) as replica:
        host = Host(
            name=name,
            run_id=Lineage(store).run.run_id,
            store=store,
            replica=replica,
            engine=FileEngine(folder / "engine"),
            engine_seconds=60.0,
        )
        options = WorkerOptions(home=home, follow_seconds=FOLLOW_SECONDS, ready_file=folder / "ready.json")
        serve_host(host, options=options)


def main(store_url: str, base: str, folder: str, home: str, *names: str) -> None:
    """Serves all of them; the first in the main thread, whose end by a signal ends the process with the others."""
    logs.to_stderr()
    for name in names[1:]:
        place = (Path(base), Path(folder, name), Path(home))
        threading.Thread(target=serve, args=(name, store_url, *place), name=name, daemon=True).start()
    serve(names[0], store_url, Path(base), Path(folder, names[0]), Path(home))


if __name__ == "__main__":
    main(*sys.argv[1:])
