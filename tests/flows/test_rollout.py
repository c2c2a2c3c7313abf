"""Rollouts on the real server, to hosts with real replicas: what becomes of a version, and how it heals."""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags, LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling, Running
from tests.flows.conftest import HostProcess, LocalHost, until
from tests.flows.small_run import SmallRun

from weighbridge.errors import OrchestrationError
from weighbridge.flows import names
from weighbridge.flows import rollout as rollouts
from weighbridge.flows.connection import connected
from weighbridge.flows.context import Retention
from weighbridge.flows.dispatch import dispatch, ensure_host_sync, follow
from weighbridge.flows.host_steps import LOOK_AFTER_SECONDS
from weighbridge.flows.retry import retry_failed
from weighbridge.flows.rollout import ensure_rollout, hosts_outcome, mirrored, rollout
from weighbridge.flows.server import ServerInfo
from weighbridge.flows.vitals import Vitals
from weighbridge.flows.worker import WorkerOptions, serve_steward
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.records import read_records
from weighbridge.tasks.host import HostReplica

Make = Callable[..., LocalHost]


def roll_out(run: SmallRun, version: int, *hosts: str, **policy: Any) -> State[Any]:
    return rollout(run.run_id, version, list(hosts), **policy, return_state=True)


def runs_of(client: SyncPrefectClient, host: str) -> list[FlowRun]:
    found = client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[names.host_tag(host)])))
    return sorted(found, key=lambda flow_run: flow_run.parameters["version"])


def state_name(client: SyncPrefectClient, flow_run: UUID) -> str | None:
    state = client.read_flow_run(flow_run).state
    return state.name if state is not None else None


def test_hosts_serve_the_version_bit_for_bit_and_the_run_shows_who_and_what(
    client: SyncPrefectClient, run: SmallRun, local_host: Make
) -> None:
    hosts = [local_host().start().wait_ready() for _ in range(2)]
    version = run.push().version
    state = roll_out(run, version, *(host.name for host in hosts))
    assert (state.name, state.message) == ("Completed", f"2 of 2 hosts serve version {version}.")
    assert all(run.is_held_by(host.current) for host in hosts)
    outcome, table = hosts_outcome(run.store, version=version, hosts=[host.name for host in hosts])
    assert (outcome, [host.outcome for host in table], [host.version for host in table]) == (
        "complete",
        ["served", "served"],
        [version, version],
    )
    (host_run,) = runs_of(client, hosts[0].name)
    assert host_run.name == f"v{version} on {hosts[0].name}"
    assert {f"run:{run.run_id}", f"version:{version}", f"host:{hosts[0].name}"} <= set(host_run.tags)
    assert host_run.parameters == {"run": run.run_id, "version": version, "host": hosts[0].name}
    assert host_run.parent_task_run_id is not None
    wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[host_run.id]))
    until(lambda: any("cut over" in line.message for line in client.read_logs(wanted)), what="our log on the run")


def test_a_failed_host_is_partial_and_retrying_it_heals_the_rollout_and_the_sync_above_it(
    client: SyncPrefectClient, run: SmallRun, local_host: Make
) -> None:
    good, bad = local_host().start().wait_ready(), local_host().start().wait_ready()
    until(lambda: "probe" in bad.engine.calls, what="the first load")
    bad.engine.order(fail="reload")

    @flow(name="sync-above", persist_result=False)
    def above(version: int) -> State[Any]:
        return mirrored(roll_out(run, version, good.name, bad.name))

    version = run.push().version
    state = above(version, return_state=True)
    assert (state.is_failed(), state.name) == (True, "PartialRollout")
    assert "told to fail at reload" in str(state.message)
    above_id, (rollout_run,) = (
        state.state_details.flow_run_id,
        [
            found
            for found in client.read_flow_runs(
                flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[names.run_tag(run.run_id)]))
            )
            if "hosts" in found.parameters
        ],
    )
    failed = [r for r in read_records(run.store, version=version) if r.outcome == "failed"]
    assert [(r.host, r.stage, r.from_version) for r in failed] == [(bad.name, "paused", 0)]
    assert failed[0].seconds["pause"] >= 0
    assert bad.engine.calls[-1] == "reload 0"  # the good copy did not load either: it stays paused
    assert hosts_outcome(run.store, version=version, hosts=[good.name, bad.name])[0] == "partial"

    bad.engine.order()
    again = retry_failed(client, run=run.run_id, version=version, wait_seconds=60)
    assert list(again) == [f"v{version} on {bad.name}"]
    assert all(found.state is not None and found.state.is_completed() for found in again.values())
    assert bad.engine.calls[-2:] == ["resume", "probe"]
    assert bad.engine.calls.count("resume") == 2
    assert run.is_held_by(bad.current)
    until(lambda: state_name(client, rollout_run.id) == "Healed", what="the rollout healed")
    assert above_id is not None
    until(lambda: state_name(client, above_id) == "Healed", what="the sync healed")
    assert hosts_outcome(run.store, version=version, hosts=[good.name, bad.name])[0] == "healed"
    assert retry_failed(client, run=run.run_id, version=version) == {}


