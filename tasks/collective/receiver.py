"""A host's side of the direct way: announces itself for a version, and puts what is broadcast where a fetch from the
store goes on from. Never fails: whatever does not come is fetched, and a digest judges either. Must not know engines.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from weighbridge.errors import WeighbridgeError
from weighbridge.storage.replica.landing import Landing
from weighbridge.tasks.collective.desk import Address, Desk
from weighbridge.tasks.collective.group import Backend, Group

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = structlog.get_logger("weighbridge.transport")

_KNOCK_SECONDS = 1.0


@dataclass(slots=True)
class Receiver:
    """Receives at most one version at a time. `seconds` bounds all of it, from the announcement on."""

    address: Address
    backend: Backend
    seconds: float
    _last: tuple[Group, Store] | None = None

    def receive(self, host: str, landing: Landing) -> int:
        """Receives a version's shards; returns the bytes that came, 0 when there is no group to take part in."""
        version, until = landing.manifest.version, time.monotonic() + self.seconds
        try:
            # torch's client tries again until its time is up; a trainer that is away is known sooner.
            socket.create_connection((self.address.host, self.address.port), _KNOCK_SECONDS).close()
            return self._receive(host, landing, until)
        except (RuntimeError, OSError, ValueError, WeighbridgeError) as trouble:
            log.warning("not received, going to the store", host=host, version=version, error=str(trouble)[:300])
            return 0

    def close(self) -> None:
        """Leaves the last group."""
        if self._last is not None:
            self._last[0].close()
            self._last = None

    def _receive(self, host: str, landing: Landing, until: float) -> int:
        manifest = landing.manifest
        desk = Desk(self.address.client(), manifest.run_id, manifest.version)
        if not desk.is_open():
            return 0
        slot = desk.announce(host)
        roster = None if slot is None else desk.roster(seconds=until - time.monotonic())
        if roster is None or slot not in roster.receivers:
            log.info("too late to receive, going to the store", host=host, version=manifest.version)
            return 0
        if roster.commit != manifest.digest or len(roster.owners) != len(manifest.shards):
            raise ValueError("the trainer broadcasts another version than the store holds under this number")
        self.close()  # the group before this one: its members may have been reading from us until now
        store = self.address.client(port=roster.port, seconds=until - time.monotonic())
        rank = roster.senders + roster.receivers.index(slot)
        size = roster.senders + len(roster.receivers)
        started = time.monotonic()
        group = Group(store, backend=self.backend, rank=rank, size=size, until=until)
        self._last = group, store
        for shard, owner in zip(manifest.shards, roster.owners, strict=True):
            for piece in group.receive(shard.nbytes, owner):
                landing.take(shard, piece)
        store.set(f"done/{rank}", "1")
        taken = round(time.monotonic() - started, 3)
        log.info("received", host=host, version=manifest.version, bytes=landing.nbytes, seconds=taken)
        return landing.nbytes
