"""One tensor, of whatever kind, to its bytes on the host in the base's dtype. Must not know names, bases or versions.
Runs in the caller's thread, since streams, collectives and grad mode belong to it; never leaves a mode changed."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from weighbridge.storage.expectation import CASTABLE

if TYPE_CHECKING:
    import torch

    from weighbridge.storage.codecs.contract import Bytes

PIECE_BYTES = 64 << 20
"""Bytes of each of the two pinned pieces that a device tensor comes through, whatever its size."""

_TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn_x2",
}  # fmt: skip
_NAMES = {f"torch.{name}": ours for ours, name in _TORCH_NAMES.items()}
_NUMPY_NAMES = {name: ours for ours, name in _TORCH_NAMES.items() if ours != "F4"}


class Unreadable(ValueError):
    """A value that has no bytes to publish; the message says why. Never leaves a push: GatherError names it."""


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a torch tensor: there are none where nobody loaded torch yet."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def whole(value: object) -> object:
    """A tensor that is spread over ranks, put together (a collective: every rank calls it); anything else as it is."""
    if not is_tensor(value) or not _is_spread(value):
        return value
    together: object = value.detach().full_tensor()  # type: ignore[attr-defined]
    return together


def is_spread(value: object) -> bool:
    """Whether a tensor is spread over ranks, so that reading it whole is a collective."""
    return is_tensor(value) and _is_spread(value)


def in_dtype(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """A tensor in the dtype of that safetensors name, its own or one of CASTABLE for another. Raises TypeError."""
    import torch

    have = _NAMES[str(tensor.dtype)]
    if have == dtype:
        return tensor
    if not {dtype, have} <= CASTABLE:
        raise TypeError(f"{tensor.dtype} is not converted to {dtype}")
    found: torch.Tensor = tensor.to(getattr(torch, _TORCH_NAMES[dtype]))
    return found


def describe(value: object) -> tuple[str, tuple[int, ...]]:
    """Dtype, by its safetensors name, and shape, without touching a byte. Raises Unreadable."""
    if isinstance(value, np.ndarray):
        name = _NUMPY_NAMES.get(value.dtype.name)
        if name is None:
            raise Unreadable(f"numpy dtype {value.dtype} is none that a checkpoint can hold")
        return name, value.shape
    if not is_tensor(value):
        raise Unreadable(f"is no tensor but {type(value).__name__}")
    if value.is_meta:
        raise Unreadable("is on the meta device and has no bytes; materialise it first")
    if value.is_quantized:
        raise Unreadable("is quantized; push its integers, scales and zero points as the checkpoint stores them")
    if "strided" not in str(value.layout) or value.is_nested:
        raise Unreadable(f"is {'nested' if value.is_nested else value.layout}; push it dense")
    name = _NAMES.get(str(value.dtype))
    if name is None:
        raise Unreadable(f"dtype {value.dtype} is none that a checkpoint can hold")
    if value.numel() and not _is_spread(value) and not _has_storage(value):
        raise Unreadable(f"is a {type(value).__name__} without bytes of its own")
    shape = tuple(value.shape)
    return name, (*shape[:-1], shape[-1] * 2) if name == "F4" and shape else shape  # torch counts pairs of F4


def memory_of(value: object) -> tuple[object, ...] | None:
    """Names the memory that a tensor shows and how: equal for two tensors means equal bytes. None where unknown."""
    if isinstance(value, np.ndarray):
        return ("numpy", value.ctypes.data, value.dtype.str, value.shape, value.strides) if value.size else None
    if not is_tensor(value) or not value.numel() or _is_spread(value):
        return None
    view = (tuple(value.shape), value.stride(), value.is_conj(), value.is_neg())
    return (str(value.device), value.data_ptr(), str(value.dtype), *view)


class Memories:
    """Which memory came under which name, for as long as that tensor lives: freed memory is soon another tensor's."""

    def __init__(self) -> None:
        self._names: dict[tuple[object, ...], tuple[str, weakref.ref[object]]] = {}

    def add(self, name: str, value: object) -> None:
        """Remembers a tensor without keeping it alive."""
        memory = memory_of(value)
        if memory is not None:
            self._names[memory] = name, weakref.ref(value)

    def find(self, value: object) -> str | None:
        """The name of a living tensor that shows the same memory in the same way."""
        name, alive = self._names.get(memory_of(value) or (), (None, None))
        return name if alive and alive() is not None else None


