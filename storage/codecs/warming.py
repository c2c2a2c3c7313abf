"""Compiles the kernels ahead of their first use. Must not know who starts."""

import numpy as np

from weighbridge.storage.codecs.contract import PartInput, PartShape
from weighbridge.storage.codecs.kernels import merge, scatter
from weighbridge.storage.codecs.registry import CODECS
from weighbridge.storage.codecs.shard import encode_shard, open_shard
from weighbridge.values import PartKey


def warm() -> None:
    """Compiles every kernel, or loads it from the cache on disk. Takes seconds on a machine that never ran them."""
    old = np.zeros(130, np.uint8)
    new = old.copy()
    new[129] = 1
    part = PartInput(PartKey("", 0), "BF16", old, new)
    for codec in (None, *CODECS):
        shard = encode_shard([part], digest_kind="xxh3-128", codec=codec)
        decoder = open_shard(shard.payload, [(shard.parts[0].codec, PartShape("BF16", 130))])
        scatter(old.copy(), decoder.decode_digested(0, old, digest_kind="xxh3-128")[0])
    merge(old, 2, [np.zeros(1, np.uint32)])
