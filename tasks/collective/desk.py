"""The desk: where hosts say that they would receive a version, and learn with whom. Keys in a TCPStore that the
trainer's first rank serves; docs/TRANSPORT.md lists them. Must not know groups or shards."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from weighbridge.storage import strict_json

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

CLOSED = 1 << 20
"""Added to the number of announcements when no more are admitted."""

_MOST_ROSTER_BYTES = 16 << 20

CALL_SECONDS = 10.0
_LATE_NAME_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where the first rank listens."""

    host: str
    port: int

    def server(self) -> Store:
        """Serves the desk on all of this machine's addresses. Raises RuntimeError when the port is taken."""
        return _store(self.host, self.port, is_master=True)

    def client(self, *, port: int | None = None, seconds: float = CALL_SECONDS) -> Store:
        """A connection of one's own: a wait on one keeps all other calls on it waiting. Raises RuntimeError."""
        return _store(self.host, self.port if port is None else port, is_master=False, seconds=seconds)


@dataclass(frozen=True, slots=True)
class Roster:
    """Who takes part in a version's group: the senders are its first ranks, and `receivers` (slots at the desk) those
    after them. `port` is the group's own store; `owners` gives the sender of each shard of the manifest, `commit` is
    that manifest's digest. One without receivers says that everybody goes to the store."""

    commit: str
    senders: int
    port: int = 0
    receivers: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()

    def to_text(self) -> str:
        """JSON."""
        said = {"commit": self.commit, "senders": self.senders, "port": self.port}
        return json.dumps({**said, "receivers": self.receivers, "owners": self.owners})

    @staticmethod
    def parse(text: bytes) -> Roster:
        """The reverse. Raises ValueError for anything that is not one: a network's word is not trusted."""
        if len(text) > _MOST_ROSTER_BYTES:
            raise ValueError(f"a roster of {len(text):,} bytes")
        said = strict_json.parse(text)
        if not isinstance(said, dict) or not isinstance(said.get("commit"), str):
            raise ValueError("no roster")
        receivers, owners = said.get("receivers"), said.get("owners")
        if not isinstance(receivers, list) or not isinstance(owners, list):
            raise ValueError("no roster")
        if not all(type(n) is int for n in (said.get("senders"), said.get("port"), *receivers, *owners)):
            raise ValueError("no roster")
        roster = Roster(said["commit"], said["senders"], said["port"], tuple(receivers), tuple(owners))
        if not all(0 <= owner < roster.senders for owner in roster.owners):
            raise ValueError("a roster with shards that nobody sends")
        if not 0 < roster.senders <= CLOSED or not 0 <= roster.port < 1 << 16:
            raise ValueError("a roster with more senders, or another port, than there can be")
        if len({*roster.receivers}) < len(roster.receivers) or not all(0 < slot < CLOSED for slot in roster.receivers):
            raise ValueError("a roster with slots that nobody has")
        return roster


class Desk:
    """One version's keys. Every call ends within its deadline; RuntimeError (torch's DistError) when it cannot."""

    def __init__(self, store: Store, run_id: str, version: int) -> None:
        self._store, self._prefix = store, f"weighbridge/{run_id}/{version}"

    def open(self) -> None:
        """First rank: from now on hosts may announce themselves."""
        self._store.set(self._key("open"), "1")

    def is_open(self) -> bool:
        """Whether this version is broadcast at all."""
        return bool(self._store.check([self._key("open")]))

    def announce(self, name: str) -> int | None:
        """Host: its slot, or None when it came too late."""
        slot = int(self._store.add(self._key("here"), 1))
        self._store.set(self._key(f"host/{slot}"), name)
        return slot if slot < CLOSED else None

    def admit(self, expected: Sequence[str], *, seconds: float) -> dict[int, str]:
        """First rank: the hosts that announced themselves, by slot; waits until all expected ones have, at most so long
        (all of it, when nobody is expected by name), and admits nobody after that."""
        until, missing = time.monotonic() + seconds, set(expected)
        found: dict[int, str] = {}
        while (left := until - time.monotonic()) > 0 and (missing or not expected):
            name = self._wait(f"host/{len(found) + 1}", left)
            if name is None:
                break
            found[len(found) + 1] = name.decode(errors="replace")
            missing.discard(found[len(found)])
        count = int(self._store.add(self._key("here"), CLOSED)) - CLOSED
        for slot in range(len(found) + 1, count + 1):
            name = self._wait(f"host/{slot}", _LATE_NAME_SECONDS)  # one that died in between never says it
            if name is not None:
                found[slot] = name.decode(errors="replace")
        return found

    def late(self) -> set[str]:
        """First rank: who announced themselves after that."""
        count = int(self._store.add(self._key("here"), 0)) - CLOSED
        slots = [self._key(f"host/{CLOSED + slot}") for slot in range(1, max(count, 0) + 1)]
        return {self._store.get(key).decode(errors="replace") for key in slots if self._store.check([key])}

    def post(self, roster: Roster) -> None:
        """First rank: says who takes part."""
        self._store.set(self._key("roster"), roster.to_text())

    def roster(self, *, seconds: float) -> Roster | None:
        """Who takes part, once that is known; None when it was not within the time. Raises ValueError."""
        text = self._wait("roster", seconds)
        return None if text is None else Roster.parse(text)

    def forget(self, slots: int) -> None:
        """First rank: removes what was said about a version, of at most so many hosts."""
        names = ["open", "here", "roster", *(f"host/{slot}" for slot in range(1, slots + 1))]
        for name in names:
            self._store.delete_key(self._key(name))

    def _wait(self, name: str, seconds: float) -> bytes | None:
        from torch.distributed import DistStoreError

        key = self._key(name)
        try:
            self._store.wait([key], timedelta(seconds=max(seconds, 0.001)))
        except DistStoreError:
            return None
        return self._store.get(key)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"


def _store(host: str, port: int, *, is_master: bool, seconds: float = CALL_SECONDS) -> Store:
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        host, port, is_master=is_master, wait_for_workers=False, timeout=timedelta(seconds=max(seconds, 0.1))
    )
