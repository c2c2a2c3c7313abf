"""A trainer: opens the run, takes over, pushes versions, dies, comes back with whatever weights it resumes from. Runs
the real publisher; the order of a push is `flows/publish.py`'s, in one thread."""

import random
from collections.abc import Iterator

import numpy as np
from tests.faults.crash_disk import Crash
from tests.replica.runs import spec
from tests.simulator.baton import Baton, Broken, SimClock
from tests.simulator.life import Life
from tests.simulator.machine import Machine, SimDisk
from tests.simulator.store import SimStore
from tests.simulator.truth import SHAPES, Truth, Weights, after_a_step
from tests.simulator.weather import Weather

from weighbridge.errors import CommitConflict, CommitStateUnknown, StoreError, WeighbridgeError, WriterOvertaken
from weighbridge.storage.batching import batches
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.feed import Feed
from weighbridge.storage.open_publisher import open_publisher
from weighbridge.storage.publication import Publication
from weighbridge.storage.publisher import Publisher
from weighbridge.values import Manifest, TensorSpec

SHARD_BYTES = 1_200
_TRIES = 3


class Trainer:
    """Works on a machine of its own until `pushes` of its versions stand, or another trainer took over."""

    def __init__(
        self, machine: Machine, *, baton: Baton, weather: Weather, rng: random.Random, truth: Truth, pushes: int
    ) -> None:
        self.machine = machine
        self.pushes = pushes
        self.ended = False
        self._baton, self._weather, self._rng, self._truth = baton, weather, rng, truth
        self._numpy = np.random.default_rng(rng.getrandbits(64))
        self._lives = 0

    def work(self) -> None:
        """The actor: one life after the other."""
        while self.pushes > 0:
            life = Life(self._baton, self._weather, self._rng)
            self._lives += 1
            try:
                self._live(life)
            except WriterOvertaken as overtaken:
                self._baton.note(f"stops for good: {overtaken}")
                break
            except WeighbridgeError as error:
                self._baton.note(f"ends by {type(error).__name__}: {error}")
            except Crash:
                pass
            self._baton.step(self._rng.expovariate(1 / 3))
        self.ended = True

    def _live(self, life: Life) -> None:
        spool = self.machine.root / f"spool-{self._lives}"
        publisher = open_publisher(
            SimStore(self._truth.objects, life),
            open_checkpoint(self._truth.base),
            run_id="run-1",
            digest_kind="xxh3-128",
            aliases={},
            spool=spool,
            disk=SimDisk(self.machine, life),
            clock=SimClock(self._baton, life.check),
            threads=1,
        )
        if self._rng.random() < 0.7:
            publisher.take_over()
        weights = self._rng.choice(self._truth.versions)  # whatever it resumes from
        while self.pushes > 0:
            self._check_snapshot(publisher)
            weights = after_a_step(weights, self._numpy)
            self._push(publisher, weights)
            life.step("the next push", self._rng.expovariate(1 / 4))
        if left := [path.name for path in spool.iterdir()]:
            raise Broken(f"the spool of a trainer that ended well still holds {left}")

    def _push(self, publisher: Publisher, weights: Weights) -> None:
        for _ in range(_TRIES):
            try:
                manifest = self._publish(publisher, weights)
            except WriterOvertaken:
                raise
            except CommitConflict as conflict:
                self._baton.note(f"a conflict: {conflict}")
                continue
            except CommitStateUnknown as unknown:
                self._baton.note(f"not known: {unknown}")
            except (StoreError, OSError) as error:
                if not isinstance(error, WeighbridgeError):
                    raise
                self._baton.note(f"no push: {type(error).__name__}: {error}")
            else:
                self._check_stands(manifest, weights)
                self.pushes -= 1
            return

    def _publish(self, publisher: Publisher, weights: Weights) -> Manifest:
        publication = Publication(publisher, publisher.begin(), Feed(in_flight=1), {}, threads=1)
        attempt = publication.attempt
        self._truth.announce(attempt.commit_id, weights)
        try:
            for batch in batches(_tensors(weights), shard_bytes=SHARD_BYTES):
                attempt.encode(batch)
                attempt.upload(batch.index)
            return publication.commit()
        finally:
            publication.give_up()

    def _check_stands(self, manifest: Manifest, weights: Weights) -> None:
        self._baton.note(f"published version {manifest.version}")
        if manifest.version > self._truth.head or not _equal(self._truth.versions[manifest.version], weights):
            raise Broken(f"a trainer was told that version {manifest.version} is its own, and it is not")

    def _check_snapshot(self, publisher: Publisher) -> None:
        if publisher.version > self._truth.head:
            raise Broken(f"the snapshot says version {publisher.version}, which was never committed")
        image = publisher._snapshot.image
        for key in image.parts:
            if bytes(image.view(key)) != self._truth.versions[publisher.version][key.tensor].tobytes():
                raise Broken(f"the snapshot says version {publisher.version}, and its {key.tensor} is another")


def _tensors(weights: Weights) -> Iterator[tuple[TensorSpec, Bytes]]:
    for name in SHAPES:
        yield spec(name, SHAPES), weights[name]


def _equal(one: Weights, other: Weights) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in SHAPES)
