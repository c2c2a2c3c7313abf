"""The question that a writer asks of a store before its first commit: does put-if-absent hold here? Some servers accept
the condition and ignore it. Must not be asked by readers: it writes."""

import contextlib
import secrets

from weighbridge.errors import ObjectExists, ObjectMissing, StoreError, StoreRefused, StoreUnfit
from weighbridge.storage.backoff import Backoff
from weighbridge.storage.clock import Clock, SystemClock
from weighbridge.storage.stores.contract import Store

PROBE_FOLDER = "probe"


def probe(store: Store, *, clock: Clock | None = None, deadline_seconds: float = 60.0) -> None:
    """Creates one key twice: the second must meet the first, and the first's bytes must stay.

    Raises StoreUnfit, naming the store, when they do not; StoreRefused when the store cannot be written at all; and
    StoreError when it did not answer until the deadline. Removes what it wrote.
    """
    time = clock or SystemClock()
    deadline = time.monotonic() + deadline_seconds
    for pause in Backoff().waits():
        try:
            _ask(store)
            return
        except (StoreUnfit, StoreRefused):
            raise
        except StoreError as failure:
            if time.monotonic() + pause >= deadline:
                raise StoreError(
                    f"{store.label} could not be asked whether it keeps put-if-absent: {failure} Nothing was "
                    "published. Check the address and the network, then start again."
                ) from failure
        time.sleep(pause)


def _ask(store: Store) -> None:
    """One try, on a key of its own: after a lost reply nothing on the old key proves anything."""
    key = f"{PROBE_FOLDER}/{secrets.token_hex(16)}"
    first, second = secrets.token_bytes(32), secrets.token_bytes(32)
    try:
        store.create(key, first)
        try:
            store.create(key, second)
        except ObjectExists:
            held = True
        else:
            held = False
        try:
            standing = store.get(key)
        except ObjectMissing:
            standing = b""
    finally:
        with contextlib.suppress(StoreError):  # a probe's object that stays harms nothing and is collected later
            store.delete(key)
    if not held or standing != first:
        seen = (
            "a second create of one key succeeded" if not held else "the bytes of an object just created did not stay"
        )
        raise StoreUnfit(
            f"the store {store.label} does not keep put-if-absent: {seen}. Two writers could overwrite each other's "
            "versions there, so nothing was published. Use a store that honours conditional writes (Amazon S3, Google "
            "Cloud Storage, SeaweedFS, Ceph, a directory on a POSIX file system)."
        )
