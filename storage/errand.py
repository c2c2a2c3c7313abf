"""An errand: all that a worker on another machine must be told to encode one shard of a checkpoint folder. Names and
places only, so that it can be sent about; no tensors, no credentials. Must not know who carries it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weighbridge.storage.batching import Batch
from weighbridge.storage.signing import Trust
from weighbridge.storage.stores.profile import Profile
from weighbridge.values import PartKey

Carrier = Literal["dask", "ray"]


@dataclass(frozen=True, slots=True)
class Errand:
    """One shard's work: `parts` of the tensors in `folder`, against version `parent` of the run in `store`.

    `whole` are the tensors whose own digest is due with this shard. `folder` and `base` are the same for every worker,
    on a file system that all of them see.
    """

    index: int
    parts: tuple[PartKey, ...]
    whole: tuple[str, ...]
    site: "ErrandSite"


@dataclass(frozen=True, slots=True)
class ErrandSite:
    """What all errands of one push have in common; see `Errand`. `spool` is a folder on each worker's own disk, or None
    for its temporary one."""

    folder: Path
    base: Path
    store: str
    profile: Profile
    trust: Trust | None
    parent: int
    parent_digest: str
    commit_id: str
    spool: Path | None

    def errand(self, batch: Batch) -> Errand:
        """The errand that a batch stands for; the batch's bytes are not looked at."""
        names = tuple(name for name, _ in batch.whole)
        return Errand(batch.index, tuple(part.part.key for part in batch.parts), names, self)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Who carries the errands of a push: a kind of cluster, and where it is (None: one of this machine's own, for this
    push)."""

    carrier: Carrier
    address: str | None
    workers: int
    site: ErrandSite
