"""An array that grows as an encoder fills it. Must not know what fills it."""

from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Scalar = TypeVar("Scalar", bound=np.generic)


class Growing(Generic[Scalar]):
    """`array` has room beyond `used`; kernels write there and the owner moves `used`."""

    __slots__ = ("array", "used")

    def __init__(self, dtype: type[Scalar]) -> None:
        self.array: npt.NDArray[Scalar] = np.empty(0, dtype)
        self.used = 0

    def room(self, more: int) -> npt.NDArray[Scalar]:
        """The array, with at least `more` entries free; doubles when it must grow."""
        if self.array.size < self.used + more:
            grown = np.empty(max(self.used + more, 2 * self.array.size), self.array.dtype)
            grown[: self.used] = self.array[: self.used]
            self.array = grown
        return self.array

    def filled(self) -> npt.NDArray[Scalar]:
        """What was filled so far."""
        return self.array[: self.used]
