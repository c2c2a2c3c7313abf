"""Gather: from what a trainer pushes to a stream of checked byte arrays in the base's dtypes. Runs in the caller's own
thread. Must not know stores, versions or Prefect, and must not hold more than one tensor's copy."""

from __future__ import annotations

import os
import sys
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeGuard, Union

from weighbridge.errors import GatherError, UsageError
from weighbridge.storage.checkpoint import Checkpoint, open_checkpoint
from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.expectation import Expectation, Tally
from weighbridge.tasks.host_bytes import HostBytes, Memories, Unreadable, describe, memory_of, whole
from weighbridge.values import TensorSpec

if TYPE_CHECKING:
    import torch

    from weighbridge.storage.codecs.contract import Bytes

Source: TypeAlias = Union[
    "torch.nn.Module", Mapping[str, object], Iterable[tuple[str, object]], str, "os.PathLike[str]", Checkpoint
]
"""What can be pushed: a module, a state dict, (name, tensor) pairs, or a checkpoint folder. Tensors are torch's
or numpy's."""

_COMPARE = "xxh3-128"


@dataclass(frozen=True, slots=True)
class Gathered:
    """One tensor: what it is, and its bytes (one-dimensional uint8, contiguous, read-only, `spec.nbytes` long).

    `stable` says how long they stay as they are: until the push returns (a copy of their own, or memory of a model that
    the caller leaves alone until then), or, when it is False, only until the next one is asked for, since a generator
    may fill the same buffer again.
    """

    spec: TensorSpec
    data: Bytes
    stable: bool

    @property
    def name(self) -> str:
        """The stored name."""
        return self.spec.name

    def lasting(self) -> Bytes:
        """The bytes, copied unless they are stable: for a consumer that asks for the next one before it is done."""
        return self.data if self.stable else self.data.copy()


def gather(source: Source, expect: Expectation) -> Iterator[Gathered]:
    """Yields every tensor that came, once, in the source's order; tied names are compared and dropped.

    Modules (parameters and buffers, as `state_dict()` has them), state dicts, lists and folders are checked as a whole
    before the first tensor is yielded, an iterator while it runs; it is always run to its end, so that the error names
    everything. fp32, bf16 and fp16 become the base's dtype as torch converts them (to nearest even; what is too large
    for fp16 becomes infinite); all else must be the base's already. Raises GatherError, CheckpointError for a folder,
    UsageError for something that cannot be pushed.
    """
    if isinstance(source, Checkpoint):
        return _from_checkpoint(source, expect)
    if isinstance(source, str | os.PathLike):
        return _from_checkpoint(open_checkpoint(Path(source)), expect)
    if _is_module(source):
        return _from_pairs(list(source.state_dict().items()), expect)
    if isinstance(source, Mapping):
        return _from_pairs(_Items(source), expect)
    if isinstance(source, Sequence | ItemsView):
        return _from_pairs(source, expect)
    if isinstance(source, Iterable):
        return _from_stream(source, expect)
    raise UsageError(
        f"{type(source).__name__} cannot be pushed: give a module, a state dict, (name, tensor) pairs or a checkpoint "
        "folder. Nothing was published."
    )


class _Items:
    """A mapping's pairs, fetched anew on each run, so that a mapping that loads on demand is never held whole."""

    def __init__(self, mapping: Mapping[str, object]) -> None:
        self._mapping = mapping

    def __iter__(self) -> Iterator[tuple[str, object]]:
        return iter(self._mapping.items())


def _from_pairs(pairs: Iterable[object], expect: Expectation) -> Iterator[Gathered]:
    """Two runs over what can be run over twice: all checks, then the bytes."""
    tally, reader = Tally(expect), HostBytes()
    memories = Memories()
    compared: list[tuple[str, object]] = []
    for name, value in map(_pair, pairs):
        _admit(tally, name, value, memories)
        if tally.needs_digest(name):
            compared.append((name, value))
    if tally.sound:
        _compare(tally, reader, expect, dict(compared))
    tally.settle()
    del compared, memories
    for name, value in map(_pair, pairs):
        spec = expect.specs.get(name)
        if spec is not None:
            yield _gathered(reader, spec, value, stable=True)
        del value  # a mapping that loads on demand may need its room for the next one


