"""The store's own time: the only clock by which ages of objects are judged, since machines' clocks disagree."""

import contextlib
import secrets

from weighbridge.errors import StoreError
from weighbridge.storage.stores.contract import Store
from weighbridge.storage.stores.probe import PROBE_FOLDER


def store_now_ns(store: Store) -> int:
    """Nanoseconds since the epoch as the store has them, by a small object that it dates. Raises StoreError."""
    key = f"{PROBE_FOLDER}/{secrets.token_hex(16)}"
    store.put(key, b"what time is it?")
    try:
        return next(info.modified_ns for info in store.list(PROBE_FOLDER) if info.key == key)
    except StopIteration:
        raise StoreError(f"{store.url} does not list {key}, which was just written. Nothing was removed.") from None
    finally:
        with contextlib.suppress(StoreError):
            store.delete(key)
