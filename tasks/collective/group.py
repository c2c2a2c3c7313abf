"""A process group of its own, beside whatever groups the process has: made without `init_process_group`, so that the
trainer's default group stays as it is. Must not know hosts, versions or shards."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

    from weighbridge.storage.codecs.contract import Bytes

Backend = Literal["gloo", "nccl"]

PIECE_BYTES = 8 << 20


class Group:
    """Broadcasts until a deadline: each wait is cut off there, and what fails is a RuntimeError (torch's own)."""

    def __init__(self, store: Store, *, backend: Backend, rank: int, size: int, until: float) -> None:
        """Blocks until all members are there. `until` is in seconds of time.monotonic."""
        from torch import distributed

        self._until = until
        left = timedelta(seconds=max(until - time.monotonic(), 0.1))
        self._device = "cpu" if backend == "gloo" else "cuda"
        if backend == "gloo":
            self._group: Any = distributed.ProcessGroupGloo(store, rank, size, left)
        else:
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = left
            self._group = distributed.ProcessGroupNCCL(store, rank, size, options)
        self._buffer: torch.Tensor | None = None

    def send(self, data: Bytes, root: int) -> None:
        """Broadcasts bytes of this rank, which is `root`: uint8, one-dimensional."""
        buffer = self._take(data.size)
        buffer.numpy()[:] = data
        self._broadcast(buffer, root)

    def receive(self, nbytes: int, root: int) -> Iterator[Bytes]:
        """The bytes that a rank broadcasts, piece by piece; each is good until the next one is asked for."""
        for size in pieces(nbytes):
            buffer = self._take(size)
            self._broadcast(buffer, root)
            yield buffer.numpy()

    def close(self) -> None:
        """Leaves the group. What is under way in it ends by its own deadline, and nobody here waits for that."""
        group, self._group = self._group, None
        threading.Thread(target=_leave, args=[group], name="weighbridge-leave", daemon=True).start()

    def _take(self, nbytes: int) -> torch.Tensor:
        import torch

        if self._buffer is None:
            self._buffer = torch.from_numpy(np.empty(PIECE_BYTES, np.uint8))
        return self._buffer[:nbytes]

    def _broadcast(self, buffer: torch.Tensor, root: int) -> None:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        there = buffer.to(self._device)
        left = self._until - time.monotonic()
        if left <= 0:
            raise RuntimeError("the time for this version's broadcast is over")
        self._group.broadcast([there], options).wait(timedelta(seconds=left))
        if there is not buffer:
            buffer.copy_(there)


def pieces(nbytes: int) -> Iterator[int]:
    """The sizes in which so many bytes are broadcast."""
    for start in range(0, nbytes, PIECE_BYTES):
        yield min(PIECE_BYTES, nbytes - start)


def _leave(group: Any) -> None:
    with suppress(RuntimeError):
        group.abort()