class HostBytes:
    """Turns tensors into host bytes; keeps two pinned pieces a device, for as long as it lives."""

    def __init__(self) -> None:
        self._lanes: dict[torch.device, tuple[torch.cuda.Stream, tuple[torch.Tensor, torch.Tensor]]] = {}

    def read(self, value: object, dtype: str) -> tuple[Bytes, bool]:
        """Bytes in `dtype` (its own, or one of CASTABLE for another, rounded to nearest even), and whether they are
        a copy. What is no copy shows the tensor's own memory. One-dimensional, contiguous, read-only.

        Expects what `describe` passed. Copies nothing that is contiguous, on the host and of the dtype already.
        """
        if isinstance(value, np.ndarray):
            data, copied = self._read_array(value, dtype)
        elif is_tensor(value):
            data, copied = self._read_tensor(value, dtype)
        else:
            raise TypeError(f"{type(value).__name__} is no tensor")
        data.flags.writeable = False
        return data, copied

    def convert(self, data: Bytes, have: str, want: str) -> Bytes:
        """Bytes of one of CASTABLE's dtypes in another."""
        return self._read_tensor(_as_torch(data, have), want)[0]

    def _read_array(self, array: np.ndarray[Any, Any], dtype: str) -> tuple[Bytes, bool]:
        native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        data = native.reshape(-1).view(np.uint8)
        have = _NUMPY_NAMES[array.dtype.name]
        if have != dtype:
            return self.convert(data, have, dtype), True
        return data, native.ctypes.data != array.ctypes.data

    def _read_tensor(self, value: torch.Tensor, dtype: str) -> tuple[Bytes, bool]:
        import torch

        tensor = in_dtype(value.detach(), dtype)
        flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        if flat.device.type == "cuda":
            return self._from_cuda(flat), True
        copied = flat.device.type != "cpu" or flat.data_ptr() != value.data_ptr()
        return flat.cpu().numpy(), copied

    def _from_cuda(self, flat: torch.Tensor) -> Bytes:
        """Through pinned pieces on a stream of its own, which first waits for what the caller's stream still does."""
        import torch

        device = flat.device
        with torch.cuda.device(device):
            if device not in self._lanes:
                one, two = (torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in "12")
                self._lanes[device] = torch.cuda.Stream(device), (one, two)  # type: ignore[no-untyped-call]
            side, pieces = self._lanes[device]
            side.wait_stream(torch.cuda.current_stream(device))
            flat.record_stream(side)  # or the allocator hands its memory out again while the copy still runs

            def start(piece: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
                with torch.cuda.stream(side):
                    piece.copy_(source, non_blocking=True)
                    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    done.record(side)
                return done.synchronize

            return through_pieces(flat, pieces, start)


def through_pieces(
    flat: torch.Tensor,
    pieces: tuple[torch.Tensor, torch.Tensor],
    start: Callable[[torch.Tensor, torch.Tensor], Callable[[], object]],
) -> Bytes:
    """Copies bytes piece by piece: one piece is on its way while the one before is put in place.

    `start(piece, source)` begins a copy and returns what waits for its end; a piece is read only after that wait, and
    used again only after it was read.
    """
    out = np.empty(flat.numel(), np.uint8)
    size = pieces[0].numel()
    waits: list[tuple[int, Callable[[], object]]] = []

    def finish() -> None:
        begin, wait = waits.pop(0)
        wait()
        target = out[begin : begin + size]
        target[:] = pieces[begin // size % 2].numpy()[: target.size]

    for begin in range(0, out.size, size):
        if len(waits) == 2:
            finish()
        source = flat[begin : begin + size]
        waits.append((begin, start(pieces[begin // size % 2][: source.numel()], source)))
    while waits:
        finish()
    return out


def _is_spread(tensor: torch.Tensor) -> bool:
    return hasattr(type(tensor), "full_tensor")  # of its class: looking up what a tensor lacks is slow


def _has_storage(tensor: torch.Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:  # fake and functional tensors refuse to say
        return False


def _as_torch(data: Bytes, dtype: str) -> torch.Tensor:
    import torch

    return torch.from_numpy(data if data.flags.writeable else data.copy()).view(getattr(torch, _TORCH_NAMES[dtype]))
