"""How rough a run is: chances and times, drawn from the seed. Must not know what they are used for."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Weather:
    """Chances are by operation (of a store, a disk, an engine) while the storm lasts; afterwards nothing fails.

    `crash`: the process dies there. `power`: the whole machine does, and what was not synced is lost but for a share
    of `keep`. `full`: the disk fills up for a while. `rot`: something on a disk is damaged while its host is down.
    """

    storm_seconds: float
    store_fault: float
    engine_fault: float
    crash: float
    power: float
    keep: float
    full: float
    rot: float
    keep_going: float


def forecast(rng: random.Random) -> Weather:
    """The weather of one seed: some are calm in one thing and rough in another."""
    rough = rng.choice((0.3, 1.0, 1.0, 2.5))

    def some(chance: float) -> float:
        return rng.choice((0.0, 0.5, 1.0, 1.0, 2.0)) * chance * rough

    return Weather(
        storm_seconds=rng.uniform(15, 50),
        store_fault=min(some(0.06), 0.3),
        engine_fault=some(0.06),
        crash=some(0.006),
        power=rng.choice((0.0, 0.5, 0.8)),
        keep=rng.choice((0.0, 0.2, 0.5, 0.8)),
        full=some(0.004),
        rot=rng.choice((0.0, 0.3)),
        keep_going=rng.choice((0.3, 0.7, 0.9)),
    )
