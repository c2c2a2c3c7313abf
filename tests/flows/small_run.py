"""A small training run for tests of the flows: a base of a few tensors, versions published without Prefect, and an
engine whose behaviour a file decides, so that a host in another process can be told to fail, to wait or to go on."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from weighbridge.errors import EngineError
from weighbridge.storage.batching import batches
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.clock import SystemClock
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.open_publisher import open_publisher
from weighbridge.storage.publisher import Publisher
from weighbridge.storage.stores import open_store
from weighbridge.values import Manifest, TensorSpec

NAMES = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight")


class SmallRun:
    """A store with a base of three float32 tensors; `push` commits the next version."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self.run_id = run_id
        self.base, self.store_url = folder / "base", str(folder / "store")
        rng = np.random.default_rng(7)
        self.tensors = {name: rng.standard_normal((64, 32), dtype=np.float32) for name in NAMES}
        self.base.mkdir(parents=True)
        save_file(self.tensors, self.base / "model.safetensors")
        (self.base / "config.json").write_text('{"model_type": "llama"}')
        self.store = open_store(self.store_url)
        self.publisher: Publisher = open_publisher(
            self.store,
            open_checkpoint(self.base),
            run_id=run_id,
            digest_kind="xxh3-128",
            aliases={},
            spool=folder / "spool",
            disk=LocalDisk("process"),
            clock=SystemClock(),
            threads=1,
        )
        self._rng = rng

    def push(self, *, changed: bool = True) -> Manifest:
        """Commits one version: a few elements of each tensor differ, or none."""
        if changed:
            for tensor in self.tensors.values():
                tensor.reshape(-1)[self._rng.integers(0, tensor.size, 20)] += np.float32(0.5)
        attempt = self.publisher.begin()
        for batch in batches(self._pairs(), shard_bytes=1 << 20):
            attempt.upload(attempt.encode(batch).index)
        return self.publisher.commit(attempt, {})

    def _pairs(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        for name, tensor in sorted(self.tensors.items()):
            spec = TensorSpec(name, "F32", tensor.shape, tensor.nbytes)
            yield spec, tensor.copy().view(np.uint8).reshape(-1)

    def is_held_by(self, current: Path) -> bool:
        """Whether a folder holds exactly the tensors of the version pushed last."""
        found = load_file(current / "model.safetensors")
        return set(found) == set(self.tensors) and all(
            np.array_equal(found[name].view(np.uint8), tensor.view(np.uint8)) for name, tensor in self.tensors.items()
        )


class FileEngine:
    """An engine that fails or hangs at the verb that `<folder>/orders.json` names, and notes each call."""

    name = "file"
    maps_files = False

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def order(self, **orders: str) -> None:
        """Says what the next calls do; no orders mean that all goes well."""
        draft = self.folder / "orders.tmp"
        draft.write_text(json.dumps(orders))
        draft.replace(self.folder / "orders.json")

    @property
    def calls(self) -> list[str]:
        """What was called, in order: "pause", "reload 3", ..."""
        path = self.folder / "calls.txt"
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def _call(self, verb: str, said: str = "") -> None:
        with open(self.folder / "calls.txt", "a") as notes:
            notes.write(f"{verb} {said}".strip() + "\n")
        while self._orders().get("hang") == verb:
            time.sleep(0.02)
        if self._orders().get("fail") == verb:
            raise EngineError(f"told to fail at {verb}.")

    def _orders(self) -> dict[str, str]:
        path = self.folder / "orders.json"
        found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def pause(self, *, seconds: float) -> None:
        self._call("pause")

    def reload(self, folder: Path, version: int, *, seconds: float) -> None:
        self._call("reload", str(version))

    def flush(self, *, seconds: float) -> None:
        self._call("flush")

    def set_version(self, version: int, *, seconds: float) -> None:
        self._call("set_version", str(version))
        (self.folder / "version").write_text(str(version))

    def checksum(self, *, seconds: float) -> str | None:
        """See Engine."""
        return None

    def read_version(self, *, seconds: float) -> int | None:
        path = self.folder / "version"
        return int(path.read_text()) if path.exists() else None

    def resume(self, *, seconds: float) -> None:
        self._call("resume")

    def probe(self, *, seconds: float) -> None:
        self._call("probe")
