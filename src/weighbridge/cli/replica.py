"""`pull`, `verify`, `checkout`: a host's disk and the store, without an orchestrator."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from weighbridge import logs
from weighbridge.cli.options import (
    Base,
    Json,
    Layout,
    LogJson,
    ReplicaFolder,
    Reseed,
    Store,
    Trust,
    Version,
    lineage_of,
    neighbour_of,
    settings_of,
    store_of,
)
from weighbridge.cli.progress import showing
from weighbridge.cli.report import print_json, print_line, size
from weighbridge.errors import UsageError
from weighbridge.settings import Settings
from weighbridge.storage.checkout import checkout as rebuild
from weighbridge.storage.peers.pull import bring_up_from_peer
from weighbridge.storage.peers.verify import verify_peer
from weighbridge.storage.replica.pull import PullResult, bring_up
from weighbridge.storage.replica.verify import Report, verify_folder
from weighbridge.storage.verify_version import verify_version


def pull(
    *,
    store: Store = None,
    base: Base = None,
    replica: ReplicaFolder = None,
    version: Version = None,
    rollback: Annotated[bool, Parameter(negative=(), help="Go back to an older version.")] = False,
    reseed: Reseed = False,
    scrub: Annotated[bool, Parameter(negative=(), help="Digest every byte first, and repair what rotted.")] = False,
    copies: int | None = None,
    durability: str | None = None,
    trust: Trust = None,
    layout: Layout = None,
    allowed_age: float | None = None,
    json: Json = False,
    log_json: LogJson = False,
) -> None:
    """Bring a replica to a version from the store alone; `<replica>/current` is the folder to load.

    Parameters
    ----------
    copies
        2 keeps the last good version beside the current one; 1 saves the space.
    durability
        power survives a power cut; process (for tmpfs) only a killed process.
    allowed_age
        With --trust: how many seconds old the newest version may be.
    """
    settings = settings_of(
        ("store", "replica"),
        store=store,
        base=base,
        replica=replica,
        copies=copies,
        durability=durability,
        trust=trust,
        allowed_age=allowed_age,
        layout=layout,
    )
    assert settings.replica is not None
    logs.to_stderr(json_lines=log_json or settings.log_json)
    if settings.layout:
        _pull_from_neighbour(settings, version, scrub=scrub, refused=rollback or reseed, json=json)
        return
    chosen = store_of(settings)
    settings.hooks.reading(chosen.url, -1 if version is None else version)
    with showing("fetch") as on_progress:
        result = bring_up(
            settings.replica,
            store=chosen,
            base=settings.base,
            version=version,
            rollback=rollback,
            scrub=scrub,
            copies=settings.copies,
            durability=settings.durability,
            lock_seconds=settings.lock_deadline,
            foreign="reseed" if reseed else "refuse",
            trust=settings.trusted,
            threads=settings.encode_threads,
            on_progress=on_progress,
        )
    _told(result, settings.replica, json=json)


def _pull_from_neighbour(settings: Settings, version: int | None, *, scrub: bool, refused: bool, json: bool) -> None:
    assert settings.replica is not None
    if refused or settings.base is None:
        raise UsageError(
            "a replica that follows a neighbour needs --base, and goes neither back nor over to another run: give an "
            "empty folder for that. Nothing was started."
        )
    layout, foreign = neighbour_of(settings)
    settings.hooks.reading(foreign.url, -1 if version is None else version)
    result = bring_up_from_peer(
        settings.replica,
        layout=layout,
        foreign=foreign,
        base=settings.base,
        version=version,
        copies=settings.copies,
        durability=settings.durability,
        lock_seconds=settings.lock_deadline,
        scrub=scrub,
        threads=settings.encode_threads,
    )
    _told(result, settings.replica, json=json)


def _told(result: PullResult, replica: Path, *, json: bool) -> None:
    if json:
        print_json(result)
        return
    print_line(
        f"version {result.version} ({result.outcome}, from {result.from_version}), {size(result.fetched_bytes)} fetched"
        + (f", {result.repaired} parts repaired" if result.repaired else "")
    )
    for note in result.recovery.notes:
        print_line(f"  {note}")
    print_line(f"load {replica / 'current'}")


def verify(
    target: str,
    *,
    store: Store = None,
    trust: Trust = None,
    layout: Layout = None,
    base: Base = None,
    json: Json = False,
) -> None:
    """Prove a version, a replica or a checkpoint folder by its digests. Exits with 9 when a byte is not right.

    Parameters
    ----------
    target
        A version's number (its chain and shards in the store), a replica (both copies), or an HF folder. With --layout
        and --base: a neighbour's version, or an HF folder that should be its newest.
    """
    settings = settings_of(("store",), store=store, trust=trust, layout=layout, base=base)
    logs.to_stderr(json_lines=settings.log_json)
    if layout is not None:
        _verify_neighbour(settings, target, json=json)
        return
    lineage = lineage_of(settings)
    if _is_version(target):
        proof = verify_version(lineage, int(target))
        if json:
            print_json({"ok": True, "version": proof})
        else:
            print_line(f"version {proof.version}: {proof.manifests} manifests and {proof.shards} shards are right")
        return
    if not Path(target).is_dir():
        raise UsageError(f"{target} is neither a version's number nor a folder. Nothing was read.")
    report = verify_folder(Path(target), lineage, threads=settings.encode_threads, lock_seconds=settings.lock_deadline)
    _say(report, json=json)
    report.demand()


def _is_version(target: str) -> bool:
    """Whether `verify` is asked for a version: a number, and no folder of that name."""
    return target.isdecimal() and not Path(target).exists()


def _verify_neighbour(settings: Settings, target: str, *, json: bool) -> None:
    if settings.base is None:
        raise UsageError("missing: --base, on which a neighbour's deltas go. Nothing was read.")
    is_version = _is_version(target)
    layout, foreign = neighbour_of(settings)
    proof = verify_peer(
        layout,
        foreign,
        base=settings.base,
        version=int(target) if is_version else None,
        folder=None if is_version else Path(target),
    )
    if json:
        print_json({"ok": True, "version": proof})
        return
    print_line(
        f"version {proof.version} of {proof.layout}: {proof.deltas} deltas over {proof.tensors} tensors are right"
    )


def checkout(
    version: int,
    folder: Path,
    *,
    store: Store = None,
    base: Base = None,
    trust: Trust = None,
    json: Json = False,
    log_json: LogJson = False,
) -> None:
    """Rebuild a version as a whole HF checkpoint folder, proven by its state digest.

    Parameters
    ----------
    version
        The version's number.
    folder
        Where to; must be empty or not there yet.
    """
    settings = settings_of(("store",), store=store, base=base, trust=trust)
    logs.to_stderr(json_lines=log_json or settings.log_json)
    lineage = lineage_of(settings)
    with showing("fetch") as on_progress:
        result = rebuild(
            version,
            folder,
            lineage=lineage,
            base=settings.base,
            threads=settings.encode_threads,
            on_progress=on_progress,
        )
    if json:
        print_json(result)
    else:
        print_line(f"version {result.version} in {result.folder}, state {result.state_digest[:16]}")


def _say(report: Report, *, json: bool) -> None:
    if json:
        print_json({"ok": report.ok, "folders": report.folders, "faults": report.all_faults})
        return
    for folder in report.folders:
        right = "every byte is right" if not folder.faults else f"{len(folder.faults)} faults"
        print_line(f"{folder.folder}: version {folder.version}, {folder.parts} parts, {right}")
