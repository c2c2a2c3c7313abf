"""What a neighbour's layout is: how a version is found, read, and written, in tensors' bytes before and after. Must not
know replicas, publishers or our own format."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from weighbridge.storage.clock import Clock
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.localdisk import Disk
from weighbridge.storage.stores.contract import Store
from weighbridge.values import TensorSpec

Specs = Mapping[str, TensorSpec]
"""The tensors of the base by name: the only ones there are, and the bound of everything that is read."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A tensor that a version changed. `old` and `new` are all its bytes, one-dimensional uint8, of equal size."""

    spec: TensorSpec
    old: Bytes
    new: Bytes


@dataclass(frozen=True, slots=True)
class Writing:
    """How to write: which delta (`xor` or `overwrite`) and checksum, where the layout leaves a choice, every how many
    versions an anchor, where the layout has them (0: none), and a folder of this process's own for files on the way."""

    spool: Path
    disk: Disk
    clock: Clock
    encoding: str = "xor"
    checksum: str = "xxh3-128"
    anchors: int = 0


class ForeignVersion(ABC):
    """One version as it stands in a store, its description read and checked, its tensors not yet. Thread-safe.

    `base` is the version that it changes; None where it is a whole state. `names` are the tensors that it has bytes of.
    `skips`: its publisher leaves numbers out in which nothing changed, so those right below it may be missing.
    """

    version: int
    skips: bool = False
    base: int | None
    names: tuple[str, ...]

    @abstractmethod
    def new_bytes(self, name: str, old: Bytes) -> Bytes:
        """A tensor's bytes in this version, from those in `base` (of any content where that is None), which stay.

        Raises PayloadCorrupt, DigestMismatch where the layout has a checksum, ShardCorrupt, StoreError; takes no more
        memory than the tensor's size allows.
        """


class Layout(ABC):
    """A layout, registered by name in `weighbridge.storage.peers.registry`."""

    name: ClassVar[str]

    @abstractmethod
    def newest(self, store: Store) -> int:
        """The newest version that stands whole, by its own marks; 0 when there is none. Raises StoreError."""

    @abstractmethod
    def open(self, store: Store, version: int, specs: Specs) -> ForeignVersion:
        """One version. Raises VersionUnknown, ManifestCorrupt or ShardCorrupt for what is not as the layout says."""

    def whole(self, store: Store, *, after: int, upto: int, specs: Specs) -> ForeignVersion | None:
        """The newest whole state above `after` and up to `upto` that stands beside deltas; None where there is none."""
        return None

    def below(self, store: Store, version: int) -> int:
        """The newest version that stands below one, for publishers that skip numbers; 0 when there is none."""
        return 0

    def demand(self, specs: Specs, writing: Writing) -> None:
        """Raises UsageError for tensors that this layout cannot carry, before anything is published."""
        return

    @abstractmethod
    def stands(self, store: Store, version: int) -> bool:
        """Whether a version was written to its end."""

    @abstractmethod
    def write(self, store: Store, version: int, changed: Iterable[Changed], writing: Writing, *, elements: int) -> None:
        """Writes a version (above 0) that leads from the one before it; `elements` are the whole model's. What makes it
        visible comes last. Safe to repeat after a death at any point. Raises StoreError, DiskFull.
        """

    def write_whole(
        self, store: Store, version: int, state: Iterable[tuple[TensorSpec, Bytes]], writing: Writing
    ) -> None:
        """Writes a version's whole state beside its delta, where the layout has such a thing."""
        return
