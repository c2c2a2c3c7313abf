"""The values that travel between the floors: frozen, slotted, with units in their names. Imports nothing of ours.

Sizes are bytes, offsets are bytes from a tensor's first byte, times of day are nanoseconds since the epoch (UTC),
durations are seconds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

Label = str | int | float | bool | None

# Bits an element takes, by the dtype names that safetensors writes. Any other name is opaque bytes.
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


def item_bytes(dtype: str) -> int:
    """Bytes of the unit in which a dtype is compared and counted: 1 for sub-byte and unknown dtypes (opaque bytes)."""
    return max(1, DTYPE_BITS.get(dtype, 8) // 8)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor is, without its bytes. `shape` () is a scalar; a zero in it makes an empty tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def elements(self) -> int:
        """Elements as the shape counts them (a sub-byte dtype packs several into a byte)."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, order=True)
class PartKey:
    """Names a part: a tensor, or the slice of a large one that starts at byte `offset`."""

    tensor: str
    offset: int


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor, or a slice of at most PART_BYTES of a larger one: the unit of digest, verification and repair."""

    key: PartKey
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class PartRow:
    """One changed part in a manifest.

    `shape` is the whole tensor's. `changed` counts units of `item_bytes(dtype)` that differ. `before` and `after` are
    raw digests of the part, `tensor_digest` the raw digest of the whole tensor after the change. `shard` indexes
    `Manifest.shards`; -1 with codec "base" means that the bytes are the base checkpoint's own.
    """

    key: PartKey
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    codec: str
    shard: int
    changed: int
    before: bytes
    after: bytes
    tensor_digest: bytes


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One payload object of a version: its name within the version's folder, size in bytes and raw digest."""

    name: str
    nbytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """The commit of one version. docs/FORMAT.md gives its bytes; `storage/manifest.py` reads and writes them.

    `parent_digest` is the parent manifest's own digest (hex blake3), "" for version 0. `state_digest` is hex, over all
    parts of the whole state. `model_bytes` and `model_elements` are those of the whole model. `aliases` maps a tied
    tensor's name to the name under which it is stored. `files` names the shard that carries small non-tensor files
    (version 0 and anchors), or "". `digest` is the manifest's own (hex blake3), known only once it was serialised.
    """

    run_id: str
    version: int
    parent: int
    parent_digest: str
    writer: str
    commit_id: str
    created_ns: int
    digest_kind: str
    state_digest: str
    model_bytes: int
    model_elements: int
    tensors: int
    shards: tuple[ShardInfo, ...]
    rows: tuple[PartRow, ...]
    labels: Mapping[str, Label] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    files: str = ""
    kind: str = "delta"
    format_version: int = 1
    digest: str = ""
    signature: str = ""

    @property
    def wire_bytes(self) -> int:
        """Bytes of all payload shards."""
        return sum(s.nbytes for s in self.shards)

    @property
    def changed_elements(self) -> int:
        """Changed units over all rows."""
        return sum(r.changed for r in self.rows)


@dataclass(frozen=True, slots=True)
class HostRecord:
    """How one attempt of a host at a version went; immutable, one object in the store each.

    `outcome` is "served", "failed", "superseded" or "missed" (the rollout's word for a host that never answered).
    `stage` is the last state of the cut over that was reached. `seconds` gives each phase's duration, "pause" included.
    `repaired` counts parts repaired from the store. `by` says who wrote it: "host", "pull" or "rollout". `head` is the
    newest version that its writer knew of when it ended, never below `version`; records are kept in its order.
    """

    run_id: str
    host: str
    version: int
    attempt: str
    outcome: str
    stage: str
    from_version: int
    state_digest: str
    started_ns: int
    ended_ns: int
    fetched_bytes: int
    repaired: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    engine: str = "none"
    error: str = ""
    by: str = "host"
    head: int = -1

    def __post_init__(self) -> None:
        """A writer that knew of no newer version than its own need not say so."""
        object.__setattr__(self, "head", max(self.head, self.version))


@dataclass(frozen=True, slots=True)
class HostOutcome:
    """What a push reports of one host: its last record's outcome, the version it serves, and why if it failed."""

    host: str
    outcome: str
    version: int
    seconds: Mapping[str, float]
    error: str = ""


@dataclass(frozen=True, slots=True)
class PushResult:
    """What a push did, for the trainer's log.

    `density` is changed units over all units, `seconds` the duration of each phase, `outcome` is "published" (no hosts
    asked), "complete", "partial" or "healed", `hosts` one entry a host asked.
    """

    version: int
    density: float
    changed_elements: int
    model_bytes: int
    wire_bytes: int
    seconds: Mapping[str, float]
    outcome: str
    hosts: tuple[HostOutcome, ...] = ()
