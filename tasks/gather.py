"""Gather: from what a trainer pushes to a stream of checked byte arrays in the base's dtypes. Runs in the caller's own
thread. Must not know stores, versions or Prefect, and must not hold more than one tensor's copy, or two buckets of
those that are spread over ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeGuard, Union

from weighbridge.errors import GatherError, UsageError
from weighbridge.storage.checkpoint import Checkpoint, open_checkpoint
from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.expectation import Expectation, Tally
from weighbridge.tasks.host_bytes import HostBytes, Memories, Unreadable, describe, is_spread, memory_of, whole
from weighbridge.tasks.sharing import Gathered, Sharing, alone
from weighbridge.tasks.spread import put_together
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


def folder_of(source: Source) -> Checkpoint | None:
    """The checkpoint folder that is pushed, if it is one. Raises CheckpointError."""
    if isinstance(source, str | os.PathLike):
        return open_checkpoint(Path(source))
    return source if isinstance(source, Checkpoint) else None


def gather(source: Source, expect: Expectation, sharing: Sharing | None = None) -> Iterator[Gathered]:
    """Yields every tensor that this rank publishes, once; tied names are compared and dropped.

    Modules (parameters and buffers, as `state_dict()` has them), state dicts, lists and folders are checked as a whole
    before the first tensor is yielded, and come in the order of their names; an iterator is checked while it runs, in
    its own order, and is always run to its end, so that the error names everything and no other rank waits for us.
    fp32, bf16 and fp16 become the base's dtype as torch converts them (to nearest even; what is too large for fp16
    becomes infinite); all else must be the base's already. Raises GatherError, CheckpointError for a folder, UsageError
    for something that cannot be pushed.
    """
    divided = sharing or alone(expect.specs)
    if (folder := folder_of(source)) is not None:
        return _from_checkpoint(folder, expect, divided)
    if _is_module(source):
        return _from_entries(_entries(source.state_dict().items()), expect, divided)
    if isinstance(source, Mapping):
        return _from_entries([(name, partial(source.__getitem__, name)) for name in source], expect, divided)
    if isinstance(source, Sequence | ItemsView):
        return _from_entries(_entries(source), expect, divided)
    if isinstance(source, Iterable):
        return _from_stream(source, expect, divided)
    raise UsageError(
        f"{type(source).__name__} cannot be pushed: give a module, a state dict, (name, tensor) pairs or a checkpoint "
        "folder. Nothing was published."
    )


_Entries: TypeAlias = Sequence[tuple[str, Callable[[], object]]]
"""Names, and what fetches each value anew, so that a mapping that loads on demand is never held whole."""


def _entries(pairs: Iterable[object]) -> _Entries:
    return [(name, lambda value=value: value) for name, value in map(_pair, pairs)]  # type: ignore[misc]


def _from_entries(entries: _Entries, expect: Expectation, sharing: Sharing) -> Iterator[Gathered]:
    """Two runs over what can be run over twice: all checks, then the bytes, in the order of names on every rank."""
    tally, reader = Tally(expect), HostBytes()
    memories = Memories()
    compared: list[tuple[str, object]] = []
    spread: set[str] = set()
    for name, fetch in entries:
        value = fetch()
        _admit(tally, name, value, memories)
        if is_spread(value):
            spread.add(name)
        if tally.needs_digest(name):
            compared.append((name, value))
        del value
    if tally.sound:
        _compare(tally, reader, expect, dict(compared), sharing)
    sharing.agree(tally)
    del compared, memories
    ordered = sorted((entry for entry in entries if entry[0] in expect.specs), key=itemgetter(0))
    for name, fetch in ordered:
        if name not in spread:
            item = _gathered(reader, expect.specs[name], fetch(), stable=True)
            if sharing.is_mine(name):
                yield item
            else:
                sharing.let_go(item)
            del item
    yield from _from_spread(((expect.specs[name], fetch()) for name, fetch in ordered if name in spread), sharing)


def _from_spread(values: Iterator[tuple[TensorSpec, object]], sharing: Sharing) -> Iterator[Gathered]:
    """Distributed tensors; equal on all ranks by their making. The collectives go on after a failure of ours, for the
    other ranks are in them too."""
    reader, failure = HostBytes(), None
    for spec, value in sharing.watch(put_together(values, wanted=sharing.is_mine)):
        if failure is None:
            try:
                item = _gathered(reader, spec, value, stable=True)
            except Exception as error:  # noqa: BLE001 - raised below, once nobody waits for this rank
                failure = error
            else:
                yield item
    if failure is not None:
        raise failure


def _from_stream(pairs: Iterable[object], expect: Expectation, sharing: Sharing) -> Iterator[Gathered]:
    """One run, checked as it goes. After a fault nothing more is yielded, and the rest is still run and checked."""
    tally, reader = Tally(expect), HostBytes()
    memories = Memories()
    sharing.expect_a_stream()
    failure: Exception | None = None
    for item in sharing.watch(pairs):  # what the source itself raises ends it, and this
        try:
            name, value = _pair(item)
            value = whole(value)  # before any check: the other ranks are in this collective too
            spec = _admit(tally, name, value, memories) if failure is None else None
            if spec is not None and tally.sound:
                found = _gathered(reader, spec, value, stable=False)
                if tally.needs_digest(name):
                    tally.prove(name, digest_bytes(_COMPARE, found.data.data))
                if name in expect.specs:
                    yield from sharing.offer(found)
                del found
        except Exception as error:  # noqa: BLE001 - raised below, once the source was run to its end
            failure = failure or error
        del item, value
    if failure is not None:
        raise failure
    sharing.agree(tally)
    yield from sharing.rest()


def _from_checkpoint(checkpoint: Checkpoint, expect: Expectation, sharing: Sharing) -> Iterator[Gathered]:
    reader = HostBytes()
    for name, spec in admit_folder(checkpoint, expect, sharing).items():
        if name not in expect.specs:
            continue
        item = Gathered(spec, read_tensor(checkpoint, reader, name, spec), stable=True)
        if sharing.is_mine(name):
            yield item
        else:
            sharing.let_go(item)


def admit_folder(checkpoint: Checkpoint, expect: Expectation, sharing: Sharing) -> dict[str, TensorSpec]:
    """What each of a folder's tensors has to become, by its name there, once everything was checked. Raises
    GatherError."""
    tally, reader = Tally(expect), HostBytes()
    wanted: dict[str, TensorSpec] = {}
    for name, have in checkpoint.specs().items():
        if (spec := tally.admit(name, have.dtype, have.shape)) is not None:
            wanted[name] = spec
    if tally.sound:
        for name in filter(tally.needs_digest, wanted):
            data = read_tensor(checkpoint, reader, name, wanted[name])
            tally.prove(name, digest_bytes(_COMPARE, data.data))
    sharing.agree(tally)
    return wanted


def read_tensor(checkpoint: Checkpoint, reader: HostBytes, name: str, want: TensorSpec) -> Bytes:
    """A tensor of a folder as the base has it, read into memory of its own: a file cut short meanwhile is an error, not
    a signal. One-dimensional uint8, read-only. Raises CheckpointError."""
    have = checkpoint.tensors[name].spec
    data = checkpoint.read(name)
    if have.dtype != want.dtype:
        data = reader.convert(data, have.dtype, want.dtype)
    data.flags.writeable = False
    return data


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


def _compare(
    tally: Tally, reader: HostBytes, expect: Expectation, values: Mapping[str, object], sharing: Sharing
) -> None:
    """Proves tied tensors equal: by being the same memory, or else by digest."""
    for alias, stored in sorted(expect.aliases.items()):
        if alias not in values and (sharing.size == 1 or stored not in values):
            continue  # with more ranks the alias may be on another one
        memory = memory_of(values.get(alias))
        if stored in values and memory is not None and memory == memory_of(values[stored]) and sharing.size == 1:
            continue
        for name in (alias, stored):
            if name in values:
                data = _gathered(reader, expect.specs[stored], whole(values[name]), stable=True).data
                tally.prove(name, digest_bytes(_COMPARE, data.data))


def _gathered(reader: HostBytes, spec: TensorSpec, value: object, *, stable: bool) -> Gathered:
    data, copied = reader.read(value, spec.dtype)
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
