"""A plan for a checkpoint folder whose shards are encoded elsewhere: the batches that a push from here would have, with
nothing in them. Reads headers, and of tied tensors the bytes. Must not know who encodes, nor Prefect."""

from collections.abc import Iterator

import numpy as np

from weighbridge.storage.batching import Batch, batches
from weighbridge.storage.checkpoint import Checkpoint
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.expectation import Expectation
from weighbridge.tasks.gather import admit_folder
from weighbridge.tasks.sharing import alone
from weighbridge.values import TensorSpec


def plan_folder(checkpoint: Checkpoint, expect: Expectation, *, shard_bytes: int) -> Iterator[Batch]:
    """Checks a folder as a push does, and yields its batches; their parts' arrays are as long as they say and take no
    memory. Raises GatherError, CheckpointError."""
    wanted = admit_folder(checkpoint, expect, alone(expect.specs))
    stored = (spec for name, spec in wanted.items() if name in expect.specs)
    return batches(((spec, _hollow(spec)) for spec in stored), shard_bytes=shard_bytes)


def _hollow(spec: TensorSpec) -> Bytes:
    return np.broadcast_to(np.zeros((), np.uint8), spec.nbytes)
