"""Rollout: takes a version to hosts, by number alone, so it can be run again anywhere. What became of it is a function
of the hosts' records in the store; the state it ends in only shows that."""

import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID

import structlog
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import SyncClientContext
from prefect.states import Completed, Failed

from weighbridge.errors import StoreError, UsageError, VersionUnknown
from weighbridge.flows import names
from weighbridge.flows.artifacts import show_hosts
from weighbridge.flows.context import store_here
from weighbridge.flows.deployments import ensure_deployment
from weighbridge.flows.dispatch import dispatch, dispatch_prepare, follow
from weighbridge.flows.marks import mark_run
from weighbridge.flows.ours import our_flow
from weighbridge.flows.vitals import Vitals
from weighbridge.storage.clock import Clock, SystemClock
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.records import (
    SERVED,
    SUPERSEDED,
    host_outcome,
    latest,
    outcome_of,
    pass_over,
    read_records,
    write_record,
)
from weighbridge.storage.stores.contract import Store
from weighbridge.values import HostOutcome, HostRecord

log = structlog.get_logger("weighbridge.rollout")

BEST_EFFORT_SECONDS = 10.0
"""A live host takes a run up within half a second; one that has not by now is down, or busy with another version."""

PREPARE_SHARE = 0.5
"""Of the deadline: hosts that are prepared by then are cut over without those that are not."""

_LOOK_SECONDS = 1.0

CutOverMode = Literal["each", "together"]

MISSED = "missed"
PENDING = "pending"
_MADE_IT = (SERVED, SUPERSEDED)


def ensure_rollout(client: SyncPrefectClient, run: str) -> UUID:
    """Makes sure that a training run's rollouts can be started from the UI, for its steward to execute; returns the
    deployment's id."""
    return ensure_deployment(
        client,
        rollout,
        deployment=names.rollout_deployment(run),
        pool=names.STEWARD_POOL,
        queue=run,
        parameters={"run": run},
    )


@our_flow(name=names.ROLLOUT, flow_run_name="rollout of v{version}")
def rollout(
    run: str,
    version: int,
    hosts: list[str],
    required: float = 1.0,
    deadline_seconds: float = 600.0,
    cutover: CutOverMode = "each",
) -> State[Any]:
    """Rolls a version out: a host-sync run a host, then the hosts' records.

    `required` is the share of hosts that must make it (1 all, 0 best effort); a share below 1 is waited for only until
    it is reached, and with 0 a host that does not take its run up within BEST_EFFORT_SECONDS, or dies over it, is not
    waited for. With
    `cutover` "together" no engine is touched before so many hosts are prepared, or PREPARE_SHARE of the deadline has
    passed; then all are cut over. Ends Completed, or Failed under the name PartialRollout.
    """
    if not hosts or len(set(hosts)) != len(hosts) or not 0 <= required <= 1:
        raise UsageError(f"a rollout needs hosts, each named once, and a share of them: {hosts}, {required}.")
    store = store_here(run)
    _need_published(store, version)
    policy = _Policy(len(hosts), math.ceil(required * len(hosts)))
    until = time.monotonic() + deadline_seconds
    with SyncClientContext.get_or_create() as context:
        client = context.client
        mark_run(run, version)
        asked = hosts
        if cutover == "together":
            waiting = dispatch_prepare(client, run=run, version=version, hosts=hosts, hold_seconds=deadline_seconds)
            ready = _wait(client, waiting, policy, deadline_seconds * PREPARE_SHARE)
            asked = [host for host in hosts if host not in ready or not _is_cancelled(ready[host])]
        runs = dispatch(client, run=run, version=version, hosts=asked)
        ended = _wait(client, runs, policy, until - time.monotonic())
    if not policy.is_reached(ended):
        write_missed(store, run=run, version=version, hosts=hosts, runs=ended, clock=SystemClock())
    outcome, table = hosts_outcome(store, version=version, hosts=hosts)
    show_hosts(version, table)
    return _state(outcome, table, version=version, needed=policy.needed)


def _need_published(store: Store, version: int) -> None:
    """Whoever reaches the UI can name any number. A store that does not answer now says nothing of it: the hosts, who
    ask it themselves, may find it back."""
    try:
        if Lineage(store).is_committed(version):
            return
    except StoreError as error:
        log.warning(
            "the store does not say whether the version stands; its hosts look", version=version, error=str(error)
        )
        return
    raise VersionUnknown(f"{store.url} has no version {version}. No host was asked.")


