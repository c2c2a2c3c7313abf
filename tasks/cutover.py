"""The cut over: a proven folder becomes what the engine serves, or the last good one stays. A state machine whose every
state is named in the host's record. Must not know stores, deltas or Prefect; the copies come as two calls."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from weighbridge.errors import EngineError, WeighbridgeError
from weighbridge.tasks.engines.contract import Engine

Answer = TypeVar("Answer")

log = structlog.get_logger("weighbridge.cutover")


class Stage(StrEnum):
    """The states of a host's part in a version, in order. The engine serves the old version up to PAUSED."""

    WAITING = "waiting"
    FETCHED = "fetched"
    VERIFIED = "verified"
    APPLIED = "applied"
    PAUSED = "paused"
    RELOADED = "reloaded"
    FLUSHED = "flushed"
    VERSION_SET = "version set"
    RESUMED = "resumed"
    CANARY = "canary"


class Copies(Protocol):
    """What a cut over needs of a replica."""

    @property
    def current(self) -> Path:
        """The link that the engine loads."""
        ...

    def switch(self) -> int:
        """Points `current` to what was applied and proven; returns its version."""
        ...

    def fall_back(self) -> int:
        """Points `current` to the other copy, the last good one; returns its version."""
        ...

    def is_untouched(self) -> bool:
        """Whether the files that `current` leads to are still those that were proven."""
        ...


class Watch(Protocol):
    """Who must know where a cut over is, in case this process dies in it: the guard."""

    def pausing(self, previous: int | None, *, seconds: float) -> None:
        """The engine, which serves `previous` (None: not known), is about to be paused; `loading` comes within
        `seconds`, or this process hangs."""
        ...

    def loading(self) -> bool:
        """The engine is about to be given other weights, or another number. False: it may not, for this process was
        taken for hung and the engine serves `previous` again."""
        ...

    def settled(self, *, resumed: bool) -> None:
        """The engine was resumed on known weights, or is left paused by a process that lives and says so."""
        ...


