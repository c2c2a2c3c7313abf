"""Pushes that go on while the trainer does: what each came to, and how many versions hosts may be behind them."""

from collections import deque
from concurrent.futures import Future
from concurrent.futures import wait as wait_for

import structlog

from weighbridge.values import PushResult

log = structlog.get_logger("weighbridge.push")


class PendingPush:
    """A push whose weights were read: the trainer may go on. `version` is the number that it will have."""

    def __init__(self, version: int, outcome: "Future[PushResult]") -> None:
        self.version = version
        self._outcome = outcome
        self._asked = False

    def done(self) -> bool:
        """Whether `result` would answer at once."""
        return self._outcome.done()

    def result(self, timeout: float | None = None) -> PushResult:
        """What the push did. Raises what went wrong, or TimeoutError when it is not over within `timeout` seconds."""
        wait_for((self._outcome,), timeout)
        self._asked = self._asked or self._outcome.done()
        return self._outcome.result(0)

    def wait(self) -> None:
        """Waits until the push is over, however it goes."""
        wait_for((self._outcome,))

    @property
    def unheard(self) -> BaseException | None:
        """What it failed with, if it is over and nobody asked for its result."""
        return None if self._asked or not self._outcome.done() else self._outcome.exception()


class Backlog:
    """The pushes whose hosts are not done yet: at most `allowed` versions; None: any number. The trainer's thread."""

    def __init__(self, allowed: int | None) -> None:
        self._allowed = allowed
        self._pending: deque[PendingPush] = deque()

    def add(self, push: PendingPush) -> None:
        """Takes in a push that has begun."""
        self._pending.append(push)

    def make_room(self, version: int) -> None:
        """Waits until hosts may be asked for `version`: until those that are more than `allowed` below it are done.

        What such a push failed with is logged when nobody asked for it; the trainer learns of it by `result`.
        """
        while self._pending:
            oldest = self._pending[0]
            if self._allowed is not None and oldest.version < version - self._allowed:
                oldest.wait()
            if not oldest.done():
                return
            if (failure := oldest.unheard) is not None:
                log.error("a push that nobody waited for failed", version=oldest.version, error=str(failure))
            self._pending.popleft()
