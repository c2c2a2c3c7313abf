"""The pause of a real vLLM on the CPU for one version, against a plain reload of the same folder in the same run:
without the plugin, with it when every tensor changed, and with it when the MLPs of four layers did.

    python -m benchmarks.pause [--hidden N] [--layers N] [--rounds N]      # needs what `make test-engines` installs

Prints one JSON line: the model's bytes, and for each way medians of the pause, of the load within it, and of what our
part adds: the pause less the load. `plain_reload` is vLLM's own reload, asked for by itself. Seconds.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from tests.engines.real import PLUGIN, Fleet, Server, host_of, make_model, sync, with_plugin

from weighbridge.storage.replica import open_replica
from weighbridge.tasks.engines.vllm import VllmEngine

SECONDS = 300.0
SOME = ("layers.0.mlp", "layers.4.mlp", "layers.8.mlp", "layers.12.mlp")


class WithoutPlugin(VllmEngine):
    """The adapter before a server that was started without the plugin."""

    def _ask_plugin(self, seconds: float) -> None:
        super()._ask_plugin(seconds)  # which makes the plugin forget
        self._has_plugin = False


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=34)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        sys.stdout.write(json.dumps(measure(Path(name), options)) + "\n")


def measure(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """All ways in turns, so that a busy machine is one for each of them."""
    size = ("--hidden", str(options.hidden), "--layers", str(options.layers))
    fleet = Fleet(folder / "trainer", make_model("vllm", folder / "base", *size))
    taken: dict[str, list[tuple[float, float]]] = {"whole": [], "plugin, all": [], "plugin, some": []}
    plain: list[float] = []
    with open_replica(folder / "replica", store=fleet.run.store, base=fleet.run.base) as replica:
        server = Server("vllm", replica.current, folder / "server.log", PLUGIN, with_plugin(folder / "plugin"))
        server.start()
        try:
            for _ in range(options.rounds + 1):  # the first loads what none after it has to
                for way, times in taken.items():
                    engine = WithoutPlugin(server.url) if way == "whole" else VllmEngine(server.url)
                    engine.check(seconds=SECONDS)
                    host = host_of(fleet, replica, engine, seconds=SECONDS)
                    if way == "plugin, some":
                        sync(
                            host, fleet.step(scale=0.01, only=("norm",))
                        )  # from here on the plugin knows what it holds
                        version = fleet.step(scale=0.01, only=SOME)
                    else:
                        version = fleet.step(scale=0.01)
                    seconds = sync(host, version).seconds
                    times.append((seconds["pause"], seconds["reload"]))
                engine = WithoutPlugin(server.url)
                engine.check(seconds=SECONDS)
                engine.pause(seconds=SECONDS)
                begun = time.perf_counter()
                engine.reload(replica.current, replica.version, seconds=SECONDS)
                plain.append(time.perf_counter() - begun)
                engine.flush(seconds=SECONDS)
                engine.resume(seconds=SECONDS)
        finally:
            server.kill()
        nbytes = sum(file.stat().st_size for file in replica.current.iterdir())
    figures = {
        way: {
            "pause": _median(pause for pause, _ in times[1:]),
            "load": _median(load for _, load in times[1:]),
            "added": _median(pause - load for pause, load in times[1:]),
            "most_added": max(pause - load for pause, load in times[1:]),
        }
        for way, times in taken.items()
    }
    return {"model_bytes": nbytes, "plain_reload": _median(plain[1:]), **figures}


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


if __name__ == "__main__":
    main()
