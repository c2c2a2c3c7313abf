"""Small checkpoint folders for tests, written by the safetensors library and not by the code under test."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Arrays = Mapping[str, "np.ndarray[Any, Any]"]


def some_arrays() -> dict[str, Any]:
    """Two layers, a scalar, an empty tensor and an odd-sized one, with bytes that differ from each other."""
    rng = np.random.default_rng(7)
    return {
        "model.embed.weight": rng.standard_normal((9, 4)).astype(np.float32),
        "model.layers.0.w": rng.standard_normal((4, 4)).astype(np.float16),
        "model.layers.0.mask": rng.integers(0, 2, (5,)).astype(bool),
        "model.layers.1.w": rng.standard_normal((4, 4)).astype(np.float16),
        "model.layers.1.steps": np.array(11, np.int64),
        "model.layers.1.none": np.empty((0, 3), np.float32),
    }


def write_single(folder: Path, arrays: Arrays) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(arrays), folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def write_sharded(folder: Path, files: Mapping[str, Arrays], weight_map: Mapping[str, str] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, arrays in files.items():
        save_file(dict(arrays), folder / name)
    listed = weight_map if weight_map is not None else {t: name for name, arrays in files.items() for t in arrays}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def split(arrays: Arrays) -> dict[str, dict[str, Any]]:
    names = list(arrays)
    return {
        "model-00001-of-00002.safetensors": {name: arrays[name] for name in names[::2]},
        "model-00002-of-00002.safetensors": {name: arrays[name] for name in names[1::2]},
    }
