"""A snapshot's tensors as they are before and after a delta that was not written into it yet, one tensor at a time.
Must not know who asks."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.codecs.kernels import scatter
from weighbridge.storage.parts import cut
from weighbridge.storage.peers.contract import Changed
from weighbridge.storage.replica.image import Image
from weighbridge.storage.replica.patching import Deltas, prove_part
from weighbridge.storage.replica.scratch import Scratch
from weighbridge.values import Manifest, PartKey, ShardInfo, TensorSpec


class NextState:
    """The image stays as it is. Every changed part is proven by its digest; raises like `prove_part`."""

    def __init__(self, image: Image, manifest: Manifest, path_of: Callable[[ShardInfo], Path]) -> None:
        self._image, self._manifest, self._path_of = image, manifest, path_of
        keys: dict[str, list[PartKey]] = defaultdict(list)
        for row in manifest.rows:
            keys[row.key.tensor].append(row.key)
        self._keys = keys
        self._scratch = Scratch()

    def changed(self) -> Iterator[Changed]:
        """Every tensor that the delta changes, in the order of its rows."""
        deltas = Deltas([self._manifest], lambda _, shard: self._path_of(shard))
        try:
            for name in self._keys:
                spec, old = self._image.specs[name], self._before(name)
                yield Changed(spec, old, self._after(name, old, deltas))
        finally:
            deltas.close()

    def whole(self) -> Iterator[tuple[TensorSpec, Bytes]]:
        """Every tensor after the delta; an unchanged one is no copy."""
        deltas = Deltas([self._manifest], lambda _, shard: self._path_of(shard))
        try:
            for name, spec in self._image.specs.items():
                old = self._before(name)
                yield spec, self._after(name, old, deltas) if name in self._keys else old
        finally:
            deltas.close()

    def _before(self, name: str) -> Bytes:
        views = [self._image.view(part.key) for part in cut(self._image.specs[name])]
        return views[0] if len(views) == 1 else np.concatenate(views)

    def _after(self, name: str, old: Bytes, deltas: Deltas) -> Bytes:
        new, kind = old.copy(), self._manifest.digest_kind
        for key in self._keys[name]:
            proven = prove_part(self._image, deltas, key, digest_kind=kind, scratch=self._scratch)
            stretch = new[key.offset : key.offset + self._image.parts[key].nbytes]
            for patch in proven.patches:
                scatter(stretch, patch)
        return new
