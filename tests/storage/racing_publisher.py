"""A publisher in a process of its own, that races another for every version: `racing_publisher ROOT BASE SPOOL SEED N`.

Says "ready VERSION" once everything but the commit is done, waits for a line, commits, and says "won VERSION STATE" or
"lost VERSION". One that was overtaken starts again, as a trainer would.
"""

import sys
from pathlib import Path

import structlog
from tests.checkpoints import as_tensors, state_digest_of, tiny_weights, trained
from tests.storage.publishing import SHARD_BYTES

from weighbridge.errors import CommitConflict, WriterOvertaken
from weighbridge.storage.attempt import Attempt
from weighbridge.storage.batching import batches
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.clock import SystemClock
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.open_publisher import open_publisher
from weighbridge.storage.publisher import Publisher
from weighbridge.storage.stores import open_store


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main() -> None:
    root, base, spool, seed, rounds = sys.argv[1:]
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))

    def opened() -> Publisher:
        return open_publisher(
            open_store(root),
            open_checkpoint(Path(base)),
            run_id="run-1",
            digest_kind="xxh3-128",
            aliases={},
            spool=Path(spool),
            disk=LocalDisk("process"),
            clock=SystemClock(),
            threads=1,
        )

    publisher = opened()
    for number in range(int(rounds)):
        try:
            attempt: Attempt = publisher.begin()
        except WriterOvertaken:
            publisher = opened()
            attempt = publisher.begin()
        weights = trained(tiny_weights(), int(seed) + number)
        for batch in batches(as_tensors(weights), shard_bytes=SHARD_BYTES):
            attempt.encode(batch)
            attempt.upload(batch.index)
        say("ready", attempt.version)
        sys.stdin.readline()
        try:
            manifest = publisher.commit(attempt, {})
        except CommitConflict:
            say("lost", attempt.version)
        else:
            say("won", manifest.version, state_digest_of(weights))


if __name__ == "__main__":
    main()
