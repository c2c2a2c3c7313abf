"""Everything that the steps of a replica share, gathered once when it is opened. Must not know the steps."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from weighbridge.errors import CheckpointError
from weighbridge.storage.checkpoint import Checkpoint, open_checkpoint
from weighbridge.storage.clock import Clock
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import Disk
from weighbridge.storage.parts import cut
from weighbridge.storage.replica.fetch import Spool
from weighbridge.storage.replica.layout import Identity, Layout
from weighbridge.storage.replica.state import CopyState, FileMark, mark_file
from weighbridge.values import Part, PartKey


@dataclass(frozen=True)
class Site:
    """One replica's surroundings. `base` is the base checkpoint's folder, or None on a host that has none."""

    layout: Layout
    identity: Identity
    lineage: Lineage
    spool: Spool
    base: Path | None
    disk: Disk
    clock: Clock
    threads: int

    @property
    def kind(self) -> str:
        """The run's kind of digest."""
        return self.identity.digest_kind

    @cached_property
    def parts(self) -> dict[PartKey, Part]:
        """Every part of the model, as version 0 has it."""
        return {row.key: Part(row.key, row.dtype, row.nbytes) for row in self.lineage.manifest(0).rows}

    def folder(self, copy: str) -> Path:
        """Where a copy lies now: hidden, if it is the only one and dirty."""
        hidden = self.layout.hidden(copy)
        return hidden if hidden.is_dir() else self.layout.copy(copy)

    def open(self, copy: str) -> Checkpoint:
        """Opens a copy's folder; see `open_folder`."""
        return self.open_folder(self.folder(copy))

    def open_folder(self, folder: Path) -> Checkpoint:
        """Opens a folder. Raises CheckpointError, also when it has other tensors than the run's base."""
        checkpoint = open_checkpoint(folder)
        if {part.key: part for place in checkpoint.tensors.values() for part in cut(place.spec)} != self.parts:
            raise CheckpointError(f"{checkpoint.folder} has other tensors than the run's base; it holds another model")
        return checkpoint

    def save(self, state: CopyState) -> CopyState:
        """Writes a copy's state: the moment at which it becomes dirty, or clean."""
        self.disk.write_atomic(self.layout.state(state.copy), state.to_bytes())
        return state

    def stamp(self, checkpoint: Checkpoint, names: frozenset[str] | set[str]) -> dict[str, FileMark]:
        """Sets our own time of change on files of a copy, syncs them, and returns their marks."""
        heads: dict[str, int] = {}
        for place in checkpoint.tensors.values():
            heads[place.file] = min(place.start, heads.get(place.file, place.start))
        marks = {}
        for name in sorted(names):
            path = checkpoint.folder / name
            self.disk.set_mtime(path, self.clock.now_ns())
            self.disk.sync(path)
            marks[name] = mark_file(path, head=heads.get(name))
        return marks
