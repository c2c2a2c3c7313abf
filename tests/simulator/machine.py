"""A machine: a disk with a medium behind it, room or none, a boot. Must not know stores or versions: what the disk
shows is judged by who watches."""

import random
from collections.abc import Callable
from pathlib import Path

from tests.faults.crash_disk import FullDisk, RecordingDisk
from tests.faults.medium import Medium, MediumDisk
from tests.simulator.life import Life

from weighbridge.errors import DiskFull
from weighbridge.storage.localdisk import Durability

ROOM_BYTES = 1 << 30
FULL_SECONDS = 15.0


class Machine:
    """`watch` is called after every write, whole or not; it raises Broken for what must not be."""

    def __init__(self, name: str, root: Path, *, durability: Durability, copies: int) -> None:
        self.name = name
        self.root = root
        self.durability: Durability = durability
        self.copies = copies
        self.watch: Callable[[str], None] = lambda _: None
        self.boot = 1
        self.full_until = 0.0
        root.mkdir()
        self.medium = Medium(root)
        self.medium.settle()

    @property
    def replica(self) -> Path:
        """The folder of the host's replica."""
        return self.root / "replica"

    def lose_power(self, rng: random.Random, *, keep: float) -> None:
        """Restarts the machine: what was not synced is lost, or some of it."""
        self.boot += 1
        self.medium.cut_power(rng, keep=keep)


class SimDisk(RecordingDisk):
    """A life's door to its machine's disk: the real one, stopped at every write and at every sync."""

    def __init__(self, machine: Machine, life: Life) -> None:
        super().__init__(machine.durability)
        self.real = _SteppingDisk(machine, life)
        self._machine = machine
        self._life = life

    def step(self, verb: str, path: Path, whole: Callable[[], None], torn: Callable[[], None]) -> None:
        life, machine = self._life, self._machine
        what = f"{verb} {path.relative_to(machine.root)}"
        life.step(what)
        life.baton.note(what)
        if life.chance(life.weather.full):
            machine.full_until = life.baton.now + life.rng.expovariate(1 / FULL_SECONDS)
        if self._is_full() and verb in FullDisk.NEEDS_ROOM and not (verb == "make_folder" and path.is_dir()):
            life.baton.note(f"no room: {what}")
            if verb in ("append", "copy", "pwrite"):
                torn()
            raise DiskFull(f"{path}: no room for it")
        try:
            if life.chance(life.weather.crash / 2):
                torn()
                life.die(f"in {what}")
            whole()
        finally:
            machine.watch(what)
        life.done(what)

    def free_bytes(self, path: Path) -> int:
        del path
        return 0 if self._is_full() else ROOM_BYTES

    def boot_id(self) -> str:
        return f"boot-{self._machine.boot}"

    def try_lock(self, path: Path, owner: bytes) -> int | None:
        self._life.step(f"lock {path.relative_to(self._machine.root)}")
        return super().try_lock(path, owner)

    def _is_full(self) -> bool:
        return self._life.stormy and self._life.baton.now < self._machine.full_until


class _SteppingDisk(MediumDisk):
    """The real disk, whose syncs go to the machine's medium, each a step at which the process may die."""

    def __init__(self, machine: Machine, life: Life) -> None:
        super().__init__(machine.medium, machine.durability)
        self._life = life

    def _sync(self, file: int) -> None:
        if self.durability == "power":
            self._life.step("a sync")
            super()._sync(file)
