"""The tensors of an HF checkpoint folder, read one at a time and only those that are asked for. Must not know vLLM."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


class CheckpointFolder:
    """A folder's safetensors files, by tensor. Raises OSError or SafetensorError for one that cannot be read."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._files: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt", device="cpu") as tensors:
                self._files.update(dict.fromkeys(tensors.keys(), file))
        if not self._files:
            raise FileNotFoundError(f"{folder} holds no safetensors files")

    @property
    def names(self) -> list[str]:
        """All tensors, file by file."""
        return list(self._files)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Names and torch tensors on the CPU, file by file."""
        from safetensors import safe_open

        asked = set(names)
        for file in dict.fromkeys(self._files.values()):
            inside = [name for name, at in self._files.items() if at == file and name in asked]
            if inside:
                with safe_open(file, framework="pt", device="cpu") as tensors:
                    for name in inside:
                        yield name, tensors.get_tensor(name)
