"""The way to Prefect's API from one thread: where it is, the settings that our flows run under, and our log lines on
the run that they belong to. Must not know what runs; changes no profile and no setting outside its context."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.context import FlowRunContext, SyncClientContext, TaskRunContext
from prefect.exceptions import PrefectException
from prefect.logging.handlers import APILogHandler
from prefect.settings import (
    PREFECT_API_REQUEST_TIMEOUT,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_RESULTS_PERSIST_BY_DEFAULT,
    PREFECT_TASKS_DEFAULT_NO_CACHE,
    PREFECT_TASKS_DEFAULT_PERSIST_RESULT,
    temporary_settings,
)

from weighbridge.errors import OrchestrationError
from weighbridge.flows.server import ensure_server, where_is

UNREACHABLE = (httpx.HTTPError, PrefectException, RuntimeError, OSError)
"""What a Prefect client raises when its server cannot be reached, or does not do as asked."""

_SETTINGS = {
    # A sync flow's heartbeat thread is joined in steps of a second; who died is found by our own sweep instead.
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
    # Nor may one that hangs hold up a step: a cancel is looked for between them.
    PREFECT_API_REQUEST_TIMEOUT: 15.0,
    # A server lost in mid-flow then costs seconds, not the 69 of the default, before the trainer hears of it.
    PREFECT_CLIENT_MAX_RETRIES: 2,
    PREFECT_TASKS_DEFAULT_NO_CACHE: True,
    PREFECT_TASKS_DEFAULT_PERSIST_RESULT: False,
    PREFECT_RESULTS_PERSIST_BY_DEFAULT: False,
}


def find_api(home: Path | None = None, *, start: bool = True) -> str:
    """The API's URL: what Prefect itself is set to, else the embedded server's, which is started unless told not to.

    Raises OrchestrationError when there is none.
    """
    if chosen := PREFECT_API_URL.value():
        return str(chosen)
    if start:
        return ensure_server(home).api_url
    if (info := where_is(home)) is not None:
        return info.api_url
    raise OrchestrationError(
        "no Prefect server runs here. Run `weighbridge server start`, or set PREFECT_API_URL. What is published stays "
        "published, and hosts follow the store by themselves."
    )


@contextmanager
def connected(api_url: str) -> Iterator[SyncPrefectClient]:
    """Runs flows of this thread against one server, over one client. Enter it in each thread that runs a flow.

    Raises OrchestrationError at once when the server does not answer.
    """
    send_logs_to_runs()
    with ExitStack() as stack:
        stack.enter_context(temporary_settings({PREFECT_API_URL: api_url, **_SETTINGS}))
        try:
            client = stack.enter_context(SyncClientContext()).client
        except UNREACHABLE as error:
            raise OrchestrationError(
                f"the Prefect server at {httpx.URL(api_url).copy_with(userinfo=b'')} does not answer: {error} Nothing "
                "was started there; check that it runs (`weighbridge server where`), then try again."
            ) from error
        yield client


class _RunLogHandler(APILogHandler):
    """Prefect's own handler, for lines that are written inside a run; others are none of the server's business."""

    def emit(self, record: logging.LogRecord) -> None:
        if FlowRunContext.get() is not None or TaskRunContext.get() is not None:
            super().emit(record)


def send_logs_to_runs() -> None:
    """Lets lines of our loggers appear on the Prefect run in which they are written; once a process is enough."""
    ours = logging.getLogger("weighbridge")
    if not any(isinstance(handler, _RunLogHandler) for handler in ours.handlers):
        ours.addHandler(_RunLogHandler())
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)
    for chatty in ("httpx", "httpcore"):
        if logging.getLogger(chatty).level == logging.NOTSET:
            logging.getLogger(chatty).setLevel(logging.WARNING)
