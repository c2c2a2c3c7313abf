"""`audit`: everything that a store holds, proven, or the first thing that is not what it must be."""

from typing import Annotated

from cyclopts import Parameter

from weighbridge.cli.options import Json, Store, Trust, settings_of, store_of
from weighbridge.cli.report import print_json, print_line, size
from weighbridge.storage.audit.audit import audit as prove


def audit(
    *,
    store: Store = None,
    chain: Annotated[bool, Parameter(negative=(), help="Only the manifests and the history's segments.")] = False,
    trust: Trust = None,
    json: Json = False,
) -> None:
    """Read everything in a store, and prove it. Exits with 9, naming the first break, when a byte is not right."""
    settings = settings_of(("store",), store=store, trust=trust)
    found = prove(store_of(settings), chain=chain, trust=settings.trusted)
    if json:
        print_json({"ok": found.ok, **{name: getattr(found, name) for name in found.__slots__}})
    else:
        print_line(
            f"head {found.head}: {found.manifests} manifests, {found.shards} shards, {found.anchors} anchors, "
            f"{found.records} records, {found.segments} segments, {found.marks} marks are right, {size(found.nbytes)}"
        )
        for note in found.notes:
            print_line(f"not proven: {note}")
        for finding in found.findings[1:]:
            print_line(f"also: {finding}")
    found.demand()
