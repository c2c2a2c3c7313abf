"""The guard: a small process beside a host, which outlives it if it dies in a cut over, so that no pause lasts because
nobody is left to end it. Engines have no lease of their own.

It hears what the host does over a pipe. When the pipe breaks while the engine is paused, it resumes an engine that
still proves the old version and was given nothing else yet; any other it leaves paused, and marks it. One at a time
has the replica's guard lock, so a host that starts again never meets the guard of the one before it at work.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
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

Verdict = Literal["resumed", "left paused"]


class Guard:
    """A host's end of the pipe. Every call is a line; none waits for an answer but the first."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self._process = process
        self._folder = folder

    def pausing(self, previous: int | None) -> None:
        """The engine, which serves `previous` (None: not known), is about to be paused. Raises EngineError when the
        guard has gone: nothing was paused yet."""
        try:
            self._tell({"pausing": previous})
        except OSError as error:
            raise EngineError(
                f"the guard of {self._folder} has gone ({error}), so the engine was not paused. Start the host again."
            ) from error

    def loading(self) -> None:
        """The engine is about to be given other weights, or another number."""
        self._mention({"loading": True})

    def settled(self, *, resumed: bool) -> None:
        """The engine was resumed on known weights, or is left paused by a host that lives and says so."""
        self._mention({"settled": resumed})
        if resumed:
            (self._folder / MARK_NAME).unlink(missing_ok=True)

    def marked(self) -> bool:
        """Whether a guard before this one left the engine paused, and nobody has settled it since."""
        return (self._folder / MARK_NAME).exists()

    def _mention(self, what: dict[str, object]) -> None:
        """Tells a guard that may have gone meanwhile: a cut over that is under way must not end for want of one."""
        try:
            self._tell(what)
        except OSError as error:
            log.warning(
                "the guard has gone; the cut over goes on without it", folder=str(self._folder), error=str(error)
            )

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
        process.stdin.write(json.dumps({"engine": asdict(spec), "folder": str(folder)}) + "\n")
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
    """What a guard does when its host has died in a cut over. Never gives an engine weights."""
    why = "the host died while the engine was being loaded" if loading else "what the engine served was not known"
    try:
        if not loading and previous is not None:
            engine = open_engine(spec)
            said = engine.read_version(seconds=_ACT_SECONDS)
            if said in (None, previous):  # None: it cannot say; it was given nothing since it served `previous`
                engine.resume(seconds=_ACT_SECONDS)
                log.warning("the host died while its engine was paused; resumed", version=previous)
                return "resumed"
            why = f"the engine says version {said}, and served {previous} when it was paused"
    except WeighbridgeError as error:
        why = str(error)
    mark = {"previous": previous, "why": why, "unix_ns": time.time_ns()}
    LocalDisk().write_atomic(folder / MARK_NAME, json.dumps(mark).encode())
    log.error("the host died in a cut over; its engine was left paused", why=why)
    return "left paused"


def _watch(source: IO[str], ready: IO[str]) -> None:
    """The guard's own life: from the spec to the end of the pipe."""
    first = json.loads(source.readline())
    command = first["engine"]["command"]
    spec = EngineSpec(**{**first["engine"], "command": tuple(command) if isinstance(command, list) else command})
    folder = Path(first["folder"])
    with owned(folder / LOCK_NAME, disk=LocalDisk(), clock=SystemClock(), seconds=_READY_SECONDS):
        ready.write("ready\n")
        ready.flush()
        paused, loading, previous = False, False, None
        for line in source:
            told = json.loads(line)
            if "pausing" in told:
                paused, loading, previous = True, False, told["pausing"]
            elif "loading" in told:
                loading = True
            else:
                paused = False
        if paused:
            act(spec, folder, previous, loading=loading)


if __name__ == "__main__":
    # What is said goes to the host's own stderr, which is still there when the host is not; stdout is the pipe.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    _watch(sys.stdin, sys.stdout)
