"""An engine that spans machines loads from a replica on each: its host waits here until the hosts of the other nodes
hold the version, as their records say. Must not know engines or Prefect."""

from collections.abc import Sequence

import structlog

from weighbridge.errors import CorruptData, EngineError
from weighbridge.storage.clock import Clock
from weighbridge.storage.records import SERVED, pass_over, read_record, record_keys, version_of
from weighbridge.storage.stores.contract import Store

log = structlog.get_logger("weighbridge.host")

_LOOK_SECONDS = 0.5


class NodesBehind(EngineError):
    """Not every node of an engine holds the version that it is to load; the engine was not touched."""


def await_nodes(store: Store, nodes: Sequence[str], version: int, *, seconds: float, clock: Clock) -> None:
    """Returns once every node's host serves exactly `version` from its replica.

    Raises NodesBehind after `seconds`, or at once when a node has gone on to a newer version, which this engine's own
    next run brings.
    """
    until = clock.monotonic() + seconds
    while True:
        served = {node: _newest_served(store, node, version) for node in nodes}
        if ahead := [f"{node} (version {newest})" for node, newest in served.items() if newest > version]:
            raise NodesBehind(
                f"version {version} is not loaded, for {', '.join(ahead)} went on, and this engine loads from there "
                "too. It was not touched; its host's run for that version brings it."
            )
        waiting = [node for node, newest in served.items() if newest < version]
        if not waiting:
            return
        if clock.monotonic() >= until:
            raise NodesBehind(
                f"version {version} is not on {', '.join(waiting)} after {seconds:g} s, and this engine loads from "
                "there too. It was not touched. See `weighbridge status`; retry this host once they are there."
            )
        log.info("waiting for the engine's other nodes", version=version, nodes=waiting)
        clock.sleep(_LOOK_SECONDS)


def _newest_served(store: Store, node: str, version: int) -> int:
    """The newest version from `version` on that a host's records say it served; -1 for none."""
    newest = -1
    for key in record_keys(store, node, head=version):
        if version_of(key) <= max(newest, version - 1):
            continue
        try:
            record = read_record(store, key)
        except CorruptData as fault:
            pass_over(fault)
            continue
        if record.outcome == SERVED:
            newest = record.version
    return newest
