"""A working buffer for each thread, kept between parts, so that memory is bounded by the parts in flight and fresh
pages are not zeroed for each. Must not know what is worked on."""

import threading

import numpy as np

from weighbridge.storage.codecs.contract import Bytes


class Scratch:
    """One buffer per thread that asks; it dies with the thread or with this object."""

    def __init__(self) -> None:
        self._own = threading.local()

    def take(self, nbytes: int) -> Bytes:
        """The calling thread's buffer, cut to `nbytes`; what the thread took before is gone."""
        buffer: Bytes | None = getattr(self._own, "buffer", None)
        if buffer is None or buffer.size < nbytes:
            buffer = np.empty(nbytes, np.uint8)
            self._own.buffer = buffer
        return buffer[:nbytes]
