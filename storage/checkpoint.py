"""Reads an HF checkpoint folder: its tensors and where they lie, its small files. Must not know versions or stores, and
writes nothing: `checkpoint_writer.py` does. Weight files are read through symbolic links (an HF hub cache is made of
them)."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np

from weighbridge.errors import CheckpointError, HeaderError
from weighbridge.storage import strict_json
from weighbridge.storage.digests import new_hasher
from weighbridge.storage.parts import cut
from weighbridge.storage.safetensors_header import Header, read_header
from weighbridge.values import PartKey, TensorSpec

if TYPE_CHECKING:
    from weighbridge.storage.codecs.contract import Bytes

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SMALL_FILE_BYTES = 64 << 20
"""Non-tensor files up to this size come along with a model; a larger one is left out."""

_INDEX_BYTES = 100_000_000
_READ_BYTES = 1 << 20
_LARGE_READ = 1 << 30
_WEIGHT_SUFFIXES = frozenset({
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".hdf5", ".msgpack", ".onnx", ".onnx_data",
    ".ot", ".pb", ".tflite", ".pkl", ".pickle", ".npy", ".npz", ".distcp", ".mlmodel", ".llamafile",
    ".tar", ".zip", ".gz", ".zst", ".7z",
})  # fmt: skip
_LAYOUT_SUFFIXES = (".safetensors.index.json", ".bin.index.json")


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of a checkpoint: the file that holds it, by its name in the folder, and its first byte in that file."""

    spec: TensorSpec
    file: str
    start: int


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """An opened checkpoint folder. Thread-safe.

    `folder` is resolved, so that a link that moves later does not mix two checkpoints. `tensors` is sorted by name.
    `weight_files` and `files` (small non-tensor files: config, tokenizer, ...) are sorted names relative to the folder.
    `index_file` is the index's name, or "". `unlisted` names weight files with tensors that the index does not list:
    these tensors do not belong to the checkpoint.
    """

    folder: Path
    tensors: Mapping[str, Place]
    weight_files: tuple[str, ...]
    files: tuple[str, ...]
    index_file: str
    unlisted: tuple[str, ...]
    _file_bytes: Mapping[str, int]
    _maps: dict[str, Bytes] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(place.spec.nbytes for place in self.tensors.values())

    def specs(self) -> dict[str, TensorSpec]:
        """What each tensor is, sorted by name."""
        return {name: place.spec for name, place in self.tensors.items()}

    def view(self, name: str) -> Bytes:
        """A tensor's bytes, mapped read-only: one-dimensional uint8. Raises CheckpointError when its file changed."""
        place = self.tensors[name]
        with self._lock:
            if place.file not in self._maps:
                self._maps[place.file] = self._map(place.file)
        return self._maps[place.file][place.start : place.start + place.spec.nbytes]

    def read(self, name: str, into: Bytes | None = None) -> Bytes:
        """A tensor's bytes, in memory of their own or in `into`: one-dimensional uint8. Raises CheckpointError for a
        cut file."""
        place = self.tensors[name]
        data = np.empty(place.spec.nbytes, np.uint8) if into is None else into
        with (self.folder / place.file).open("rb", buffering=0) as file:
            filled = 0
            while filled < data.size:
                filled += _read_piece(
                    file.fileno(), place.start + filled, data[filled : filled + _LARGE_READ].data, place
                )
        return data

    def digests(self, kind: str, *, threads: int | None = None) -> tuple[dict[PartKey, bytes], dict[str, bytes]]:
        """Raw digests of all parts and of all whole tensors, from one pass over the files.

        Reads in pieces rather than through a mapping: a failing disk is then an error and not a signal. `threads`
        defaults to the CPUs this process may use. Raises CheckpointError.
        """
        parts: dict[PartKey, bytes] = {}
        tensors: dict[str, bytes] = {}
        with ExitStack() as stack:
            opened = {
                name: stack.enter_context((self.folder / name).open("rb", buffering=0)) for name in self.weight_files
            }
            by_place = sorted(self.tensors.values(), key=lambda place: (place.file, place.start))
            pool = stack.enter_context(ThreadPoolExecutor(threads or len(os.sched_getaffinity(0)), "digest"))
            reader = _Reader(kind)
            for place, (of_parts, of_tensor) in zip(
                by_place,
                pool.map(lambda place: reader.digest(opened[place.file].fileno(), place), by_place),
                strict=True,
            ):
                parts.update(of_parts)
                tensors[place.spec.name] = of_tensor
        return parts, {name: tensors[name] for name in self.tensors}

    def _map(self, name: str) -> Bytes:
        with (self.folder / name).open("rb") as file:
            if os.fstat(file.fileno()).st_size != self._file_bytes[name]:
                raise CheckpointError(
                    f"{self.folder / name} changed its size since it was opened. Open the folder again."
                )
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Opens an HF checkpoint: `model.safetensors`, or the files that `model.safetensors.index.json` names.

    The index decides: only the tensors it lists, each from the file it names, belong to the checkpoint. Raises
    CheckpointError, which names all that is wrong.
    """
    folder = folder.resolve()
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder. Name the folder that holds config.json and the weights.")
    problems: list[str] = []
    listed = _read_index(folder, problems) if (folder / INDEX_FILE).exists() else None
    names = sorted(set(listed.values())) if listed is not None else [SINGLE_FILE]
    headers: dict[str, Header] = {}
    if listed is None and not (folder / SINGLE_FILE).exists():
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        found = "it holds " + ", ".join(others) if others else "it holds no safetensors file"
        problems.append(f"neither {INDEX_FILE} nor {SINGLE_FILE} is there; {found}")
        names = []
    for name in names:
        try:
            headers[name] = read_header(folder / name)
        except HeaderError as error:
            problems.append(str(error))
    tensors = _places(headers, listed, problems)
    if not tensors and not problems:
        problems.append("it holds no tensors")
    files = _small_files(folder, problems)
    if problems:
        listing = "".join(f"\n  - {problem}" for problem in problems)
        raise CheckpointError(
            f"{folder} is not a whole HF checkpoint:{listing}\nNothing was changed; repair the folder."
        )
    return Checkpoint(
        folder=folder,
        tensors={name: tensors[name] for name in sorted(tensors)},
        weight_files=tuple(names),
        files=files,
        index_file=INDEX_FILE if listed is not None else "",
        unlisted=tuple(
            name
            for name, header in headers.items()
            if listed is not None and any(listed.get(tensor) != name for tensor in header.tensors)
        ),
        _file_bytes={name: header.file_bytes for name, header in headers.items()},
    )


def is_small_file(name: str) -> bool:
    """Whether a file of this relative name may come along with a model: no weights, no index, nothing hidden."""
    path = PurePosixPath(name)
    plain = name == path.as_posix() and not path.is_absolute() and not any(p.startswith(".") for p in path.parts)
    return (
        plain
        and bool(path.parts)
        and "__pycache__" not in path.parts
        and path.suffix.lower() not in _WEIGHT_SUFFIXES
        and not name.lower().endswith(_LAYOUT_SUFFIXES)
        and _is_unicode(name)
    )


def _read_index(folder: Path, problems: list[str]) -> dict[str, str]:
    path = folder / INDEX_FILE
    try:
        if path.stat().st_size > _INDEX_BYTES:
            raise ValueError(f"it has more than {_INDEX_BYTES} bytes")
        document = strict_json.parse(path.read_bytes())
        weight_map = document.get("weight_map") if isinstance(document, dict) else None
        if not isinstance(weight_map, dict):
            raise ValueError("it has no weight_map object")
    except (OSError, ValueError) as error:
        problems.append(f"{INDEX_FILE} cannot be read: {error}")
        return {}
    listed: dict[str, str] = {}
    for tensor, file in weight_map.items():
        if isinstance(file, str) and _is_weight_name(file):
            listed[tensor] = file
        else:
            problems.append(f"{INDEX_FILE} puts tensor {tensor!r} into {file!r}, which is no file of this folder")
    return listed


def _is_weight_name(name: str) -> bool:
    path = PurePosixPath(name)
    return (
        name == path.as_posix() and not path.is_absolute() and ".." not in path.parts and path.suffix == ".safetensors"
    )


def _places(headers: Mapping[str, Header], listed: Mapping[str, str] | None, problems: list[str]) -> dict[str, Place]:
    if listed is None:
        return {
            name: Place(place.spec, file, place.start)
            for file, header in headers.items()
            for name, place in header.tensors.items()
        }
    found: dict[str, Place] = {}
    for name, file in listed.items():
        if file not in headers:
            continue  # the file itself is a problem already
        place = headers[file].tensors.get(name)
        if place is None:
            problems.append(f"{file} does not hold tensor {name!r}, which {INDEX_FILE} says is in it")
        else:
            found[name] = Place(place.spec, file, place.start)
    return found


def _small_files(folder: Path, problems: list[str]) -> tuple[str, ...]:
    found: list[str] = []
    for path, subfolders, files in os.walk(folder):
        here = Path(path)
        if here != folder and any(Path(file).suffix.lower() in _WEIGHT_SUFFIXES for file in files):
            subfolders.clear()  # another model, or another form of this one
            continue
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name != "__pycache__"]
        for file in files:
            name = (here / file).relative_to(folder).as_posix()
            if not is_small_file(name):
                continue
            try:
                status = (here / file).stat()
            except OSError as error:
                problems.append(f"{name} cannot be read: {error.strerror}")
                continue
            if (here / file).is_file() and status.st_size <= SMALL_FILE_BYTES:
                found.append(name)
    return tuple(sorted(found))


def _is_unicode(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class _Reader:
    """Digests tensors piece by piece, with one buffer a thread."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._local = threading.local()

    def digest(self, file: int, place: Place) -> tuple[dict[PartKey, bytes], bytes]:
        parts = cut(place.spec)
        whole = new_hasher(self._kind)
        found: dict[PartKey, bytes] = {}
        for part in parts:
            hashers = [new_hasher(self._kind), whole] if len(parts) > 1 else [whole]
            start, left = place.start + part.key.offset, part.nbytes
            while left:
                piece = self._read(file, start, left, place)
                for hasher in hashers:
                    hasher.update(piece)
                start, left = start + len(piece), left - len(piece)
            found[part.key] = hashers[0].digest()
        return found, whole.digest()

    def _read(self, file: int, start: int, left: int, place: Place) -> memoryview:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = memoryview(bytearray(_READ_BYTES))
        buffer: memoryview = self._local.buffer
        return buffer[: _read_piece(file, start, buffer[: min(left, _READ_BYTES)], place)]


def _read_piece(file: int, start: int, into: memoryview, place: Place) -> int:
    try:
        size = os.preadv(file, [into], start)
    except OSError as error:
        raise CheckpointError(f"tensor {place.spec.name!r} in {place.file}: {error.strerror}") from error
    if not size:
        raise CheckpointError(f"tensor {place.spec.name!r}: {place.file} became shorter while it was read")
    return size
