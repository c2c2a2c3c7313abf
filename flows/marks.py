"""Marks flow runs with what they are about, for people who filter by it, and for automations and sweeps that must find
a run when its process is gone. Must not know what the flows do."""

from contextlib import AbstractContextManager

from prefect import tags
from prefect.context import FlowRunContext, SyncClientContext, TagsContext

from weighbridge.flows import names


def marked(run: str, version: int) -> AbstractContextManager[set[str]]:
    """Flow runs that begin within it carry their training run and version from their first event on."""
    return tags(names.run_tag(run), names.version_tag(version))


def steps_unmarked() -> TagsContext:
    """Within it, tasks do not carry what their flow run is marked with: one with tags asks the server for its turn
    among all with that tag, and fails when there is no server, though there is no limit to keep."""
    return TagsContext(current_tags=set())


def mark_run(run: str, version: int, host: str | None = None) -> None:
    """Marks the calling flow run now, where it was not from the first, as when somebody started it from the UI."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    ours, standing = {names.run_tag(run), names.version_tag(version)}, set(context.flow_run.tags)
    ours |= set() if host is None else {names.host_tag(host)}
    if not ours <= standing:
        with SyncClientContext.get_or_create() as connection:
            connection.client.update_flow_run(context.flow_run.id, tags=sorted(standing | ours))
