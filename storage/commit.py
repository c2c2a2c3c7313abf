"""The commit: one object is created if no other stands there, and the answer is known even when the store's reply was
lost. Must not know what the bytes mean; callers make them unique to the attempt."""

from weighbridge.errors import CommitStateUnknown, ObjectExists, ObjectMissing, StoreError, StoreRefused, StoreUnfit
from weighbridge.storage.backoff import Backoff
from weighbridge.storage.clock import Clock
from weighbridge.storage.stores.contract import Store


def put_if_absent(
    store: Store,
    key: str,
    data: bytes,
    *,
    clock: Clock,
    deadline_seconds: float = 60.0,
    backoff: Backoff | None = None,
) -> bool:
    """Creates `key` with `data`, which must be unique to this attempt. True: our bytes stand there. False: others do.

    A create that fails may have landed, and one that meets an object may have met our own, from a try whose reply was
    lost; so after either the object is read back, and only what stands there decides. Nothing there means trying again.
    Raises StoreRefused when the store said no and no try can have landed; StoreUnfit; and CommitStateUnknown when the
    deadline passes (or the store refuses) while a try may still have landed or may still land.
    """
    waits = (backoff or Backoff()).waits()
    deadline = clock.monotonic() + deadline_seconds
    in_doubt = False
    while True:
        trouble: StoreError
        try:
            store.create(key, data)
            return True
        except StoreUnfit:
            raise
        except StoreRefused as refusal:
            trouble = refusal
        except ObjectExists as conflict:
            in_doubt, trouble = True, conflict
        except StoreError as failure:
            in_doubt, trouble = True, failure

        standing, unread = _read_back(store, key, data)
        if standing is not None:
            return standing == data
        if isinstance(trouble, StoreRefused) and not in_doubt:
            raise trouble
        pause = next(waits)
        if isinstance(trouble, StoreRefused) or clock.monotonic() + pause >= deadline:
            raise CommitStateUnknown(
                f"the outcome of creating {key} in {store.url} is not known: {trouble} "
                f"{'Reading it back failed too: ' + str(unread) if unread else 'It is not there, but may yet appear.'} "
                "Nothing that was committed before is touched; the next push finds out what stands there and goes on."
            ) from trouble
        clock.sleep(pause)


def _read_back(store: Store, key: str, ours: bytes) -> tuple[bytes | None, StoreError | None]:
    """What stands at `key`, or why that could not be read (neither: nothing is there). Believed only when two reads
    agree, so that one reply with a flipped bit does not make us think that we lost; and never when it is the beginning
    of ours, which two replies that were cut off at the same place can both be."""
    try:
        standing, again = store.get(key), store.get(key)
    except ObjectMissing:
        return None, None
    except StoreError as failure:
        return None, failure
    if standing != again:
        return None, StoreError(f"two reads of {key} in {store.url} gave different bytes.")
    if len(standing) < len(ours) and ours.startswith(standing):
        return None, StoreError(f"{key} in {store.url} was read with {len(standing)} bytes of {len(ours)}.")
    return standing, None
