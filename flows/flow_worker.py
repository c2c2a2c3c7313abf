"""A Prefect worker that runs a few flows, named to it beforehand, inside its own warm process; woken by events, with
polling as the floor. Must not know what the flows do, and never follows an entry point that a server names."""

import asyncio
import contextlib
import copy
import os
from collections.abc import Callable, Mapping
from contextvars import copy_context
from typing import Any
from uuid import UUID

import anyio.abc
import structlog
from prefect import Flow
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import WorkerFlowRunResponse
from prefect.events import Event
from prefect.events.clients import get_events_subscriber
from prefect.events.filters import EventFilter, EventNameFilter
from prefect.exceptions import PrefectSignal
from prefect.flow_engine import run_flow
from prefect.states import Pending
from prefect.workers.base import BaseJobConfiguration, BaseVariables, BaseWorker, BaseWorkerResult

from weighbridge.flows import names
from weighbridge.flows.connection import connected
from weighbridge.flows.presence import REPORT_SECONDS

log = structlog.get_logger("weighbridge.worker")

_SLOT_SECONDS = 0.02
_SELDOM_SECONDS = 5.0
WAKING = ("prefect.flow-run.Scheduled", "prefect.flow-run.AwaitingRetry", "prefect.flow-run.Late")


class InProcess(BaseJobConfiguration):
    """The configuration of a run in this very process: there is nothing to configure."""

    @classmethod
    async def resolve_for_flow_run(cls, flow_run: FlowRun, **_: Any) -> "InProcess":
        """Asks the server nothing, where Prefect's own reads deployment, flow and variables to build a command line."""
        return cls()


class FlowRunResult(BaseWorkerResult):
    """How a run left the worker; what became of it is the flow engine's to report."""


