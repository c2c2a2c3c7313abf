"""One run of everything from one seed: a store, trainers, hosts and their machines, a storm, a calm, and the checks
once all is over."""

import gc
import random
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.faults.medium import UNUSED_INODES
from tests.simulator.baton import Baton
from tests.simulator.chance import seeded
from tests.simulator.host import SimHost
from tests.simulator.keeper import Keeper
from tests.simulator.machine import Machine
from tests.simulator.promises import check_all
from tests.simulator.store import Objects
from tests.simulator.trainer import Trainer
from tests.simulator.truth import FOREIGN, Truth
from tests.simulator.weather import forecast

HOSTS = (("host-0", "power", 2), ("host-1", "power", 1), ("host-2", "process", 2))


class Simulation:
    """What one seed makes. `run` raises the first failure; `trace` tells what happened up to then."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._rng = random.Random(seed)
        self._weather = forecast(self._rng)
        self._baton = Baton(self._rng, keep_going=self._weather.keep_going)

    @property
    def trace(self) -> list[str]:
        """A line for every step so far."""
        return self._baton.trace

    def run(self) -> None:
        """Raises Broken for a promise that does not hold, or what the code under test should not have raised."""
        with ExitStack() as stack:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sim-", dir=UNUSED_INODES)))
            self._baton.hidden = str(place)
            stack.enter_context(seeded(self._baton, self._rng))
            gc.disable()  # faster, and what it would finalize is not run in somebody else's turn
            stack.callback(gc.enable)
            self._run(place)

    def _run(self, place: Path) -> None:
        baton, weather, rng = self._baton, self._weather, self._rng
        truth = Truth(place / "base")
        truth.objects = objects = Objects(baton, truth)
        for key in FOREIGN:
            objects.put(key, b"not yours")
        common = {"baton": baton, "weather": weather, "rng": rng, "truth": truth}
        trainers = [
            Trainer(Machine(f"trainer-{n}", place / f"trainer-{n}", durability="process", copies=0), pushes=p, **common)
            for n, p in enumerate(rng.choice(((2,), (3,), (2, 1), (2, 2))))
        ]
        hosts = [
            SimHost(Machine(name, place / name, durability=durability, copies=copies), **common)
            for name, durability, copies in HOSTS
        ]

        keeper = Keeper(Machine("keeper", place / "keeper", durability="process", copies=0), **common)

        def ended() -> bool:
            return all(trainer.ended for trainer in trainers)

        for number, trainer in enumerate(trainers):
            baton.spawn(trainer.machine.name, trainer.work, after=number * rng.uniform(1, 20))
        for host in hosts:
            host.trainers_ended = ended
            baton.spawn(host.machine.name, host.work, after=rng.choice((0, rng.uniform(0, 30))))
        keeper.may_end = lambda: ended() and all(host.settled for host in hosts)
        if rng.random() < 0.8:
            baton.spawn("keeper", keeper.work)
        baton.spawn("calm", self._calm)
        baton.run()
        check_all(truth, hosts, place)

    def _calm(self) -> None:
        self._baton.step(self._weather.storm_seconds)
        self._baton.note("the storm is over")
        self._baton.land_everything()
