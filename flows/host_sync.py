"""Host-sync: a host's part in a version, executed by its own worker. Takes a run, a version and a host's name; store,
replica and engine are the process' own. Cancel takes effect between steps, never between dirty and clean."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

import structlog
from prefect import flow
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext, SyncClientContext
from prefect.states import Cancelled, Completed

from weighbridge.errors import WeighbridgeError
from weighbridge.flows import names
from weighbridge.flows.connection import UNREACHABLE
from weighbridge.flows.context import host_here
from weighbridge.flows.healing import heal_after
from weighbridge.tasks.apply import apply
from weighbridge.tasks.fetch import fetch
from weighbridge.tasks.handle import Handle
from weighbridge.tasks.host_attempt import HostAttempt
from weighbridge.tasks.record import record
from weighbridge.tasks.reload import reload
from weighbridge.tasks.verify import verify

log = structlog.get_logger("weighbridge.host")


class CancelAsked(WeighbridgeError):
    """Somebody cancelled the run; the step that was under way is done, the next one was not begun."""


@flow(name=names.HOST_SYNC, flow_run_name="v{version} on {host}", on_completion=[heal_after], persist_result=False)
def host_sync(run: str, version: int, host: str) -> State[Any]:
    """Brings one host to a version: fetch, apply, verify, cut over, record."""
    here = host_here(host, run)
    with here.turn:
        attempt = HostAttempt(here, version)
        if attempt.is_superseded:
            attempt.record_superseded()
            return Completed(
                name=names.SUPERSEDED, message=f"{host} serves version {here.replica.version} already, which is newer."
            )
        handle = Handle(attempt)
        try:
            _carry_out(handle)
        except CancelAsked as asked:
            attempt.record_failed(asked)
            return Cancelled(message=str(asked))
        except Exception as failure:
            attempt.record_failed(failure)
            raise
        finally:
            handle.release()
    return Completed(message=_summary(attempt))


def _carry_out(attempt: Handle[HostAttempt]) -> None:
    go_on = _cancel_check(attempt.value)
    if not attempt.value.is_standing:
        fetch(attempt)
        go_on("apply")
        apply(attempt)
        verify(attempt)
        go_on("the cut over")
    reload(attempt)
    record(attempt)


def _cancel_check(attempt: HostAttempt) -> Callable[[str], None]:
    context = FlowRunContext.get()
    flow_run: UUID | None = context.flow_run.id if context is not None and context.flow_run is not None else None

    def go_on(step: str) -> None:
        if flow_run is not None and _is_cancelled(flow_run):
            raise CancelAsked(
                f"cancelled before {step}. {attempt.host.name} serves version {attempt.host.replica.version}, and its "
                "copies are whole."
            )

    return go_on


def _is_cancelled(flow_run: UUID) -> bool:
    try:
        with SyncClientContext.get_or_create() as context:
            state = context.client.read_flow_run(flow_run).state
    except UNREACHABLE as error:
        log.warning("Prefect does not answer; going on without it", error=str(error))
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def _summary(attempt: HostAttempt) -> str:
    phases = ", ".join(f"{phase} {taken:.3f} s" for phase, taken in attempt.seconds.items())
    return f"{attempt.host.name} serves version {attempt.version} ({phases or 'it did already'})."
