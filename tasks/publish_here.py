"""Publish without Prefect: the steps of the publish flow in threads of this process, for the ranks that do not talk to
Prefect. Their shards are the first rank's to commit. Must not know Prefect."""

from concurrent.futures import Future, ThreadPoolExecutor

from weighbridge.storage.batching import Batch
from weighbridge.storage.feed import FeedBroken
from weighbridge.storage.publication import Publication


def publish_here(publication: Publication) -> None:
    """Encodes and uploads shards as the trainer's thread hands them over, then takes part in the commit. Raises what
    the failing step raised, or what any other rank did."""
    attempt, feed = publication.attempt, publication.feed

    def encode_and_upload(batch: Batch) -> None:
        try:
            attempt.encode(batch)
        except BaseException as failure:
            feed.fail(failure)
            raise
        finally:
            feed.done()
        attempt.upload(batch.index)

    try:
        with ThreadPoolExecutor(publication.threads, "weighbridge-publish") as pool:
            steps: list[Future[None]] = [pool.submit(encode_and_upload, batch) for batch in feed]
        for step in steps:
            step.result()
        publication.commit()
    except BaseException as failure:
        # The feed tells of its other side; what that side failed with is what every rank is owed.
        cause = failure.__cause__ if isinstance(failure, FeedBroken) and failure.__cause__ is not None else failure
        publication.failure = cause
        feed.fail(cause)
        if cause is failure:
            raise
        raise cause from None
