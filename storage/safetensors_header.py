"""Reads and writes the header of a safetensors file. Must not know checkpoints: one file, its tensors, their places.

The parser accepts and refuses what `safetensors.safe_open` does, found out before a byte of tensor data is touched,
with these differences on purpose:

- duplicate keys are refused at every level (safe_open lets the last one win);
- a dtype that safe_open does not know is accepted as opaque bytes, of the size that its offsets give;
- a tensor's description must be an object and its dtype a string (safe_open also takes serde's other spellings);
- a dimension is at most 2^63 - 1.
"""

import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from weighbridge.errors import HeaderError
from weighbridge.storage import strict_json
from weighbridge.values import DTYPE_BITS, TensorSpec

MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_U64_MAX = (1 << 64) - 1
_I64_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor and where its bytes start in the file, counted from the file's first byte."""

    spec: TensorSpec
    start: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says. `tensors` is in the order in which the bytes lie; `file_bytes` is the whole file's size."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorPlace]
    file_bytes: int


def read_header(path: Path) -> Header:
    """Reads and checks the header of a safetensors file. Raises HeaderError, also for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(_LENGTH_BYTES)
            return parse_header(prefix + file.read(_declared_bytes(prefix, file_bytes)), file_bytes)
    except HeaderError as error:
        raise HeaderError(f"{path}: {error}") from None
    except OSError as error:
        raise HeaderError(f"{path}: cannot be read: {error.strerror}") from error


def parse_header(data: bytes, file_bytes: int) -> Header:
    """Parses a header from `data`, which begins with the file's first byte and reaches at least to the header's end.

    The tensors must cover the rest of a file of `file_bytes` exactly, without overlap. Raises HeaderError.
    """
    length = _declared_bytes(data, file_bytes)
    end = _LENGTH_BYTES + length
    try:
        document = strict_json.parse(data[_LENGTH_BYTES:end])
    except ValueError as error:
        raise HeaderError(f"the header is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise HeaderError("the header is not a JSON object")
    metadata = _metadata(document.pop("__metadata__", None))
    entries = [(*_offsets(name, info), name, info) for name, info in document.items()]
    entries.sort(key=lambda entry: entry[:2])
    tensors: dict[str, TensorPlace] = {}
    reached = 0
    for start, stop, name, info in entries:
        if start != reached or stop < start:
            raise HeaderError(f"tensor {name!r}: bytes {start} to {stop}, but they must start at {reached}")
        reached = stop
        tensors[name] = TensorPlace(_spec(name, info, stop - start), end + start)
    if end + reached != file_bytes:
        raise HeaderError(f"the tensors end at byte {end + reached}, the file at {file_bytes}")
    return Header(metadata, tensors, file_bytes)


def build_header(specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The header, length field included, of a file that holds `specs` end to end in the order given.

    Its size is a multiple of 8, so that data which follows keeps the alignment it has among the tensors.
    """
    document: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for spec in specs:
        if spec.name == "__metadata__" or spec.name in document:
            raise HeaderError(f"a file cannot hold a tensor {spec.name!r} beside another of that name or the metadata")
        document[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise HeaderError(f"a header of {len(text)} bytes is more than the {MAX_HEADER_BYTES} that readers accept")
    return struct.pack("<Q", len(text)) + text


def _declared_bytes(data: bytes, file_bytes: int) -> int:
    if len(data) < _LENGTH_BYTES:
        raise HeaderError(f"{file_bytes} bytes are too few for a safetensors file")
    length: int = struct.unpack_from("<Q", data)[0]
    if length > MAX_HEADER_BYTES:
        raise HeaderError(f"a header of {length} bytes is more than the {MAX_HEADER_BYTES} allowed")
    if _LENGTH_BYTES + length > file_bytes:
        raise HeaderError(f"the header claims {length} bytes, the file has {file_bytes}")
    return length


def _metadata(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise HeaderError("__metadata__ is not an object of strings")
    return value


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0  # bool is an int too, and must not pass


def _offsets(name: str, info: object) -> tuple[int, int]:
    if not isinstance(info, dict):
        raise HeaderError(f"tensor {name!r}: its description is not an object")
    offsets = info.get("data_offsets")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise HeaderError(f"tensor {name!r}: data_offsets are not two byte counts")
    return offsets[0], offsets[1]


def _spec(name: str, info: Mapping[str, object], nbytes: int) -> TensorSpec:
    dtype, shape = info.get("dtype"), info.get("shape")
    if not isinstance(dtype, str) or not dtype:
        raise HeaderError(f"tensor {name!r}: its dtype is not a name")
    if not isinstance(shape, list) or not all(_is_count(size) and size <= _I64_MAX for size in shape):
        raise HeaderError(f"tensor {name!r}: its shape is not a list of counts")
    elements = _checked_elements(name, shape)
    bits = DTYPE_BITS.get(dtype)
    if bits is not None:
        if elements * bits > _U64_MAX:
            raise HeaderError(f"tensor {name!r}: its size overflows")
        if elements * bits != nbytes * 8:
            raise HeaderError(f"tensor {name!r}: {dtype} of shape {shape} does not fill {nbytes} bytes")
    return TensorSpec(name, dtype, tuple(shape), nbytes)


def _checked_elements(name: str, shape: list[int]) -> int:
    elements = 1
    for size in shape:  # in order, and refused as soon as 64 bits overflow: a zero further on does not save it
        elements *= size
        if elements > _U64_MAX:
            raise HeaderError(f"tensor {name!r}: its shape {shape[:8]} overflows")
    return elements