def _from_stream(pairs: Iterable[object], expect: Expectation) -> Iterator[Gathered]:
    """One run, checked as it goes. After a fault nothing more is yielded, and the rest is still run and checked."""
    tally, reader = Tally(expect), HostBytes()
    memories = Memories()
    for name, value in map(_pair, pairs):
        value = whole(value)  # before any check: the other ranks are in this collective too
        spec = _admit(tally, name, value, memories)
        if spec is None or not tally.sound:
            continue
        item = _gathered(reader, spec, value, stable=False)
        if tally.needs_digest(name):
            tally.prove(name, digest_bytes(_COMPARE, item.data.data))
        if name in expect.specs:
            yield item
        del item, value
    tally.settle()


def _from_checkpoint(checkpoint: Checkpoint, expect: Expectation) -> Iterator[Gathered]:
    """A folder's tensors, read into memory of their own: a file cut short meanwhile is an error, not a signal."""
    tally, reader = Tally(expect), HostBytes()
    wanted = {name: tally.admit(name, spec.dtype, spec.shape) for name, spec in checkpoint.specs().items()}

    def read(name: str) -> Gathered:
        have, want = checkpoint.tensors[name].spec, wanted[name]
        assert want is not None  # settled above
        data = checkpoint.read(name)
        if have.dtype != want.dtype:
            data = reader.convert(data, have.dtype, want.dtype)
        data.flags.writeable = False
        return Gathered(want, data, stable=True)

    if tally.sound:
        for name in filter(tally.needs_digest, wanted):
            tally.prove(name, digest_bytes(_COMPARE, read(name).data.data))
    tally.settle()
    for name in wanted:
        if name in expect.specs:
            yield read(name)


def _admit(tally: Tally, name: str, value: object, memories: Memories) -> TensorSpec | None:
    try:
        dtype, shape = describe(value)
    except Unreadable as reason:
        tally.refuse(name, str(reason))
        return None
    spec = tally.admit(name, dtype, shape)
    if spec is not None:
        memories.add(name, value)
    elif stored := memories.find(value):
        tally.suggest(name, stored)
    return spec


def _compare(tally: Tally, reader: HostBytes, expect: Expectation, values: Mapping[str, object]) -> None:
    """Proves tied tensors equal: by being the same memory, or else by digest."""
    for alias, stored in expect.aliases.items():
        if alias not in values:
            continue
        memory = memory_of(values[alias])
        if stored in values and memory is not None and memory == memory_of(values[stored]):
            continue
        for name in (alias, stored):
            if name in values:
                data = _gathered(reader, expect.specs[stored], values[name], stable=True).data
                tally.prove(name, digest_bytes(_COMPARE, data.data))


def _gathered(reader: HostBytes, spec: TensorSpec, value: object, *, stable: bool) -> Gathered:
    data, copied = reader.read(whole(value), spec.dtype)
    if data.size != spec.nbytes:
        raise GatherError(
            f"{spec.name}: {data.size} bytes came where {spec.nbytes} were announced: it changed while it was pushed. "
            "Nothing was published."
        )
    return Gathered(spec, data, stable or copied)


def _pair(item: object) -> tuple[str, object]:
    if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str):
        return item[0], item[1]
    raise GatherError(
        f"a push takes (name, tensor) pairs, and {type(item).__name__} came instead. Nothing was published."
    )


def _is_module(source: object) -> TypeGuard[torch.nn.Module]:
    torch = sys.modules.get("torch")  # a module can only come from a process that loaded torch
    return torch is not None and isinstance(source, torch.nn.Module)
