"""Writers that race for the same keys, as threads of this process or, run as a module, of a process of their own."""

import json
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from weighbridge.storage.clock import SystemClock
from weighbridge.storage.commit import put_if_absent
from weighbridge.storage.stores import Store, open_store


def race_key(number: int) -> str:
    return f"race/{number:06d}/manifest"


def race(store: Store, writers: Sequence[str], commits: int) -> dict[str, list[int]]:
    """Every writer tries for every key, all at the same moment; returns which keys each of them believes it won."""
    start_line = threading.Barrier(len(writers))

    def run(writer: str) -> list[int]:
        won = []
        for number in range(commits):
            start_line.wait(timeout=60)
            if put_if_absent(store, race_key(number), f"{writer}:{number}".encode(), clock=SystemClock()):
                won.append(number)
        return won

    with ThreadPoolExecutor(len(writers)) as pool:
        return dict(zip(writers, pool.map(run, writers), strict=True))


def main() -> None:
    """`racer URL COMMITS WRITER...`: says "ready", waits for a line, races, and prints what each writer won."""
    url, commits, *writers = sys.argv[1:]
    store = open_store(url)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    sys.stdout.write(json.dumps(race(store, writers, int(commits))) + "\n")


if __name__ == "__main__":
    main()