class _Nobody:
    def pausing(self, previous: int | None, *, seconds: float) -> None: ...

    def loading(self) -> bool:
        return True

    def settled(self, *, resumed: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class CutOver:
    """How a cut over went: the stage it reached, the version served since, and how long the engine was paused.

    `seconds` has what the engine itself took: "drain" until it had paused, "reload", "flush", "set version", "resume",
    and the "canary" after it. What of the pause is in none of them is ours. `said` is whether it read its version back.
    """

    stage: Stage
    version: int
    pause_seconds: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    said: bool = False


class CutOverFailed(EngineError):
    """A cut over that did not reach its end. `served` is the version served since; None: left paused.
    `said` is whether it ever read back a version in it."""

    def __init__(
        self, message: str, *, stage: Stage, served: int | None, pause_seconds: float, said: bool = False
    ) -> None:
        super().__init__(message)
        self.stage = stage
        self.served = served
        self.pause_seconds = pause_seconds
        self.said = said


def cut_over(
    copies: Copies,
    engine: Engine,
    *,
    version: int,
    previous: int | None,
    reload: bool,
    deadline_seconds: float,
    on_stage: Callable[[Stage], None] = lambda _: None,
    watch: Watch | None = None,
    monotonic: Callable[[], float] = time.monotonic,
) -> CutOver:
    """Moves an engine from `previous` to `version`, which stands applied and proven in the spare copy.

    `previous` None: what the engine holds is not known, so it is only ever resumed after a load. `reload` False (an
    empty version) changes the number only. Each call to the engine gets what is left of the deadline. Raises
    CutOverFailed; afterwards either the last good version is served, or the engine stays paused. Resumes at most once,
    and never on weights that were not proven.
    """
    cut = _CutOver(copies, engine, version, previous, deadline_seconds, on_stage, watch or _Nobody(), monotonic)
    return cut.run(reload=reload)


class _CutOver:
    def __init__(
        self,
        copies: Copies,
        engine: Engine,
        version: int,
        previous: int | None,
        deadline_seconds: float,
        on_stage: Callable[[Stage], None],
        watch: Watch,
        monotonic: Callable[[], float],
    ) -> None:
        self._copies = copies
        self._engine = engine
        self._version = version
        self._previous = previous
        self._budget = deadline_seconds
        self._on_stage = on_stage
        self._watch = watch
        self._now = monotonic
        self._deadline = monotonic() + deadline_seconds
        self._stage = Stage.APPLIED
        self._paused_at: float | None = None
        self._pause_seconds = 0.0
        self._resumed = False
        self._seconds: dict[str, float] = {}
        self._checksum: str | None = None
        self._said = False

    def run(self, *, reload: bool) -> CutOver:
        if not reload:
            return self._renumber()
        self._checksum = self._checksum_before()
        self._watch.pausing(self._previous, seconds=self._budget)
        try:
            self._pause()
            self._switch()
            if not self._watch.loading():
                raise self._taken_over()
            try:
                self._load(self._version)
                self._prove_other()
            except WeighbridgeError as failure:
                self._restore(failure)
            self._resume(self._version)
        finally:
            self._watch.settled(resumed=self._resumed)
        self._canary()
        return CutOver(self._stage, self._version, self._pause_seconds, self._seconds, self._said)

    def _renumber(self) -> CutOver:
        """The same weights under a new number: nothing to pause for."""
        self._copies.switch()
        try:
            self._number(self._version)
        except WeighbridgeError as failure:
            raise self._failed(
                f"the engine did not take version {self._version}: {failure} It serves the same weights.",
                served=self._previous,
            ) from failure
        return CutOver(self._stage, self._version, 0.0, self._seconds, self._said)

    def _pause(self) -> None:
        # Before the call: a pause that timed out may have taken effect.
        self._paused_at = self._now()
        try:
            self._timed("drain", lambda seconds: self._engine.pause(seconds=seconds))
        except WeighbridgeError as failure:
            raise self._unchanged(f"the engine did not pause: {failure} Nothing was switched.", failure) from failure
        self._reach(Stage.PAUSED)

    def _switch(self) -> None:
        try:
            self._copies.switch()
        except WeighbridgeError as failure:
            raise self._unchanged(f"the replica could not be switched: {failure}", failure) from failure

    def _unchanged(self, what: str, failure: WeighbridgeError) -> CutOverFailed:
        """Nothing was loaded: resumes what the engine was known to hold, whether the pause took or not, and nothing
        else."""
        if self._previous is None:
            return self._failed(
                f"{what} What the engine holds is not known, so it was not resumed: restart it on the replica's "
                "`current` folder, then retry this host.",
                served=None,
            )
        self._name_again(self._previous, after=failure)
        self._resume(self._previous, after=failure)
        return self._failed(f"{what} The engine serves version {self._previous}.", served=self._previous)

    def _name_again(self, version: int, *, after: WeighbridgeError) -> None:
        """Tells an engine that started anew, from the folder that nothing has moved since, which number it holds."""
        try:
            if self._engine.read_version(seconds=self._left()) is None:
                self._engine.set_version(version, seconds=self._left())
        except WeighbridgeError as failure:
            raise self._failed(
                f"{after} Then the engine did not say what it serves, or did not take its number: {failure} It was not "
                f"resumed, and holds version {version} if it lives: look at it, then retry this host.",
                served=None,
            ) from failure

    def _taken_over(self) -> CutOverFailed:
        """The guard ended the pause while this process hung: `current` goes back to what the engine serves."""
        self._resumed = True
        try:
            self._copies.fall_back()
        except WeighbridgeError as failure:  # one copy: the next attempt finds it ahead of the engine, and loads it
            log.warning("nothing to fall back to", error=str(failure))
        return self._failed(
            "this host hung while its engine was paused, and its guard resumed the engine. It serves version "
            f"{self._previous}.",
            served=self._previous,
        )

    def _load(self, version: int) -> None:
        folder = self._copies.current
        self._timed("reload", lambda seconds: self._engine.reload(folder, version, seconds=seconds))
        if not self._copies.is_untouched():
            raise EngineError(f"{folder} was changed by somebody while it was loaded; what was loaded is not proven.")
        self._reach(Stage.RELOADED)
        self._timed("flush", lambda seconds: self._engine.flush(seconds=seconds))
        self._reach(Stage.FLUSHED)
        self._number(version)

    def _number(self, version: int) -> None:
        self._timed("set version", lambda seconds: self._engine.set_version(version, seconds=seconds))
        answered = self._engine.read_version(seconds=self._left())
        if answered is not None and answered != version:
            raise EngineError(f"the engine was told version {version} and answers {answered}.")
        self._said = answered is not None
        self._reach(Stage.VERSION_SET)

    def _restore(self, failure: WeighbridgeError) -> None:
        """Loads the last good copy while still paused, resumes, and reports the failure; or leaves it paused."""
        reached = self._stage
        log.error("reload failed", version=self._version, stage=str(reached), error=str(failure))
        self._deadline = self._now() + self._budget  # what is left may be nothing, and the good copy deserves a try
        try:
            kept = self._copies.fall_back()
            self._load(kept)
            self._prove_same(kept)
        except WeighbridgeError as second:
            self._stage = reached
            raise self._failed(
                f"the engine failed to load version {self._version} ({failure}) and then the last good copy "
                f"({second}). It was left paused, since its weights are not known. Both copies on "
                "disk are whole: restart the engine on the replica's `current` folder, then retry this host.",
                served=None,
            ) from second
        self._resume(kept, after=failure)
        self._stage = reached
        raise self._failed(
            f"the engine failed to load version {self._version}: {failure} It was given the last good copy again and "
            f"serves version {kept}.",
            served=kept,
        ) from failure

    def _checksum_before(self) -> str | None:
        """The engine's own checksum of `previous`, before anything is paused; None: it has none, or what it holds is
        not known."""
        if self._previous is None:
            return None
        try:
            return self._engine.checksum(seconds=self._left())
        except WeighbridgeError as failure:
            raise self._failed(
                f"the engine gave no checksum of version {self._previous}: {failure} It was not paused, and serves it.",
                served=self._previous,
            ) from failure

    def _prove_other(self) -> None:
        """A version that changed bytes has another checksum than the one before it."""
        if self._checksum is not None and self._ask_checksum() == self._checksum:
            raise EngineError("the engine says that it loaded, and its own checksum of its weights is what it was.")

    def _prove_same(self, kept: int) -> None:
        """The version that was served before has the checksum that it had then."""
        if self._checksum is not None and kept == self._previous and self._ask_checksum() != self._checksum:
            raise EngineError("its own checksum of its weights is not what it was before.")

    def _ask_checksum(self) -> str | None:
        return self._timed("checksum", lambda seconds: self._engine.checksum(seconds=seconds))

    def _resume(self, version: int, *, after: WeighbridgeError | None = None) -> None:
        try:
            self._timed("resume", lambda seconds: self._engine.resume(seconds=seconds))
        except WeighbridgeError as failure:
            raise self._failed(
                f"the engine holds version {version} and did not resume: {failure} The resume is not sent twice; look "
                f"at the engine, then retry this host.{f' Before that: {after}' if after else ''}",
                served=None,
            ) from failure
        self._resumed = True
        self._end_pause()
        if after is None:
            self._reach(Stage.RESUMED)

    def _canary(self) -> None:
        try:
            self._timed("canary", lambda seconds: self._engine.probe(seconds=seconds))
        except WeighbridgeError as failure:
            raise self._failed(
                f"the engine serves version {self._version}, and its canary failed: {failure}", served=self._version
            ) from failure
        self._reach(Stage.CANARY)

    def _timed(self, phase: str, call: Callable[[float], Answer]) -> Answer:
        begun = self._now()
        try:
            return call(self._left())
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._now() - begun

    def _left(self) -> float:
        return max(0.001, self._deadline - self._now())

    def _reach(self, stage: Stage) -> None:
        self._stage = stage
        self._on_stage(stage)

    def _end_pause(self) -> None:
        if self._paused_at is not None:
            self._pause_seconds = self._now() - self._paused_at

    def _failed(self, message: str, *, served: int | None) -> CutOverFailed:
        if self._paused_at is not None and not self._pause_seconds:
            self._end_pause()
        return CutOverFailed(
            message, stage=self._stage, served=served, pause_seconds=self._pause_seconds, said=self._said
        )
