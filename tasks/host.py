"""A host: what its process holds while it serves, and what it asks of its replica. Must not know the steps of a sync,
nor Prefect."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import structlog

from weighbridge.errors import EngineError, UsageError
from weighbridge.storage.clock import Clock, SystemClock
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.replica.landing import Landing, Transport
from weighbridge.storage.signing import Trust
from weighbridge.storage.stores.contract import Store
from weighbridge.storage.stores.hooks import Hooks
from weighbridge.tasks.cutover import Copies, Watch
from weighbridge.tasks.engines.contract import Engine

log = structlog.get_logger("weighbridge.host")

_FIRST_CANARY_SECONDS = 20.0


class HostReplica(Copies, Protocol):
    """What a host's sync needs of a replica. A plan, and what comes of it, are the replica's own values."""

    @property
    def version(self) -> int:
        """The version that `current` holds."""
        ...

    @property
    def state_digest(self) -> str:
        """The digest of the whole state that `current` holds."""
        ...

    @property
    def held(self) -> Mapping[str, int]:
        """The version that each copy holds: one or two."""
        ...

    def plan_and_fetch(self, target: int | None = None, *, on_progress: Callable[[int, int], None]) -> Any:
        """Finds the shortest way to `target` and brings what it needs onto the local disk, proven by digest."""
        ...

    def landing(self, version: int) -> Landing | None:
        """Where a version's shards may be put that come by another way than from the store, if they are wanted."""
        ...

    def scrub(self) -> Any:
        """Digests every byte, and mends what rotted."""
        ...

    def apply(self, fetched: Any) -> Any:
        """Patches the spare copy and proves it; `current` is not touched."""
        ...

    def settle(self) -> None:
        """Mends what changed behind our back since the last step."""
        ...

    def tidy(self) -> None:
        """Removes what was fetched and will not be needed again."""
        ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A version that stands proven in the spare copy and waits for its rollout to cut over, with what it took so far.

    `until` is the host's monotonic clock: after that the rollout is taken for dead, and the host goes on by itself.
    """

    version: int
    until: float
    started_ns: int
    fetched_bytes: int
    repaired: int
    seconds: Mapping[str, float]


@dataclass(slots=True)
class Host:
    """What a host's process brings to a run that names only run, version and host."""

    name: str
    run_id: str
    store: Store
    replica: HostReplica
    engine: Engine
    engine_seconds: float = 300.0
    hooks: Hooks = field(default_factory=Hooks)
    clock: Clock = field(default_factory=SystemClock)
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held by whoever brings this host to a version: one at a time."""
    engine_version: int | None = None
    """What this process knows the engine to serve; None: not known, so it is loaded before anything is believed."""
    engine_says: bool = False
    """Whether the engine is of a kind that names its version: one that no longer does was started anew."""
    engine_in_doubt: bool = False
    """Whether a cut over ended without known weights, of this process or, by its guard's mark, of one that died; an
    engine's own word is then worth nothing."""
    watch: Watch | None = None
    """The guard of this host, if its engine is one that is paused."""
    restart: Callable[[Path], None] | None = None
    """Starts the engine anew on a folder, or raises EngineError; None: a person or a supervisor does."""
    trust: Trust | None = None
    """The keys whose versions this host believes; None: it believes the store."""
    nodes: tuple[str, ...] = ()
    """The hosts on the other machines that this engine loads from: it is cut over once all of them hold the version."""
    transport: Transport | None = None
    """Another way to a version's shards, which is tried before the store."""
    prepared: Prepared | None = None
    """What was prepared for a cut over together with other hosts."""
    lineage: Lineage = field(init=False)

    def __post_init__(self) -> None:
        """Raises UsageError for an engine that keeps its files mapped on a replica with one copy: that copy is patched
        in place, under the engine's feet."""
        if self.engine.maps_files and len(self.replica.held) < 2:
            raise UsageError(
                f"engine {self.engine.name!r} keeps the files that it loaded mapped, and the replica keeps one copy, "
                "which is patched in place. Nothing was started; keep two copies (copies = 2)."
            )
        self.lineage = Lineage(self.store, trust=self.trust)

    def engine_is_at(self, version: int) -> bool:
        """Whether the engine is known to serve a version: by its own word where it has one, else by our memory."""
        if self.engine.name == "none":
            return True
        if self.engine_in_doubt:
            return False
        said = self.engine.read_version(seconds=self.engine_seconds)
        if said is None and self.engine_says:  # started anew: on what, and whether it is numbered, a load settles
            return False
        if version != (self.engine_version if said is None else said):
            return False
        return self.engine_version is not None or self._engine_answers()

    def _engine_answers(self) -> bool:
        """Whether an engine that this process never cut over serves at all: the process before may have paused it."""
        paused = self.engine.is_paused(seconds=self.engine_seconds)
        if paused is not None:
            return not paused
        try:
            self.engine.probe(seconds=min(self.engine_seconds, _FIRST_CANARY_SECONDS))
        except EngineError as error:
            log.warning("the engine does not answer; it is loaded and resumed anew", host=self.name, error=str(error))
            return False
        return True
