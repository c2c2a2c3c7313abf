"""Proves a neighbour's versions over a base, and a folder against one of them. Only reads; must not know replicas."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weighbridge.errors import DigestMismatch
from weighbridge.storage.checkpoint import Checkpoint, open_checkpoint
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.peers.chain import chain, fold, touched
from weighbridge.storage.peers.contract import Layout
from weighbridge.storage.stores.contract import Store


@dataclass(frozen=True, slots=True)
class PeerProof:
    """What was proven: every delta from the base, or from the newest whole state, to `version`."""

    layout: str
    version: int
    deltas: int
    tensors: int


def verify_peer(
    layout: Layout, foreign: Store, *, base: Path, version: int | None = None, folder: Path | None = None
) -> PeerProof:
    """Applies every delta up to a version (None: the newest) to the base, a tensor at a time, in memory, and compares
    the result with `folder`'s tensors where one is given.

    Raises what reading a version raises, and DigestMismatch naming the tensors that `folder` has otherwise.
    """
    checkpoint = open_checkpoint(base)
    other = None if folder is None else open_checkpoint(folder)
    specs = checkpoint.specs()
    target = layout.newest(foreign) if version is None else version
    versions = chain(layout, foreign, after=0, upto=target, specs=specs)
    names = touched(versions)
    changed = set(names)
    wrong = [
        name
        for name in (names if other is None else specs)
        if not _same(other, name, fold(versions, name, checkpoint.read(name)) if name in changed else None, checkpoint)
    ]
    if wrong or (other is not None and other.specs() != specs):
        raise DigestMismatch(
            f"{folder} is not version {target} of layout {layout.name} in {foreign.url}: {len(wrong)} tensors differ "
            f"({', '.join(wrong[:5])}). Nothing was changed."
        )
    return PeerProof(layout.name, target, len(versions), len(names))


def _same(other: Checkpoint | None, name: str, new: Bytes | None, base: Checkpoint) -> bool:
    if other is None:
        return True
    if name not in other.tensors:
        return False
    return np.array_equal(base.view(name) if new is None else new, other.view(name))
