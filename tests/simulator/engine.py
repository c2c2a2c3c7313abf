"""An engine that lives beside a host's process: it loads what `current` leads to, byte for byte, refuses or fails at
times, and knows what it must never be made to do."""

from pathlib import Path

from tests.simulator.baton import Broken
from tests.simulator.life import Life
from tests.simulator.truth import Truth

from weighbridge.errors import EngineError


class Serving:
    """What one engine process holds. `floor` is the newest version that it ever answered requests with."""

    def __init__(self, truth: Truth, *, tells_pauses: bool) -> None:
        self.truth = truth
        self.tells_pauses = tells_pauses
        self.loaded: set[int] | None = None
        self.said: int | None = None
        self.paused = False
        self.floor = -1
        self.served: list[int] = []

    def answers_with(self, version: int) -> bool:
        """Whether it answers requests, with a version's bytes."""
        return not self.paused and bool(self.loaded and self.loaded & self.truth.alike(version))

    def restart(self, current: Path) -> None:
        """The engine's process starts anew, loads `current` if that can be loaded, and answers requests."""
        self.loaded, self.said, self.paused = self.truth.held_by(current), None, False


class SimEngine:
    """See weighbridge.tasks.engines.contract.Engine: a life's calls to its machine's engine."""

    name = "simulated"
    maps_files = False

    def __init__(self, serving: Serving, life: Life) -> None:
        self._serving, self._life = serving, life

    def check(self, *, seconds: float) -> None:
        self._life.step("check the engine")

    def is_paused(self, *, seconds: float) -> bool | None:
        self._life.step("ask whether it is paused")
        return self._serving.paused if self._serving.tells_pauses else None

    def pause(self, *, seconds: float) -> None:
        self._call("pause", lambda: self._pause(True))

    def reload(self, folder: Path, version: int, *, seconds: float) -> None:
        def load() -> None:
            found = self._serving.truth.held_by(folder)
            if found is None or version not in found:
                raise Broken(f"the engine was told to load version {version} and found {found}")
            self._serving.loaded = found

        if not self._serving.paused:
            raise Broken("the engine was told to load while it answers requests")
        self._serving.loaded = None
        self._call(f"reload {version}", load)

    def flush(self, *, seconds: float) -> None:
        self._call("flush", lambda: None)

    def set_version(self, version: int, *, seconds: float) -> None:
        def say() -> None:
            if self._serving.loaded is not None and not self._holds(version):
                raise Broken(f"the engine holds {self._serving.loaded} and is to call it version {version}")
            self._serving.said = version
            if not self._serving.paused:
                self._serve(version)  # an empty version: the number moves, nothing was loaded

        self._call(f"set version {version}", say)

    def checksum(self, *, seconds: float) -> str | None:
        """See Engine."""
        return None

    def read_version(self, *, seconds: float) -> int | None:
        self._life.step("read version")
        return self._serving.said

    def resume(self, *, seconds: float) -> None:
        def go_on() -> None:
            serving = self._serving
            if serving.paused and (serving.said is None or not self._holds(serving.said)):
                raise Broken(f"the engine was resumed on {serving.loaded}, called version {serving.said}")
            serving.paused = False
            if serving.said is not None:
                self._serve(serving.said)

        self._call("resume", go_on)

    def probe(self, *, seconds: float) -> None:
        def answer() -> None:
            if self._serving.paused or self._serving.loaded is None:
                raise EngineError("the engine does not answer requests")

        self._call("canary", answer)

    def _holds(self, version: int) -> bool:
        return bool(self._serving.loaded and self._serving.loaded & self._serving.truth.alike(version))

    def _pause(self, paused: bool) -> None:
        self._serving.paused = paused

    def _serve(self, version: int) -> None:
        if version < self._serving.floor:
            raise Broken(f"a host went back from version {self._serving.floor} to {version}, unasked")
        self._serving.floor = version
        self._serving.served.append(version)

    def _call(self, what: str, action: object) -> None:
        life = self._life
        failing = life.rng.choice(("before", "after")) if life.chance(life.weather.engine_fault) else ""
        life.step(what)
        life.baton.note(f"engine: {what} {failing}".rstrip())
        if failing == "before":
            raise EngineError(f"{what}: the engine did not answer")
        assert callable(action)
        action()
        life.done(what)
        if failing == "after":
            raise EngineError(f"{what}: the engine's answer was lost")
