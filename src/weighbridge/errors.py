"""Every error weighbridge raises on purpose: one tree, drawn here. A message says what happened, what was kept safe,
and what to do. Each class also derives from the built-in that it means, and carries the exit code of the command line.

WeighbridgeError                     1
├── UsageError (ValueError)          2   arguments or settings that cannot be right
├── CheckpointError (ValueError)     3   a checkpoint folder that cannot be read as one
│   └── HeaderError                  3   a safetensors header that does not describe its file
├── GatherError (ValueError)         4   pushed tensors do not match the base
├── StoreError (OSError)             5   the store failed, or refused
│   ├── ObjectMissing (LookupError)  5   an object that was asked for is not there
│   ├── ObjectExists (FileExistsError) 5 an object stands where one was to be created
│   ├── StoreRefused                 5   the store said no (full, denied, no such bucket): asking again now is no use
│   │   └── ObjectTooLarge           5   an object is larger than any of its kind
│   ├── StoreUnfit                   5   the store does not honour put-if-absent
│   ├── CommitConflict               6   another writer's commit stands where ours should
│   │   └── WriterOvertaken          6   another writer took this run over; this one stops for good
│   └── CommitStateUnknown           7   a commit was sent and its outcome could not be read
├── LineageError (LookupError)       8   a version, run or base that is not the one meant
│   ├── ForeignRun                   8   the root or replica belongs to another run or base
│   ├── ReplicaAhead                 8   the replica holds a version that the store does not have
│   └── VersionUnknown               8   a version that was never published
│       └── VersionRetired           8   a version whose shards were collected
├── CorruptData (ValueError)         9   bytes that do not prove what they claim
│   ├── ManifestCorrupt              9
│   ├── ShardCorrupt                 9
│   ├── PayloadCorrupt               9   a codec met input that no encoder writes
│   ├── DigestMismatch               9   tensors do not have the digest they must have
│   └── NotTrusted                  16   a version that is not proven to be the trainer's
│       ├── Unsigned                16
│       ├── ForeignSignature        16   signed by no trusted key, or changed after it was signed
│       ├── Replayed                16   rightly signed, as another version or of another run
│       ├── RolledBack              16   the store shows an older or other history than it did before
│       └── Frozen                  16   the newest version is older than allowed
├── ReplicaError (RuntimeError)     10   a replica that cannot go on by itself
│   ├── ReplicaLocked (TimeoutError) 11  another process owns the replica
│   └── DiskFull (OSError)          12   no room; the last good version is kept
├── EngineError (RuntimeError)      13   the engine refused, failed, or did not answer
├── OrchestrationError (RuntimeError) 14 Prefect could not be reached or could not run what it was asked
│   └── NameTaken                   14   another process, on whichever machine, serves under this name
├── SyncIncomplete (RuntimeError)   15   published, but fewer hosts serve it than the policy asks for
└── RankLost (TimeoutError)         17   a rank of the trainer did not do its part in time
"""

import re
from typing import ClassVar

_WHAT_WAS_KEPT = re.compile(r"[.;,:] [Nn]othing (was|is|were) ")


def what_happened(error: object) -> str:
    """The first part of a message, for another one that says itself what was kept safe and what to do."""
    return _WHAT_WAS_KEPT.split(str(error), maxsplit=1)[0].removesuffix(".")


class WeighbridgeError(Exception):
    """Root of the tree. Raised itself only where no child fits."""

    exit_code: ClassVar[int] = 1


class UsageError(WeighbridgeError, ValueError):
    """Arguments or settings that cannot be right."""

    exit_code = 2


class CheckpointError(WeighbridgeError, ValueError):
    """A folder that cannot be read as an HF checkpoint."""

    exit_code = 3


class HeaderError(CheckpointError):
    """A safetensors header that does not describe its file."""


class GatherError(WeighbridgeError, ValueError):
    """Pushed tensors that do not match the base; names all of them."""

    exit_code = 4


