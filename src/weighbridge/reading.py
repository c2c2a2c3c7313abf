"""Reads what is pushed, in the trainer's thread: tensors into the feed, or of a folder only the plan, for those who
read it elsewhere. Must not know what becomes of a batch."""

import time
from contextlib import suppress

from weighbridge.settings import Settings
from weighbridge.storage.attempt import Attempt
from weighbridge.storage.batching import batches
from weighbridge.storage.checkpoint import Checkpoint
from weighbridge.storage.errand import Elsewhere, ErrandSite
from weighbridge.storage.expectation import Expectation
from weighbridge.storage.feed import FeedBroken
from weighbridge.storage.publication import Publication
from weighbridge.storage.publisher import Publisher
from weighbridge.tasks.folder_plan import plan_folder
from weighbridge.tasks.gather import Source, gather
from weighbridge.tasks.sharing import Sharing


def read_here(source: Source, publication: Publication, sharing: Sharing, settings: Settings) -> None:
    """Reads the trainer's tensors until all of them were encoded. Raises GatherError, FeedBroken."""
    started = time.perf_counter()
    publisher, feed = publication.publisher, publication.feed
    gathered = gather(source, _expect(publisher, settings), sharing)
    tensors = ((item.spec, item.lasting()) for item in gathered)
    try:
        for batch in batches(tensors, shard_bytes=settings.shard_bytes):
            feed.put(batch)
    except FeedBroken:
        if publisher.ranks.size > 1:
            with suppress(Exception):  # what broke the feed is what is told
                for _ in gathered:  # other ranks may be in the source's collectives with us
                    pass
        raise
    feed.close()
    feed.drain()
    publication.seconds["gather"] = time.perf_counter() - started


def have_read(folder: Checkpoint, publication: Publication, settings: Settings) -> None:
    """Has a folder read by those who encode it, until all of it was. Raises like `read_here`."""
    started = time.perf_counter()
    feed = publication.feed
    for batch in plan_folder(folder, _expect(publication.publisher, settings), shard_bytes=settings.shard_bytes):
        feed.put(batch)
    feed.close()
    feed.drain()
    publication.seconds["gather"] = time.perf_counter() - started


def elsewhere_of(folder: Checkpoint, publisher: Publisher, attempt: Attempt, settings: Settings) -> Elsewhere:
    """Who encodes a folder's shards, and what they are told."""
    assert settings.base is not None and settings.encode_on != "threads"
    publisher.hold_nothing()
    site = ErrandSite(
        folder=folder.folder,
        base=settings.base.resolve(),
        store=publisher.store.url,
        profile=settings.profile,
        trust=publisher.lineage.trust,
        parent=publisher.version,
        parent_digest=publisher.parent_digest,
        commit_id=attempt.commit_id,
        spool=settings.spool,
    )
    return Elsewhere(settings.encode_on, settings.encode_address, settings.encode_threads, site)


def _expect(publisher: Publisher, settings: Settings) -> Expectation:
    return Expectation(publisher.specs, publisher.aliases, settings.unchanged)
