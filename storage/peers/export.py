"""Writes neighbours' layouts beside our own, a version at a time, from the bytes before and after it that a publisher
holds. Must not know how they were proven, nor what was published before."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from weighbridge.errors import StoreError, UsageError
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.peers.contract import Changed, Layout, Specs, Writing
from weighbridge.storage.stores.contract import Store
from weighbridge.values import TensorSpec

log = structlog.get_logger("weighbridge.peers")


@dataclass(frozen=True, slots=True)
class Export:
    """One layout, and the root under which it is written."""

    layout: Layout
    store: Store
    writing: Writing

    def demand(self, specs: Specs) -> None:
        """Raises UsageError unless the layout can carry the tensors. Asked before anything is published."""
        self.layout.demand(specs, self.writing)

    def begin(self, version: int) -> None:
        """Raises UsageError unless the store has all that a publisher whose snapshot begins at `version` can no longer
        write."""
        if version > 0 and not self.layout.stands(self.store, version):
            raise UsageError(
                f"{self.store.url} lacks version {version} of layout {self.layout.name}, where this trainer begins: "
                "an anchor skipped it, and it cannot be written any more. Nothing was published; leave the layout out "
                "or begin a new root."
            )

    def write(
        self,
        version: int,
        *,
        changed: Callable[[], Iterable[Changed]],
        state: Callable[[], Iterable[tuple[TensorSpec, Bytes]]],
        elements: int,
    ) -> None:
        """Writes a version that is committed in our own format, unless it stands already. `changed` and `state` (of all
        tensors, after the version) are asked for when they are needed. Raises StoreError, UsageError, DiskFull."""
        writing = self.writing
        writing.disk.make_folder(writing.spool)
        try:
            if self.layout.stands(self.store, version):
                return
            self.layout.write(self.store, version, changed(), writing, elements=elements)
            if writing.anchors and version % writing.anchors == 0:
                self.layout.write_whole(self.store, version, state(), writing)
        except StoreError as error:
            raise type(error)(
                f"version {version} is committed and stands, but its {self.layout.name} form in {self.store.url} could "
                f"not be written: {error} The next push writes it first."
            ) from error
        log.info("written for neighbours", layout=self.layout.name, version=version, store=self.store.url)
