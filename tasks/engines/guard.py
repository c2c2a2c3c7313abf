"""The guard: a small process beside a host, which ends a pause that the host does not end, because it died in a cut
over or because it hangs. Engines have no lease of their own.

It hears what the host does over a pipe. When the pipe breaks while the engine is paused, or the host says nothing for
longer than a cut over may take, it resumes an engine that still proves the old version and was given nothing else yet;
any other it leaves paused, and marks it. Before the host gives the engine anything it asks the guard, so that one that
wakes up late does nothing more. One at a time has the replica's guard lock, so a host that starts again never meets the
guard of the one before it at work.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Literal

import structlog

from weighbridge.errors import EngineError, WeighbridgeError
from weighbridge.storage.clock import SystemClock
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.lock import owned
from weighbridge.tasks.engines.choose import open_engine
from weighbridge.tasks.engines.spec import EngineSpec

log = structlog.get_logger("weighbridge.guard")

LOCK_NAME, MARK_NAME = "guard.lock", "engine-left-paused.json"
_READY_SECONDS = 60.0
_ACT_SECONDS = 30.0

_LATE_SECONDS = 5.0  # beyond the deadline: a host that is only slow ends its cut over, or its pause, by itself
_LOADS = 2  # a load that failed is followed by one of the last good copy, each under the whole deadline

Verdict = Literal["resumed", "left paused"]
_RESUMED: Verdict = "resumed"


class Guard:
    """A host's end of the pipe. Every call is a line; `loading` and `settled` wait for an answer."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self._process = process
        self._folder = folder

    def pausing(self, previous: int | None, *, seconds: float) -> None:
        """The engine, which serves `previous` (None: not known), is about to be paused, and `loading` follows within
        `seconds`. Raises EngineError when the guard has gone: nothing was paused yet."""
        try:
            self._tell({"pausing": previous, "seconds": seconds})
        except OSError as error:
            raise EngineError(
                f"the guard of {self._folder} has gone ({error}), so the engine was not paused. Start the host again."
            ) from error

    def loading(self) -> bool:
        """The engine is about to be given other weights, or another number; False when the guard has taken over and
        resumed it. A guard that has gone keeps nobody from going on."""
        return self._ask({"loading": True}) != _RESUMED

    def settled(self, *, resumed: bool) -> None:
        """The engine was resumed on known weights, or is left paused by a host that lives and says so. A mark goes once
        the guard has heard it: one that acts at this very moment would set it again."""
        self._ask({"settled": resumed})
        if resumed:
            (self._folder / MARK_NAME).unlink(missing_ok=True)

    def marked(self) -> bool:
        """Whether a guard before this one left the engine paused, and nobody has settled it since."""
        return (self._folder / MARK_NAME).exists()

    def _ask(self, what: dict[str, object]) -> str:
        """The guard's answer; none from one that has gone: a cut over that is under way must not end for want of it."""
        assert self._process.stdout is not None
        try:
            self._tell(what)
            return self._process.stdout.readline().strip()
        except OSError as error:
            log.warning(
                "the guard has gone; the cut over goes on without it", folder=str(self._folder), error=str(error)
            )
            return ""

    def _tell(self, what: dict[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()


@contextlib.contextmanager
def guarded(spec: EngineSpec, folder: Path) -> Iterator[Guard | None]:
    """A guard for as long as a host runs; None for an engine that is never paused. Waits for the guard of a host that
    died before. Raises EngineError when it does not become ready."""
    if spec.kind == "none":
        yield None
        return
    # Out of our process group and session: what kills a host with all its children must not kill its guard.
    process = subprocess.Popen(
        [sys.executable, "-m", "weighbridge.tasks.engines.guard"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps({"engine": asdict(replace(spec, pulls=None)), "folder": str(folder)}) + "\n")
        process.stdin.flush()
        if process.stdout.readline().strip() != "ready":
            raise EngineError(f"the guard of {folder} did not become ready. Nothing was started.")
        yield Guard(process, folder)
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.wait(_ACT_SECONDS + _READY_SECONDS)
        process.stdout.close()


def act(spec: EngineSpec, folder: Path, previous: int | None, *, loading: bool) -> Verdict:
    """What a guard does when its host has died or hangs in a cut over. Never gives an engine weights."""
    why = "the host ended while the engine was being loaded" if loading else "what the engine served was not known"
    try:
        if not loading and previous is not None:
            engine = open_engine(spec)
            said = engine.read_version(seconds=_ACT_SECONDS)
            if said in (None, previous):  # None: it cannot say; it was given nothing since it served `previous`
                engine.resume(seconds=_ACT_SECONDS)
                log.warning("the host died or hangs while its engine is paused; resumed", version=previous)
                return _RESUMED
            why = f"the engine says version {said}, and served {previous} when it was paused"
    except WeighbridgeError as error:
        why = str(error)
    mark = {"previous": previous, "why": why, "unix_ns": time.time_ns()}
    LocalDisk().write_atomic(folder / MARK_NAME, json.dumps(mark).encode())
    log.error("the host died or hangs in a cut over; its engine was left paused", why=why)
    return "left paused"


@dataclass(slots=True)
class _Pause:
    """What the host said last of a pause that it has not ended. `until` is monotonic; None: the guard has acted."""

    previous: int | None
    seconds: float
    until: float | None
    loading: bool = False
    verdict: Verdict | None = None


def _watch(source: IO[bytes], answer: IO[str]) -> None:
    """The guard's own life: from the spec to the end of the pipe."""
    lines = _Lines(source)
    first = json.loads(lines.next(None) or b"{}")
    command = first["engine"]["command"]
    spec = EngineSpec(**{**first["engine"], "command": tuple(command) if isinstance(command, list) else command})
    folder = Path(first["folder"])
    with owned(folder / LOCK_NAME, disk=LocalDisk(), clock=SystemClock(), seconds=_READY_SECONDS):
        _say(answer, "ready")
        pause: _Pause | None = None
        while True:
            line = lines.next(pause.until if pause is not None else None)
            if pause is not None and pause.until is not None and not line:  # hung, or dead
                pause.verdict, pause.until = act(spec, folder, pause.previous, loading=pause.loading), None
            if line == b"":
                return
            if line is None:
                continue
            told = json.loads(line)
            if "pausing" in told:
                seconds = float(told["seconds"])
                pause = _Pause(told["pausing"], seconds, time.monotonic() + seconds + _LATE_SECONDS)
            elif "loading" in told:
                _say(answer, (pause and pause.verdict) or "go on")
                if pause is not None and pause.verdict != _RESUMED:
                    pause.loading = True
                    pause.until = time.monotonic() + _LOADS * pause.seconds + _LATE_SECONDS
            else:
                pause = None
                _say(answer, "heard")


def _say(answer: IO[str], word: str) -> None:
    """Answers a host that may be dead by now: that is what the guard is there for."""
    with contextlib.suppress(BrokenPipeError):
        answer.write(word + "\n")
        answer.flush()


class _Lines:
    """Lines of a pipe, each waited for only so long."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._rest = b""

    def next(self, until: float | None) -> bytes | None:
        """The next line; b"" at the end of the pipe, None when the monotonic clock has passed `until`."""
        while b"\n" not in self._rest:
            wait = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._source], [], [], wait)[0]:
                return None
            more = os.read(self._source.fileno(), 1 << 16)
            if not more:
                return b""
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line


if __name__ == "__main__":
    # What is said goes to the host's own stderr, which is still there when the host is not; stdout is the pipe.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    _watch(sys.stdin.buffer, sys.stdout)