def test_a_host_that_is_down_is_missed_by_the_deadline_and_heals_the_version_when_it_comes_up(
    client: SyncPrefectClient, run: SmallRun, local_host: Make
) -> None:
    down = local_host()
    version = run.push().version
    state = roll_out(run, version, down.name, deadline_seconds=0.3)
    assert state.name == "PartialRollout"
    (missed,) = read_records(run.store, version=version)
    assert (missed.outcome, missed.by, missed.host) == ("missed", "rollout", down.name)
    down.start()
    until(lambda: hosts_outcome(run.store, version=version, hosts=[down.name])[0] == "healed", what="healed")
    rollout_id = state.state_details.flow_run_id
    assert rollout_id is not None
    until(lambda: state_name(client, rollout_id) == "Healed", what="the rollout's state follows the records")


def test_the_policy_says_how_many_hosts_are_enough(
    client: SyncPrefectClient, run: SmallRun, local_host: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    up, down = local_host().start().wait_ready(), local_host()
    version = run.push().version
    share = roll_out(run, version, up.name, down.name, required=0.5, deadline_seconds=60)
    assert (share.is_completed(), share.name) == (True, "Enough")
    monkeypatch.setattr(rollouts, "BEST_EFFORT_SECONDS", 5.0)
    version = run.push().version
    begun = time.monotonic()
    best_effort = roll_out(run, version, up.name, down.name, required=0.0, deadline_seconds=300)
    assert time.monotonic() - begun < 60, "a host that is down is not waited for until the deadline"
    assert (best_effort.is_completed(), best_effort.name) == (True, "Enough")
    assert {r.host: r.outcome for r in read_records(run.store, version=version)} == {
        up.name: "served",
        down.name: "missed",
    }


def test_best_effort_does_not_wait_for_a_host_that_died_over_its_run(
    client: SyncPrefectClient, run: SmallRun, local_host: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    up, dead = local_host().start().wait_ready(), local_host()
    real = rollouts.dispatch

    def dispatch(client: SyncPrefectClient, **asked: Any) -> Any:
        runs = real(client, **asked)
        client.set_flow_run_state(runs[dead.name], Running(), force=True)  # as a process that was killed leaves it
        return runs

    monkeypatch.setattr(rollouts, "dispatch", dispatch)
    monkeypatch.setattr(rollouts, "BEST_EFFORT_SECONDS", 5.0)
    monkeypatch.setattr(rollouts, "Vitals", partial(Vitals, silent_seconds=3.0))
    version = run.push().version
    begun = time.monotonic()
    state = roll_out(run, version, up.name, dead.name, required=0.0, deadline_seconds=300)
    assert time.monotonic() - begun < 120
    assert (state.is_completed(), state.name) == (True, "Enough")
    assert {r.host: r.outcome for r in read_records(run.store, version=version)} == {
        up.name: "served",
        dead.name: "missed",
    }


def test_a_host_is_silent_when_its_report_has_not_changed_for_a_while() -> None:
    now, reports = [100.0], {"a": 1, "b": 1}

    class Server:
        def read_workers_for_work_pool(self, pool: str, *, offset: int, limit: int) -> list[SimpleNamespace]:
            return [SimpleNamespace(name=name, last_heartbeat_time=when) for name, when in reports.items()]

    vitals = Vitals(Server(), silent_seconds=50.0, monotonic=lambda: now[0])  # type: ignore[arg-type]
    gone = {"b", "never seen"}
    for later, reported, silent in ((0, 0, set()), (30, 1, set()), (19, 1, set()), (1, 0, gone), (49, 0, {"a", *gone})):
        now[0] += later
        reports["a"] += reported
        vitals.look()
        assert {host for host in ("a", "b", "never seen") if vitals.is_silent(host)} == silent


class Held:
    """A replica whose apply waits until it is let go."""

    def __init__(self, replica: HostReplica) -> None:
        self._replica, self.entered, self.go = replica, threading.Event(), threading.Event()

    def apply(self, fetched: Any) -> Any:
        self.entered.set()
        assert self.go.wait(60)
        return self._replica.apply(fetched)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)


def test_together_no_engine_is_touched_before_every_host_has_applied(
    client: SyncPrefectClient, run: SmallRun, local_host: Make
) -> None:
    quick, slow, held = local_host(), local_host(), []
    slow.wrap = lambda replica: held.append(Held(replica)) or held[0]  # type: ignore[func-returns-value]
    hosts = [quick.start().wait_ready(), slow.start().wait_ready()]
    until(lambda: all("probe" in host.engine.calls for host in hosts), what="the first loads")
    version, before, seen = run.push().version, [len(host.engine.calls) for host in hosts], []

    def let_go() -> None:
        assert held[0].entered.wait(90)
        until(lambda: _ended(client, quick.name), what="the quick one is prepared")
        seen.extend([*(len(host.engine.calls) for host in hosts), quick.version, len(runs_of(client, quick.name))])
        held[0].go.set()

    release = threading.Thread(target=let_go)
    release.start()
    state = roll_out(run, version, quick.name, slow.name, cutover="together", deadline_seconds=180)
    release.join(90)
    assert seen == [*before, version - 1, 1]
    assert state.name == "Completed"
    assert all(run.is_held_by(host.current) for host in hosts)
    for host in hosts:
        ran = sorted(found.name for found in runs_of(client, host.name))
        assert ran == [f"prepare v{version} on {host.name}", f"v{version} on {host.name}"]
    (record,) = read_records(run.store, host=quick.name, version=version)
    assert record.fetched_bytes > 0, "what prepare did is in the record of what it came to"
    assert {"fetch", "apply", "verify", "pause"} <= set(record.seconds)


def _ended(client: SyncPrefectClient, host: str) -> bool:
    return any(found.state is not None and found.state.is_final() for found in runs_of(client, host))


def test_together_a_host_that_cannot_apply_does_not_hold_the_others(
    client: SyncPrefectClient, run: SmallRun, local_host: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "PREPARE_SHARE", 0.01)
    good, stuck, held = local_host(), local_host(), []
    stuck.wrap = lambda replica: held.append(Held(replica)) or held[0]  # type: ignore[func-returns-value]
    for host in (good, stuck):
        host.start().wait_ready()
    version, served = run.push().version, []

    def let_go() -> None:
        until(lambda: read_records(run.store, host=good.name, version=version), what="the good one serves")
        served.append(stuck.version)
        held[0].go.set()

    release = threading.Thread(target=let_go)
    release.start()
    state = roll_out(run, version, good.name, stuck.name, cutover="together", deadline_seconds=180)
    release.join(90)
    assert served == [version - 1]
    assert state.name == "Completed", "the stuck one came after all"


def test_together_as_many_as_the_policy_asks_for_are_enough(
    client: SyncPrefectClient, run: SmallRun, local_host: Make
) -> None:
    up, down = local_host().start().wait_ready(), local_host()
    version = run.push().version
    state = roll_out(run, version, up.name, down.name, required=0.5, deadline_seconds=180, cutover="together")
    assert (state.is_completed(), state.name) == (True, "Enough")
    assert run.is_held_by(up.current)


def test_a_cancel_takes_effect_between_steps_and_leaves_the_engine_alone(
    client: SyncPrefectClient, run: SmallRun, local_host: Make
) -> None:
    host, held = local_host(), []
    host.wrap = lambda replica: held.append(Held(replica)) or held[0]  # type: ignore[func-returns-value]
    host.start().wait_ready()
    until(lambda: "probe" in host.engine.calls, what="the first load")
    calls, version = len(host.engine.calls), run.push().version
    (id_,) = dispatch(client, run=run.run_id, version=version, hosts=[host.name]).values()
    assert held[0].entered.wait(60)
    client.set_flow_run_state(id_, Cancelling())
    time.sleep(LOOK_AFTER_SECONDS)
    held[0].go.set()
    done = follow(client, {"it": id_}, deadline_seconds=60)["it"]
    assert done.state is not None
    assert done.state.is_cancelled()
    assert "before the cut over" in str(done.state.message)
    assert len(host.engine.calls) == calls
    assert host.version == version - 1
    (record,) = read_records(run.store, host=host.name, version=version)
    assert (record.outcome, record.stage) == ("failed", "applied")

    again = retry_failed(client, run=run.run_id, host=host.name, wait_seconds=60)
    assert [found.state.is_completed() for found in again.values() if found.state] == [True]
    assert run.is_held_by(host.current)


def test_waiting_runs_coalesce_to_the_newest_and_older_ones_end_superseded(
    client: SyncPrefectClient, run: SmallRun, local_host: Make
) -> None:
    host, held = local_host(), []
    host.wrap = lambda replica: held.append(Held(replica)) or held[0]  # type: ignore[func-returns-value]
    host.start().wait_ready()
    until(lambda: "probe" in host.engine.calls, what="the first load")
    ids = {}
    for turn in range(4):
        version = run.push().version
        ids[str(version)] = dispatch(client, run=run.run_id, version=version, hosts=[host.name])[host.name]
        if turn == 0:
            assert held[0].entered.wait(60)
    held[0].go.set()
    ended = follow(client, ids, deadline_seconds=60)
    assert [ended[str(v)].state_name for v in (1, 2, 3, 4)] == ["Completed", "Superseded", "Superseded", "Completed"]
    assert all(found.state is not None and found.state.is_completed() for found in ended.values())
    assert [call for call in host.engine.calls if call.startswith("reload")] == ["reload 0", "reload 1", "reload 4"]
    by_version = {r.version: r for r in read_records(run.store, host=host.name)}
    assert [by_version[v].outcome for v in (1, 2, 3, 4)] == ["served", "superseded", "superseded", "served"]
    assert by_version[2].from_version == 4
    assert run.is_held_by(host.current)


def test_asking_twice_asks_for_one_run_and_a_failed_one_runs_again(
    client: SyncPrefectClient, run: SmallRun, local_host: Make
) -> None:
    host = local_host().start().wait_ready()
    until(lambda: "probe" in host.engine.calls, what="the first load")
    version = run.push().version
    host.engine.order(fail="pause")
    first = dispatch(client, run=run.run_id, version=version, hosts=[host.name])
    assert dispatch(client, run=run.run_id, version=version, hosts=[host.name]) == first
    ended = follow(client, first, deadline_seconds=60)[host.name]
    assert ended.state is not None
    assert ended.state.is_failed()
    host.engine.order()
    assert dispatch(client, run=run.run_id, version=version, hosts=[host.name]) == first
    ended = follow(client, first, deadline_seconds=60)[host.name]
    assert (ended.state_name, ended.run_count) == ("Completed", 2)
    assert dispatch(client, run=run.run_id, version=version, hosts=[host.name]) == first
    assert state_name(client, first[host.name]) == "Completed"


def test_an_empty_version_only_changes_the_engines_number(
    client: SyncPrefectClient, run: SmallRun, local_host: Make
) -> None:
    host = local_host().start().wait_ready()
    until(lambda: "probe" in host.engine.calls, what="the first load")
    calls, version = len(host.engine.calls), run.push(changed=False).version
    assert roll_out(run, version, host.name).name == "Completed"
    assert host.engine.calls[calls:] == [f"set_version {version}"]
    (record,) = read_records(run.store, host=host.name, version=version)
    assert (record.outcome, record.seconds["pause"], host.version) == ("served", 0.0, version)


def test_a_worker_runs_only_the_flows_it_knows(client: SyncPrefectClient, run: SmallRun, local_host: Make) -> None:
    ran = threading.Event()

    @flow(name="stranger")
    def stranger() -> None:
        ran.set()

    host = local_host().start().wait_ready()
    ensure_host_sync(client)
    deployment = client.create_deployment(
        flow_id=client.create_flow(stranger),
        name="host",
        entrypoint="os:abort",
        work_pool_name=names.HOSTS_POOL,
        work_queue_name=host.name,
    )
    asked = client.create_flow_run_from_deployment(deployment)
    ended = follow(client, {"it": asked.id}, deadline_seconds=60)["it"]
    assert ended.state is not None
    assert ended.state.is_crashed()
    assert "host-sync, prepare, scrub and nothing else" in str(ended.state.message)
    assert not ran.is_set()
    version = run.push().version
    assert roll_out(run, version, host.name).name == "Completed"  # and goes on working


def test_a_host_refuses_another_training_run(client: SyncPrefectClient, run: SmallRun, local_host: Make) -> None:
    host = local_host().start().wait_ready()
    ids = dispatch(client, run="another-run", version=1, hosts=[host.name])
    ended = follow(client, ids, deadline_seconds=60)[host.name]
    assert ended.state is not None
    assert ended.state.is_failed()
    assert f"host '{host.name}' follows run {run.run_id}" in str(ended.state.message)
    assert read_records(run.store, host=host.name, version=1) == []


def test_events_start_a_run_long_before_the_next_poll(
    client: SyncPrefectClient, run: SmallRun, local_host: Make
) -> None:
    host = local_host(poll_seconds=300.0).start().wait_ready()
    version = run.push().version
    assert roll_out(run, version, host.name, deadline_seconds=60).name == "Completed"


def test_a_host_killed_in_mid_cut_over_heals_by_itself_when_it_is_started_again(
    client: SyncPrefectClient, run: SmallRun, new_host: Callable[..., HostProcess]
) -> None:
    host = new_host()
    host.wait_ready()
    until(lambda: "probe" in host.engine.calls, what="the first load")
    version = run.push().version
    host.engine.order(hang="reload")
    ids = dispatch(client, run=run.run_id, version=version, hosts=[host.name])
    until(lambda: f"reload {version}" in host.engine.calls, what="the reload")
    host.kill()
    assert state_name(client, ids[host.name]) == "Running"  # Prefect alone would say so for ever
    host.engine.order()
    host.start()
    ended = follow(client, ids, deadline_seconds=90)[host.name]
    assert (ended.state_name, ended.run_count) == ("Completed", 2)
    assert run.is_held_by(host.current)
    assert host.engine.calls[-2:] == ["resume", "probe"]
    assert host.stop() == 0
    assert not (host.folder / "ready.json").exists()


def test_a_server_that_does_not_answer_is_an_error_at_once(server: ServerInfo) -> None:
    with pytest.raises(OrchestrationError, match=r"does not answer"), connected("http://127.0.0.1:1/api"):
        pass


def test_a_host_follows_the_store_while_prefect_is_away_and_connects_once_it_is_back(
    client: SyncPrefectClient,
    server: ServerInfo,
    run: SmallRun,
    local_host: Make,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    where = ["http://127.0.0.1:1/api"]
    monkeypatch.setattr("weighbridge.flows.keep_working.find_api", lambda home, start: where[0])
    host = local_host().start().wait_ready(connected=False)
    for _ in range(2):
        version = run.push().version
        until(lambda: host.version == version, what="following")  # noqa: B023 - called before the next turn
    assert run.is_held_by(host.current)
    where[0] = server.api_url
    host.wait_ready()
    version = run.push().version
    assert roll_out(run, version, host.name, deadline_seconds=60).name == "Completed"


def test_a_host_that_starts_behind_catches_up_without_being_asked(
    client: SyncPrefectClient, run: SmallRun, local_host: Make
) -> None:
    version = [run.push().version for _ in range(2)][-1]
    host = local_host().start()
    until(lambda: read_records(run.store, host=host.name), what="catching up")
    (record,) = read_records(run.store, host=host.name)
    assert (record.version, record.outcome, record.by) == (version, "served", "host")
    assert host.engine.calls == ["pause", f"reload {version}", "flush", f"set_version {version}", "resume", "probe"]
    assert run.is_held_by(host.current)


def test_a_rollout_started_from_the_ui_is_carried_out_by_the_runs_steward(
    client: SyncPrefectClient, run: SmallRun, local_host: Make, home: Path
) -> None:
    host, stop = local_host().start().wait_ready(), threading.Event()
    steward = threading.Thread(
        target=serve_steward, args=(run.run_id, run.store), kwargs={"options": WorkerOptions(home=home), "stop": stop}
    )
    steward.start()
    try:
        version = run.push().version
        asked = client.create_flow_run_from_deployment(
            ensure_rollout(client, run.run_id), parameters={"version": version, "hosts": [host.name]}
        )
        ended = follow(client, {"it": asked.id}, deadline_seconds=60)["it"]
    finally:
        stop.set()
        steward.join(60)
    assert (ended.state_name, ended.name) == ("Completed", f"rollout of v{version}")
    assert run.is_held_by(host.current)


def test_what_healed_while_prefect_was_away_is_marked_when_a_host_comes_back(
    client: SyncPrefectClient, run: SmallRun, local_host: Make, monkeypatch: pytest.MonkeyPatch, server: ServerInfo
) -> None:
    version = run.push().version
    host = local_host()
    state = roll_out(run, version, host.name, deadline_seconds=0.1)
    client.set_flow_run_state(runs_of(client, host.name)[0].id, Cancelling())  # so that only the records can heal it
    where = ["http://127.0.0.1:1/api"]
    monkeypatch.setattr("weighbridge.flows.keep_working.find_api", lambda home, start: where[0])
    host.start().wait_ready(connected=False)
    until(lambda: hosts_outcome(run.store, version=version, hosts=[host.name])[0] == "healed", what="following")
    id_ = state.state_details.flow_run_id
    assert id_ is not None
    assert state_name(client, id_) == "PartialRollout"
    where[0] = server.api_url
    until(lambda: state_name(client, id_) == "Healed", what="reconciled")


def test_upkeep_is_deployed_on_schedules_and_carried_out_by_the_steward_and_by_the_host_beside_pushes(
    client: SyncPrefectClient, run: SmallRun, local_host: Make, home: Path
) -> None:
    host, stop = local_host().start().wait_ready(), threading.Event()
    version = run.push().version
    assert roll_out(run, version, host.name, deadline_seconds=60).name == "Completed"
    steward = threading.Thread(
        target=serve_steward,
        args=(run.run_id, run.store),
        kwargs={
            "base": run.base,
            "retention": Retention(keep=1, grace_seconds=0.0),
            "options": WorkerOptions(home=home),
            "stop": stop,
        },
    )
    steward.start()
    wanted = {
        f"anchor/{run.run_id}": {"every_versions": 1},
        f"gc/{run.run_id}": {},
        f"scrub/{host.name}": {},
    }
    try:
        for name, parameters in wanted.items():
            until(lambda n=name: _deployed(client, n), what=name)
            deployment = client.read_deployment_by_name(name)
            assert [schedule.active for schedule in deployment.schedules] == [True]
            asked = client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
            until(lambda a=asked: state_name(client, a.id) == "Completed", what=f"{name} carried out")
    finally:
        stop.set()
        steward.join()
    assert Lineage(run.store).anchors() == (version,)
    assert Lineage(run.store).is_retired(version), "gc found a way by the anchor, and hosts without grace"
    assert roll_out(run, run.push().version, host.name, deadline_seconds=60).name == "Completed"


def _deployed(client: SyncPrefectClient, name: str) -> bool:
    try:
        return client.read_deployment_by_name(name) is not None
    except ObjectNotFound:
        return False
