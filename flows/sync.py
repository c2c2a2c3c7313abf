"""Sync: what `push` starts. Publish, then roll the version out to the hosts. Whatever becomes of Prefect on the way,
the trainer is told what really happened: the commit and the hosts' records say so, not the states."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import structlog
from prefect import Flow
from prefect.client.schemas.objects import State
from prefect.context import SyncClientContext
from prefect.exceptions import PrefectException

from weighbridge.errors import OrchestrationError
from weighbridge.flows import names
from weighbridge.flows.connection import UNREACHABLE, connected, find_api
from weighbridge.flows.context import using_store
from weighbridge.flows.elsewhere import task_runner
from weighbridge.flows.marks import marked
from weighbridge.flows.ours import our_flow
from weighbridge.flows.publish import publish
from weighbridge.flows.rollout import CutOverMode, hosts_outcome, mirrored, rollout
from weighbridge.flows.sweep import sweep_trainer
from weighbridge.storage.feed import FeedBroken
from weighbridge.storage.publication import Publication
from weighbridge.storage.stores.contract import Store
from weighbridge.tasks.handle import Handle
from weighbridge.values import HostOutcome

log = structlog.get_logger("weighbridge.sync")

_swept: set[str] = set()
"""The training runs of which the server knows how everything ended that this process and those before it did."""
_versions_at_work: defaultdict[str, set[int]] = defaultdict(set)


@dataclass(frozen=True, slots=True)
class SyncOptions:
    """How far to go: the `hosts` to bring along, the share of them that is `required`, by when, and whether each engine
    changes over as soon as its host is ready, or all together."""

    hosts: tuple[str, ...]
    required: float
    deadline_seconds: float
    cutover: CutOverMode = "each"


@dataclass(frozen=True, slots=True)
class SyncOutcome:
    """What the hosts' records say once a sync is over: see `records.outcome_of`."""

    outcome: str
    hosts: tuple[HostOutcome, ...] = ()


@our_flow(
    name=names.SYNC,
    flow_run_name="sync v{version}",
    validate_parameters=False,
)
def sync(
    run: str,
    version: int,
    hosts: list[str],
    required: float,
    deadline_seconds: float,
    cutover: CutOverMode,
    publication: Handle[Publication],
) -> State[Any]:
    """Publishes one version and brings the hosts to it; ends as the rollout ends."""
    _threaded(publication)(run, version, publication)
    return mirrored(rollout(run, version, hosts, required, deadline_seconds, cutover, return_state=True))


def run_sync(publication: Publication, options: SyncOptions) -> SyncOutcome:
    """Runs the flow for a push, in the calling thread, which is connected; returns what came of it.

    Raises what kept the version from being committed; OrchestrationError when Prefect was lost, which says whether the
    version stands.
    """
    run, version = publication.publisher.run_id, publication.attempt.version
    hosts, store = list(options.hosts), publication.publisher.store
    handle = Handle(publication)
    try:
        with _at_work(run, version), using_store(run, store), marked(run, version):
            ended: Any  # Prefect's overloads do not know a flow that returns a state
            if hosts:
                policy = (options.required, options.deadline_seconds, options.cutover)
                ended = sync(run, version, hosts, *policy, handle, return_state=True)
            else:
                ended = _threaded(handle)(run, version, handle, return_state=True)
            state: State[Any] = ended
            _note_end(run, state)
    except (OrchestrationError, *UNREACHABLE) as lost:
        raise _verdict(publication, str(lost)) from lost
    finally:
        handle.release()
    if publication.manifest is None or not _ended_well(state):
        raise _verdict(publication, f"it ended {state.name}: {state.message}") from publication.failure
    if not hosts:
        return SyncOutcome("published")
    return SyncOutcome(*hosts_outcome(store, version=version, hosts=hosts))


def run_rollout(store: Store, run: str, version: int, options: SyncOptions) -> SyncOutcome:
    """Brings the hosts to a version that is committed already; see `run_sync`."""
    hosts = list(options.hosts)
    try:
        with _at_work(run, version), using_store(run, store), marked(run, version):
            state: State[Any] = rollout(
                run,
                version,
                hosts,
                options.required,
                options.deadline_seconds,
                options.cutover,
                return_state=True,
            )
            _note_end(run, state)
    except UNREACHABLE as lost:
        raise _unfinished(version, str(lost)) from lost
    if not _ended_well(state):
        raise _unfinished(version, f"it ended {state.name}: {state.message}")
    return SyncOutcome(*hosts_outcome(store, version=version, hosts=hosts))


@contextmanager
def _at_work(run: str, version: int) -> Iterator[None]:
    """For the while of a flow of this process. Before the first of a training run, and after one that did not end well,
    whatever else is under way at the server is told to have crashed: nobody carries it on."""
    if run not in _swept:
        with SyncClientContext.get_or_create() as context:
            sweep_trainer(context.client, run=run, under_way=_versions_at_work[run])
        _swept.add(run)
    _versions_at_work[run].add(version)
    try:
        yield
    except BaseException:
        _swept.discard(run)
        raise
    finally:
        _versions_at_work[run].discard(version)


def _note_end(run: str, state: State[Any]) -> None:
    """The server may not know of the end of a flow that did not end well."""
    if not _ended_well(state):
        _swept.discard(run)


def _ended_well(state: State[Any]) -> bool:
    return state.is_completed() or state.name == names.PARTIAL


def leave(run: str, home: Path) -> None:
    """What a trainer that ends does last, in a thread of its own: says of flows that lost their server how they ended.
    Starts no server for it, and raises nothing."""
    if run in _swept:
        return
    try:
        with connected(find_api(home, start=False)) as client:
            sweep_trainer(client, run=run)
    except (OrchestrationError, *UNREACHABLE) as error:
        log.info("no server to tell how the last flows ended; the next start of this run does", error=str(error))


def _threaded(publication: Handle[Publication]) -> Flow[..., Any]:
    return publish.with_options(task_runner=task_runner(publication.value.elsewhere, threads=publication.value.threads))


def _unfinished(version: int, trouble: str) -> OrchestrationError:
    return OrchestrationError(
        f"version {version} is committed and stands, but its rollout did not run to its end: {trouble} Hosts follow "
        f"the store by themselves: see `weighbridge status`; `weighbridge retry {version}` asks them again."
    )


def _verdict(publication: Publication, trouble: str) -> BaseException:
    """What the trainer is told of a push that did not end well: its own error, or whether the version stands."""
    failure = publication.failure
    if isinstance(failure, FeedBroken) and failure.__cause__ is not None:
        failure = failure.__cause__
    version = publication.attempt.version
    if publication.manifest is not None:
        return _unfinished(version, trouble)
    if failure is not None and not isinstance(failure, (httpx.HTTPError, PrefectException)):
        return failure
    return OrchestrationError(
        f"version {version} was not published, for Prefect was lost: {trouble} Nothing of it is visible; push again "
        "once the server answers (`weighbridge server start`)."
    )
