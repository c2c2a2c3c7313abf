"""A store in memory, shared by all actors, and each process' own connection to it, which fails: errors, lost replies,
requests that land late or twice, replies cut short or with a flipped bit. The store itself keeps its promise: a create
has one winner. Must not know what objects mean; whoever watches it is told of every write before it is done."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

from tests.faults.faulty_store import flipped
from tests.simulator.baton import START_NS, Baton
from tests.simulator.life import Life

from weighbridge.errors import ObjectExists, ObjectMissing, StoreError, StoreRefused
from weighbridge.storage.stores.contract import MOST_SMALL_BYTES, ObjectInfo, Store

T = TypeVar("T")

LATE_SECONDS = 40.0
_WRITES = ("before", "lose", "lose", "late", "late", "twice", "slow", "refuse")
_OFTEN = 3.0  # creates and records fail that much more often than the rest: everything hangs on them
_AWAY_SECONDS = 60.0
_AWAY = 0.3  # how often a write without an answer is the last that is heard for a while
_READS = ("before", "slow", "truncate", "flip", "refuse")


class Watcher(Protocol):
    """Who is told of writes, and raises Broken for one that must not be."""

    def writing(self, key: str, old: bytes | None, new: bytes) -> None: ...

    def deleting(self, key: str) -> None: ...


class Objects:
    """What stands in the store, each with the store's own time."""

    def __init__(self, baton: Baton, watcher: Watcher) -> None:
        self.data: dict[str, tuple[bytes, int]] = {}
        self._baton = baton
        self._watcher = watcher

    def create(self, key: str, data: bytes) -> None:
        if key in self.data:
            raise ObjectExists(f"{key} is there")
        self.put(key, data)

    def put(self, key: str, data: bytes) -> None:
        self._watcher.writing(key, self.data[key][0] if key in self.data else None, data)
        self.data[key] = (data, START_NS + int(self._baton.now * 1e9))

    def get(self, key: str) -> bytes:
        try:
            return self.data[key][0]
        except KeyError:
            raise ObjectMissing(f"{key} is not there") from None

    def delete(self, key: str) -> None:
        if key in self.data:
            self._watcher.deleting(key)
            del self.data[key]

    def under(self, prefix: str) -> list[str]:
        return sorted(key for key in self.data if not prefix or key.startswith(f"{prefix}/"))


class SimStore(Store):
    """One process' connection to the objects. Without a life nothing fails: for the checks at the end."""

    url = "sim://store"

    def __init__(self, objects: Objects, life: Life | None = None) -> None:
        self.objects = objects
        self._life = life

    def create(self, key: str, data: bytes) -> None:
        self._write("create", key, lambda: self.objects.create(key, data))

    def put(self, key: str, data: bytes) -> None:
        self._write("put", key, lambda: self.objects.put(key, data))

    def put_file(self, key: str, path: Path) -> None:
        data = path.read_bytes()
        self._write("put_file", key, lambda: self.objects.put(key, data))

    def delete(self, key: str) -> None:
        self._write("delete", key, lambda: self.objects.delete(key))

    def get(self, key: str, *, most: int = MOST_SMALL_BYTES) -> bytes:
        return self._read("get", key, lambda: self.objects.get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        def cut() -> bytes:
            data = self.objects.get(key)[start : start + length]
            if len(data) < length:
                raise StoreError(f"{key} is shorter")
            return data

        return self._read("get_range", key, cut)

    def size(self, key: str) -> int:
        return self._ask("size", key, lambda: len(self.objects.get(key)))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        def found() -> list[ObjectInfo]:
            return [ObjectInfo(k, len(self.objects.data[k][0]), self.objects.data[k][1]) for k in under(prefix)]

        under = self.objects.under
        return iter(self._ask("list", prefix, found))

    def folders(self, prefix: str) -> Iterator[str]:
        depth = len(prefix) + 1 if prefix else 0

        def found() -> list[str]:
            return sorted({key[depth:].split("/")[0] for key in self.objects.under(prefix) if "/" in key[depth:]})

        return iter(self._ask("folders", prefix, found))

    def _write(self, verb: str, key: str, action: Callable[[], None]) -> None:
        life = self._life
        if life is None:
            action()
            return
        what = f"{verb} {key}"
        fault = self._begin(life, what, _WRITES)
        if fault == "late":
            life.baton.later(life.rng.expovariate(1 / LATE_SECONDS), lambda: _unheard(life.baton, what, action))
            raise StoreError(f"{what}: no answer")
        action()
        if fault == "twice":
            life.baton.later(life.rng.expovariate(1 / LATE_SECONDS), lambda: _unheard(life.baton, what, action))
        life.done(what)
        if fault == "lose":
            raise StoreError(f"{what}: the reply was lost")

    def _read(self, verb: str, key: str, action: Callable[[], bytes]) -> bytes:
        if self._life is None:
            return action()
        fault = self._begin(self._life, f"{verb} {key}", _READS)
        data = action()
        self._life.done(f"{verb} {key}")
        if fault == "truncate":
            return data[: len(data) // 2]
        return flipped(data) if fault == "flip" and data else data

    def _ask(self, verb: str, key: str, action: Callable[[], T]) -> T:
        if self._life is None:
            return action()
        self._begin(self._life, f"{verb} {key}", ("before", "slow"))
        answer = action()
        self._life.done(f"{verb} {key}")
        return answer

    def _begin(self, life: Life, what: str, faults: tuple[str, ...]) -> str:
        if life.baton.now < life.away_until:
            life.step(what, 1.0)
            life.baton.note(f"{what} away")
            raise StoreError(f"{what}: the store is away")
        often = _OFTEN if what.startswith(("create", "put hosts/")) else 1.0
        fault = life.rng.choice(faults) if life.chance(life.weather.store_fault * often) else ""
        life.step(what, life.rng.expovariate(1 / 10) if fault == "slow" else 0.0)
        life.baton.note(f"{what} {fault}".rstrip())
        if fault in ("late", "lose") and life.rng.random() < _AWAY:
            life.away_until = life.baton.now + life.rng.uniform(1, 2 * _AWAY_SECONDS)
        if fault == "before":
            raise StoreError(f"{what}: the connection failed")
        if fault == "refuse":
            raise StoreRefused(f"{what}: refused")
        return fault


def _unheard(baton: Baton, what: str, action: Callable[[], None]) -> None:
    baton.note(f"lands by itself: {what}")
    with suppress(StoreError):
        action()
