"""Which of a neighbour's versions lead from one version to another, and what they make of a tensor, folded. Only reads;
must not know where the old bytes come from."""

from collections.abc import Sequence

import structlog

from weighbridge.errors import ManifestCorrupt, VersionUnknown
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.peers.contract import ForeignVersion, Layout, Specs
from weighbridge.storage.stores.contract import Store

log = structlog.get_logger("weighbridge.peers")

MOST_VERSIONS = 1 << 16
"""More than this many versions are not folded at once: nobody is that far behind, and each is held open."""


def chain(layout: Layout, store: Store, *, after: int, upto: int, specs: Specs) -> tuple[ForeignVersion, ...]:
    """The versions that lead from `after` to `upto`, oldest first: deltas, or a whole state and the deltas after it.
    Numbers that a publisher skipped are stepped over.

    Raises VersionUnknown where the chain has a gap that no whole state bridges, and what opening a version raises.
    """
    found: list[ForeignVersion] = []
    at = upto
    while at > after:
        try:
            version = layout.open(store, at, specs)
        except VersionUnknown:
            whole = layout.whole(store, after=after, upto=upto, specs=specs)
            if whole is not None:
                kept = [one for one in found if one.version > whole.version]
                if (kept[-1].base if kept else upto) == whole.version:
                    return (whole, *reversed(kept))
            below = layout.below(store, at) if found and found[-1].skips else 0
            if not below:
                raise  # a version is lost, and no whole state stands above it
            log.warning("numbers that are not there changed nothing", layout=layout.name, above=below, upto=at)
            at = below
            continue
        found.append(version)
        if version.base is None:
            return tuple(reversed(found))
        if version.base < after or len(found) > MOST_VERSIONS:
            raise ManifestCorrupt(
                f"version {at} of layout {layout.name} in {store.url} goes on from {version.base}, and what is here is "
                f"{after}: no way leads on from it. Nothing was written."
            )
        at = version.base
    return tuple(reversed(found))


def touched(versions: Sequence[ForeignVersion]) -> tuple[str, ...]:
    """The tensors that any of the versions has bytes of, sorted."""
    return tuple(sorted({name for version in versions for name in version.names}))


def fold(versions: Sequence[ForeignVersion], name: str, old: Bytes) -> Bytes:
    """What the versions make of a tensor, one after the other. Raises like `ForeignVersion.new_bytes`."""
    for version in versions:
        if name in version.names:
            old = version.new_bytes(name, old)
    return old
