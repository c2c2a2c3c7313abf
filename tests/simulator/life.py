"""One life of one process: it may die at any step, and whatever it still tries after that comes to nothing. Must not
know what its steps are."""

import random

from tests.faults.crash_disk import Crash
from tests.simulator.baton import Baton
from tests.simulator.weather import Weather


class Life:
    """What a process' disk, store, clock and engine ask at each step."""

    def __init__(self, baton: Baton, weather: Weather, rng: random.Random) -> None:
        self.baton = baton
        self.weather = weather
        self.rng = rng
        self.dead = False
        self.away_until = 0.0
        self._actor = baton.here()

    @property
    def stormy(self) -> bool:
        """Whether anything fails at all."""
        return self.baton.now < self.weather.storm_seconds

    def chance(self, chance: float) -> bool:
        """Whether something that befalls a step with this chance befalls this one."""
        return self.stormy and self.rng.random() < chance

    def check(self) -> None:
        """Raises Crash if this life is over: also in whatever the garbage collector still runs of it."""
        if self.dead or self.baton.here() is not self._actor:
            raise Crash

    def die(self, where: str) -> None:
        """The process is gone."""
        self.dead = True
        self.baton.note(f"dies {where}")
        raise Crash

    def step(self, what: str, seconds: float = 0.0) -> None:
        """Before a step: others go first, and perhaps it is never done."""
        self.check()
        self.baton.step(seconds)
        if self.chance(self.weather.crash / 2):
            self.die(f"before {what}")

    def done(self, what: str) -> None:
        """After a step, with its effects: perhaps nobody lives to see them."""
        if self.chance(self.weather.crash / 2):
            self.die(f"after {what}")
