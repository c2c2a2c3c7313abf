"""Upkeep, beside everything else: collects, makes anchors, keeps versions by name, and dies in the middle of each. Runs
the real gc and the real anchors."""

import random

from tests.faults.crash_disk import Crash
from tests.simulator.baton import Baton, SimClock
from tests.simulator.life import Life
from tests.simulator.machine import Machine, SimDisk
from tests.simulator.store import SimStore
from tests.simulator.truth import Truth
from tests.simulator.weather import Weather

from weighbridge.errors import StoreError, VersionRetired, WeighbridgeError
from weighbridge.storage.anchor_sources import anchor_from_store
from weighbridge.storage.gc import run_gc
from weighbridge.storage.kept import keep
from weighbridge.storage.lineage import Lineage

GRACE_SECONDS = 3600.0
"""Longer than any upload, and than any host is away."""


class Keeper:
    """Works until it is told to end. What it is told to keep, the truth demands of every deletion."""

    def __init__(self, machine: Machine, *, baton: Baton, weather: Weather, rng: random.Random, truth: Truth) -> None:
        self.machine = machine
        self.may_end = lambda: False
        self._baton, self._weather, self._rng, self._truth = baton, weather, rng, truth
        truth.keep = rng.choice((1, 1, 2, 3))

    def work(self) -> None:
        """The actor: one life after the other."""
        while not self.may_end():
            life = Life(self._baton, self._weather, self._rng)
            try:
                while not self.may_end():
                    self._work_once(life)
                    life.step("the next upkeep", self._rng.expovariate(1 / 4))
            except WeighbridgeError as error:
                self._baton.note(f"ends by {type(error).__name__}: {error}")
            except Crash:
                pass
            self._baton.step(self._rng.expovariate(1 / 3))

    def _work_once(self, life: Life) -> None:
        lineage = Lineage(SimStore(self._truth.objects, life))
        clock = SimClock(self._baton, life.check)
        head = lineage.head()
        if head < 1:
            return
        what = self._rng.choice(("gc", "gc", "anchor", "name"))
        self._baton.note(f"{what}, at head {head}")
        if what == "gc":
            result = run_gc(lineage, keep=self._truth.keep, clock=clock, grace_seconds=GRACE_SECONDS)
            self._baton.note(f"collected {', '.join(map(str, result.plan.forms)) or 'nothing'}")
        elif what == "anchor":
            version = head if self._rng.random() < 0.7 else self._rng.randint(1, head)
            anchor_from_store(
                lineage,
                version,
                base=self._truth.base,
                spool=self.machine.root / "spool",
                disk=SimDisk(self.machine, life),
                clock=clock,
            )
        elif self._rng.random() < 0.3:
            self._name(lineage, self._rng.randint(1, head), clock)

    def _name(self, lineage: Lineage, version: int, clock: SimClock) -> None:
        try:
            kept = keep(lineage, version, f"version-{version}", clock=clock)
        except (VersionRetired, StoreError) as error:
            self._baton.note(f"not kept: {error}")
            return
        self._truth.named.add(kept.version)
        self._truth.demand_kept("a name was given")
