"""A host in a process of its own, for tests: `python host_process.py NAME STORE BASE FOLDER HOME`. Its replica and its
engine live in FOLDER; FOLDER/ready.json appears when it is ready."""

import sys
from pathlib import Path

from tests.flows.small_run import FileEngine

from weighbridge import logs
from weighbridge.flows.worker import WorkerOptions, serve_host
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.replica import open_replica
from weighbridge.storage.stores import open_store
from weighbridge.tasks.host import Host


def main(name: str, store_url: str, base: str, folder: Path, home: Path) -> None:
    logs.to_stderr()
    store = open_store(store_url)
    with open_replica(folder / "replica", store=store, base=Path(base), durability="process", threads=1) as replica:
        host = Host(
            name=name,
            run_id=Lineage(store).run.run_id,
            store=store,
            replica=replica,
            engine=FileEngine(folder / "engine"),
            engine_seconds=20.0,
        )
        serve_host(host, options=WorkerOptions(home=home, follow_seconds=1.0, ready_file=folder / "ready.json"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5]))
