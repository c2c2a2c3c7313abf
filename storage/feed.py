"""The hand-over between the trainer's thread, which gathers batches, and the threads that encode them: bounded, so that
the model is never held twice, and without a wait that outlives a failure on the other side."""

import threading
from collections import deque
from collections.abc import Iterator

from weighbridge.storage.batching import Batch


class FeedBroken(RuntimeError):
    """The other side of the feed ended early; `__cause__` says why. Never leaves a push: its cause does."""


class Feed:
    """At most `in_flight` batches are handed over and not yet `done`; `put` waits for room.

    One thread puts and then closes; one iterates; any thread calls `done`. `fail` from either side ends every wait.
    """

    def __init__(self, *, in_flight: int) -> None:
        self._in_flight = self._room = in_flight
        self._waiting: deque[Batch] = deque()
        self._closed = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, batch: Batch) -> None:
        """Hands a batch over; waits while too many are in flight. Raises FeedBroken after a failure."""
        with self._changed:
            self._changed.wait_for(lambda: self._room > 0 or self._failure is not None)
            self._raise()
            self._room -= 1
            self._waiting.append(batch)
            self._changed.notify_all()

    def close(self) -> None:
        """Says that no batch follows."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def fail(self, failure: BaseException) -> None:
        """Ends every wait on both sides; the first failure counts."""
        with self._changed:
            self._failure = failure if self._failure is None else self._failure
            self._waiting.clear()
            self._changed.notify_all()

    def drain(self) -> None:
        """Waits until every batch that was put is done: nobody reads the trainer's memory any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._room == self._in_flight or self._failure is not None)
            self._raise()

    def done(self) -> None:
        """Says that one batch's bytes were read: room for another."""
        with self._changed:
            self._room += 1
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed or self._failure is not None)
                self._raise()
                if not self._waiting:
                    return
                batch = self._waiting.popleft()
            yield batch

    def _raise(self) -> None:
        if self._failure is not None:
            raise FeedBroken("the push ended early; nothing was committed") from self._failure
