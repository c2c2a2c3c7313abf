"""What a writer of several processes asks of its ranks: to pass values, to divide work, to fail together. Must not know
how they reach each other; a writer of one process is a group of one, on the same path.
"""

from typing import Any, Protocol

from weighbridge.errors import RankLost

FIRST = 0
"""The rank that claims the run, talks to Prefect and commits."""


class Round(Protocol):
    """One thing that all ranks do together: opening the run, or a push. Every rank is in the same one.

    Waits end by a deadline with RankLost, and at once with the error that a rank failed with.
    """

    def post(self, topic: str, value: Any) -> None:
        """Says something to the other ranks, once a topic; never waits."""
        ...

    def take(self, topic: str, rank: int, *, heed: bool = True, more_seconds: float = 0.0) -> Any:
        """What a rank posted, once it has. Unless told not to `heed` it, a failure of the round ends the wait.
        `more_seconds` are added to the deadline."""
        ...

    def exchange(self, topic: str, value: Any) -> list[Any]:
        """Posts, and takes what every rank posted, by rank."""
        ...

    def check(self) -> None:
        """Raises the error that a rank failed with, if one has."""
        ...

    def claim(self, name: str) -> int:
        """Which rank asked first for a name in this round; this one, if none did. Never waits."""
        ...

    def fail(self, error: BaseException) -> None:
        """Ends the round for every rank; the first failure counts, and becomes the error of all."""
        ...

    def leave(self, error: BaseException | None = None) -> None:
        """Says that this rank's source was run to its end, or stopped with an `error` of its own: then ranks that
        wait for it in a collective are freed."""
        ...


class Ranks(Protocol):
    """The processes of one writer."""

    rank: int
    size: int

    def round(self) -> Round:
        """The next round. Ranks begin them in the same order."""
        ...


class Alone:
    """A writer of one process."""

    rank = FIRST
    size = 1

    def round(self) -> "AloneRound":
        """See Ranks."""
        return AloneRound()


class AloneRound:
    """A round of one: what is taken was posted before."""

    def __init__(self) -> None:
        self._posted: dict[str, Any] = {}

    def post(self, topic: str, value: Any) -> None:
        """See Round."""
        self._posted[topic] = value

    def take(self, topic: str, rank: int, *, heed: bool = True, more_seconds: float = 0.0) -> Any:
        """See Round."""
        if topic not in self._posted:
            raise RankLost(f"nothing was said about {topic!r}, and there is no other rank to wait for.")
        return self._posted[topic]

    def exchange(self, topic: str, value: Any) -> list[Any]:
        """See Round."""
        return [value]

    def check(self) -> None:
        """See Round."""

    def claim(self, name: str) -> int:
        """See Round."""
        return FIRST

    def fail(self, error: BaseException) -> None:
        """See Round: nobody else is there to hear of it."""

    def leave(self, error: BaseException | None = None) -> None:
        """See Round: nobody waits."""
