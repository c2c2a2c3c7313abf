"""A process named so that a reused id is never mistaken for it: its id and when it was created. Must not know what
runs in it. Ending one is always by this pair, never by a name."""

import contextlib
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil

T = TypeVar("T")
_SAME_START_SECONDS = 2.0  # psutil derives the time from the boot time, which moves a little with the clock


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """A process's id, and its creation in seconds since the epoch."""

    pid: int
    created: float

    def process(self) -> psutil.Process | None:
        """The living process that this marks, or None when it has ended (a zombie has)."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) <= _SAME_START_SECONDS
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self.process() is not None


def mark(pid: int) -> ProcessMark:
    """Marks a living process. Raises psutil.NoSuchProcess when it has ended."""
    return ProcessMark(pid, psutil.Process(pid).create_time())


def end(target: ProcessMark, *, first: signal.Signals = signal.SIGTERM, grace_seconds: float = 10.0) -> bool:
    """Ends a process and what it started: asks with `first`, kills after the grace. False when it had ended already."""
    process = target.process()
    if process is None:
        return False
    family: list[Any] = _tolerant(lambda: process.children(recursive=True), [])
    _tolerant(lambda: process.send_signal(first), None)
    try:
        process.wait(grace_seconds)
    except psutil.TimeoutExpired:
        _tolerant(process.kill, None)
    _, left = psutil.wait_procs(family, timeout=2.0)
    for child in left:
        _tolerant(child.kill, None)
    with contextlib.suppress(psutil.TimeoutExpired):
        process.wait(5.0)
    return True


def _tolerant(call: Callable[[], T], otherwise: T) -> T:
    try:
        return call()
    except psutil.NoSuchProcess:
        return otherwise
