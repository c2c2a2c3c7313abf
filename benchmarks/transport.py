"""What two hosts read from the store, and for how long they fetch, with the direct transport and without it: two ranks,
two hosts, gloo on loopback, a store in a local folder. `COLLECTIVE_SIDE=2048 python -m benchmarks.transport`."""

import statistics
import sys
import tempfile
from pathlib import Path

from tests.tasks.collective_play import HOSTS
from tests.tasks.test_collective import Stage


def main(versions: int) -> None:
    """So many versions by either way; the first by each is left out."""
    seconds: dict[str, list[float]] = {"group": [], "store": []}
    nbytes: dict[str, list[int]] = {"group": [], "store": []}
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder))
        try:
            for version in range(2 * versions + 2):
                way = "group" if version <= versions else "store"
                stage.push(version + 1, terms={"window_seconds": 90.0 if way == "group" else 0.05})
                for said in stage.both(version + 1, transport=way == "group").values():
                    if version not in (0, versions + 1):
                        seconds[way].append(said["fetch_seconds"])
                        nbytes[way].append(said["store_bytes"])
            wire = stage.shard_bytes(versions)
        finally:
            stage.end()
    for way, took in seconds.items():
        read = sum(nbytes[way]) // len(nbytes[way]) * len(HOSTS)
        print(f"{way}: {read:,} bytes read from the store a version, {statistics.median(took):.3f} s to fetch")  # noqa: T201
    print(f"a version has {wire:,} bytes on the wire")  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
