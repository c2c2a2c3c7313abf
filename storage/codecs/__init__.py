"""Codecs: what changed in the parts of a shard, bit for bit, in few bytes. Pure: bytes in, bytes out; imports neither
Prefect nor torch."""

from weighbridge.storage.codecs.apply import fold, patched_digest
from weighbridge.storage.codecs.contract import CHUNK_BYTES, PartInput, PartShape, Patch
from weighbridge.storage.codecs.kernels import scatter
from weighbridge.storage.codecs.registry import CODECS, get_codec
from weighbridge.storage.codecs.shard import (
    EncodedPart,
    EncodedShard,
    ShardDecoder,
    encode_shard,
    encode_whole,
    open_shard,
)
from weighbridge.storage.codecs.warming import warm

__all__ = [
    "CHUNK_BYTES",
    "CODECS",
    "EncodedPart",
    "EncodedShard",
    "PartInput",
    "PartShape",
    "Patch",
    "ShardDecoder",
    "encode_shard",
    "encode_whole",
    "fold",
    "get_codec",
    "open_shard",
    "patched_digest",
    "scatter",
    "warm",
]
