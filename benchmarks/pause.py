"""The pause of a real vLLM on the CPU for one version, against a plain reload of the same folder in the same run.

    python -m benchmarks.pause [--hidden N] [--layers N] [--rounds N]      # needs what `make test-engines` installs

Prints one JSON line: the model's bytes, medians of the pause, of our reload within it and of the plain one, and what
our part adds: the pause less the plain reload. Seconds.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.engines.real import Fleet, Server, host_of, make_model, sync

from weighbridge.storage.replica import open_replica
from weighbridge.tasks.engines.vllm import VllmEngine

SECONDS = 300.0


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        sys.stdout.write(json.dumps(measure(Path(name), options)) + "\n")


def measure(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Versions and plain reloads in turns."""
    size = ("--hidden", str(options.hidden), "--layers", str(options.layers))
    fleet = Fleet(folder / "trainer", make_model("vllm", folder / "base", *size))
    pauses, reloads, plain = [], [], []
    with open_replica(folder / "replica", store=fleet.run.store, base=fleet.run.base) as replica:
        server = Server("vllm", replica.current, folder / "server.log")
        server.start()
        try:
            engine = VllmEngine(server.url)
            host = host_of(fleet, replica, engine, seconds=SECONDS)
            for _ in range(options.rounds + 1):
                attempt = sync(host, fleet.step(scale=0.01))
                pauses.append(attempt.seconds["pause"])
                reloads.append(attempt.seconds["reload"])
                engine.pause(seconds=SECONDS)
                begun = time.perf_counter()
                engine.reload(replica.current, replica.version, seconds=SECONDS)
                plain.append(time.perf_counter() - begun)
                engine.flush(seconds=SECONDS)
                engine.resume(seconds=SECONDS)
        finally:
            server.kill()
        nbytes = sum(file.stat().st_size for file in replica.current.iterdir())
    # The first round loads what no round after it has to.
    medians = [statistics.median(taken[1:]) for taken in (pauses, reloads, plain)]
    names = ("pause", "reload", "plain_reload")
    added = statistics.median(p - q for p, q in zip(pauses[1:], plain[1:], strict=True))
    return {"model_bytes": nbytes, **dict(zip(names, medians, strict=True)), "added": added}


if __name__ == "__main__":
    main()
