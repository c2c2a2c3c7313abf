"""The text that the demo's model learns: the sources of Python's own standard library, cut to a bounded size.

Bytes only; knows nothing of models or of torch.
"""

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weighbridge.errors import UsageError

DEFAULT_BYTES = 8 << 20
RUN_BYTES = 3
_HELD_OUT_SHARE = 0.02
_LEAST_BYTES = 4096
# Tables and tests are not prose: code pages, generated grammars and fixtures would fill a bounded corpus with noise.
_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data", "lib2to3", "idlelib"}
)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text as uint8 arrays: `train` to learn from, `held_out` to judge by, and which runs of RUN_BYTES occur in either.

    `runs` is a bool array of all runs there can be (2^24), indexed by the run's bytes read as one big-endian number.
    """

    train: npt.NDArray[np.uint8]
    held_out: npt.NDArray[np.uint8]
    runs: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, text: bytes) -> "Corpus":
        """Splits `text`: its end is held out. Raises UsageError if it is too short to learn from."""
        if len(text) < _LEAST_BYTES:
            raise UsageError(
                f"The demo found {len(text)} bytes of text to learn from and needs {_LEAST_BYTES}. "
                "Nothing was started. Run it with a Python that has its standard library as .py files."
            )
        data = np.frombuffer(text, dtype=np.uint8)
        cut = len(data) - max(RUN_BYTES, int(len(data) * _HELD_OUT_SHARE))
        runs = np.zeros(1 << 8 * RUN_BYTES, dtype=np.bool_)
        runs[byte_runs(data)] = True
        return cls(train=data[:cut], held_out=data[cut:], runs=runs)

    def likeness(self, text: npt.NDArray[np.uint8]) -> float:
        """Share of the runs of RUN_BYTES in `text` that the corpus has too, 0 to 1: a reward that needs no judge."""
        seen = byte_runs(text)
        if not len(seen):
            return 0.0
        return float(self.runs[seen].mean())


def byte_runs(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """Every run of RUN_BYTES neighbours in `data`, each as one number, in order of position."""
    count = max(0, len(data) - RUN_BYTES + 1)
    runs = np.zeros(count, dtype=np.uint32)
    for i in range(RUN_BYTES):
        runs = (runs << np.uint32(8)) | data[i : i + count].astype(np.uint32)
    return runs


def read_corpus(limit_bytes: int = DEFAULT_BYTES, *, folder: Path | None = None) -> Corpus:
    """Reads .py files below `folder` (the standard library), always in one order, until `limit_bytes` are had.

    The same Python and limit give the same corpus. Raises UsageError where there are no sources to read.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    text = bytearray()
    for folder_name, subfolders, files in os.walk(root):
        # In place: os.walk then neither enters these (site-packages alone can hold more than the library) nor reorders.
        subfolders[:] = sorted(set(subfolders) - _SKIPPED)
        for name in sorted(files):
            if len(text) >= limit_bytes:
                break
            if name.endswith(".py"):
                text += Path(folder_name, name).read_bytes()
    return Corpus.of(bytes(text[:limit_bytes]))
