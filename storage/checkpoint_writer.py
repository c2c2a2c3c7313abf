"""Writes whole HF checkpoint folders: a copy of one, or a new one from a stream of parts. Must not know versions or
replicas. A folder is only good once the call returns: the caller gives a new name and renames it, or removes it."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from weighbridge.errors import CheckpointError
from weighbridge.storage.checkpoint import (
    INDEX_FILE,
    SMALL_FILE_BYTES,
    Checkpoint,
    Place,
    is_small_file,
    open_checkpoint,
)
from weighbridge.storage.digests import Buffer
from weighbridge.storage.layout import FILE_BYTES, plan_files
from weighbridge.storage.localdisk import SHARED_FILE, Disk
from weighbridge.storage.parts import cut
from weighbridge.storage.safetensors_header import build_header, read_header
from weighbridge.values import Part, PartKey, TensorSpec

_PIECE_BYTES = 32 << 20


def copy_checkpoint(source: Checkpoint, target: Path, *, disk: Disk) -> Checkpoint:
    """Copies weight files, index and small files under their own names into `target`, a new or empty folder.

    Copies share blocks where the file system can, never an inode, and are plain files where the source has links. A
    weight file that also holds tensors which do not belong to the checkpoint is copied without them, since an engine
    might load them. Raises CheckpointError; DiskFull from the disk.
    """
    _start(target, disk)
    for name in source.weight_files:
        disk.make_folder((target / name).parent)
        if name in source.unlisted:
            _copy_listed(source, name, target / name, disk)
        else:
            disk.copy(source.folder / name, target / name)
    for name in (*source.files, *filter(None, [source.index_file])):
        disk.make_folder((target / name).parent)
        disk.copy(source.folder / name, target / name)
    _sync_names(target, (*source.weight_files, *source.files), disk)
    copied = open_checkpoint(target)
    if copied.specs() != source.specs():
        raise CheckpointError(
            f"{source.folder} changed while it was copied to {target}. Nothing uses the copy; try again."
        )
    return copied


def write_checkpoint(
    target: Path,
    specs: Iterable[TensorSpec],
    parts: Iterable[tuple[PartKey, Buffer]],
    files: Mapping[str, bytes],
    *,
    disk: Disk,
    file_bytes: int = FILE_BYTES,
) -> Checkpoint:
    """Writes a checkpoint into `target`, a new or empty folder, holding one part at a time.

    `parts` brings every part of every tensor of `specs` once, cut as `parts.cut` does, in any order. `files` are small
    non-tensor files by relative name. Raises CheckpointError for a part that is missing, foreign, repeated or of the
    wrong size, or a file's name that leads elsewhere; DiskFull from the disk.
    """
    _start(target, disk)
    plan = plan_files(specs, file_bytes=file_bytes)
    places: dict[str, Place] = {}
    due: dict[PartKey, Part] = {}
    for file in plan:
        header = build_header(file.specs, {"format": "pt"})
        disk.append(target / file.name, [header], mode=SHARED_FILE)
        start = len(header)
        for spec in file.specs:
            places[spec.name] = Place(spec, file.name, start)
            due.update({part.key: part for part in cut(spec)})
            start += spec.nbytes
    for key, data in parts:
        part = due.pop(key, None)
        if part is None:
            raise CheckpointError(
                f"tensor {key.tensor!r} at byte {key.offset} is no part of this checkpoint, or came twice"
            )
        if memoryview(data).nbytes != part.nbytes:
            raise CheckpointError(
                f"tensor {key.tensor!r} at byte {key.offset}: {part.nbytes} bytes were due, not {len(data)}"
            )
        if part.nbytes:
            place = places[key.tensor]
            disk.pwrite(target / place.file, place.start + key.offset, data)
    if due:
        missing = ", ".join(sorted({repr(key.tensor) for key in due}))
        raise CheckpointError(f"no bytes came for tensors {missing}; {target} is not whole")
    for file in plan:
        disk.sync(target / file.name)
    for name, content in files.items():
        if not is_small_file(name) or len(content) > SMALL_FILE_BYTES:
            raise CheckpointError(f"{name!r} is no small file of a checkpoint, and was not written")
        disk.make_folder((target / name).parent)
        disk.write_atomic(target / name, content, mode=SHARED_FILE)
    if len(plan) > 1:
        disk.write_atomic(target / INDEX_FILE, _index(places), mode=SHARED_FILE)
    _sync_names(target, files, disk)
    return open_checkpoint(target)


def _start(target: Path, disk: Disk) -> None:
    if target.is_dir() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty. Nothing was written; name a new folder, or empty this one.")
    disk.make_folder(target)


def _sync_names(target: Path, names: Iterable[str], disk: Disk) -> None:
    """Brings the names of files to the medium, those in subfolders too."""
    folders = {target, *(folder for name in names for folder in (target / name).parents if target in folder.parents)}
    for folder in sorted(folders):
        disk.sync_folder(folder)


def _copy_listed(source: Checkpoint, name: str, path: Path, disk: Disk) -> None:
    places = sorted((p for p in source.tensors.values() if p.file == name), key=lambda place: place.start)
    metadata = read_header(source.folder / name).metadata
    disk.append(path, [build_header((place.spec for place in places), metadata)], mode=SHARED_FILE)
    for place in places:
        data = source.view(place.spec.name)
        for start in range(0, len(data), _PIECE_BYTES):
            disk.append(path, [data[start : start + _PIECE_BYTES].data])
    disk.sync(path)


def _index(places: Mapping[str, Place]) -> bytes:
    index = {
        "metadata": {"total_size": sum(place.spec.nbytes for place in places.values())},
        "weight_map": {name: places[name].file for name in sorted(places)},
    }
    return json.dumps(index, indent=2, ensure_ascii=False).encode("utf-8")
