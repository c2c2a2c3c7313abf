"""What this process brings to runs that name only a run, a version and hosts: its own hosts, and the stores it may use.
A flow's parameters carry neither credentials nor folders. Must not know Prefect."""

from collections.abc import Iterator
from contextlib import contextmanager

from weighbridge.errors import ForeignRun, OrchestrationError
from weighbridge.storage.stores.contract import Store
from weighbridge.tasks.host_attempt import Host

_hosts: dict[str, Host] = {}
_stores: dict[str, Store] = {}


@contextmanager
def hosting(host: Host) -> Iterator[Host]:
    """Lets host-sync runs of this process reach a host, and its store."""
    if host.name in _hosts:
        raise OrchestrationError(f"this process already serves a host named {host.name!r}. Nothing was started.")
    _hosts[host.name] = host
    try:
        with using_store(host.run_id, host.store):
            yield host
    finally:
        del _hosts[host.name]


@contextmanager
def using_store(run: str, store: Store) -> Iterator[Store]:
    """Lets rollouts of this process find the store of a training run."""
    before = _stores.get(run)
    _stores[run] = store
    try:
        yield store
    finally:
        if before is None:
            _stores.pop(run, None)
        else:
            _stores[run] = before


def host_here(name: str, run: str) -> Host:
    """A host of this process. Raises OrchestrationError when it is not, ForeignRun when it follows another run."""
    host = _hosts.get(name)
    if host is None:
        served = ", ".join(sorted(_hosts)) or "none"
        raise OrchestrationError(
            f"host {name!r} is not served by this process (served: {served}). Nothing was changed."
        )
    if host.run_id != run:
        raise ForeignRun(
            f"host {name!r} follows run {host.run_id}, and was asked for run {run}. Nothing was changed; start it with "
            "that run's store."
        )
    return host


def store_here(run: str) -> Store:
    """The store of a training run. Raises OrchestrationError when this process was given none."""
    try:
        return _stores[run]
    except KeyError:
        known = ", ".join(sorted(_stores)) or "none"
        raise OrchestrationError(
            f"this process has no store for run {run!r} (known: {known}). Nothing was changed."
        ) from None
