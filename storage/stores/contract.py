"""What a store is: a few verbs over keys. Must not know versions, manifests or tensors; retries and read-back of a
commit live above it (`storage/commit.py`, `storage/transfer.py`), credentials below it (the provider's own chain)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weighbridge.errors import ObjectTooLarge, UsageError

MOST_SMALL_BYTES = 1 << 30
"""No object that is read whole is larger: a manifest of a million parts takes a quarter of it."""


def too_large(key: str, label: str, nbytes: int, most: int) -> ObjectTooLarge:
    """What `get` raises for an object that nobody who writes here would have written."""
    return ObjectTooLarge(
        f"{key} in {label} has {nbytes:,} bytes, and an object of its kind at most {most:,}: it is not "
        "what was published. It was not read; restore it or audit the store."
    )


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object as a listing shows it; `modified_ns` is the store's own time."""

    key: str
    nbytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A write that was begun and not ended, by a writer who is dead or still at it. `key` is for people, `handle` for
    the store; `began_ns` is the store's own time."""

    key: str
    handle: str
    nbytes: int
    began_ns: int


class Store(ABC):
    """Keys are relative, "/"-separated, without empty, "." or ".." segments; anything else is a UsageError.

    Every call ends within the store's deadline, by an answer or by a StoreError. Instances are thread-safe, and are
    created in the process that uses them.
    """

    url: str
    """Where the store is, safe to print: never holds a credential."""

    @property
    def label(self) -> str:
        """The store as an error should name it: its URL, and the endpoint if that is not the provider's own."""
        return self.url

    @abstractmethod
    def create(self, key: str, data: bytes) -> None:
        """Writes an object only if none has that key, atomically: readers see all of it or nothing.

        Raises ObjectExists when one is there (which may be our own, from an attempt whose reply was lost), StoreError
        for anything else, in which case the object may or may not be there.
        """

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Writes an object whose name is unique to its writer; repeating it is safe."""

    @abstractmethod
    def put_file(self, key: str, path: Path) -> None:
        """Writes a local file as an object whose name is unique to its writer, in bounded memory; repeating is safe."""

    @abstractmethod
    def get(self, key: str, *, most: int = MOST_SMALL_BYTES) -> bytes:
        """The whole of a small object. Raises ObjectMissing; ObjectTooLarge for one of more than `most` bytes."""

    @abstractmethod
    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`. Raises ObjectMissing, or StoreError when the object is shorter."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Bytes of an object, never from a cache. Raises ObjectMissing."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects under a folder key ("" is the root), however deep, in key order; empty when there are none."""

    @abstractmethod
    def folders(self, prefix: str) -> Iterator[str]:
        """Names (not keys) of the folders directly under a folder key, sorted. One that is being filled, or
        has just been emptied, may be among them."""

    def list_after(self, prefix: str, key: str) -> Iterator[ObjectInfo]:
        """What `list` has after a key ("": all of it). Stores that can ask for just that do, since folders grow."""
        return (info for info in self.list(prefix) if info.key > key)

    def folders_after(self, prefix: str, name: str) -> Iterator[str]:
        """What `folders` has after a name ("": all of them); likewise."""
        return (folder for folder in self.folders(prefix) if folder > name)

    @abstractmethod
    def delete(self, key: str) -> None:
        """Removes an object; none there is no error."""

    def unfinished(self) -> Iterator[Unfinished]:
        """Writes under this root that were begun and not ended. None on a store whose server forgets them by itself."""
        return iter(())

    def discard(self, unfinished: Unfinished) -> None:
        """Removes what such a write left; none there is no error. Its writer, if alive, fails and tries again."""
        raise UsageError(f"{self.url} has no unfinished writes, so {unfinished.key} was not removed.")
