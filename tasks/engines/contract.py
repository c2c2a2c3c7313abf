"""What a cut over asks of an engine: ten small verbs, each with a deadline. A user's own adapter is one class with
them. Must not know replicas, stores or Prefect; the order of the calls is `tasks/cutover.py`'s."""

from pathlib import Path
from typing import Protocol


class Engine(Protocol):
    """An inference engine as its host sees it. Every verb ends within `seconds`, by returning or by an EngineError.

    An adapter never retries by itself and keeps no state of its own about weights: what an engine serves is what it
    answers, or is not known.
    """

    name: str
    """The kind, as records show it."""

    maps_files: bool
    """Whether the engine may keep the loaded files mapped: they must then never be patched in place."""

    def check(self, *, seconds: float) -> None:
        """Whether this engine can be cut over at all: its release, its routes, its keys. Asked once, before anything.

        Raises UsageError for what only a person can change, EngineError for an engine that does not answer (yet).
        """
        ...

    def is_paused(self, *, seconds: float) -> bool | None:
        """Whether it was paused and not resumed; None when it is of a kind that cannot say."""
        ...

    def pause(self, *, seconds: float) -> None:
        """Stops taking up work, so that no request sees two versions; returns once it has stopped."""
        ...

    def reload(self, folder: Path, version: int, *, seconds: float) -> None:
        """Loads all weights from an HF checkpoint folder; returns once they are loaded."""
        ...

    def flush(self, *, seconds: float) -> None:
        """Drops every cache that the old weights filled (prefix cache, KV pages)."""
        ...

    def set_version(self, version: int, *, seconds: float) -> None:
        """Tells the engine the number of what it serves."""
        ...

    def read_version(self, *, seconds: float) -> int | None:
        """The version the engine says it serves; None when it is of a kind that cannot say, or was never told."""
        ...

    def checksum(self, *, seconds: float) -> str | None:
        """The engine's own checksum of the weights it holds, which it computes anew; None where it has none, or is not
        asked for one. It must be the same for the same weights, and another for others."""
        ...

    def resume(self, *, seconds: float) -> None:
        """Takes up work again. Sent once a cut over, never repeated."""
        ...

    def probe(self, *, seconds: float) -> None:
        """A canary: one small request that must succeed after the resume."""
        ...


VERBS = ("check", "is_paused", "pause", "reload", "flush", "set_version", "read_version", "checksum", "resume", "probe")
"""What a user's own adapter must have."""
