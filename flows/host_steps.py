"""What the runs of a host have in common: they take the host's turn, end as superseded when it serves a newer version,
record why they failed, and can be cancelled between steps. Must not know which steps there are."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

import structlog
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext, SyncClientContext
from prefect.states import Cancelled, Completed

from weighbridge.errors import WeighbridgeError
from weighbridge.flows import names
from weighbridge.flows.connection import UNREACHABLE
from weighbridge.flows.context import host_here
from weighbridge.flows.marks import mark_run
from weighbridge.tasks.apply import apply
from weighbridge.tasks.fetch import fetch
from weighbridge.tasks.handle import Handle
from weighbridge.tasks.host_attempt import HostAttempt
from weighbridge.tasks.record import record
from weighbridge.tasks.reload import reload
from weighbridge.tasks.verify import verify

log = structlog.get_logger("weighbridge.host")

LOOK_AFTER_SECONDS = 0.5
"""Of work: an attempt that has done less does not ask whether somebody cancelled it."""


class CancelAsked(WeighbridgeError):
    """Somebody cancelled the run; the step that was under way is done, the next one was not begun."""


def take_turn(run: str, version: int, host: str, steps: Callable[[Handle[HostAttempt]], str]) -> State[Any]:
    """Carries out one attempt of a host of this process at a version; `steps` returns what to say when it is done."""
    here = host_here(host, run)
    mark_run(run, version, host)
    with here.turn:
        attempt = HostAttempt(here, version)
        if attempt.is_superseded:
            attempt.record_superseded()
            return Completed(
                name=names.SUPERSEDED, message=f"{host} serves version {here.replica.version} already, which is newer."
            )
        handle = Handle(attempt)
        try:
            said = steps(handle)
        except CancelAsked as asked:
            attempt.record_failed(asked)
            return Cancelled(message=str(asked))
        except Exception as failure:
            attempt.record_failed(failure)
            raise
        finally:
            handle.release()
    return Completed(message=said)


def bring_up_copy(attempt: Handle[HostAttempt]) -> None:
    """Fetch, apply, verify: everything before an engine is touched."""
    fetch(attempt)
    stop_if_cancelled(attempt.value, "apply")
    apply(attempt)
    verify(attempt)
    stop_if_cancelled(attempt.value, "the cut over")


def serve(attempt: Handle[HostAttempt]) -> str:
    """All of it: what is missing of the copy, the cut over, the record; returns what to say."""
    if not attempt.value.is_standing:
        bring_up_copy(attempt)
    reload(attempt)
    record(attempt)
    return summary(attempt.value, "serves")


def stop_if_cancelled(attempt: HostAttempt, step: str) -> None:
    """Raises CancelAsked when somebody cancelled the run that this is, before `step`. An attempt that began just now
    does not ask: nobody can have meant to cancel it, and each question is one more call of every host."""
    if sum(attempt.seconds.values()) < LOOK_AFTER_SECONDS:
        return
    context = FlowRunContext.get()
    flow_run = context.flow_run.id if context is not None and context.flow_run is not None else None
    if flow_run is not None and _is_cancelled(flow_run):
        raise CancelAsked(
            f"cancelled before {step}. {attempt.host.name} serves version {attempt.host.replica.version}, and its "
            "copies are whole."
        )


def _is_cancelled(flow_run: UUID) -> bool:
    try:
        with SyncClientContext.get_or_create() as context:
            state = context.client.read_flow_run(flow_run).state
    except UNREACHABLE as error:
        log.warning("Prefect does not answer; going on without it", error=str(error))
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def summary(attempt: HostAttempt, what: str) -> str:
    """What became of an attempt, with the time of each phase."""
    phases = ", ".join(f"{phase} {taken:.3f} s" for phase, taken in attempt.seconds.items())
    return f"{attempt.host.name} {what} version {attempt.version} ({phases or 'it did already'})."
