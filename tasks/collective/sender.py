"""The trainer's side of the direct way: after a commit, a thread of its own broadcasts the version's shards from the
ranks that encoded them to the hosts that announced themselves. No push waits for it. Must not know tensors or Prefect.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import structlog

from weighbridge.errors import UsageError, WeighbridgeError
from weighbridge.storage.attempt import Attempt
from weighbridge.storage.localdisk import PRIVATE_FOLDER, Disk
from weighbridge.storage.ranks import FIRST, Ranks
from weighbridge.tasks.collective.desk import Address, Desk, Roster
from weighbridge.tasks.collective.group import Backend, Group, pieces
from weighbridge.values import Manifest, ShardInfo

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = structlog.get_logger("weighbridge.transport")

_REMEMBERED = 3
"""Versions whose keys stay at the desk, for hosts that still look."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How long: `window_seconds` for hosts to announce themselves, `seconds` for a broadcast from then on."""

    address: Address
    backend: Backend
    window_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _Load:
    """A committed version's shards on this rank, by the manifest's place of each; `owners` are known to the first."""

    manifest: Manifest
    paths: Mapping[int, Path]
    owners: tuple[int, ...]


class Sender:
    """One rank's part. `hosts` says whom the first rank waits for; others that come in time are admitted too.

    Where pushes come faster than broadcasts, only the newest version waits; hosts that want one before it are sent to
    the store.
    """

    def __init__(
        self, terms: Terms, ranks: Ranks, *, folder: Path, disk: Disk, hosts: Callable[[], Sequence[str]]
    ) -> None:
        """Raises UsageError when the first rank cannot listen at the address."""
        self._terms, self._rank, self._size = terms, ranks.rank, ranks.size
        self._folder, self._disk, self._hosts = folder, disk, hosts
        self._server: Store | None = None
        if self._rank == FIRST:
            try:
                self._server = terms.address.server()
            except RuntimeError as error:
                raise UsageError(
                    f"transport_address {terms.address.host}:{terms.address.port} cannot be listened at: "
                    f"{str(error)[:200]}. Nothing was published; give a free port of this machine."
                ) from error
        disk.make_folder(folder, mode=PRIVATE_FOLDER)
        self._waiting: deque[_Load] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._absent: set[str] = set()
        self._told: deque[tuple[Desk, int]] = deque()
        self._last: tuple[Group, Store] | None = None
        self._thread = threading.Thread(target=self._serve, name="weighbridge-transport", daemon=True)
        self._thread.start()

    def take(self, manifest: Manifest, attempt: Attempt) -> None:
        """Takes a committed attempt's spooled shards over, by renaming them. Never raises: what cannot be broadcast is
        in the store."""
        if not manifest.shards:
            return
        try:
            places = {shard.name: number for number, shard in enumerate(manifest.shards)}
            paths = {}
            for shard in (spooled.info for spooled in attempt.shards if spooled.info is not None):
                paths[places[shard.name]] = self._folder / shard.name
                self._disk.rename(attempt.path(shard), paths[places[shard.name]])
            if self._server is not None:
                Desk(self._server, manifest.run_id, manifest.version).open()
        except (RuntimeError, OSError, WeighbridgeError) as trouble:
            log.warning("not broadcast", version=manifest.version, error=str(trouble)[:300])
            return
        owners = attempt.owners
        load = _Load(manifest, paths, tuple(owners.get(shard.name, FIRST) for shard in manifest.shards))
        with self._changed:
            self._waiting.append(load)
            self._changed.notify_all()

    def close(self) -> None:
        """Ends after the broadcast under way, which has its deadline; what waits is left to the store."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(self._terms.window_seconds + self._terms.seconds)
        self._leave()

    def _serve(self) -> None:
        while (load := self._next()) is not None:
            try:
                self._send(load)
            except (RuntimeError, OSError, ValueError, WeighbridgeError) as trouble:
                log.warning("the broadcast broke", version=load.manifest.version, error=str(trouble)[:300])
                self._leave()
            finally:
                self._drop(load)

    def _next(self) -> _Load | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            return self._waiting.popleft() if self._waiting and not self._closed else None

    def _is_outrun(self) -> bool:
        with self._changed:
            return bool(self._waiting)

    def _drop(self, load: _Load) -> None:
        for path in load.paths.values():
            self._disk.unlink(path)

    def _desk(self, load: _Load) -> Desk:
        """This version's, over a connection of this thread's own."""
        return Desk(self._terms.address.client(), load.manifest.run_id, load.manifest.version)

    def _send(self, load: _Load) -> None:
        desk, manifest, terms = self._desk(load), load.manifest, self._terms
        store: Store | None = None
        if self._rank == FIRST:
            roster = Roster(manifest.digest, self._size)
            try:
                slots = [] if self._is_outrun() else self._admit(desk)
                if slots:
                    store = Address(terms.address.host, 0).server()
                    port = store.port  # type: ignore[attr-defined] # Store's stub; it is a TCPStore
                    roster = Roster(manifest.digest, self._size, port, tuple(slots), load.owners)
            finally:
                desk.post(roster)
        else:
            found = desk.roster(seconds=terms.window_seconds + 2 * terms.seconds)  # the first may be at one before it
            if found is None or found.commit != manifest.digest:
                return
            roster = found
        if not roster.receivers:
            return
        until = time.monotonic() + terms.seconds
        self._leave()
        if store is None:
            store = terms.address.client(port=roster.port, seconds=terms.seconds)
        size = self._size + len(roster.receivers)
        group = Group(store, backend=terms.backend, rank=self._rank, size=size, until=until)
        self._last = group, store
        for number, (shard, owner) in enumerate(zip(manifest.shards, roster.owners, strict=True)):
            self._broadcast(group, shard, owner, load.paths.get(number))
        # A member that is still reading must not lose us.
        done = [f"done/{rank}" for rank in range(self._size, size)]
        store.wait(done, timedelta(seconds=max(until - time.monotonic(), 0.1)))
        log.info("broadcast", version=manifest.version, receivers=len(roster.receivers), bytes=manifest.wire_bytes)

    def _broadcast(self, group: Group, shard: ShardInfo, owner: int, path: Path | None) -> None:
        if owner != self._rank:
            for _ in group.receive(shard.nbytes, owner):
                pass
            return
        if path is None:
            raise ValueError(f"shard {shard.name} is not here")
        with path.open("rb", buffering=0) as file:
            for nbytes in pieces(shard.nbytes):
                group.send(np.frombuffer(_read(file.fileno(), nbytes), np.uint8), owner)

    def _admit(self, desk: Desk) -> list[int]:
        """The slots of those that take part. Who stayed away from the last version is not waited for again, until it
        has been heard of."""
        hosts = set(self._hosts())
        if self._told:
            self._absent -= self._told[-1][0].late()
        found = desk.admit(sorted(hosts - self._absent), seconds=self._terms.window_seconds)
        self._absent = hosts - set(found.values())
        self._told.append((desk, len(found)))
        while len(self._told) > _REMEMBERED:
            old, slots = self._told.popleft()
            old.forget(slots)
        return sorted(found)

    def _leave(self) -> None:
        if self._last is not None:
            self._last[0].close()
            self._last = None


def _read(file: int, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        piece = os.read(file, nbytes - len(data))
        if not piece:
            raise ValueError("a spooled shard is shorter than its manifest says")
        data += piece
    return bytes(data)