@dataclass(frozen=True, slots=True)
class _Policy:
    """How many of the hosts must make it."""

    hosts: int
    needed: int

    def is_reached(self, now: Mapping[str, FlowRun]) -> bool:
        """Whether no other host need be waited for. Where all are needed, that is when all have ended."""
        return 0 < self.needed < self.hosts and sum(_is_completed(r) for r in now.values()) >= self.needed


def _wait(
    client: SyncPrefectClient, runs: Mapping[str, UUID], policy: _Policy, seconds: float
) -> Mapping[str, FlowRun]:
    """Follows runs until all have ended, the policy has what it asks for, or the time is up."""
    asked, vitals = time.monotonic(), Vitals(client)

    def enough(now: Mapping[str, FlowRun]) -> bool:
        if policy.needed:
            return policy.is_reached(now)
        if time.monotonic() - asked < BEST_EFFORT_SECONDS:
            return False
        at_work = [host for host, flow_run in now.items() if _is_at_work(flow_run)]
        if at_work:
            vitals.look()
        return all(vitals.is_silent(host) for host in at_work)

    look = math.inf if policy.needed else _LOOK_SECONDS
    return follow(client, runs, deadline_seconds=seconds, enough=enough, look_seconds=look)


def mirrored(state: State[Any]) -> State[Any]:
    """A rollout's state for the flow above it to end in. A flow that returned the rollout's very own would be judged by
    counting, and lose its name."""
    return State(type=state.type, name=state.name, message=state.message)


def hosts_outcome(store: Store, *, version: int, hosts: Sequence[str]) -> tuple[str, tuple[HostOutcome, ...]]:
    """What the records say of a version: its outcome, and an entry for each host asked, in the order asked.

    "pending" stands for a host that has not answered yet, in both.
    """
    records = [r for r in read_records(store, version=version, on_corrupt=pass_over) if r.host in set(hosts)]
    counted = latest(records)
    table = tuple(host_outcome(counted[h]) if h in counted else HostOutcome(h, PENDING, -1, {}) for h in hosts)
    return (PENDING if len(counted) < len(hosts) else outcome_of(records)), table


def write_missed(
    store: Store, *, run: str, version: int, hosts: Sequence[str], runs: Mapping[str, FlowRun], clock: Clock
) -> None:
    """Writes, in the rollout's own name, a record for each host that has none: it never answered."""
    answered = {r.host for r in read_records(store, version=version, on_corrupt=pass_over)}
    head = Lineage(store, floor=version).head() if set(hosts) - answered else version
    for host in hosts:
        if host in answered:
            continue
        flow_run = runs.get(host)
        seen = flow_run.state.name if flow_run is not None and flow_run.state is not None else "not known"
        now = clock.now_ns()
        write_record(
            store,
            HostRecord(
                run_id=run,
                host=host,
                version=version,
                attempt=uuid.uuid4().hex,
                outcome=MISSED,
                stage="waiting",
                from_version=-1,
                state_digest="",
                started_ns=now,
                ended_ns=now,
                fetched_bytes=0,
                repaired=0,
                error=f"the host did not answer by the deadline; its run is {seen}. It catches up once it is back.",
                by="rollout",
                head=head,
            ),
        )


def _state(outcome: str, table: Sequence[HostOutcome], *, version: int, needed: int) -> State[Any]:
    made = sum(host.outcome in _MADE_IT for host in table)
    said = f"{made} of {len(table)} hosts serve version {version}"
    late = "; ".join(f"{host.host} {host.outcome}: {host.error}" for host in table if host.outcome not in _MADE_IT)
    if made == len(table):
        return Completed(name=names.HEALED if outcome == "healed" else "Completed", message=f"{said}.")
    if made >= needed:
        log.warning("some hosts are behind, as the policy allows", version=version, hosts=late)
        return Completed(name=names.ENOUGH, message=f"{said}; {needed} were asked for. {late}")
    log.error("rollout is partial", version=version, hosts=late)
    return Failed(name=names.PARTIAL, message=f"{said}. {late}")


def _is_at_work(flow_run: FlowRun) -> bool:
    """Whether a host has taken a run up and not ended it: one that waits is a host's that is down, or busy."""
    return flow_run.state is not None and (flow_run.state.is_running() or flow_run.state.is_pending())


def _is_completed(flow_run: FlowRun) -> bool:
    return flow_run.state is not None and flow_run.state.is_completed()


def _is_cancelled(flow_run: FlowRun) -> bool:
    return flow_run.state is not None and (flow_run.state.is_cancelled() or flow_run.state.is_cancelling())
