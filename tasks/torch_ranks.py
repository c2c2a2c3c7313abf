"""The ranks of a trainer under torch.distributed, talking through the key-value store of its process group: no
collective of ours can get in between the trainer's own, and no wait outlives its deadline."""

from __future__ import annotations

import itertools
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import structlog

from weighbridge.errors import RankLost
from weighbridge.storage.ranks import FIRST, Alone, Ranks, Round

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = structlog.get_logger("weighbridge.ranks")

_PIECE_BYTES = 4 << 20
"""A TCPStore takes 8 MiB at once."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
_KEPT_ROUNDS = 3

_writers = itertools.count()


def ranks_of_process(*, deadline_seconds: float, grace_seconds: float) -> Ranks:
    """The ranks of this process' default group, or a group of one where there is none.

    `deadline_seconds` bounds every wait for another rank; `grace_seconds` is how long a rank whose source failed waits
    for the others to come out of theirs before it breaks the collectives that hold them.
    """
    torch = sys.modules.get("torch")
    if torch is None or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return Alone()
    if torch.distributed.get_world_size() == 1:
        return Alone()
    return TorchRanks(deadline_seconds=deadline_seconds, grace_seconds=grace_seconds)


class TorchRanks:
    """See Ranks. Every rank makes as many of these, in the same order."""

    def __init__(self, *, deadline_seconds: float, grace_seconds: float) -> None:
        from torch import distributed
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()
        self.deadline_seconds, self.grace_seconds = deadline_seconds, grace_seconds
        self.turn = threading.Lock()
        self.store: Store = PrefixStore(f"weighbridge/{next(_writers)}", _get_default_store())
        self._rounds: list[TorchRound] = []
        self._begun = 0

    def round(self) -> TorchRound:
        """See Ranks. What was said three rounds ago is forgotten: every rank has left it since, for a push begins once
        all have left the one before, and at most one other round lies between two of them."""
        while len(self._rounds) >= _KEPT_ROUNDS:
            self._rounds.pop(0).forget()
        self._rounds.append(TorchRound(self, self._begun))
        self._begun += 1
        return self._rounds[-1]


class TorchRound:
    """See Round. Thread-safe: the trainer's thread and the one that publishes share it."""

    def __init__(self, ranks: TorchRanks, number: int) -> None:
        self._ranks, self._number = ranks, number
        self._written: list[str] = []
        self._failure: BaseException | None = None

    def post(self, topic: str, value: Any) -> None:
        """See Round."""
        data = pickle.dumps(value)
        key = self._key(topic, self._ranks.rank)
        pieces = [data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)]
        with self._store() as store:
            for number, piece in enumerate(pieces):
                store.set(f"{key}/{number}", piece)  # type: ignore[arg-type] # its stub knows text alone
            store.set(key, str(len(pieces)))
        self._written += [key, *(f"{key}/{number}" for number in range(len(pieces)))]

    def take(self, topic: str, rank: int, *, heed: bool = True, more_seconds: float = 0.0) -> Any:
        """See Round."""
        key = self._key(topic, rank)
        seconds = self._ranks.deadline_seconds + more_seconds
        deadline = time.monotonic() + seconds
        pause = _FIRST_PAUSE
        while True:
            with self._store() as store:
                if store.check([key]):
                    pieces = [store.get(f"{key}/{number}") for number in range(int(store.get(key)))]
                    return pickle.loads(b"".join(pieces))
            if heed:
                self.check()
            if time.monotonic() >= deadline:
                raise RankLost(
                    f"rank {rank} did not say its {topic!r} within {seconds:.0f} s. What was "
                    "committed before stands. Every rank calls every push and warm, in the same order; where only one "
                    "does, set ranks='alone'. rank_deadline says how long one waits for another."
                )
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 1.5)

    def exchange(self, topic: str, value: Any) -> list[Any]:
        """See Round."""
        self.post(topic, value)
        return [self.take(topic, rank) for rank in range(self._ranks.size)]

    def check(self) -> None:
        """See Round."""
        key = self._key("failed", FIRST)
        with self._store() as store:
            data = store.get(key) if store.check([key]) else b""
        if data:
            raise self._failure or pickle.loads(bytes.fromhex(data.decode()))

    def claim(self, name: str) -> int:
        """See Round."""
        key = self._key(f"own/{name}", FIRST)
        with self._store() as store:
            owner = int(store.compare_set(key, "", str(self._ranks.rank)))
        if owner == self._ranks.rank:
            self._written.append(key)
        return owner

    def fail(self, error: BaseException) -> None:
        """See Round."""
        packed = _pack(error, self._ranks.rank)
        with self._store() as store:
            if store.compare_set(self._key("failed", FIRST), "", packed) == packed.encode():
                self._failure = error  # as it was raised here, not as it comes back from the store

    def leave(self, error: BaseException | None = None) -> None:
        """See Round."""
        with self._store() as store:
            store.set(self._key("left", self._ranks.rank), "")
        self._written.append(self._key("left", self._ranks.rank))
        if error is None:
            return
        waiting = [self._key("left", rank) for rank in range(self._ranks.size)]
        deadline, pause = time.monotonic() + self._ranks.grace_seconds, _FIRST_PAUSE
        while time.monotonic() < deadline:
            with self._store() as store:
                if store.check(waiting):
                    return
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 1.5)
        self._break_collectives(error)

    def forget(self) -> None:
        """Removes what this rank said."""
        keys = [*self._written, self._key("failed", FIRST)] if self._ranks.rank == FIRST else self._written
        with self._store() as store:
            for key in keys:
                store.delete_key(key)
        self._written = []

    def _break_collectives(self, error: BaseException) -> None:
        """The others wait in a collective that this rank will never join: gloo ends theirs when our side closes."""
        from torch import distributed

        log.error(
            "other ranks hang in a collective of the source that failed here; this rank leaves its process groups",
            rank=self._ranks.rank,
            error=str(error),
        )
        if distributed.is_initialized():
            distributed.destroy_process_group()

    @contextmanager
    def _store(self) -> Iterator[Store]:
        """The store, for one thread at a time, and its loss as an error of ours."""
        from torch.distributed import DistError

        try:
            with self._ranks.turn:
                yield self._ranks.store
        except DistError as lost:
            raise RankLost(
                f"the process group's store is gone, and with it rank {FIRST}: {lost}. What was committed before "
                "stands; start the trainer again."
            ) from lost

    def _key(self, topic: str, rank: int) -> str:
        return f"{self._number}/{topic}/{rank}"


def as_message(error: BaseException) -> BaseException:
    """An error as it can be sent: without what led to it, which may lead back to it, and which some libraries have
    pickle follow; one that does not survive the way becomes a RuntimeError."""
    try:
        reduced: Any = error.__reduce__()
        made, arguments, *more = reduced
        sent: BaseException = made(*arguments)
        vars(sent).update(more[0] if more else {})
        pickle.loads(pickle.dumps(sent))
    except Exception:  # noqa: BLE001 - whatever a foreign class does when it is pickled
        return RuntimeError(f"{type(error).__name__}: {error}")
    return sent


def _pack(error: BaseException, rank: int) -> str:
    """An error as text that a compare_set can carry, saying where it was raised."""
    sent = as_message(error)
    if not any(note.startswith("(raised on rank") for note in getattr(sent, "__notes__", ())):
        for told in (error, sent):
            told.add_note(f"(raised on rank {rank})")
    return pickle.dumps(sent).hex()


_: type[Ranks] = TorchRanks
__: type[Round] = TorchRound
