"""The cut over's rules, each against an engine and copies that note what was asked of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from weighbridge.errors import EngineError, ReplicaError
from weighbridge.tasks.cutover import CutOver, CutOverFailed, Stage, cut_over


class World:
    """Two copies and an engine under one list of calls. `fails` maps a call to how often it fails."""

    def __init__(self, **fails: int) -> None:
        self.calls: list[str] = []
        self.fails = fails
        self.loaded: int | None = 4
        self.number: int | None = 4
        self.points_to, self.spare = 4, 5
        self.now = 0.0
        self.stages: list[Stage] = []
        self.ignores_reload = False
        self.checks = False
        self.keeps_weights: set[int] = set()  # versions whose load changes nothing, though the engine says it did
        self.touched: set[int] = set()

    def _call(self, name: str, *, kind: type[Exception] = EngineError) -> None:
        self.calls.append(name)
        self.now += 1.0
        verb = name.partition(" ")[0]
        if self.fails.get(verb, 0) > 0:
            self.fails[verb] -= 1
            raise kind(f"{verb} failed.")

    @property
    def current(self) -> Path:
        return Path("/replica/current")

    def switch(self) -> int:
        self._call("switch", kind=ReplicaError)
        self.points_to, self.spare = self.spare, self.points_to
        return self.points_to

    def fall_back(self) -> int:
        self._call("fall_back", kind=ReplicaError)
        self.points_to, self.spare = self.spare, self.points_to
        return self.points_to

    def is_untouched(self) -> bool:
        return self.loaded not in self.touched

    name = "world"
    maps_files = False

    def pause(self, *, seconds: float) -> None:
        self._call("pause")

    def reload(self, folder: Path, version: int, *, seconds: float) -> None:
        before = self.loaded
        self.loaded = None  # gone until a good reload
        self._call(f"reload {version}")
        assert folder == self.current
        self.loaded = before if version in self.keeps_weights else self.points_to

    def flush(self, *, seconds: float) -> None:
        self._call("flush")

    def set_version(self, version: int, *, seconds: float) -> None:
        self._call(f"set_version {version}")
        if not self.ignores_reload:
            self.number = version

    def checksum(self, *, seconds: float) -> str | None:
        if not self.checks:
            return None
        self._call("checksum")
        return f"weights {self.loaded}"

    def read_version(self, *, seconds: float) -> int | None:
        return self.number

    def resume(self, *, seconds: float) -> None:
        assert self.loaded is not None, "resumed on unknown weights"
        self._call("resume")

    def probe(self, *, seconds: float) -> None:
        self._call("probe")

    def run(
        self, *, reload: bool = True, previous: int | None = 4, on_stage: Callable[[Stage], None] | None = None
    ) -> CutOver:
        return cut_over(
            self,
            self,
            version=5,
            previous=previous,
            reload=reload,
            deadline_seconds=100.0,
            on_stage=on_stage or self.stages.append,
            monotonic=lambda: self.now,
        )


def test_a_cut_over_goes_through_its_states_in_order_and_records_the_pause() -> None:
    world = World()
    done = world.run()
    assert world.calls == ["pause", "switch", "reload 5", "flush", "set_version 5", "resume", "probe"]
    assert world.stages == ["paused", "reloaded", "flushed", "version set", "resumed", "canary"]
    assert (done.version, done.stage, done.pause_seconds) == (5, Stage.CANARY, 6.0)
    assert done.seconds == dict.fromkeys(("drain", "reload", "flush", "set version", "resume", "canary"), 1.0)
    assert world.loaded == 5


def test_an_empty_version_changes_the_number_and_neither_pauses_nor_reloads() -> None:
    world = World()
    done = world.run(reload=False)
    assert world.calls == ["switch", "set_version 5"]
    assert (done.version, done.pause_seconds, world.number) == (5, 0.0, 5)


@pytest.mark.parametrize(("verb", "stage"), [("reload", "paused"), ("flush", "reloaded"), ("set_version", "flushed")])
def test_after_a_failed_load_the_last_good_copy_is_served_again(verb: str, stage: str) -> None:
    world = World(**{verb: 1})
    with pytest.raises(CutOverFailed, match=r"serves version 4") as caught:
        world.run()
    assert (caught.value.served, caught.value.stage) == (4, stage)
    assert world.loaded == world.number == world.points_to == 4
    assert world.calls.count("resume") == 1
    assert world.calls.index("fall_back") < world.calls.index("reload 4") < world.calls.index("resume")
    assert caught.value.pause_seconds > 0


def test_a_folder_that_was_changed_while_it_was_loaded_is_not_served() -> None:
    world = World()
    world.touched = {5}
    with pytest.raises(CutOverFailed, match=r"was changed by somebody while it was loaded.*serves version 4") as caught:
        world.run()
    assert (caught.value.served, world.loaded, world.calls.count("resume")) == (4, 4, 1)


def test_a_load_that_changed_nothing_is_found_by_the_engines_own_checksum() -> None:
    world = World()
    world.checks, world.keeps_weights = True, {5}
    with pytest.raises(CutOverFailed, match="checksum of its weights is what it was") as failed:
        world.run()
    assert failed.value.served == 4 and world.calls.index("checksum") < world.calls.index("pause")
    assert world.calls[-5:] == ["reload 4", "flush", "set_version 4", "checksum", "resume"]


def test_an_engine_that_holds_something_else_after_its_last_good_copy_was_loaded_stays_paused() -> None:
    world = World(flush=1)
    world.checks, world.keeps_weights = True, {4}
    with pytest.raises(CutOverFailed, match="not what it was before") as failed:
        world.run()
    assert failed.value.served is None and "resume" not in world.calls


def test_an_engine_that_gives_no_checksum_is_not_paused() -> None:
    world = World(checksum=1)
    world.checks = True
    with pytest.raises(CutOverFailed, match="It was not paused") as failed:
        world.run()
    assert failed.value.served == 4 and world.calls == ["checksum"]


def test_an_engine_that_answers_another_version_is_not_resumed_on_it() -> None:
    world = World()
    world.ignores_reload = True
    with pytest.raises(CutOverFailed, match=r"was told version 5 and answers 4"):
        world.run()
    assert world.loaded == 4
    assert world.calls.count("resume") == 1


@pytest.mark.parametrize("fails", [{"reload": 2}, {"flush": 2}, {"reload": 1, "fall_back": 1}])
def test_an_engine_whose_weights_are_not_known_stays_paused(fails: dict[str, int]) -> None:
    world = World(**fails)
    with pytest.raises(CutOverFailed, match=r"left paused") as caught:
        world.run()
    assert caught.value.served is None
    assert "resume" not in world.calls


def test_an_engine_that_does_not_pause_is_resumed_on_the_old_version_since_the_pause_may_have_taken() -> None:
    world = World(pause=1)
    with pytest.raises(CutOverFailed, match=r"did not pause") as caught:
        world.run()
    assert world.calls == ["pause", "resume"]
    assert (caught.value.served, caught.value.stage, world.points_to) == (4, Stage.APPLIED, 4)


def test_an_engine_that_started_anew_gets_its_number_again_before_it_is_resumed() -> None:
    world = World(pause=1)
    world.number = None
    with pytest.raises(CutOverFailed, match=r"did not pause") as caught:
        world.run()
    assert world.calls == ["pause", "set_version 4", "resume"]
    assert (caught.value.served, world.number) == (4, 4)

    world = World(pause=1, set_version=1)
    world.number = None
    with pytest.raises(CutOverFailed, match=r"was not resumed") as caught:
        world.run()
    assert (caught.value.served, world.calls) == (None, ["pause", "set_version 4"])


def test_a_replica_that_does_not_switch_leaves_the_engine_on_the_old_version() -> None:
    world = World(switch=1)
    with pytest.raises(CutOverFailed, match=r"could not be switched") as caught:
        world.run()
    assert world.calls == ["pause", "switch", "resume"]
    assert (caught.value.served, world.loaded) == (4, 4)


@pytest.mark.parametrize("verb", ["pause", "switch"])
def test_an_engine_of_which_nothing_is_known_is_resumed_only_after_a_load(verb: str) -> None:
    world = World(**{verb: 1})
    world.loaded = None
    with pytest.raises(CutOverFailed, match=r"not known, so it was not resumed") as caught:
        world.run(previous=None)
    assert caught.value.served is None
    assert "resume" not in world.calls
    assert world.run(previous=None).version == 5
    assert world.calls[-2:] == ["resume", "probe"]


def test_a_resume_that_fails_is_not_sent_twice() -> None:
    world = World(resume=1)
    with pytest.raises(CutOverFailed, match=r"not sent twice") as caught:
        world.run()
    assert world.calls.count("resume") == 1
    assert caught.value.served is None


def test_a_canary_that_fails_is_told_and_the_new_version_is_what_is_served() -> None:
    world = World(probe=1)
    with pytest.raises(CutOverFailed, match=r"canary failed") as caught:
        world.run()
    assert (caught.value.served, caught.value.stage, world.loaded) == (5, Stage.RESUMED, 5)


def test_the_good_copy_gets_a_deadline_of_its_own() -> None:
    class Slow(World):
        def reload(self, folder: Path, version: int, *, seconds: float) -> None:
            if version == 5:
                self.now += 200.0
                self.loaded = None
                raise EngineError("it took too long.")
            assert seconds > 90.0
            super().reload(folder, version, seconds=seconds)

    world = Slow()
    with pytest.raises(CutOverFailed) as caught:
        world.run()
    assert (caught.value.served, world.loaded) == (4, 4)


class TakenOver:
    """A guard that resumed the engine while this process hung."""

    def __init__(self) -> None:
        self.ends: list[bool] = []

    def pausing(self, previous: int | None, *, seconds: float) -> None: ...

    def loading(self) -> bool:
        return False

    def settled(self, *, resumed: bool) -> None:
        self.ends.append(resumed)


def test_a_process_that_was_taken_for_hung_gives_the_engine_nothing_and_resumes_nothing() -> None:
    world, guard = World(), TakenOver()
    with pytest.raises(CutOverFailed, match=r"guard resumed the engine. It serves version 4") as caught:
        cut_over(world, world, version=5, previous=4, reload=True, deadline_seconds=100.0, watch=guard)
    assert world.calls == ["pause", "switch", "fall_back"]
    assert (caught.value.served, world.points_to, guard.ends) == (4, 4, [True])
