"""Many small objects read in order, and ahead in threads where a store is slow. Must not know what they are."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from weighbridge.errors import ObjectTooLarge, StoreError
from weighbridge.storage.stores.contract import MOST_SMALL_BYTES, Store

_THREADS = 8
_AT_ONCE = 2  # keys a thread takes
_AHEAD = 4  # batches a thread that may wait to be taken
_MOST_AHEAD_BYTES = 16 << 20
"""Of an object that is read ahead, so that many large ones are not in memory at once; a larger one is read in turn."""
_LOOK_AT = 31
_SLOW_SECONDS = 0.002


def fetch_all(
    store: Store, keys: Iterable[str], *, most: int = MOST_SMALL_BYTES
) -> Iterator[tuple[str, bytes | StoreError]]:
    """Each key with its object's bytes, at most `most`, or with what the store said instead, in the order of `keys`."""
    left, ahead = iter(keys), min(most, _MOST_AHEAD_BYTES)
    # Beside a caller who computes, threads that read from a local disk cost more than they win.
    waited = deque([0.0] * _LOOK_AT, maxlen=_LOOK_AT)
    for key in left:
        started = time.perf_counter()
        answer = _get(store, key, most)
        waited.append(time.perf_counter() - started)
        yield key, answer
        if sorted(waited)[_LOOK_AT // 2] > _SLOW_SECONDS:  # one that the machine kept waiting says nothing
            break
    else:
        return
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="history") as pool:
        under_way: deque[Future[list[tuple[str, bytes | StoreError]]]] = deque()
        try:
            while True:
                while len(under_way) < _THREADS * _AHEAD and (batch := list(islice(left, _AT_ONCE))):
                    under_way.append(pool.submit(_get_all, store, batch, ahead))
                if not under_way:
                    return
                for key, answer in under_way.popleft().result():
                    yield key, _get(store, key, most) if isinstance(answer, ObjectTooLarge) and ahead < most else answer
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _get_all(store: Store, keys: list[str], most: int) -> list[tuple[str, bytes | StoreError]]:
    return [(key, _get(store, key, most)) for key in keys]


def _get(store: Store, key: str, most: int) -> bytes | StoreError:
    try:
        return store.get(key, most=most)
    except StoreError as error:
        return error
