"""The processes of a broadcast, for tests: `trainer FOLDER RANK PORT DESK` publishes a version for each file go-N in
FOLDER, `host NAME FOLDER DESK` follows the orders on its standard input and answers on its standard output, in JSON
lines."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import weighbridge.tasks.collective.group as group_module
from weighbridge import logs
from weighbridge.storage.batching import batches
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.clock import SystemClock
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.open_publisher import open_publisher
from weighbridge.storage.replica import open_replica
from weighbridge.storage.replica.landing import Landing
from weighbridge.storage.stores import open_store
from weighbridge.tasks.collective.desk import Address
from weighbridge.tasks.collective.receiver import Receiver
from weighbridge.tasks.collective.sender import Sender, Terms
from weighbridge.tasks.engines.none import NoEngine
from weighbridge.tasks.host import Host
from weighbridge.tasks.host_attempt import HostAttempt
from weighbridge.tasks.torch_ranks import ranks_of_process
from weighbridge.values import TensorSpec

LATEST_SECONDS = 90.0
HOSTS = ("a", "b")
SENDERS = 2
SIDE = int(os.environ.get("COLLECTIVE_SIDE", "512"))
"""Of eight square tensors of F16; benchmarks/transport.py has larger ones."""


def weights(version: int) -> dict[str, Any]:
    """Some 4 MiB unless SIDE is set, of which every version changes everything."""
    rng = np.random.default_rng(version)
    return {f"layers.{i}.weight": rng.standard_normal((SIDE, SIDE)).astype(np.float16) for i in range(8)}


def trainer(folder: Path, rank: int, port: int, desk: int) -> None:
    """One rank; half of the tensors are its own."""
    from torch import distributed

    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=SENDERS)
    ranks = ranks_of_process(deadline_seconds=LATEST_SECONDS, grace_seconds=1.0)
    disk, spool = LocalDisk("process"), folder / f"spool-{rank}"
    terms = Terms(Address("127.0.0.1", desk), "gloo", window_seconds=LATEST_SECONDS, seconds=LATEST_SECONDS)
    sender = Sender(terms, ranks, folder=spool / "transport", disk=disk, hosts=lambda: HOSTS)
    publisher = open_publisher(
        open_store(str(folder / "store")),
        open_checkpoint(folder / "base"),
        run_id="run",
        digest_kind="xxh3-128",
        aliases={},
        spool=spool,
        disk=disk,
        clock=SystemClock(),
        threads=1,
        ranks=ranks,
        hand_over=sender.take,
    )
    (folder / f"pushed-0-{rank}").touch()
    for version in range(1, 100):
        while not (folder / f"go-{version}").exists():
            time.sleep(0.02)
        said = json.loads((folder / f"go-{version}").read_text())
        if said.get("end"):
            sender.close()
            os._exit(0)
        sender._terms = replace(terms, **said.get("terms", {}))
        if said.get("dies") == rank:
            group_module.Group.send = _die  # type: ignore[assignment, method-assign]
        started = time.monotonic()
        attempt = publisher.begin()
        for batch in batches(_own(version, rank), shard_bytes=1 << 20):
            attempt.upload(attempt.encode(batch).index)
        publisher.commit(attempt, {})
        attempt.round.leave()
        (folder / f"draft-{version}-{rank}").write_text(json.dumps({"seconds": time.monotonic() - started}))
        (folder / f"draft-{version}-{rank}").rename(folder / f"pushed-{version}-{rank}")


def _own(version: int, rank: int) -> Iterator[tuple[TensorSpec, Any]]:
    for number, (name, array) in enumerate(sorted(weights(version).items())):
        if number % SENDERS == rank:
            yield TensorSpec(name, "F16", array.shape, array.nbytes), array.view(np.uint8).reshape(-1)


def _die(*_: object) -> None:
    os._exit(9)


class Counting:
    """A store that counts the bytes of shards which are read from it."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.nbytes = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data: bytes = self._inner.get_range(key, start, length)
        self.nbytes += len(data) if key.endswith(".safetensors") else 0
        return data


class Mischief(Receiver):
    """A receiver that does something else with what comes; `what` says what."""

    what = ""

    def receive(self, host: str, landing: Landing) -> int:
        real = landing.take
        pieces = 0

        def take(shard: Any, data: Any) -> None:
            nonlocal pieces
            pieces += 1
            if self.what == "flips" and pieces == 1:
                data = data.copy()
                data[100] ^= 1
            if self.what == "dies" and pieces == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "hangs" and pieces == 2:
                _say({"hanging": True})
                time.sleep(3600)
            real(shard, data)

        return super().receive(host, _Bent(landing, take))  # type: ignore[arg-type]


class _Bent:
    def __init__(self, landing: Landing, take: Any) -> None:
        self._landing, self.take = landing, take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._landing, name)


def host(name: str, folder: Path, desk: int) -> None:
    """Each order is {"version": N, "what": "", "seconds": S, "transport": true}."""
    logs.to_stderr()
    store: Any = Counting(open_store(str(folder / "store")))
    receiver = Mischief(Address("127.0.0.1", desk), "gloo", LATEST_SECONDS)
    with open_replica(
        folder / f"replica-{name}", store=store, base=folder / "base", durability="process", threads=1
    ) as replica:
        served = Host(name=name, run_id=Lineage(store).run.run_id, store=store, replica=replica, engine=NoEngine())
        _say({"ready": True})
        for line in sys.stdin:
            order = json.loads(line)
            receiver.what, receiver.seconds = order.get("what", ""), order.get("seconds", LATEST_SECONDS)
            served.transport = receiver if order.get("transport", True) else None
            store.nbytes, started = 0, time.monotonic()
            attempt = HostAttempt(served, order["version"])
            attempt.fetch()
            fetched = time.monotonic() - started
            attempt.apply()
            attempt.verify()
            attempt.cut_over()
            record = attempt.record_served()
            said = {"version": replica.version, "store_bytes": store.nbytes, "fetch_seconds": fetched}
            _say({**said, "fetched_bytes": record.fetched_bytes})


def _say(said: dict[str, Any]) -> None:
    print(json.dumps(said), flush=True)  # noqa: T201 - read by the test


if __name__ == "__main__":
    if SIDE <= 512:
        group_module.PIECE_BYTES = 128 << 10  # several a shard
    if sys.argv[1] == "trainer":
        trainer(Path(sys.argv[2]), *map(int, sys.argv[3:6]))
    else:
        host(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
