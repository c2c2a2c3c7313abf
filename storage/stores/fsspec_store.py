"""A store at any other URL that fsspec opens. Its client must create conditionally by itself: fsspec's own fallback
asks first and writes then, which two writers can both win. Must not be used where a store of our own exists."""

import inspect
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import fsspec
import fsspec.core
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from weighbridge.errors import ObjectExists, ObjectMissing, StoreError, StoreRefused, StoreUnfit, UsageError
from weighbridge.storage.stores.contract import MOST_SMALL_BYTES, ObjectInfo, Store, too_large
from weighbridge.storage.stores.keys import checked_create, checked_key, checked_prefix
from weighbridge.storage.stores.profile import Profile

T = TypeVar("T")

_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_FAILURES = (OSError, ValueError, LookupError, EOFError, RuntimeError)
_THREADS = 8


@dataclass(frozen=True, slots=True, repr=False)
class _Opened:
    """A client, of one process: after a fork it would hang."""

    pid: int
    client: AbstractFileSystem
    root: str
    threads: ThreadPoolExecutor


_inherited: list[_Opened] = []


class FsspecStore(Store):
    """Objects under a URL of fsspec's. Options and credentials come from fsspec's configuration and the client's chain.

    Calls run in threads, so that one that hangs does not keep its caller beyond the profile's deadline; the thread
    stays until the client gives up.
    """

    def __init__(self, url: str, *, profile: Profile) -> None:
        self.url = url
        self.profile = profile
        self._lock = threading.Lock()
        self._opened: _Opened | None = None
        scheme = url.partition("://")[0]
        try:
            fsspec.get_filesystem_class(scheme)
        except (ValueError, ImportError) as error:
            raise UsageError(
                f"{scheme!r} is not a kind of store that is known here: {error}. Use a path, s3://, gs://, or another "
                "URL whose fsspec client is installed."
            ) from error

    def create(self, key: str, data: bytes) -> None:
        """See Store. Raises StoreUnfit when the client has no conditional create."""
        checked_create(key, data)
        client = self._open().client
        if not _creates_conditionally(client):
            raise StoreUnfit(
                f"the client of {self.url} ({type(client).__name__}) cannot create conditionally, so no commit on it "
                "would be safe. Nothing was written. Use s3://, gs:// or a shared directory."
            )
        self._run("create", checked_key(key), lambda fs, path: fs.pipe_file(path, data, mode="create"))

    def put(self, key: str, data: bytes) -> None:
        """See Store."""
        self._run("write", checked_key(key), lambda fs, path: fs.pipe_file(path, data))

    def put_file(self, key: str, path: Path) -> None:
        """See Store. How much of it is in memory is up to the client."""
        if not path.is_file():
            raise UsageError(f"{path} is not a file, so it was not uploaded.")
        seconds = self.profile.seconds(path.stat().st_size)
        self._run("write", checked_key(key), lambda fs, target: fs.put_file(str(path), target), seconds=seconds)

    def get(self, key: str, *, most: int = MOST_SMALL_BYTES) -> bytes:
        """See Store."""

        def read(fs: AbstractFileSystem, path: str) -> bytes:
            nbytes = int(_fresh(fs).info(path).get("size") or 0)
            if nbytes > most:
                raise too_large(key, self.url, nbytes, most)
            return bytes(fs.cat_file(path))

        return self._run("read", checked_key(key), read)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See Store."""
        data = bytes(
            self._run("read", checked_key(key), lambda fs, path: fs.cat_file(path, start=start, end=start + length))
        )
        if len(data) != length:
            raise StoreError(f"{key} in {self.url} is too short: {len(data)} of {length} bytes came.")
        return data

    def size(self, key: str) -> int:
        """See Store."""
        info = self._run("read", checked_key(key), lambda fs, path: _fresh(fs).info(path))
        if info.get("type") != "file":
            raise ObjectMissing(f"{key} is not in {self.url}.")
        return int(info["size"])

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See Store. A client that does not tell when an object was written makes it as old as can be."""
        found = self._find(checked_prefix(prefix))
        objects = [ObjectInfo(key, int(i["size"]), _written(i)) for key, i in found.items() if i["type"] == "file"]
        return iter(sorted(objects, key=lambda info: info.key))

    def folders(self, prefix: str) -> Iterator[str]:
        """See Store."""
        depth = len(prefix) + 1 if prefix else 0
        names = {key[depth:].partition("/")[0] for key in self._find(checked_prefix(prefix)) if "/" in key[depth:]}
        return iter(sorted(names))

    def delete(self, key: str) -> None:
        """See Store."""
        try:
            self._run("delete", checked_key(key), lambda fs, path: fs.rm_file(path))
        except ObjectMissing:
            return

    def _find(self, prefix: str) -> dict[str, dict[str, Any]]:
        """Everything under a folder, by key."""
        root = self._open().root

        def find(fs: AbstractFileSystem, path: str) -> Any:
            return {} if fs.isfile(path) else _fresh(fs).find(path, detail=True)

        try:
            found = self._run("list", prefix, find)
        except ObjectMissing:
            return {}
        return {path.removeprefix(root).lstrip("/"): info for path, info in found.items()}

    def _run(
        self, verb: str, key: str, action: Callable[[AbstractFileSystem, str], T], *, seconds: float | None = None
    ) -> T:
        """One call, given up at its deadline, with errors in this house's words."""
        opened = self._open()
        limit = seconds or self.profile.call_seconds
        future = opened.threads.submit(action, opened.client, f"{opened.root}/{key}" if key else opened.root)
        try:
            return future.result(limit)
        except StoreError:
            raise  # in this house's words already
        except FileExistsError as error:
            if verb != "create":
                raise StoreError(f"{self.url} could not {verb} {key}: {error}.") from error
            raise ObjectExists(f"{key} exists in {self.url} already; it was left as it is.") from error
        except _MISSING as error:
            if verb in ("write", "create"):
                raise StoreRefused(f"{self.url} has nowhere to {verb} {key}: {error}. Nothing was changed.") from error
            raise ObjectMissing(f"{key} is not in {self.url}.") from error
        except PermissionError as error:
            raise StoreRefused(f"{self.url} does not let us {verb} {key}: {error}. Nothing was changed.") from error
        except TimeoutError as error:
            raise StoreError(f"{self.url} did not {verb} {key} within {limit:.0f} s.") from error
        except _FAILURES as error:
            raise StoreError(f"{self.url} could not {verb} {key}: {error}.") from error

    def _open(self) -> _Opened:
        with self._lock:
            if self._opened is not None and self._opened.pid != os.getpid():
                _inherited.append(self._opened)  # letting it go here would disturb the parent's connections
                self._opened = None
            if self._opened is None:
                client, root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)
                threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="store")
                self._opened = _Opened(os.getpid(), client, root.rstrip("/"), threads)
            return self._opened

    def __reduce__(self) -> NoReturn:
        """A client holds credentials: it is opened where it is used, and never travels."""
        raise TypeError(f"a store cannot be pickled: pass its URL ({self.url}) and open it where it is used.")

    def __repr__(self) -> str:
        """Names the store; holds nothing secret."""
        return f"{type(self).__name__}({self.url!r})"


def _creates_conditionally(client: AbstractFileSystem) -> bool:
    """Whether the client has a create of its own, not fsspec's ask-then-write."""
    kind = type(client)
    if isinstance(client, AsyncFileSystem):
        own, fallback = kind._pipe_file, AsyncFileSystem._pipe_file
    else:
        own, fallback = kind.pipe_file, AbstractFileSystem.pipe_file
    return own is not fallback and "mode" in inspect.signature(own).parameters


def _fresh(client: AbstractFileSystem) -> AbstractFileSystem:
    """The client, with whatever it remembers of listings forgotten."""
    client.invalidate_cache()
    return client


def _written(info: dict[str, Any]) -> int:
    """When an object was written, in nanoseconds; clients name it differently, and 0 is as old as can be."""
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        moment = info.get(name)
        if isinstance(moment, datetime):
            return int(moment.timestamp() * 1e9)
        if isinstance(moment, int | float):
            return int(moment * 1e9)
    return 0
