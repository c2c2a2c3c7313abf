"""Tensors that are spread over ranks, put together: many in one collective, for those who publish them. Every rank of
their mesh comes here with the same tensors in the same order. Must not know names' meaning, nor who publishes what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from weighbridge.tasks.host_bytes import in_dtype, whole
from weighbridge.values import TensorSpec

if TYPE_CHECKING:
    import torch

BUCKET_BYTES = 64 << 20
"""Of whole tensors in one collective; a larger tensor has one of its own."""


def put_together(
    values: Iterator[tuple[TensorSpec, Any]], *, wanted: Callable[[str], bool], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Yields, in order, the whole of each distributed tensor that is `wanted` here, in its spec's dtype.

    Those that are cut into rows over a one-dimensional mesh (as FSDP2 does) share collectives, in the dtype that is
    published; any other is put together by its own `full_tensor`. At most two buckets are in memory.
    """
    bucket: list[tuple[TensorSpec, Any]] = []
    for spec, value in chain(values, [(None, None)]):
        fits = (
            bool(bucket)
            and spec is not None
            and _is_in_rows(value)
            and value.device_mesh == bucket[0][1].device_mesh
            and sum(held.nbytes for held, _ in bucket) + spec.nbytes <= bucket_bytes
        )
        if bucket and not fits:
            yield from _together(bucket, wanted)
            bucket = []
        if spec is None:
            return
        if _is_in_rows(value):
            bucket.append((spec, value))
        else:
            full: Any = whole(value)
            if wanted(spec.name):
                yield spec, full


def _together(
    bucket: list[tuple[TensorSpec, Any]], wanted: Callable[[str], bool]
) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    import torch
    from torch import distributed

    mesh = bucket[0][1].device_mesh
    count = mesh.size()
    # torch cuts a dimension as torch.chunk does: all pieces but the last are of equal length, and some may be empty.
    slots = [-(-spec.shape[0] // count) * (spec.nbytes // spec.shape[0]) if spec.nbytes else 0 for spec, _ in bucket]
    pieces = [in_dtype(value.detach().to_local(), spec.dtype).contiguous() for spec, value in bucket]
    flat = [piece.reshape(-1).view(torch.uint8) for piece in pieces]
    mine = torch.zeros(sum(slots), dtype=torch.uint8, device=flat[0].device)
    starts = [sum(slots[:number]) for number in range(len(slots))]
    for start, piece in zip(starts, flat, strict=True):
        mine[start : start + piece.numel()] = piece
    dtypes = [piece.dtype for piece in pieces]
    del pieces, flat
    all_rows = torch.empty(count * mine.numel(), dtype=torch.uint8, device=mine.device)
    # By its new name, where torch has it; the old one is deprecated there.
    all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    all_gather(all_rows, mine, group=mesh.get_group())
    by_rank = all_rows.view(count, mine.numel()) if mine.numel() else all_rows.view(count, 0)
    for (spec, _), start, slot, dtype in zip(bucket, starts, slots, dtypes, strict=True):
        if wanted(spec.name):
            raw = by_rank[:, start : start + slot].reshape(-1)[: spec.nbytes]
            yield spec, raw.view(dtype)


def _is_in_rows(value: Any) -> bool:
    from torch.distributed.tensor import Shard

    return value is not None and value.device_mesh.ndim == 1 and value.ndim > 0 and value.placements == (Shard(0),)
