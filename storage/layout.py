"""Which tensor goes into which file of a checkpoint that is written anew. Pure: names and sizes in, a plan out."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from weighbridge.values import TensorSpec, item_bytes

FILE_BYTES = 4 << 30
_DIGITS = re.compile(r"([0-9]+)")
_LAYER = re.compile(r"^(?:.*?\.)?[0-9]+(?=\.)")


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One weight file: its name and its tensors in the order in which their bytes lie."""

    name: str
    specs: tuple[TensorSpec, ...]


def plan_files(specs: Iterable[TensorSpec], *, file_bytes: int = FILE_BYTES) -> tuple[FilePlan, ...]:
    """Files of at most `file_bytes` (a larger tensor has one to itself), a layer's tensors in one file if they fit.

    Layers follow each other by number. Within a file the wider elements come first, as the safetensors library writes
    them, so that every tensor is aligned to its element.
    """
    files: list[list[TensorSpec]] = [[]]
    filled = 0
    for _, group in groupby(sorted(specs, key=lambda spec: natural_key(spec.name)), key=lambda spec: _layer(spec.name)):
        tensors = list(group)
        together = sum(spec.nbytes for spec in tensors)
        for chunk in [tensors] if together <= file_bytes else [[spec] for spec in tensors]:
            nbytes = sum(spec.nbytes for spec in chunk)
            if files[-1] and filled + nbytes > file_bytes:
                files.append([])
                filled = 0
            files[-1].extend(chunk)
            filled += nbytes
    if len(files) == 1:
        return (FilePlan("model.safetensors", _aligned(files[0])),)
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    return tuple(FilePlan(name, _aligned(specs)) for name, specs in zip(names, files, strict=True))


def natural_key(name: str) -> tuple[tuple[int, str, str], ...]:
    """Sorts names as people count: layers.2 before layers.10."""
    return tuple(map(_piece_key, _DIGITS.split(name)))


def _piece_key(piece: str) -> tuple[int, str, str]:
    if not _DIGITS.fullmatch(piece):
        return 0, piece, ""
    digits = piece.lstrip("0")
    return len(digits) + 1, digits, piece


def _layer(name: str) -> str:
    found = _LAYER.match(name)
    return found.group() if found else name


def _aligned(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(sorted(specs, key=lambda spec: -item_bytes(spec.dtype)))
