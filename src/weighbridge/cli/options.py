"""The options that several commands share, with one wording each, and how they become settings."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from weighbridge.errors import UsageError
from weighbridge.settings import Settings, load_settings
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.peers import contract as peers
from weighbridge.storage.peers.registry import get_layout
from weighbridge.storage.stores import contract as store_contract
from weighbridge.storage.stores import open_store

Store = Annotated[str | None, Parameter(name="--store", help="Where versions are kept: a directory or a URL.")]
Base = Annotated[Path | None, Parameter(name="--base", help="The base checkpoint, an HF folder: version 0.")]
ReplicaFolder = Annotated[Path | None, Parameter(name="--replica", help="This host's replica folder.")]
Run = Annotated[str | None, Parameter(name="--run", help="The run's id; by default the one that claimed the store.")]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="JSON instead of text.")]
Arrow = Annotated[Path | None, Parameter(name="--arrow", help="Write the answer to this file, as Arrow IPC.")]
Limit = Annotated[int | None, Parameter(name=["--limit", "-n"], help="At most so many.")]
Reseed = Annotated[
    bool, Parameter(name="--reseed", negative=(), help="Seed a replica of another run or base anew, for this one.")
]
LogJson = Annotated[bool, Parameter(name="--log-json", negative=(), help="Events as JSON lines on standard error.")]
Layout = Annotated[
    str | None, Parameter(name="--layout", help="A neighbour's layout: pull-weights, skyrl or trl. See docs/PEERS.md.")
]
Trust = Annotated[
    str | None, Parameter(name="--trust", help="Public keys, with commas between: only what they signed is believed.")
]
Version = Annotated[int | None, Parameter(name="--version", help="The version; by default the newest.")]


def checked_limit(limit: int | None) -> int | None:
    """A limit that can be one. Raises UsageError."""
    if limit is not None and limit < 1:
        raise UsageError(f"-n {limit} asks for nothing: give a number above 0, or none for everything.")
    return limit


def store_of(settings: Settings) -> store_contract.Store:
    """The store that the settings name, spoken to as they say."""
    if settings.store is None:
        raise UsageError("missing: --store (or WEIGHBRIDGE_STORE). Nothing was started.")
    return open_store(settings.store, profile=settings.profile)


def neighbour_of(settings: Settings) -> tuple[peers.Layout, store_contract.Store]:
    """The one layout that is read, and the store that it lies in. Raises UsageError for none, or several."""
    if len(settings.layout) != 1:
        raise UsageError(f"one layout is read at a time, not {len(settings.layout)}. Nothing was started.")
    if settings.trust:
        raise UsageError("a neighbour's versions are not signed, so --trust refuses all of them. Nothing was started.")
    place = settings.layout_store or settings.store
    if place is None:
        raise UsageError("missing: --store (or WEIGHBRIDGE_STORE). Nothing was started.")
    return get_layout(settings.layout[0]), open_store(place, profile=settings.profile)


def lineage_of(settings: Settings) -> Lineage:
    """The versions in the store that the settings name, believed as they say."""
    return Lineage(store_of(settings), trust=settings.trusted)


def settings_of(needed: tuple[str, ...] = (), /, **arguments: Any) -> Settings:
    """Settings from arguments, environment and files. Raises UsageError when one that is needed was not given."""
    settings = load_settings(arguments)
    missing = [name for name in needed if getattr(settings, name) is None]
    if missing:
        options = ", ".join(f"--{name.replace('_', '-')} (or WEIGHBRIDGE_{name.upper()})" for name in missing)
        raise UsageError(f"missing: {options}. Nothing was started.")
    return settings
