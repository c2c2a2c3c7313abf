"""What a patch makes of a part, proven before anything is written: its digest, and several patches folded into one.

Pure: the old bytes stay as they are, the caller journals and scatters. Must not know replicas, files or manifests.
"""

from collections.abc import Callable, Sequence

import numpy as np

from weighbridge.errors import PayloadCorrupt
from weighbridge.storage.codecs import kernels
from weighbridge.storage.codecs.contract import CHUNK_BYTES, Bytes, Patch
from weighbridge.storage.digests import new_hasher


def patched_digest(old: Bytes, patch: Patch, *, digest_kind: str) -> bytes:
    """Raw digest of a part as it will be once `patch` was applied to `old`.

    Goes through the part in pieces that stay in the processor's cache, and needs no memory but one of them. Raises
    PayloadCorrupt for a patch that does not fit the part.
    """
    hasher = new_hasher(digest_kind)
    kernels.check_patch(patch, old.size)
    if patch.positions is None:
        hasher.update(patch.values.data)
        return hasher.digest()
    scratch = np.empty(min(CHUNK_BYTES, old.size), np.uint8)
    cursor = 0
    for start in range(0, old.size, CHUNK_BYTES):
        chunk = scratch[: min(CHUNK_BYTES, old.size - start)]
        np.copyto(chunk, old[start : start + CHUNK_BYTES])
        cursor = kernels.write_stretch(chunk, start // patch.width, patch, cursor)
        hasher.update(chunk.data)
    if cursor != patch.positions.size:
        raise PayloadCorrupt("a patch whose positions do not ascend; nothing was written. Fetch the shard again.")
    return hasher.digest()


def fold(old: Bytes, steps: Sequence[Callable[[Bytes], Patch]]) -> Patch:
    """One patch of `old` that does what the patches of `steps`, each decoded against the result so far, do in turn.

    A step is `lambda bytes: decoder.decode(row, bytes)`. Several of them need one copy of the part. Raises
    PayloadCorrupt.
    """
    if len(steps) == 1:
        return steps[0](old)
    scratch = old.copy()
    done = []
    for step in steps:
        patch = step(scratch)
        kernels.scatter(scratch, patch)
        done.append(patch)
    widths = {patch.width for patch in done}
    positions = [patch.positions for patch in done if patch.positions is not None]
    if len(positions) < len(done) or len(widths) != 1:
        return Patch(max(widths, default=1), None, scratch)
    return kernels.merge(scratch, widths.pop(), positions)
