"""Encode: one batch against the snapshot, to a spooled shard. Coarse as a shard; safe to repeat, but never retried by
itself: it fails for want of memory or disk, or for a fault of ours, and neither is better at once."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from weighbridge.storage.attempt import Attempt
from weighbridge.storage.batching import Batch
from weighbridge.storage.feed import Feed
from weighbridge.tasks.handle import Handle


@task(name="encode", task_run_name="encode-{index:05d}", cache_policy=NO_CACHE, persist_result=False)
def encode(index: int, attempt: Handle[Attempt], batch: Handle[Batch], feed: Handle[Feed]) -> int:
    """Encodes one batch; returns its index. Releases the batch and makes room in the feed, whatever happens."""
    try:
        attempt.value.encode(batch.value)
    except BaseException as failure:
        feed.value.fail(failure)
        raise
    finally:
        batch.release()
        feed.value.done()
    return index
