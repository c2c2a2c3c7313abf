"""What all stores behind a network client share: a client made lazily in the process that uses it, a deadline round
every call, credentials renewed once, errors in this house's words. Must not know any provider."""

import os
import threading
import weakref
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

from weighbridge.errors import ObjectExists, ObjectMissing, StoreError, StoreRefused, StoreUnfit
from weighbridge.storage.backoff import Backoff
from weighbridge.storage.clock import Clock, SystemClock
from weighbridge.storage.stores.background import BackgroundLoop
from weighbridge.storage.stores.contract import Store
from weighbridge.storage.stores.profile import Profile

C = TypeVar("C")
T = TypeVar("T")

REPEATABLE = 4
"""Tries of a call that is small and may be repeated: clients send a lost request again, but give up on a reply whose
body breaks off."""

_BACKOFF = Backoff(first_seconds=0.1, most_seconds=1.0)


@dataclass(frozen=True, slots=True)
class Verb:
    """What was asked for, for the words of an error. `nbytes` is how many bytes it carries."""

    name: str
    key: str
    nbytes: int = 0


@dataclass(frozen=True, slots=True, repr=False, eq=False, weakref_slot=True)
class Connection(Generic[C]):
    """A client, and the loop that it lives in."""

    background: BackgroundLoop
    client: C


# A forked child that let go of its parent's client would take its sockets out of the parent's epoll, which both share,
# and the parent's next request would wait for nothing. So a child keeps what it inherits, and never uses it.
_live: "weakref.WeakSet[Connection[Any]]" = weakref.WeakSet()
_inherited: list[Connection[Any]] = []
os.register_at_fork(after_in_child=lambda: _inherited.extend(_live))


class RemoteStore(Store, Generic[C]):
    """A store behind an asynchronous client of type C. Subclasses make the client, call it, and tell its errors."""

    failures: ClassVar[tuple[type[Exception], ...]] = (OSError, TimeoutError, ValueError, LookupError, EOFError)
    """What a client may raise, garbled answers included; anything else is a bug and passes through."""

    def __init__(self, url: str, *, prefix: str, profile: Profile) -> None:
        self.url = url
        self.prefix = prefix
        self.profile = profile
        self._clock: Clock = SystemClock()
        self._lock = threading.Lock()
        self._connection: Connection[C] | None = None

    @property
    def label(self) -> str:
        """See Store."""
        return f"{self.url} at {self.profile.endpoint_url}" if self.profile.endpoint_url else self.url

    @abstractmethod
    async def _connect(self) -> C:
        """A fresh client, with credentials read anew from the provider's chain. Runs in the store's own loop."""

    @staticmethod
    @abstractmethod
    async def _disconnect(client: C) -> None:
        """Closes a client's connections."""

    @abstractmethod
    def _told(self, error: Exception, verb: Verb) -> StoreError:
        """A client's error in this house's words and classes."""

    @abstractmethod
    def _is_stale(self, error: Exception) -> bool:
        """Whether an error may pass once credentials are read anew."""

    def run(
        self, verb: Verb, action: Callable[[C], Awaitable[T]], *, seconds: float | None = None, tries: int = 1
    ) -> T:
        """One call within its deadline, tried again `tries` times in all while that lasts. What is above the store
        tries again where a try may change something, or is large; REPEATABLE is for the rest.
        """
        limit = self.profile.seconds(verb.nbytes) if seconds is None else seconds
        give_up = self._clock.monotonic() + limit
        for pause in islice(_BACKOFF.waits(), tries - 1):
            try:
                return self._try(verb, action, limit)
            except (StoreRefused, StoreUnfit, ObjectMissing, ObjectExists):
                raise
            except StoreError:
                if self._clock.monotonic() + pause >= give_up:
                    raise
            self._clock.sleep(pause)
        return self._try(verb, action, limit)

    def name(self, key: str) -> str:
        """The object's name in the bucket."""
        return f"{self.prefix}/{key}" if self.prefix else key

    def folder(self, prefix: str) -> str:
        """What the names of all objects under a folder key begin with."""
        folder = self.name(prefix) if prefix else self.prefix
        return f"{folder}/" if folder else ""

    def key(self, name: str) -> str:
        """The key of an object's name in the bucket."""
        return name.removeprefix(f"{self.prefix}/") if self.prefix else name

    def unreachable(self, error: Exception, verb: Verb) -> StoreError:
        """An error that says nothing about the object: the request or the reply was lost, or came too late."""
        reason = str(error) or type(error).__name__
        return StoreError(f"{self.label} did not answer ({verb.name} {verb.key}): {reason}")

    def _try(self, verb: Verb, action: Callable[[C], Awaitable[T]], limit: float) -> T:
        """One try. When the store did not accept our credentials they are read anew, once."""
        connection: Connection[C] | None = None
        try:
            connection = self._open()
            return self._bounded(connection, action, limit)
        except StoreError:
            raise  # in this house's words already
        except self.failures as error:
            if not self._is_stale(error):
                raise self._told(error, verb) from error
        try:
            return self._bounded(self._open(instead_of=connection), action, limit)
        except StoreError:
            raise
        except self.failures as error:
            raise self._told(error, verb) from error

    def _bounded(self, connection: Connection[C], action: Callable[[C], Awaitable[T]], limit: float) -> T:
        try:
            return connection.background.run(lambda: action(connection.client), seconds=limit)
        except TimeoutError as late:
            raise TimeoutError(str(late) or f"no answer within {limit:.0f} s") from late

    def _open(self, *, instead_of: Connection[C] | None = None) -> Connection[C]:
        """The connection of this process; a new one in place of `instead_of`, unless another thread has made it."""
        with self._lock:
            current = self._connection
            if current is None or current is instead_of or not current.background.usable:
                background = BackgroundLoop(f"store {self.url}")
                try:
                    client = background.run(self._connect, seconds=self.profile.call_seconds)
                except BaseException:
                    background.stop()
                    raise
                current = Connection(background, client)
                weakref.finalize(current, background.stop, partial(self._disconnect, client))
                _live.add(current)
                self._connection = current
            return current

    def __reduce__(self) -> NoReturn:
        """A client holds credentials and threads: it is opened where it is used, and never travels."""
        raise TypeError(f"a store cannot be pickled: pass its URL ({self.url}) and open it where it is used.")

    def __repr__(self) -> str:
        """Names the store; holds nothing secret."""
        return f"{type(self).__name__}({self.url!r})"
