"""What a host believes of its engine, against an engine that keeps its old number whatever became of its weights."""

from pathlib import Path
from typing import Any

import pytest

from weighbridge.errors import EngineError
from weighbridge.storage.stores import open_store
from weighbridge.tasks.cutover import CutOverFailed
from weighbridge.tasks.engines.none import NoEngine
from weighbridge.tasks.host_attempt import Host, HostAttempt


class Engine(NoEngine):
    """Notes its calls. `broken` makes every load fail, its number stays; `sick` fails every canary."""

    name = "world"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.number: int | None = None
        self.broken = False
        self.sick = False

    def reload(self, folder: Path, version: int, *, seconds: float) -> None:
        self.calls.append(f"reload {version}")
        if self.broken:
            raise EngineError("no load.")

    def set_version(self, version: int, *, seconds: float) -> None:
        self.number = version

    def read_version(self, *, seconds: float) -> int | None:
        return self.number

    def resume(self, *, seconds: float) -> None:
        self.calls.append("resume")

    def probe(self, *, seconds: float) -> None:
        if self.sick:
            raise EngineError("no answer.")


class Replica:
    """Stands at version 4, in both copies."""

    version, state_digest, current = 4, "", Path("/replica/current")

    def switch(self) -> int:
        return self.version

    def fall_back(self) -> int:
        return self.version

    def plan_and_fetch(self, target: int | None = None, *, on_progress: Any) -> Any: ...

    def apply(self, fetched: Any) -> Any: ...


def test_an_engine_that_was_left_paused_is_loaded_again_whatever_number_it_names(tmp_path: Path) -> None:
    engine = Engine()
    host = Host("a", "run", open_store(str(tmp_path)), Replica(), engine)
    HostAttempt(host, 4).cut_over()
    assert (engine.calls, host.engine_is_at(4)) == (["reload 4", "resume"], True)

    engine.broken, host.engine_version, engine.number = True, None, None
    engine.calls.clear()
    with pytest.raises(CutOverFailed):
        HostAttempt(host, 4).cut_over()
    assert "resume" not in engine.calls

    engine.broken, engine.number = False, 4
    engine.calls.clear()
    assert not host.engine_is_at(4)
    HostAttempt(host, 4).cut_over()
    assert engine.calls == ["reload 4", "resume"]
    assert host.engine_is_at(4)


def test_a_canary_that_failed_is_asked_again_before_the_version_counts_as_served(tmp_path: Path) -> None:
    engine = Engine()
    engine.sick = True
    host = Host("a", "run", open_store(str(tmp_path)), Replica(), engine)
    for _ in range(2):
        with pytest.raises(EngineError, match=r"no answer"):
            HostAttempt(host, 4).cut_over()
    engine.sick = False
    HostAttempt(host, 4).cut_over()
    assert engine.calls == ["reload 4", "resume"]
