"""Checkpoint pairs to measure on: read from folders, drawn at a wanted density, or taken from a model really trained.

Knows nothing of codecs. A pair is old and new bytes of every tensor, under its name.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weighbridge.storage.checkpoint import open_checkpoint

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_PROBE = 1 << 21
_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class TensorPair:
    """One tensor before and after: its raw bytes."""

    name: str
    dtype: str
    old: Bytes
    new: Bytes


@dataclass(frozen=True, slots=True)
class Pair:
    """Two versions of a model."""

    name: str
    tensors: tuple[TensorPair, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one version."""
        return sum(tensor.new.size for tensor in self.tensors)


def from_folders(old: Path, new: Path) -> Pair:
    """Two checkpoint folders, mapped; pages come from the page cache once they were touched."""
    before, after = open_checkpoint(old), open_checkpoint(new)
    tensors = tuple(
        TensorPair(name, place.spec.dtype, np.asarray(before.view(name)), np.asarray(after.view(name)))
        for name, place in before.tensors.items()
    )
    return Pair(f"{old.name}..{new.parent.name}/{new.name}", tensors)


def synthetic(parameters: float, densities: list[float], seed: int = 1) -> Iterator[Pair]:
    """A decoder's weights, N(0, 0.02) in float32 rounded to bf16, before and after one clipped, Adam-like step.

    The step's size is searched for such that the wanted share of bf16 elements changes.
    """
    shapes = _decoder(parameters)
    olds = {name: _round(_weights(name, count, seed + i)) for i, (name, count) in enumerate(shapes)}
    for density in densities:
        rate = _rate_for(density)
        tensors = tuple(
            TensorPair(name, "BF16", olds[name], _stepped(name, count, seed + i, rate))
            for i, (name, count) in enumerate(shapes)
        )
        yield Pair(f"synthetic {density:g}", tensors)


def trained(steps: int, rate: float, pretrain_seconds: float) -> Iterator[Pair]:
    """The demo's model, pre-trained, then `steps` steps at `rate`; pairs of successive exports from step 2 on."""
    from weighbridge.demo.corpus import read_corpus
    from weighbridge.demo.trainer import Trainer, TrainingPlan

    trainer = Trainer(read_corpus(), plan=TrainingPlan(rl_rate=rate))
    trainer.pretrain(seconds=pretrain_seconds)
    before: dict[str, Bytes] | None = None
    for step in range(1, steps + 1):
        trainer.step()
        after = {name: _torch_bytes(tensor) for name, tensor in trainer.state().items()}
        if before is not None:
            pairs = tuple(TensorPair(name, "BF16", before[name], data) for name, data in after.items())
            yield Pair(f"trained, step {step}", pairs)
        before = after


def _torch_bytes(tensor: object) -> Bytes:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError("an export holds tensors")
    data: Bytes = tensor.contiguous().view(torch.uint8).reshape(-1).numpy()
    return data


def _decoder(parameters: float) -> list[tuple[str, int]]:
    """Names and element counts: an embedding of a fifth, and layers of seven matrices and two norms."""
    layers = max(2, round(math.sqrt(parameters / 1e6)))
    hidden = max(64, round(math.sqrt(0.8 * parameters / layers / 14) / 64) * 64)
    out = [("embedding", round(0.2 * parameters / hidden) * hidden)]
    for layer in range(layers):
        sizes = {"norm_in": hidden, "query": hidden**2, "key": hidden**2 // 4, "value": hidden**2 // 4}
        sizes |= {"output": hidden**2, "norm_out": hidden, "gate": 4 * hidden**2, "up": 4 * hidden**2}
        sizes |= {"down": 4 * hidden**2 - hidden**2 // 2}
        out += [(f"layer.{layer}.{name}", count) for name, count in sizes.items()]
    return out


def _weights(name: str, count: int, seed: int) -> Floats:
    noise = np.random.default_rng(seed).standard_normal(count, dtype=np.float32)
    noise *= np.float32(0.02)
    return noise + np.float32(1) if "norm" in name else noise


def _stepped(name: str, count: int, seed: int, rate: float) -> Bytes:
    masters = _weights(name, count, seed)
    rng = np.random.default_rng(seed + 1_000_003)
    for start in range(0, count, _BLOCK):
        masters[start : start + _BLOCK] -= _update(rng, masters[start : start + _BLOCK].size) * np.float32(rate)
    return _round(masters)


def _update(rng: np.random.Generator, count: int) -> Floats:
    step = rng.standard_normal(count, dtype=np.float32) * np.float32(0.4)
    return np.clip(step, -1, 1, out=step)


def _round(values: Floats) -> Bytes:
    """To bf16, ties to even."""
    out = np.empty(values.size, np.uint16)
    for start in range(0, values.size, _BLOCK):
        words = values[start : start + _BLOCK].view(np.uint32)
        out[start : start + _BLOCK] = (words + 0x7FFF + ((words >> 16) & 1)) >> 16
    return out.view(np.uint8)


def _rate_for(density: float) -> float:
    masters = _weights("probe", _PROBE, 11)
    update, old = _update(np.random.default_rng(12), _PROBE), _round(masters).view(np.uint16)
    low, high = 1e-9, 1e-2
    for _ in range(40):
        rate = math.sqrt(low * high)
        share = float((_round(masters - np.float32(rate) * update).view(np.uint16) != old).mean())
        low, high = (rate, high) if share < density else (low, rate)
    return math.sqrt(low * high)
