"""A handle carries a value through Prefect without Prefect looking into it: no hashing, no copying, no serialising.

Prefect serialises parameters field by field and hashes a task's inputs; a slotted object without fields that it knows
costs nothing there. Whoever made a handle releases it, since a finished task's parameters live until the next garbage
collection.
"""

from typing import Generic, TypeVar

T = TypeVar("T")


class Handle(Generic[T]):
    """Holds one value until it is released. Not a dataclass, not iterable, no `__dict__`: Prefect must see nothing."""

    __slots__ = ("__weakref__", "_value")

    def __init__(self, value: T | None) -> None:
        self._value = value

    @property
    def value(self) -> T:
        """What the handle carries. Raises RuntimeError once it was released."""
        if self._value is None:
            raise RuntimeError("this handle was released: its step is over")
        return self._value

    def release(self) -> None:
        """Lets go of the value."""
        self._value = None

    def __reduce__(self) -> "tuple[type[Handle[T]], tuple[None]]":
        """What a handle carries does not leave its process: elsewhere it is a released one."""
        return Handle, (None,)

    def __repr__(self) -> str:
        return f"Handle({type(self._value).__name__})"
