"""`anchor`: a second form of a version, for those who come late or were away for long."""

import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from weighbridge import logs
from weighbridge.cli.options import Base, Json, LogJson, ReplicaFolder, Store, lineage_of, settings_of
from weighbridge.cli.progress import showing
from weighbridge.cli.report import print_json, print_line, size
from weighbridge.errors import UsageError
from weighbridge.settings import Settings
from weighbridge.storage.anchor import is_due, standing_anchor
from weighbridge.storage.anchor_sources import anchor_from_folder, anchor_from_store, held_version
from weighbridge.storage.clock import SystemClock
from weighbridge.storage.lineage import Lineage
from weighbridge.values import Manifest


def anchor(
    version: int | None = None,
    *,
    store: Store = None,
    base: Base = None,
    replica: ReplicaFolder = None,
    if_due: Annotated[bool, Parameter(name="--if-due", negative=(), help="Only when it pays.")] = False,
    every: Annotated[int | None, Parameter(help="With --if-due: after so many versions, however light.")] = None,
    json: Json = False,
    log_json: LogJson = False,
) -> None:
    """Make an anchor of a version: its whole state, proven, from which hosts that are far behind, and those without the
    base, go on. Safe while a trainer runs; hosts that keep up never read it.

    Parameters
    ----------
    version
        The version's number; by default what the replica holds, or the newest.
    """
    settings = settings_of(("store",), store=store, base=base, replica=replica)
    logs.to_stderr(json_lines=log_json or settings.log_json)
    lineage = lineage_of(settings)
    held = held_version(settings.replica) if settings.replica is not None else None
    if settings.replica is not None and version is None and held is None:
        raise UsageError(f"{settings.replica} holds no version by its own word. Nothing was made; pull it first.")
    chosen = version if version is not None else held[0] if held is not None else max(lineage.head(), 0)
    if if_due and not is_due(lineage, chosen, every_versions=every):
        _say(None, chosen, json=json)
        return
    standing = standing_anchor(lineage, chosen, clock=SystemClock())
    if standing is not None:
        _say(standing, chosen, json=json, made=False)
        return
    with tempfile.TemporaryDirectory(prefix="weighbridge-anchor-", dir=settings.spool) as spool:
        _say(_make(lineage, chosen, held, settings, Path(spool)), chosen, json=json)


def _make(lineage: Lineage, version: int, held: tuple[int, Path] | None, settings: Settings, spool: Path) -> Manifest:
    if version == 0 and settings.base is not None:
        return anchor_from_folder(lineage, 0, settings.base, spool=spool)
    if held is not None and held[0] == version:
        return anchor_from_folder(lineage, version, held[1], spool=spool)
    with showing("fetch") as on_progress:
        return anchor_from_store(
            lineage,
            version,
            base=settings.base,
            spool=spool,
            threads=min(2, settings.encode_threads),
            on_progress=on_progress,
        )


def _say(anchor: Manifest | None, version: int, *, json: bool, made: bool = True) -> None:
    if json:
        nbytes = 0 if anchor is None else anchor.wire_bytes
        print_json({"version": version, "made": made and anchor is not None, "wire_bytes": nbytes})
    elif anchor is None:
        print_line(f"no anchor of version {version} is due")
    else:
        already = "" if made else " stands already, whole"
        print_line(f"anchor of version {version}{already}: {size(anchor.wire_bytes)} in {len(anchor.shards)} shards")
