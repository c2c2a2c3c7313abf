"""One push under way: what the trainer's thread and the threads that publish share. Says when the commit stands, and
keeps that answer when whoever ran it is lost."""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from weighbridge.storage.attempt import Attempt
from weighbridge.storage.errand import Elsewhere
from weighbridge.storage.feed import Feed
from weighbridge.storage.publisher import Publisher
from weighbridge.storage.stores.hooks import Hooks
from weighbridge.values import Label, Manifest


@dataclass(slots=True)
class Publication:
    """Made by `push`, carried through Prefect in a handle. `manifest` is set once the commit stands, `settled` once
    the publisher may begin the next one, whatever came of this one. `seconds` by phase. `failure` is what ended
    it without a commit. `elsewhere` says who encodes the batches, which then hold no bytes; None: this process."""

    publisher: Publisher
    attempt: Attempt
    feed: Feed
    labels: Mapping[str, Label]
    threads: int
    hooks: Hooks = field(default_factory=Hooks)
    manifest: Manifest | None = None
    settled: threading.Event = field(default_factory=threading.Event)
    seconds: dict[str, float] = field(default_factory=dict)
    failure: BaseException | None = None
    elsewhere: Elsewhere | None = None

    def commit(self) -> Manifest:
        """Commits the attempt and advances the snapshot; see Publisher.commit."""
        started = time.perf_counter()
        try:
            self.manifest = self.publisher.commit(self.attempt, self.labels)
        except BaseException as failure:
            self.attempt.round.fail(failure)
            self.publisher.discard(self.attempt)  # not while its outcome is in doubt
            raise
        finally:
            self.seconds["commit"] = time.perf_counter() - started
            self.seconds["encode"] = sum(shard.seconds for shard in self.attempt.shards)
            self.settled.set()
        return self.manifest

    def announce(self) -> None:
        """Runs the store's own step after a publish. Raises StoreError; the version stands all the same."""
        self.hooks.published(self.publisher.store.url, self.attempt.version)

    def give_up(self, failure: BaseException | None = None) -> None:
        """Takes back what was uploaded, if the commit was never sent; the store is as it was before this push."""
        if not self.settled.is_set():
            if failure is not None:
                self.attempt.round.fail(failure)
            self.publisher.discard(self.attempt)
            self.settled.set()

    def end(self, outcome: Future[Any]) -> None:
        """For whoever ran the flow, or could not: ends every wait on this push, however it went."""
        failure = outcome.exception()
        if failure is not None:
            self.feed.fail(failure)
        self.give_up(failure)
