"""How a kernel is compiled: nogil, and cached on disk where the machine lets us. Must not know what kernels do.

With NUMBA_DISABLE_JIT=1 kernels run as plain Python, with the same results; `JIT` says which it is.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np

Kernel = Callable[..., Any]

JIT: bool = not numba.config.DISABLE_JIT  # type: ignore[attr-defined]


def kernel(function: Kernel) -> Kernel:
    """Compiles at the first call. Without a writable cache folder it does so in every process."""
    if not JIT:
        return _as_plain_python(function)
    try:
        return cast(Kernel, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # numba: "no locator available": neither __pycache__ nor the user's cache can be written
        return cast(Kernel, numba.njit(nogil=True)(function))


def _as_plain_python(function: Kernel) -> Kernel:
    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        with np.errstate(over="ignore"):  # kernels count modulo 2^64, as compiled code does without a word
            return function(*arguments)

    return run


def inlined(function: Kernel) -> Kernel:
    """A small function of scalars that kernels call, and LLVM inlines.

    Functions that take arrays are no use here: numba counts references around each call, and that costs more than the
    work. So kernels are written out, tails and all.
    """
    return cast(Kernel, numba.njit(nogil=True)(function))
