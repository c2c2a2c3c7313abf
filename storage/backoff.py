"""How long to wait before trying again: exponential, with full jitter, so that many hosts do not come back at once.
Must not know what is tried."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Backoff:
    """`first_seconds` bounds the first wait, every later bound is twice the one before, up to `most_seconds`. A
    simulator passes a seeded `rng`."""

    first_seconds: float = 0.2
    most_seconds: float = 5.0
    rng: random.Random = field(default_factory=random.Random, compare=False, repr=False)

    def waits(self) -> Iterator[float]:
        """Endless waits in seconds, each drawn between a tenth of its bound and the bound."""
        bound = self.first_seconds
        while True:
            yield self.rng.uniform(bound / 10, bound)
            bound = min(bound * 2, self.most_seconds)
