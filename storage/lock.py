"""One process owns a replica, or a host's name on a machine: a lock on the machine's own disk, taken by a deadline,
that names who holds it. Must not know what the owner does."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weighbridge.errors import ReplicaLocked
from weighbridge.storage.clock import Clock
from weighbridge.storage.localdisk import Disk

_POLL_SECONDS = 0.05


@contextmanager
def owned(
    path: Path,
    *,
    disk: Disk,
    clock: Clock,
    seconds: float,
    what: str = "",
    instead: str = "give this one another replica folder",
) -> Iterator[None]:
    """Holds the lock until the context ends. The kernel gives it back when the owner dies, however it dies.

    Raises ReplicaLocked after `seconds`; it says that `what` (by default the lock's folder) is owned, and what else to
    do than to wait, `instead`.
    """
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since_ns": clock.now_ns()}
    deadline = clock.monotonic() + seconds
    while (held := disk.try_lock(path, json.dumps(owner).encode())) is None:
        if clock.monotonic() >= deadline:
            raise ReplicaLocked(
                f"{what or path.parent} is owned by {_owner(path)}, and was not given up within {seconds:g} s. Nothing "
                f"was changed; let that process end, or {instead}."
            )
        clock.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        disk.unlock(held)


def _owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_bytes())
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
