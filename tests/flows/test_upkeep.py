"""Upkeep as Prefect runs it: deployed on schedules by the run's steward, and executed there."""

import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient
from tests.faults.faulty_store import flipped
from tests.flows.conftest import until
from tests.storage.long_runs import LongRun

from weighbridge.errors import StoreError, VersionUnknown
from weighbridge.flows import names
from weighbridge.flows import rollout as rollouts
from weighbridge.flows.audit import audit
from weighbridge.flows.compact import compact
from weighbridge.flows.context import Retention, using_store
from weighbridge.flows.deployments import forget_deployments
from weighbridge.flows.dispatch import follow
from weighbridge.flows.gc import gc
from weighbridge.flows.rollout import rollout
from weighbridge.flows.upkeep import UPKEEP, ensure_upkeep
from weighbridge.flows.worker import WorkerOptions, serve_steward
from weighbridge.storage.history import segments
from weighbridge.storage.history.segments import list_segments
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.manifest import manifest_key
from weighbridge.storage.stores import open_store


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LongRun:
    monkeypatch.setattr(segments, "BLOCK", 4)
    return LongRun(open_store(str(tmp_path / "root")), tensors=3, hosts=("a",), shards=True).grow(8)


def test_a_runs_steward_deploys_its_upkeep_on_schedules_and_executes_it(
    client: SyncPrefectClient, run: LongRun, home: Path
) -> None:
    stop = threading.Event()
    steward = threading.Thread(
        target=serve_steward, args=(run.run_id, run.store), kwargs={"options": WorkerOptions(home=home), "stop": stop}
    )
    steward.start()
    try:
        asked = {}
        for upkeep in UPKEEP:
            name = names.upkeep_deployment(upkeep.flow.name, run.run_id)
            until(lambda name=name: name in deployed(client, run), what=name, seconds=60)
            deployment = client.read_deployment_by_name(name)
            due = [upkeep.every] if upkeep.every is not None else []
            assert [one.schedule.interval for one in deployment.schedules] == due
            asked[name] = client.create_flow_run_from_deployment(deployment.id).id
        ended = follow(client, asked, deadline_seconds=90)
    finally:
        stop.set()
        steward.join(60)
    assert {name: flow_run.state_name for name, flow_run in ended.items()} == dict.fromkeys(asked, "Completed")
    assert list_segments(run.store, "parts")


def deployed(client: SyncPrefectClient, run: LongRun) -> list[str]:
    flows = {flow.id: flow.name for flow in client.read_flows()}
    return [f"{flows[d.flow_id]}/{d.name}" for d in client.read_deployments() if d.name == run.run_id]


def test_a_schedule_that_somebody_changed_stays_as_it_is(client: SyncPrefectClient, run: LongRun) -> None:
    ensure_upkeep(client, run.run_id)
    name = names.upkeep_deployment(names.COMPACT, run.run_id)
    before = client.read_deployment_by_name(name)
    (own,) = before.schedules
    client.update_deployment_schedule(before.id, own.id, active=False)
    forget_deployments()
    ensure_upkeep(client, run.run_id)
    (left,) = client.read_deployment_by_name(name).schedules
    assert (left.active, left.schedule.interval) == (False, timedelta(hours=1))


def test_an_audit_that_finds_something_is_red_and_names_it(client: SyncPrefectClient, run: LongRun) -> None:
    run.store.put(manifest_key(5), flipped(run.store.get(manifest_key(5))))
    with using_store(run.run_id, run.store):
        state = audit(run.run_id, return_state=True)
        assert state.is_failed()
        assert state.message is not None and manifest_key(5) in state.message
        state = compact(run.run_id, return_state=True)
        assert state.is_failed()
        assert state.message is not None and manifest_key(5) in state.message
    assert [s.span for s in list_segments(run.store, "parts")] == [(0, 3)]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (3, 60.0)),
        ({"keep": 1, "grace_seconds": 0.0}, (3, 60.0)),
        ({"keep": -5, "grace_seconds": float("nan")}, (3, 60.0)),
        ({"keep": 5, "grace_seconds": 99.0}, (5, 99.0)),
    ],
)
def test_whoever_starts_a_gc_in_the_ui_cannot_have_more_collected_than_the_steward_lets_go(
    asked: dict[str, Any], expected: tuple[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[int, float]] = []

    def collect(_: Lineage, *, keep: int, grace_seconds: float, clock: object) -> SimpleNamespace:
        kept.append((keep, grace_seconds))
        return SimpleNamespace(collected=[], deleted_bytes=0, leftovers=0, failures=[])

    monkeypatch.setattr("weighbridge.flows.gc.run_gc", collect)
    with using_store("run", open_store(str(tmp_path)), retention=Retention(keep=3, grace_seconds=60.0)):
        gc.fn("run", **asked)
    assert kept == [expected]


@pytest.mark.parametrize("version", [9, -1, 10**12, 2**70])
def test_a_rollout_of_a_version_that_was_never_published_asks_no_host_and_writes_nothing(
    run: LongRun, version: int
) -> None:
    before = [info.key for info in run.store.list("")]
    with using_store(run.run_id, run.store), pytest.raises(VersionUnknown):
        rollout.fn(run.run_id, version, ["a", "../b"])
    assert [info.key for info in run.store.list("")] == before


def test_a_store_that_does_not_answer_keeps_no_rollout_from_its_hosts(
    run: LongRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(lineage: Lineage, version: int) -> bool:
        raise StoreError("it does not answer")

    monkeypatch.setattr(Lineage, "is_committed", away)
    rollouts._need_published(run.store, 9)
