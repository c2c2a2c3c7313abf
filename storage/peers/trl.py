"""TRL's sparse patches: one file a delta, one file an anchor. docs/PEERS.md gives their bytes."""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from weighbridge.errors import ObjectMissing, PayloadCorrupt, ShardCorrupt, UsageError, VersionUnknown
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.peers.contract import Changed, ForeignVersion, Layout, Specs, Writing
from weighbridge.storage.peers.payload import Payload, there
from weighbridge.storage.safetensors_header import build_header
from weighbridge.storage.stores.contract import Store
from weighbridge.storage.transfer import upload_file
from weighbridge.values import TensorSpec, item_bytes

_STEP = re.compile(r"step_([0-9]{6,12})\.safetensors")
_FORMAT, _VERSION = "sparse_weight_patch", "1"
_RAW, _GAPS = "raw", "gap_delta"
_INDEX_WIDTHS = {_RAW: {"I32": 4}, _GAPS: {"U16": 2, "U32": 4}}
_MOST_ELEMENTS = 1 << 31
_FOLDERS = ("deltas", "anchors")
_BEFORE = "prev_model_version"
"""We write it, since we leave no number out; TRL does not, and skips the numbers in which nothing changed."""


def _delta_key(version: int) -> str:
    return f"deltas/step_{version:06d}.safetensors"


def _anchor_key(version: int) -> str:
    return f"anchors/step_{version:06d}.safetensors"


def _steps(store: Store, folder: str) -> list[int]:
    """The versions that have a file in a folder, newest first."""
    names = (info.key.removeprefix(f"{folder}/") for info in store.list(folder))
    return sorted((int(match[1]) for name in names if (match := _STEP.fullmatch(name))), reverse=True)


class _Patch(ForeignVersion):
    """One file: its header is what describes it."""

    def __init__(self, store: Store, key: str, version: int, specs: Specs) -> None:
        self._key, self._store, self.version, self._specs = key, store, version, specs
        self._payload = Payload(store, key)
        meta = self._payload.header.metadata
        if (meta.get("format"), meta.get("version")) != (_FORMAT, _VERSION):
            raise self._wrong(f"it is of format {meta.get('format', '')[:40]!r} {meta.get('version', '')[:40]!r}")
        if meta.get("model_version") != str(version):
            raise self._wrong(f"it is of model version {meta.get('model_version', '')[:40]!r}")
        self._meta = meta

    def _known(self, names: Iterable[str]) -> tuple[str, ...]:
        found = tuple(sorted(names))
        if strangers := [name for name in found if name not in self._specs]:
            raise self._wrong(f"it has tensors that the base has not: {', '.join(map(repr, strangers[:3]))}")
        return found

    def _wrong(self, why: str) -> ShardCorrupt:
        return ShardCorrupt(f"{self._key} in {self._store.url}: {why}. Nothing was written from it.")


