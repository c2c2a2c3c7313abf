"""What a host believes of its engine, against an engine that keeps its old number whatever became of its weights."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from tests.faults.faulty_store import Fault, FaultyStore
from tests.faults.virtual_clock import VirtualClock
from tests.replica.runs import SmallRun

from weighbridge.errors import EngineError, StoreError, UsageError
from weighbridge.flows.follower import Follower
from weighbridge.storage.records import read_records
from weighbridge.storage.stores import open_store
from weighbridge.tasks.cutover import CutOverFailed
from weighbridge.tasks.engines.none import NoEngine
from weighbridge.tasks.engines.restart import Restart
from weighbridge.tasks.host import Host
from weighbridge.tasks.host_attempt import HostAttempt
from weighbridge.tasks.nodes import NodesBehind


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

    state_digest, current = "", Path("/replica/current")
    held: ClassVar[dict[str, int]] = {"a": 4, "b": 4}

    def __init__(self) -> None:
        self.version = 4
        self.fell_back = False

    def switch(self) -> int:
        return self.version

    def fall_back(self) -> int:
        self.fell_back = True
        return self.version

    def is_untouched(self) -> bool:
        return True

    def settle(self) -> None: ...

    def tidy(self) -> None:
        raise OSError("no room to make room")

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


def test_an_engine_left_paused_by_a_process_that_died_is_loaded_and_resumed_once_its_canary_fails(
    tmp_path: Path,
) -> None:
    engine = Engine()
    engine.number, engine.sick = 4, True  # it took the number, and then nobody resumed it
    host = Host("a", "run", open_store(str(tmp_path)), Replica(), engine)
    with pytest.raises(EngineError, match=r"no answer"):
        HostAttempt(host, 4).cut_over()
    engine.sick = False
    HostAttempt(host, 4).cut_over()
    assert engine.calls == ["reload 4", "resume"]


def test_an_engine_that_fails_to_load_what_was_served_before_is_given_nothing_older(tmp_path: Path) -> None:
    engine, replica = Engine(), Replica()
    engine.broken = True
    host = Host("a", "run", open_store(str(tmp_path)), replica, engine)
    with pytest.raises(CutOverFailed):
        HostAttempt(host, 4).cut_over()
    assert not replica.fell_back and "resume" not in engine.calls
    engine.broken = False
    HostAttempt(host, 4).cut_over()
    assert host.engine_is_at(4)


def test_an_engine_that_nobody_can_resume_is_restarted_on_current_where_the_user_said_how(tmp_path: Path) -> None:
    engine, said = Engine(), tmp_path / "said"
    engine.broken = True
    host = Host("a", "run", open_store(str(tmp_path)), Replica(), engine)
    host.restart = Restart(["sh", "-c", f"printf %s {{path}} > {said}"], engine, seconds=30)
    with pytest.raises(CutOverFailed, match="It was restarted on") as failed:
        HostAttempt(host, 4).cut_over()
    assert failed.value.served is None and not host.engine_is_at(4)
    assert said.read_text() == str(host.replica.current)
    engine.broken = False
    HostAttempt(host, 4).cut_over()
    assert host.engine_is_at(4)


def test_an_engine_that_names_its_version_no_more_was_started_anew_and_is_loaded(tmp_path: Path) -> None:
    engine = Engine()
    host = Host("a", "run", open_store(str(tmp_path)), Replica(), engine)
    HostAttempt(host, 4).cut_over()
    engine.number = None
    engine.calls.clear()
    assert not host.engine_is_at(4)
    HostAttempt(host, 4).cut_over()
    assert (engine.calls, engine.number) == (["reload 4", "resume"], 4)


def test_a_restart_that_fails_is_told_and_the_failure_before_it_too(tmp_path: Path) -> None:
    engine = Engine()
    engine.broken = True
    host = Host("a", "run", open_store(str(tmp_path)), Replica(), engine)
    host.restart = Restart(["sh", "-c", "echo no such unit; exit 5"], engine, seconds=30)
    with pytest.raises(CutOverFailed, match=r"(?s)failed to load.*could not be restarted either.*no such unit"):
        HostAttempt(host, 4).cut_over()


@pytest.mark.parametrize(("command", "why"), [("no-such-program now", "no program"), ("sh {version}", "version")])
def test_a_restart_command_that_cannot_be_one_is_refused_at_the_start(command: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Restart(command, Engine(), seconds=30)


class Mended(Replica):
    """Finishes, when it is asked for a plan, an apply to version 6 that was cut short; version 7 is empty."""

    def plan_and_fetch(self, target: int | None = None, *, on_progress: Any) -> Any:
        self.version = 6
        return SimpleNamespace(downloaded_bytes=0)

    def apply(self, fetched: Any) -> Any:
        return SimpleNamespace(parts=0, repaired=0, reload=False, state_digest="")

    def switch(self) -> int:
        self.version = 7
        return 7


def test_an_empty_version_above_an_apply_that_was_finished_meanwhile_is_loaded(tmp_path: Path) -> None:
    engine = Engine()
    host = Host("a", "run", open_store(str(tmp_path)), Mended(), engine)
    HostAttempt(host, 4).cut_over()
    engine.calls.clear()
    attempt = HostAttempt(host, 7)
    attempt.fetch()
    attempt.apply()
    attempt.cut_over()
    assert engine.calls == ["reload 7", "resume"]
    assert attempt.from_version == 6


def test_a_record_that_is_sent_again_stays_the_same_and_a_failure_after_it_is_another(tmp_path: Path) -> None:
    store = FaultyStore(open_store(str(tmp_path)), Fault("put", "lose", key="hosts/*", times=2))
    attempt = HostAttempt(Host("a", "run", store, Replica(), Engine()), 4)
    for _ in range(2):
        with pytest.raises(StoreError):
            attempt.record_served()
    assert len(list(store.list("hosts"))) == 1
    first = [store.get(info.key) for info in store.list("hosts")]
    attempt.record_failed(EngineError("too late."))
    found = read_records(store)
    assert sorted(record.outcome for record in found) == ["failed", "served"]
    assert first[0] in [store.get(info.key) for info in store.list("hosts")]


def test_the_follower_sees_to_it_that_what_is_served_is_in_the_history(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = SmallRun(folder)
    replica = Replica()
    replica.version = run.push()
    store = FaultyStore(run.store, Fault("put", "before", key="hosts/*", times=2))
    engine = Engine()
    host = Host("a", run.lineage.run.run_id, store, replica, engine)
    follower = Follower(host, is_connected=lambda: True, every_seconds=1, patience_seconds=0, at_once=True)
    with pytest.raises(StoreError):
        follower.look()
    assert read_records(store) == []
    assert follower.look()
    assert [record.outcome for record in read_records(store)] == ["served"]
    assert engine.calls == ["reload 1", "resume"]
    assert not follower.look()


def test_an_engine_that_keeps_its_files_mapped_is_refused_on_a_replica_with_one_copy(tmp_path: Path) -> None:
    class Mapping(Engine):
        maps_files = True

    class OneCopy(Replica):
        held: ClassVar[dict[str, int]] = {"a": 4}

    store = open_store(str(tmp_path))
    with pytest.raises(UsageError, match="copies = 2"):
        Host("a", "run", store, OneCopy(), Mapping())
    assert Host("a", "run", store, Replica(), Mapping()).name == "a"
    assert Host("a", "run", store, OneCopy(), Engine()).name == "a"


class Prepares(Replica):
    """Brings version 5 into the spare copy."""

    def plan_and_fetch(self, target: int | None = None, *, on_progress: Any) -> Any:
        return SimpleNamespace(downloaded_bytes=70)

    def apply(self, fetched: Any) -> Any:
        return SimpleNamespace(parts=1, repaired=0, reload=True, state_digest="new")

    def switch(self) -> int:
        self.version = 5
        return 5


def test_a_prepared_version_is_left_to_its_rollout_until_the_time_is_up_or_prefect_is_lost(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run")
    replica = Replica()
    replica.version = run.push() - 1
    connected = [True]
    host = Host("a", run.lineage.run.run_id, run.store, replica, Engine())
    host.engine_version = replica.version
    follower = Follower(host, is_connected=lambda: connected[0], every_seconds=1, patience_seconds=0, at_once=True)
    HostAttempt(host, 1).hold(seconds=600)
    assert not follower.look()
    connected[0] = False
    with pytest.raises(AttributeError):  # this replica cannot be brought anywhere, and was asked to be
        follower.look()
    connected[0] = True
    HostAttempt(host, 1).hold(seconds=-1)
    with pytest.raises(AttributeError):
        follower.look()


def test_what_preparing_took_is_in_the_record_of_what_it_came_to(tmp_path: Path) -> None:
    host = Host("a", "run", open_store(str(tmp_path)), Prepares(), Engine())
    first = HostAttempt(host, 5)
    first.fetch()
    first.apply()
    first.hold(seconds=600)
    second = HostAttempt(host, 5)
    second.fetch()
    second.apply()
    second.cut_over()
    record = second.record_served()
    assert (record.fetched_bytes, host.prepared) == (140, None)
    assert record.seconds["fetch"] >= first.seconds["fetch"]


def test_an_engine_that_spans_nodes_is_cut_over_once_all_of_them_hold_the_version(tmp_path: Path) -> None:
    store, engine, now = open_store(str(tmp_path)), Engine(), VirtualClock()
    leader = Host("leader", "run", store, Replica(), engine, nodes=("n1", "n2"), engine_seconds=60, clock=now)
    node = {name: Host(name, "run", store, Replica(), NoEngine()) for name in leader.nodes}
    HostAttempt(node["n1"], 4).record_served()
    HostAttempt(node["n2"], 4).record_failed(EngineError("no."))
    with pytest.raises(NodesBehind, match=r"version 4 is not on n2 after 60 s"):
        HostAttempt(leader, 4).cut_over()
    assert engine.calls == []
    HostAttempt(node["n2"], 4).record_served()
    HostAttempt(leader, 4).cut_over()
    assert engine.calls == ["reload 4", "resume"]
    HostAttempt(node["n1"], 5).record_served()
    with pytest.raises(NodesBehind, match=r"n1 \(version 5\) went on"):
        HostAttempt(leader, 4).cut_over()
