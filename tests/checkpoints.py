"""Tiny checkpoints and what a trainer would make of them: weights as plain numpy arrays, written by the safetensors
library, and digested here by docs/FORMAT.md rather than by the code under test."""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import xxhash
from safetensors.numpy import save_file

from weighbridge.storage.codecs.contract import Bytes
from weighbridge.values import TensorSpec

Weights = Mapping[str, "np.ndarray[Any, Any]"]

DTYPES = {"float16": "F16", "float32": "F32", "int64": "I64", "bool": "BOOL", "uint8": "U8"}


def tiny_weights(seed: int = 0) -> dict[str, Any]:
    """A few kB: half and single floats, a scalar, an empty tensor, an odd number of booleans."""
    rng = np.random.default_rng(seed)
    return {
        "embed.weight": rng.standard_normal((48, 16)).astype(np.float16),
        "layers.0.attn.weight": rng.standard_normal((32, 16)).astype(np.float16),
        "layers.0.norm.weight": rng.standard_normal(16).astype(np.float32),
        "layers.1.attn.weight": rng.standard_normal((32, 16)).astype(np.float16),
        "layers.1.nothing": np.empty((0, 4), np.float32),
        "layers.1.steps": np.array(11, np.int64),
        "mask": rng.integers(0, 2, 33).astype(bool),
    }


def half_weights(seed: int = 0) -> dict[str, Any]:
    """The same tensors, all of them half floats."""
    return {name: array.astype(np.float16) for name, array in tiny_weights(seed).items()}


def trained(weights: Weights, seed: int, *, share: float = 0.1, only: tuple[str, ...] | None = None) -> dict[str, Any]:
    """The weights after a step in which some bits of some elements changed: at least one of each tensor's."""
    rng = np.random.default_rng(seed)
    after = {}
    for name, array in weights.items():
        new = array.copy()
        if new.size and (only is None or name in only):
            raw = new.reshape(-1).view(np.uint8)
            hit = rng.choice(raw.size, max(1, int(raw.size * share)), replace=False)
            raw[hit] ^= np.uint8(1) if new.dtype == bool else rng.integers(1, 256, hit.size, np.uint8)
        after[name] = new
    return after


def write_checkpoint(folder: Path, weights: Weights) -> Path:
    """An HF folder with one weight file and two small files."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(weights), folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "generation_config.json").write_text("{}")
    return folder


def spec_of(name: str, array: "np.ndarray[Any, Any]") -> TensorSpec:
    return TensorSpec(name, DTYPES[array.dtype.name], array.shape, array.nbytes)


def as_tensors(weights: Weights) -> Iterator[tuple[TensorSpec, Bytes]]:
    """What a gather yields: each tensor and its bytes."""
    for name, array in weights.items():
        yield spec_of(name, array), np.frombuffer(array.tobytes(), np.uint8)


def state_digest_of(weights: Weights, *, kind: str = "xxh3-128", part_bytes: int = 256 << 20) -> str:
    """The state digest, computed from the format's text."""
    digest = {"xxh3-128": xxhash.xxh3_128_digest, "blake3": lambda data: blake3.blake3(data).digest()}[kind]
    state = b""
    for name in sorted(weights, key=lambda n: n.encode()):
        data = weights[name].tobytes()
        for offset in range(0, max(1, len(data)), part_bytes):
            of_part = digest(data[offset : offset + part_bytes])
            state += struct.pack("<I", len(name.encode())) + name.encode()
            state += struct.pack("<QB", offset, len(of_part)) + of_part
    return blake3.blake3(state).hexdigest()
