"""A host: its process opens the replica and follows the store's head with the real follower, dies, and starts again.
Its machine loses power, its disk fills up and rots. Judges at every write what `current` leads to."""

import random
from pathlib import Path

from tests.faults.crash_disk import Crash
from tests.simulator.baton import Baton, Broken, SimClock
from tests.simulator.engine import Serving, SimEngine
from tests.simulator.life import Life
from tests.simulator.machine import Machine, SimDisk
from tests.simulator.rot import damage
from tests.simulator.store import SimStore
from tests.simulator.truth import Truth
from tests.simulator.weather import Weather

from weighbridge.errors import WeighbridgeError
from weighbridge.flows.follower import Follower
from weighbridge.storage.replica import Replica, open_replica
from weighbridge.tasks.host import Host
from weighbridge.tasks.host_attempt import HostAttempt

FOREIGN = "replica/notes.txt"
"""A file in the replica's folder that is not ours."""

_ENGINE_RESTARTS = 0.03
PATIENCE_SECONDS = 700.0


class SimHost:
    """`settled` says that nothing is left to do: trainers are done, and the head is served."""

    def __init__(self, machine: Machine, *, baton: Baton, weather: Weather, rng: random.Random, truth: Truth) -> None:
        self.machine = machine
        self.serving = Serving(truth, tells_pauses=machine.copies == 2)
        self.settled = False
        self.trainers_ended = lambda: False
        self._baton, self._weather, self._rng, self._truth = baton, weather, rng, truth
        self._loadable = False  # whether `current` must lead to a version
        self._excused = False  # whether something that was done to the disk may show until the replica is opened
        self._forgiven = False  # whether it may cost what was served before
        self._current = machine.replica / "current"
        machine.watch = self._watch

    def work(self) -> None:
        """The actor: one life after the other."""
        while not self.settled:
            life = Life(self._baton, self._weather, self._rng)
            try:
                self._live(life)
            except WeighbridgeError as error:
                self._baton.note(f"ends by {type(error).__name__}: {error}")
                self._check_patience()
            except Crash:
                self._fall()
            if not self.settled:
                self._baton.step(self._rng.expovariate(1 / 2))

    def _live(self, life: Life) -> None:
        store, clock = SimStore(self._truth.objects, life), SimClock(self._baton, life.check)
        with open_replica(
            self.machine.replica,
            store=store,
            base=self._truth.base,
            copies=self.machine.copies,
            threads=1,
            clock=clock,
            disk=SimDisk(self.machine, life),
        ) as replica:
            self._opened(replica)
            host = Host(self.machine.name, "run-1", store, replica, SimEngine(self.serving, life), 60.0, clock=clock)
            follower = Follower(host, is_connected=lambda: False, every_seconds=1, patience_seconds=5, at_once=True)
            while not self.settled:
                if life.chance(_ENGINE_RESTARTS) and self._truth.held_by(self._current):
                    self._baton.note("the engine restarts by itself")
                    self.serving.restart(self._current)
                self._look(host, follower)
                clock.sleep(self._rng.uniform(0.5, 4))

    def _look(self, host: Host, follower: Follower) -> None:
        try:
            if self._rng.random() < 0.1:
                self._late_order(host)
            moved = follower.look()
        except WeighbridgeError as error:
            self._baton.note(f"could not: {type(error).__name__}: {error}")
            self._check_patience()
            return
        at_head = host.replica.version == self._truth.head and self.serving.answers_with(self._truth.head)
        self.settled = not moved and at_head and self._calm() and self.trainers_ended()
        if not self.settled:
            self._check_patience()

    def _late_order(self, host: Host) -> None:
        """A rollout of an older version arrives late: it is superseded, and nothing goes back."""
        version = self._rng.randrange(host.replica.version + 1)
        attempt = HostAttempt(host, version)
        if attempt.is_superseded:
            attempt.record_superseded()

    def _calm(self) -> bool:
        return self._baton.now > self._weather.storm_seconds

    def _check_patience(self) -> None:
        if self._baton.now > self._weather.storm_seconds + PATIENCE_SECONDS:
            raise Broken(f"{self.machine.name} is still not at the head")

    def _opened(self, replica: Replica) -> None:
        self._excused = False
        self._loadable = True
        if self._forgiven:
            self._forgiven, self.serving.floor = False, -1
        self._baton.note(f"opened at version {replica.version}, {replica.recovery.how}")
        self._watch("opened replica/current")
        if replica.version < self.serving.floor:
            raise Broken(f"{self.machine.name} opened version {replica.version} after serving {self.serving.floor}")
        notes = self.machine.root / FOREIGN
        if not notes.exists():
            notes.write_text("not yours")
            self.machine.medium.settle()

    def _fall(self) -> None:
        """After the process' death: sometimes the whole machine's, and sometimes something rots meanwhile."""
        weather = self._weather
        if self._calm():
            return
        if self._rng.random() < weather.power:
            self._baton.note("the power fails")
            if self.machine.durability == "process":
                self._excused = self._forgiven = True
            self.machine.lose_power(self._rng, keep=weather.keep)
            self._watch("after a power cut replica/current")
            self.serving.restart(self._current)
        elif self._rng.random() < 0.5:
            self.serving.restart(self._current)
        if self._rng.random() < weather.rot and self.machine.replica.is_dir():
            what, grave = damage(self.machine.replica, self._rng)
            self._baton.note(f"rots: {what}")
            self._excused = self._excused or grave
            self._forgiven = self._forgiven or grave
            self.machine.medium.settle()

    def _concerns_current(self, what: str) -> bool:
        """Whether something may have changed in the folder that `current` leads to, or in where it leads."""
        if "replica/current" in what:
            return True
        try:
            return str(self._current.readlink()) in what
        except OSError:
            return False

    def _watch(self, what: str) -> None:
        if not self._concerns_current(what):
            return
        found = self._truth.held_by(self._current)
        if self._excused or (found is None and (self.machine.copies == 1 or not self._loadable)):
            return
        if not found:
            holds = "nothing" if found is None else self._truth.describe(self._current)
            raise Broken(f"{self.machine.name}: `current` leads to {holds} ({what})")
        if max(found) < self.serving.floor and not self._forgiven:
            raise Broken(f"{self.machine.name}: `current` went back from {self.serving.floor} to {found} ({what})")


def notes_of(machine: Machine) -> Path:
    """Where the file lies that is not ours."""
    return machine.root / FOREIGN
