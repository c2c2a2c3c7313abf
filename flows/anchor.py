"""Anchor: upkeep of a training run, carried out by its steward. Makes an anchor of the newest version when one is due.
Safe beside a running trainer, hosts, and itself: an anchor is created once."""

import tempfile
from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import State
from prefect.states import Completed

from weighbridge.flows import names
from weighbridge.flows.context import base_here, store_here
from weighbridge.flows.ours import our_flow
from weighbridge.storage.anchor import is_due
from weighbridge.storage.anchor_sources import anchor_from_store
from weighbridge.storage.lineage import Lineage


@our_flow(name=names.ANCHOR, flow_run_name="anchor of {run}")
def anchor(run: str, every_versions: int | None = None) -> State[Any]:
    """Makes an anchor of the newest version if the deltas since the last one weigh more than it would, or are
    `every_versions` in number."""
    lineage = Lineage(store_here(run))
    version = max(lineage.head(), 0)
    if not is_due(lineage, version, every_versions=every_versions):
        return Completed(message=f"No anchor of version {version} is due.")
    with tempfile.TemporaryDirectory(prefix="weighbridge-anchor-") as spool:
        made = anchor_from_store(lineage, version, base=base_here(run), spool=Path(spool))
    return Completed(message=f"Version {version} has an anchor of {made.wire_bytes:,} bytes.")
