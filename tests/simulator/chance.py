"""What the code under test takes from chance (names, commit ids, jitter) comes from the seed, for the simulation's
threads only; and nothing is logged meanwhile."""

import logging
import random
import secrets
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import structlog
from tests.simulator.baton import Baton

from weighbridge.storage.backoff import Backoff
from weighbridge.storage.replica import replica
from weighbridge.storage.replica.site import Site


@contextmanager
def seeded(baton: Baton, rng: random.Random) -> Iterator[None]:
    """While it lasts, actors of `baton` draw from `rng`; all other threads draw as ever."""
    uuid4, token_bytes, waits = uuid.uuid4, secrets.token_bytes, Backoff.waits

    def seeded_uuid() -> uuid.UUID:
        return uuid4() if baton.here() is None else uuid.UUID(int=rng.getrandbits(128), version=4)

    def seeded_bytes(nbytes: int = 32) -> bytes:
        return token_bytes(nbytes) if baton.here() is None else rng.randbytes(nbytes)

    def seeded_waits(backoff: Backoff) -> Iterator[float]:
        source = backoff.rng if baton.here() is None else rng
        return waits(Backoff(backoff.first_seconds, backoff.most_seconds, source))

    with (
        _silence(),
        patch.object(uuid, "uuid4", seeded_uuid),
        patch.object(secrets, "token_bytes", seeded_bytes),
        patch.object(secrets, "token_hex", lambda nbytes=32: seeded_bytes(nbytes).hex()),
        patch.object(Backoff, "waits", seeded_waits),
        patch.object(replica, "warm", lambda: None),
        # Until 3.12 one lock serves all instances; here it would be held while others have their turn.
        patch.object(vars(Site)["parts"], "lock", nullcontext(), create=True),
    ):
        yield


@contextmanager
def _silence() -> Iterator[None]:
    configured, before = structlog.is_configured(), structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        if configured:
            structlog.configure(**before)
        else:
            structlog.reset_defaults()
