"""Time as a value that is passed in, so that a simulator can run the real code in virtual time."""

import time
from typing import Protocol


class Clock(Protocol):
    """The three things this house asks of time."""

    def now_ns(self) -> int:
        """Nanoseconds since the epoch, for records that people read; no decision compares it across machines."""
        ...

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back, for durations and deadlines."""
        ...

    def sleep(self, seconds: float) -> None:
        """Waits; a simulator only advances."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now_ns(self) -> int:
        """See Clock."""
        return time.time_ns()

    def monotonic(self) -> float:
        """See Clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """See Clock."""
        time.sleep(seconds)
