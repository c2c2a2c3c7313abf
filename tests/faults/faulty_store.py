"""A store that lies and fails by script, around any real store. Tests say what goes wrong with which call; everything
that is not in the script works."""

import contextlib
import errno
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypeVar

from weighbridge.errors import StoreError, StoreRefused
from weighbridge.storage.clock import Clock
from weighbridge.storage.stores.contract import MOST_SMALL_BYTES, ObjectInfo, Store, Unfinished

T = TypeVar("T")

Verb = Literal["create", "put", "put_file", "get", "get_range", "size", "list", "folders", "delete"]

Action = Literal[
    "lose",  # done, and then the reply is lost (StoreError)
    "before",  # fails before anything is done (StoreError)
    "truncate",  # the data, in either direction, loses its second half; a size is half
    "flip",  # one bit of the data, in either direction, is flipped
    "delay",  # takes `seconds` of the clock first, then works
    "full",  # no room (StoreRefused)
    "denied",  # no permission (StoreRefused)
    "kill",  # done, and then the process is as good as dead (raises Killed, which nobody catches)
    "kill before",  # dead before anything is done
]


class Killed(BaseException):
    """Stands for SIGKILL: not an Exception, so only a process's edge could catch it."""


@dataclass(slots=True)
class Fault:
    """What goes wrong with the calls of `verb` ("*": any) whose key matches the glob `key`: the first `skip` of them
    still work, then `times` of them do not."""

    verb: Verb | Literal["*"]
    action: Action
    key: str = "*"
    times: int = 1
    skip: int = 0
    seconds: float = 0.0
    hits: int = field(default=0, init=False)
    """Calls that this fault has spoiled."""


class FaultyStore(Store):
    """`calls` lists every call as (verb, key), failed ones too."""

    def __init__(self, inner: Store, *faults: Fault, clock: Clock | None = None) -> None:
        self.inner = inner
        self.url = inner.url
        self.faults = list(faults)
        self.calls: list[tuple[str, str]] = []
        self._clock = clock
        self._lock = threading.Lock()

    def create(self, key: str, data: bytes) -> None:
        self._send("create", key, data, lambda sent: self.inner.create(key, sent))

    def put(self, key: str, data: bytes) -> None:
        self._send("put", key, data, lambda sent: self.inner.put(key, sent))

    def put_file(self, key: str, path: Path) -> None:
        def send(spoil: Callable[[bytes], bytes] | None) -> None:
            if spoil is None:
                self.inner.put_file(key, path)
                return
            with tempfile.NamedTemporaryFile(suffix=".spoilt") as copy:
                with path.open("rb") as source:
                    shutil.copyfileobj(source, copy)
                copy.flush()
                spoilt = Path(copy.name)
                spoilt.write_bytes(spoil(spoilt.read_bytes()))
                self.inner.put_file(key, spoilt)

        self._call("put_file", key, send)

    def get(self, key: str, *, most: int = MOST_SMALL_BYTES) -> bytes:
        return self._receive("get", key, lambda: self.inner.get(key, most=most))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._receive("get_range", key, lambda: self.inner.get_range(key, start, length))

    def size(self, key: str) -> int:
        def ask(spoil: Callable[[bytes], bytes] | None) -> int:
            size = self.inner.size(key)
            return size if spoil is None else size // 2

        return self._call("size", key, ask)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._call("list", prefix, lambda _: iter(tuple(self.inner.list(prefix))))

    def folders(self, prefix: str) -> Iterator[str]:
        return self._call("folders", prefix, lambda _: iter(tuple(self.inner.folders(prefix))))

    def delete(self, key: str) -> None:
        self._call("delete", key, lambda _: self.inner.delete(key))

    def unfinished(self) -> Iterator[Unfinished]:
        return self.inner.unfinished()

    def discard(self, unfinished: Unfinished) -> None:
        self.inner.discard(unfinished)

    def _send(self, verb: Verb, key: str, data: bytes, action: Callable[[bytes], None]) -> None:
        self._call(verb, key, lambda spoil: action(data if spoil is None else spoil(data)))

    def _receive(self, verb: Verb, key: str, action: Callable[[], bytes]) -> bytes:
        return self._call(verb, key, lambda spoil: action() if spoil is None else spoil(action()))

    def _call(self, verb: Verb, key: str, action: Callable[[Callable[[bytes], bytes] | None], T]) -> T:
        fault = self._next_fault(verb, key)
        if fault is None:
            return action(None)
        what = f"{verb} {key} (scripted fault)"
        match fault.action:
            case "before":
                raise StoreError(f"the connection failed: {what}")
            case "full":
                raise StoreRefused(f"no room: {what}") from OSError(errno.ENOSPC, "No space left on device")
            case "denied":
                raise StoreRefused(f"access denied: {what}") from PermissionError(errno.EACCES, "Permission denied")
            case "kill before":
                raise Killed(what)
            case "kill":
                with contextlib.suppress(StoreError):  # who is dead never learns that it failed
                    action(None)
                raise Killed(what)
            case "lose":
                action(None)
                raise StoreError(f"the reply was lost: {what}")
            case "truncate":
                return action(lambda data: data[: len(data) // 2])
            case "flip":
                return action(flipped)
            case "delay":
                assert self._clock is not None, "a delay needs the clock that it passes on"
                self._clock.sleep(fault.seconds)
                return action(None)

    def _next_fault(self, verb: Verb, key: str) -> Fault | None:
        with self._lock:
            self.calls.append((verb, key))
            for fault in self.faults:
                if fault.verb in (verb, "*") and fnmatchcase(key, fault.key) and fault.hits < fault.times:
                    if fault.skip > 0:
                        fault.skip -= 1
                        continue
                    fault.hits += 1
                    return fault
        return None


def flipped(data: bytes) -> bytes:
    """`data` with one bit in its middle flipped; never the same bytes."""
    assert data, "nothing to flip"
    spoilt = bytearray(data)
    spoilt[len(spoilt) // 2] ^= 0x10
    return bytes(spoilt)
