"""What this process brings to runs that name only a run, a version and hosts: its own hosts, and the stores it may use.
A flow's parameters carry neither credentials nor folders. Must not know Prefect."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from weighbridge.errors import ForeignRun, OrchestrationError
from weighbridge.storage.retention import GRACE_SECONDS
from weighbridge.storage.stores.contract import Store
from weighbridge.tasks.host import Host

Known = TypeVar("Known")

SyncCheckpoint = Callable[[Sequence[str]], str]
"""Publishes the checkpoint that this process was started with and brings hosts to it (none: those it was started with);
returns what to say."""

KEPT = 100
"""Of the last versions, unless somebody says another number."""


@dataclass(frozen=True, slots=True)
class Retention:
    """The least that a run's gc keeps here, whatever it is asked for: so many of the last versions, and what a host
    that has been silent for so long may fetch."""

    keep: int = KEPT
    grace_seconds: float = GRACE_SECONDS


_turn = threading.Lock()
_hosts: dict[str, Host] = {}
# Lists, of which the last counts: a rollout may go on beside the next push, and either may end first.
_stores: dict[str, list[Store]] = {}
_bases: dict[str, list[Path]] = {}
_retentions: dict[str, list[Retention]] = {}
_checkpoints: dict[str, list[SyncCheckpoint]] = {}


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
def using_store(
    run: str, store: Store, *, base: Path | None = None, retention: Retention | None = None
) -> Iterator[Store]:
    """Lets rollouts and upkeep of this process find the store of a training run, and its base's folder and what is
    kept of it if given."""
    with (
        _among(_stores, run, store),
        nullcontext() if base is None else _among(_bases, run, base),
        nullcontext() if retention is None else _among(_retentions, run, retention),
    ):
        yield store


@contextmanager
def _among(known: dict[str, list[Known]], run: str, one: Known) -> Iterator[None]:
    with _turn:
        known.setdefault(run, []).append(one)
    try:
        yield
    finally:
        with _turn:
            known[run].remove(one)
            if not known[run]:
                del known[run]


@contextmanager
def using_checkpoint(run: str, sync: SyncCheckpoint) -> Iterator[None]:
    """Lets runs of this process sync the checkpoint of a training run."""
    with _among(_checkpoints, run, sync):
        yield


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
        return _stores[run][-1]
    except KeyError:
        known = ", ".join(sorted(_stores)) or "none"
        raise OrchestrationError(
            f"this process has no store for run {run!r} (known: {known}). Nothing was changed."
        ) from None


def base_here(run: str) -> Path | None:
    """The folder of a training run's base, if this process was given one."""
    return _bases[run][-1] if run in _bases else None


def retention_here(run: str) -> Retention:
    """What is kept of a training run at least."""
    return _retentions[run][-1] if run in _retentions else Retention()


def checkpoint_here(run: str) -> SyncCheckpoint:
    """What syncs the checkpoint of a training run. Raises OrchestrationError when this process was given none."""
    try:
        return _checkpoints[run][-1]
    except KeyError:
        raise OrchestrationError(
            f"this process was given no checkpoint of run {run!r}. Nothing was published; start its steward with "
            "--checkpoint."
        ) from None