class _Delta(_Patch):
    def __init__(self, store: Store, version: int, specs: Specs) -> None:
        super().__init__(store, _delta_key(version), version, specs)
        self.base = version - 1
        self.skips = _BEFORE not in self._meta
        if self._meta.get(_BEFORE, str(self.base)) != str(self.base):
            raise self._wrong(f"it goes on from version {self._meta[_BEFORE][:40]!r}")
        encoding = self._meta.get("encoding", "")
        if encoding not in _INDEX_WIDTHS:
            raise self._wrong(f"index encoding {encoding[:40]!r} is not known here ({', '.join(_INDEX_WIDTHS)})")
        self._encoding = encoding
        keys = self._payload.header.tensors
        self.names = self._known(name.removesuffix(".val") for name in keys if name.endswith(".val"))
        if len(keys) != 2 * len(self.names) or any(f"{name}.idx" not in keys for name in self.names):
            raise self._wrong("its tensors are not pairs of .idx and .val")
        for name in self.names:
            self._check(name)

    def new_bytes(self, name: str, old: Bytes) -> Bytes:
        """See ForeignVersion."""
        spec, width = self._specs[name], item_bytes(self._specs[name].dtype)
        index = self._payload.spec(f"{name}.idx")
        raw = self._payload.read(f"{name}.idx", most=4 * old.size)
        values = np.frombuffer(self._payload.read(f"{name}.val", most=spec.nbytes), np.uint8).reshape(-1, width)
        positions = np.frombuffer(raw, f"<u{_INDEX_WIDTHS[self._encoding][index.dtype]}").astype(np.int64)
        if self._encoding == _GAPS:
            positions = np.cumsum(positions + 1) - 1
        elements = old.size // width
        if positions.size and (
            int(positions.min()) < 0 or int(positions.max()) >= elements or not bool((np.diff(positions) > 0).all())
        ):
            raise PayloadCorrupt(
                f"{name}: positions that do not ascend, or lie outside the tensor; nothing was written"
            )
        new = old.copy()
        new.reshape(-1, width)[positions] = values
        return new

    def _check(self, name: str) -> None:
        """Whether index and values fit each other and the base's tensor."""
        spec, index, values = self._specs[name], self._payload.spec(f"{name}.idx"), self._payload.spec(f"{name}.val")
        count = index.shape[0] if len(index.shape) == 1 else -1
        if index.dtype not in _INDEX_WIDTHS[self._encoding] or count < 0 or values.shape != (count,):
            raise self._wrong(f"{name!r}: {index.dtype} {list(index.shape)} cannot say where {list(values.shape)} go")
        if values.dtype != spec.dtype or not count * item_bytes(spec.dtype) == values.nbytes <= spec.nbytes:
            raise self._wrong(f"{name!r}: {count} of {values.dtype} are not elements of the base's {spec.dtype}")


class _Anchor(_Patch):
    def __init__(self, store: Store, version: int, specs: Specs) -> None:
        super().__init__(store, _anchor_key(version), version, specs)
        self.names = self._known(self._payload.header.tensors)
        self.skips = _BEFORE not in self._meta
        missing = sorted(specs.keys() - set(self.names))
        if missing and not self.skips:
            raise self._wrong(f"an anchor is whole, and it lacks {', '.join(map(repr, missing[:3]))}")
        # TRL's own, after the first, have those tensors alone that changed in their step.
        self.base = version - 1 if missing else None
        for name in self.names:
            spec, found = specs[name], self._payload.spec(name)
            if (found.dtype, found.shape) != (spec.dtype, spec.shape):
                raise self._wrong(f"{name!r} is {found.dtype} {list(found.shape)} there and another in the base")

    def new_bytes(self, name: str, old: Bytes) -> Bytes:
        """See ForeignVersion."""
        return np.frombuffer(self._payload.read(name, most=self._specs[name].nbytes), np.uint8)


