"""The step before a host looks for versions, where it follows a neighbour: what is new there is said again in the
mirror, which is the store that the host reads. Must not know engines or Prefect."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from weighbridge.storage.peers.mirror import Mirror
from weighbridge.storage.stores.hooks import Hooks


class Served(Protocol):
    """What of a replica is needed here."""

    @property
    def current(self) -> Path:
        """The folder that is served."""
        ...

    @property
    def version(self) -> int:
        """The mirror's version that it holds."""
        ...


def _nothing() -> None:
    """Without a neighbour there is nothing to do."""


@dataclass(frozen=True, slots=True)
class Following(Hooks):
    """Hooks that also call `follow` before a read."""

    follow: Callable[[], None] = field(default=_nothing)

    def reading(self, store: str, version: int = -1) -> None:
        """See Hooks. Raises also what `Mirror.advance` raises; nothing was written then."""
        Hooks.reading(self, store, version)
        self.follow()


def following(mirror: Mirror, replica: Served, hooks: Hooks) -> Following:
    """The hooks of a host that follows a neighbour. Called by one thread at a time, as a host looks for versions."""
    moved = False

    def follow() -> None:
        nonlocal moved
        if replica.version != mirror.version:
            return  # it has still to apply what was mirrored before, and its bytes are not the mirror's newest yet
        if moved:
            mirror.tidy(replica.current)
        moved = mirror.advance(replica.current)

    return Following(hooks.after_publish, hooks.before_read, hooks.seconds, follow)