class FlowWorker(BaseWorker[InProcess, BaseVariables, FlowRunResult]):
    """Runs the flows it was given, in a thread each, from one work queue, at most `limit` at a time."""

    type = names.POOL_TYPE
    job_configuration = InProcess
    job_configuration_variables = BaseVariables
    _description = "Runs weighbridge's flows inside a warm process on the machine they are about."

    def __init__(
        self,
        *,
        pool: str,
        queue: str,
        name: str,
        flows: Mapping[str, Flow[..., Any]],
        api_url: str,
        limit: int,
        order: Callable[[FlowRun], Any],
        running: set[UUID],
    ) -> None:
        super().__init__(
            work_pool_name=pool,
            work_queues=[queue],
            name=name,
            limit=limit,
            heartbeat_interval_seconds=REPORT_SECONDS,
        )
        self.queue = queue
        self.woken = asyncio.Event()
        self._flows = flows
        self._api_url = api_url
        self._order = order
        self._flow_names: dict[UUID, str] = {}
        self._running = running
        self._listening = False
        self._left_waiting = False

    async def _submit_scheduled_flow_runs(self, flow_run_response: list[WorkerFlowRunResponse]) -> list[FlowRun]:
        """Takes what waits in the order we were given, where Prefect takes the oldest first."""
        taken = await super()._submit_scheduled_flow_runs(
            sorted(flow_run_response, key=lambda entry: self._order(entry.flow_run))
        )
        self._left_waiting = len(taken) < len(flow_run_response)
        return taken

    async def _submit_run(self, flow_run: FlowRun) -> None:
        """Begins it at once. Prefect's own first asks whether the deployment stands, which we never follow, proposes
        Pending, by which workers of one queue keep each other from a run, where a queue of ours has one worker, and
        writes down a process for somebody to kill: three calls a run, with the first ones in every version's way."""
        assert self._runs_task_group is not None
        begun = await self._runs_task_group.start(self._submit_run_and_capture_errors, flow_run)
        if self._cancelling_observer is not None:
            self._cancelling_observer.remove_in_flight_flow_run_id(flow_run.id)
        if isinstance(begun, Exception):
            self._submitting_flow_run_ids.discard(flow_run.id)

    def _emit_flow_run_submitted_event(self, configuration: BaseJobConfiguration) -> Event | None:
        """Tells nobody, now or at the end of the run: the run's own states say as much, and each event has its cost."""
        return None

    async def _propose_submitting_state(self, flow_run: FlowRun) -> None:
        """Nothing is submitted anywhere: the run begins in this process at once."""

    async def _give_worker_labels_to_flow_run(self, flow_run_id: UUID) -> None:
        """The queue names the host already."""

    async def run(
        self,
        flow_run: FlowRun,
        configuration: InProcess,
        task_status: anyio.abc.TaskStatus[str] | None = None,  # type: ignore[override]
    ) -> FlowRunResult:
        """Runs one flow run to its end in a thread of this process. A flow that is not ours is refused."""
        identifier = f"{os.getpid()}"
        flow = self._flows.get(await self._flow_name(flow_run.flow_id))
        if flow is None:
            raise LookupError(
                f"this worker runs {', '.join(sorted(self._flows))} and nothing else; the run was refused."
            )
        if task_status is not None:
            task_status.started(identifier)
        # Pending, for one that is Scheduled would be waited for. Without its deployment on it, the engine starts no
        # thread, loop and websocket to watch for Suspend, which no step could honour; for Cancel the steps look.
        begun = flow_run.model_copy(update={"state": Pending(), "deployment_id": None})
        try:
            await asyncio.get_running_loop().run_in_executor(None, copy_context().run, self._run_here, flow, begun)
        finally:
            self._submitting_flow_run_ids.discard(flow_run.id)  # until it ran it may wait at the server still
            if self._left_waiting:  # once our slot is free again
                asyncio.get_running_loop().call_later(_SLOT_SECONDS, self.woken.set)
        return FlowRunResult(status_code=0, identifier=identifier)

    def _run_here(self, flow: Flow[..., Any], flow_run: FlowRun) -> None:
        self._running.add(flow_run.id)
        try:
            with connected(self._api_url):
                run_flow(_bare(flow, flow_run), flow_run=flow_run, return_type="state")
        except PrefectSignal as signal:  # cancelled, paused or taken away before it began: the server knows already
            log.info("run not carried out", flow_run=flow_run.name, reason=str(signal))
        finally:
            # Here and not with the caller, which may lose its server, and be gone, long before this thread ends.
            self._running.discard(flow_run.id)

    async def _flow_name(self, flow_id: UUID) -> str:
        if flow_id not in self._flow_names:
            self._flow_names[flow_id] = (await self.client.read_flow(flow_id)).name
        return self._flow_names[flow_id]

    async def listen(self) -> None:
        """Sets `woken` whenever a run of our queue is to start. Ends, by an error, when the connection does."""
        wanted = EventFilter(event=EventNameFilter(name=list(WAKING)))
        async with get_events_subscriber(filter=wanted, reconnection_attempts=0) as subscriber:
            self._listening = True
            self.woken.set()  # what happened before we listened
            try:
                async for event in subscriber:
                    if any(r.role == "work-queue" and r.name == self.queue for r in event.related):
                        self.woken.set()
            finally:
                self._listening = False

    async def poll(self, *, seconds: float) -> None:
        """Takes up what waits, when woken and every `seconds`; less often while events arrive, since each poll costs
        the server some 10 ms, and there may be many hosts. Ends, by an error, when the server is lost."""
        while True:
            # Not wait_for, which up to Python 3.11 loses a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(seconds, _SELDOM_SECONDS) if self._listening else seconds):
                    await self.woken.wait()
            self.woken.clear()
            await self.get_and_submit_flow_runs()

    async def report(self) -> None:
        """Tells the server that we live. Ends, by an error, when the server is lost."""
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            await self.sync_with_backend()


def _bare(flow: Flow[..., Any], flow_run: FlowRun) -> Flow[..., Any]:
    """The flow, without the wish to name a run that was given that very name when it was asked for."""
    template = flow.flow_run_name
    if not isinstance(template, str) or template.format(**flow_run.parameters) != flow_run.name:
        return flow
    bare = copy.copy(flow)
    bare.flow_run_name = None
    return bare