class StoreError(WeighbridgeError, OSError):
    """The store failed, or refused."""

    exit_code = 5


class ObjectMissing(StoreError, LookupError):
    """An object that was asked for is not there."""


class ObjectExists(StoreError, FileExistsError):
    """An object stands where one was to be created; it may be our own, from an attempt whose reply was lost."""


class StoreRefused(StoreError):
    """The store said no, and did nothing: it is full, access is denied, the bucket is not there. Asking again at once
    would not help; every other StoreError may pass by itself."""


class ObjectTooLarge(StoreRefused):
    """An object is larger than any of its kind that is written here; it was not read."""


class StoreUnfit(StoreError):
    """The store does not honour put-if-absent, so no commit on it would be safe."""


class CommitConflict(StoreError):
    """Another writer's commit stands where ours should; nothing of ours is visible."""

    exit_code = 6


class WriterOvertaken(CommitConflict):
    """Another writer took this run over; this writer stops for good."""


class CommitStateUnknown(StoreError):
    """A commit was sent and its outcome could not be read back; the next push settles it first."""

    exit_code = 7


class LineageError(WeighbridgeError, LookupError):
    """A version, run or base that is not the one meant."""

    exit_code = 8


class ForeignRun(LineageError):
    """The root or the replica belongs to another run, or to another base."""


class ReplicaAhead(LineageError):
    """The replica holds a version that the store does not have: the store was rewound, or it is another."""


class VersionUnknown(LineageError):
    """A version that was never published."""


class VersionRetired(VersionUnknown):
    """A version whose shards were collected; its manifest remains as history."""


class CorruptData(WeighbridgeError, ValueError):
    """Bytes that do not prove what they claim. Nothing was written from them."""

    exit_code = 9


class ManifestCorrupt(CorruptData):
    """A manifest that cannot be parsed, or whose own digest differs."""


class ShardCorrupt(CorruptData):
    """A shard whose size, digest or container is not the one its manifest names."""


class PayloadCorrupt(CorruptData):
    """A codec met input that no encoder writes."""


class DigestMismatch(CorruptData):
    """Tensors that do not have the digest they must have."""


class NotTrusted(CorruptData):
    """A version that is not proven to be the trainer's, for a reader who trusts keys. What is served stays."""

    exit_code = 16


class Unsigned(NotTrusted):
    """A version without a signature where only signed ones are believed."""


class ForeignSignature(NotTrusted):
    """A version signed by no trusted key, or changed after it was signed."""


class Replayed(NotTrusted):
    """A rightly signed manifest that stands where another version's, or another run's, should."""


class RolledBack(NotTrusted):
    """A store that shows an older or another history than it showed this replica before."""


class Frozen(NotTrusted):
    """The newest version that a store shows is older than allowed: newer ones may be held back."""


class ReplicaError(WeighbridgeError, RuntimeError):
    """A replica that cannot go on by itself."""

    exit_code = 10


class ReplicaLocked(ReplicaError, TimeoutError):
    """Another process owns the replica; the message names it."""

    exit_code = 11


class DiskFull(ReplicaError, OSError):
    """No room on the host's disk; the last good version is kept and stays loadable."""

    exit_code = 12


class EngineError(WeighbridgeError, RuntimeError):
    """The engine refused, failed, or did not answer in time."""

    exit_code = 13


class OrchestrationError(WeighbridgeError, RuntimeError):
    """Prefect could not be reached, or could not run what it was asked to."""

    exit_code = 14


class NameTaken(OrchestrationError):
    """Another process, on whichever machine, serves under this name."""


class SyncIncomplete(WeighbridgeError, RuntimeError):
    """The version is published, but fewer hosts serve it than the policy asks for; `result` has the push's result."""

    exit_code = 15

    def __init__(self, message: str, *, result: object = None) -> None:
        super().__init__(message)
        self.result = result


class RankLost(WeighbridgeError, TimeoutError):
    """A rank of the trainer did not do its part in time; every rank takes part in every push."""

    exit_code = 17
