"""A clock for tests: sleeping only advances it."""

import threading


class VirtualClock:
    """Virtual time, shared by threads; `slept` remembers every sleep."""

    def __init__(self, start_ns: int = 1_700_000_000_000_000_000) -> None:
        self._lock = threading.Lock()
        self._start_ns = start_ns
        self._seconds = 0.0
        self.slept: list[float] = []

    def now_ns(self) -> int:
        return self._start_ns + int(self.monotonic() * 1e9)

    def monotonic(self) -> float:
        with self._lock:
            return self._seconds

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self._seconds += seconds
            self.slept.append(seconds)
