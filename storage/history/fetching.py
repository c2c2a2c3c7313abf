"""Many small objects read ahead, in threads, and handed over in order. Must not know what they are."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from weighbridge.errors import StoreError
from weighbridge.storage.stores.contract import Store

_THREADS = 8
_AT_ONCE = 4  # keys a thread takes: on a local disk handing one over costs more than reading it
_AHEAD = 4  # batches a thread that may wait to be taken


def fetch_all(store: Store, keys: Iterable[str]) -> Iterator[tuple[str, bytes | StoreError]]:
    """Each key with its object's bytes, or with what the store said instead, in the order of `keys`."""
    left = iter(keys)
    first = list(islice(left, 1))
    if not first:
        return
    yield first[0], _get(store, first[0])  # one alone needs no threads
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="history") as pool:
        under_way: deque[Future[list[tuple[str, bytes | StoreError]]]] = deque()
        try:
            while True:
                while len(under_way) < _THREADS * _AHEAD and (batch := list(islice(left, _AT_ONCE))):
                    under_way.append(pool.submit(_get_all, store, batch))
                if not under_way:
                    return
                yield from under_way.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _get_all(store: Store, keys: list[str]) -> list[tuple[str, bytes | StoreError]]:
    return [(key, _get(store, key)) for key in keys]


def _get(store: Store, key: str) -> bytes | StoreError:
    try:
        return store.get(key)
    except StoreError as error:
        return error