class Trl(Layout):
    """See the module."""

    name = "trl"

    def newest(self, store: Store) -> int:
        """See Layout."""
        return max((at for folder in _FOLDERS for at in _steps(store, folder)[:1]), default=0)

    def open(self, store: Store, version: int, specs: Specs) -> ForeignVersion:
        """See Layout."""
        for kind in (_Delta, _Anchor):  # TRL publishes an anchor instead of a delta, we beside one
            with suppress(ObjectMissing):
                return kind(store, version, specs)
        raise VersionUnknown(f"{store.url} has no version {version} of layout {self.name}. Nothing was read.")

    def whole(self, store: Store, *, after: int, upto: int, specs: Specs) -> ForeignVersion | None:
        """See Layout."""
        anchors = (_Anchor(store, at, specs) for at in _steps(store, "anchors") if after < at <= upto)
        return next((anchor for anchor in anchors if anchor.base is None), None)

    def below(self, store: Store, version: int) -> int:
        """See Layout."""
        return max((at for folder in _FOLDERS for at in _steps(store, folder) if at < version), default=0)

    def demand(self, specs: Specs, writing: Writing) -> None:
        """See Layout. TRL's receiver joins the values of a delta's tensors, which only values of one dtype survive."""
        dtypes = sorted({spec.dtype for spec in specs.values() if spec.nbytes})
        if len(dtypes) > 1:
            raise UsageError(
                f"tensors of {', '.join(dtypes)} cannot be published in layout trl, whose receiver takes deltas of one "
                "dtype alone. Nothing was published; leave layout trl out."
            )
        for spec in specs.values():
            units = spec.nbytes // item_bytes(spec.dtype)
            if units >= _MOST_ELEMENTS or units != spec.elements:
                raise UsageError(
                    f"{spec.name!r} ({spec.dtype}, {spec.elements:,} elements) cannot be published in layout trl, "
                    "whose positions are whole elements in I32. Nothing was published; leave layout trl out."
                )

    def stands(self, store: Store, version: int) -> bool:
        """See Layout."""
        return there(store, _delta_key(version))

    def write(self, store: Store, version: int, changed: Iterable[Changed], writing: Writing, *, elements: int) -> None:
        """See Layout. Holds the whole delta: it is one file."""
        pieces: list[bytes] = []
        specs: list[TensorSpec] = []
        tensors = total = 0
        for one in changed:
            index, values, dtype = _sparse(one)
            count = len(values) // item_bytes(one.spec.dtype)
            specs += [
                TensorSpec(f"{one.spec.name}.idx", dtype, (count,), len(index)),
                TensorSpec(f"{one.spec.name}.val", one.spec.dtype, (count,), len(values)),
            ]
            pieces += [index, values]
            tensors, total = tensors + 1, total + count
        meta = _metadata(version, sparse=True, tensors=tensors, changed=total, elements=elements)
        _upload(store, _delta_key(version), [build_header(specs, meta), *pieces], writing)

    def write_whole(
        self, store: Store, version: int, state: Iterable[tuple[TensorSpec, Bytes]], writing: Writing
    ) -> None:
        """See Layout."""
        whole = list(state)
        specs = [spec for spec, _ in whole]
        elements = sum(spec.elements for spec in specs)
        meta = _metadata(version, sparse=False, tensors=len(specs), changed=elements, elements=elements)
        _upload(store, _anchor_key(version), [build_header(specs, meta), *(data.data for _, data in whole)], writing)


def _sparse(one: Changed) -> tuple[bytes, bytes, str]:
    """Index bytes, value bytes and the index's dtype of a changed tensor."""
    width = item_bytes(one.spec.dtype)
    old, new = one.old.view(f"<u{width}"), one.new.view(f"<u{width}")
    positions: npt.NDArray[np.int64] = np.flatnonzero(old != new).astype(np.int64)
    gaps = np.diff(positions, prepend=-1) - 1
    narrow = not gaps.size or int(gaps.max()) < 1 << 16
    return gaps.astype("<u2" if narrow else "<u4").tobytes(), new[positions].tobytes(), "U16" if narrow else "U32"


def _metadata(version: int, *, sparse: bool, tensors: int, changed: int, elements: int) -> Mapping[str, str]:
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "sparse": str(sparse),
        "model_version": str(version),
        _BEFORE: str(version - 1),
        "num_changed_params": str(tensors),
        "total_changed_elements": str(changed),
        "total_elements": str(elements),
        "sparsity": str(1.0 - changed / max(elements, 1)),
        "encoding": _GAPS,
    }


def _upload(store: Store, key: str, pieces: list[bytes | memoryview], writing: Writing) -> None:
    path = writing.spool / "patch"
    writing.disk.unlink(path)
    try:
        writing.disk.append(path, pieces)
        upload_file(store, key, path, clock=writing.clock)
    finally:
        writing.disk.unlink(path)
