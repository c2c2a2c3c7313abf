"""A long run's history, and how long questions about it take: real manifests made fast, compacted, then each question
by the functions that the commands call, in a process of its own, after start-up. python -m benchmarks.history
[--versions N] [--tensors N] [--hosts N] [--seaweedfs] [--folder DIR] [--json]; SeaweedFS needs the group `stores`."""

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.storage.long_runs import LongRun

from weighbridge.storage.history.compact import compact
from weighbridge.storage.stores import open_store
from weighbridge.storage.stores.directory import DirectoryStore

QUESTIONS = ("log -n 20", "show", "blame", "diff of all", "hosts -n 20", "status", "stats", "audit --chain")


class UnsyncedStore(DirectoryStore):
    """A directory without a sync for every object: only to make the run fast."""

    def put(self, key: str, data: bytes) -> None:
        """See Store."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def make(url: str, *, versions: int, tensors: int, hosts: int) -> float:
    """Makes a run of so many versions, of which each changes all tensors, and compacts it; returns the seconds
    that this took."""
    store = open_store(url) if "://" in url else UnsyncedStore(Path(url))
    LongRun(store, tensors=tensors, hosts=[f"rollout-{n}" for n in range(hosts)]).grow(versions)
    started = time.perf_counter()
    compact(store)
    return time.perf_counter() - started


def ask(url: str, question: str) -> dict[str, float]:
    """One question in this process: seconds after start-up, and the most memory that the process ever had."""
    from weighbridge.storage.audit.audit import audit
    from weighbridge.storage.history import questions
    from weighbridge.storage.history.reader import History
    from weighbridge.storage.history.stats import stats

    store = open_store(url)
    tensor = "model.layers.0.block.0.weight"
    ways: dict[str, Callable[[History], object]] = {
        "log -n 20": lambda h: list(questions.log(h, limit=20)),
        "show": lambda h: questions.show(h, h.head // 2),
        "blame": lambda h: questions.blame(h, tensor),
        "diff of all": lambda h: questions.diff(h, 0, h.head),
        "hosts -n 20": lambda h: questions.hosts(h, limit=20),
        "status": questions.status,
        "stats": stats,
        "audit --chain": lambda h: audit(h.store, chain=True).demand(),
    }
    started, cpu = time.perf_counter(), time.process_time()
    history = History(store)
    ways[question](history)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    assert not history.faults
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mb": peak_mb}


@contextlib.contextmanager
def place(options: argparse.Namespace) -> Iterator[str]:
    """Where the run is made: a folder, or a SeaweedFS that is started for it."""
    if options.seaweedfs:
        import boto3
        from tests.stores.servers import seaweedfs

        with seaweedfs() as server:
            os.environ.update(server.environment)
            boto3.client("s3").create_bucket(Bucket="weighbridge-bench")
            yield "s3://weighbridge-bench/run"
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        yield f"{folder}/run"


def main() -> None:
    """Prints the figures: the median of three processes a question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=10_000)
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--seaweedfs", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ask", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        sys.stdout.write(json.dumps(ask(*options.ask)) + "\n")
        return
    with place(options) as url:
        compaction = make(url, versions=options.versions, tensors=options.tensors, hosts=options.hosts)
        figures = {"compact": {"seconds": compaction, "cpu_seconds": 0.0, "peak_mb": 0.0}}
        for question in QUESTIONS:
            asked = [sys.executable, "-m", "benchmarks.history", "--ask", url, question]
            answers = [
                json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout) for _ in range(3)
            ]
            figures[question] = sorted(answers, key=lambda answer: answer["seconds"])[1]
    if options.json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    for name, figure in figures.items():
        sys.stdout.write(
            f"{name:16} {figure['seconds']:8.3f} s {figure['cpu_seconds']:8.3f} s CPU {figure['peak_mb']:8.0f} MB\n"
        )


if __name__ == "__main__":
    main()
