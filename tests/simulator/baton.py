"""One thread runs at a time: actors hand a baton over at every step, to whom the seed says, in virtual time. So the
order of everything that happens is a function of the seed. Must not know what the actors do."""

import heapq
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

START_NS = 1_700_000_000_000_000_000
STEP_SECONDS = 0.002
MOST_STEPS = 20_000


class Stopped(BaseException):
    """The simulation is over: an actor's thread unwinds."""


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass(eq=False)
class Actor:
    """One thread. `wakes` is the time from which it may go on."""

    name: str
    thread: threading.Thread | None = None
    gate: threading.Lock = field(default_factory=threading.Lock)
    wakes: float = 0.0
    ended: bool = False


class Baton:
    """Holds actors, virtual time and the trace. `run` ends when every actor has, or at the first failure."""

    def __init__(self, rng: random.Random, *, keep_going: float) -> None:
        self.rng = rng
        self.now = 0.0
        self.trace: list[str] = []
        self.failure: BaseException | None = None
        self.hidden = ""
        """A path that traces do not show, since it is another in every run."""
        self._keep_going = keep_going
        self._actors: list[Actor] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._steps = 0
        self._over = threading.Event()
        self._local = threading.local()

    def note(self, text: str) -> None:
        """Adds a line to the trace."""
        actor = self.here()
        self.trace.append(f"{self.now:10.3f} {actor.name if actor else '-':<10} {text.replace(self.hidden, '')}")

    def here(self) -> Actor | None:
        """The actor whose thread this is; None for any other thread."""
        return getattr(self._local, "actor", None)

    def spawn(self, name: str, work: Callable[[], None], *, after: float = 0.0) -> None:
        """Adds an actor, which begins `after` seconds of virtual time from now."""
        actor = Actor(name, wakes=self.now + after)
        actor.gate.acquire()
        actor.thread = threading.Thread(target=self._body, args=(actor, work), name=name, daemon=True)
        self._actors.append(actor)
        actor.thread.start()

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        """Something that happens by itself, `seconds` from now, between two steps."""
        heapq.heappush(self._due, (self.now + seconds, len(self.trace) + len(self._due), event))

    def land_everything(self) -> None:
        """All that would happen by itself happens now."""
        while self._due:
            heapq.heappop(self._due)[2]()

    def run(self) -> None:
        """Runs all actors to their ends. Raises the first failure of any."""
        self._pass_on(None)
        self._over.wait()
        for actor in self._actors:
            if actor.gate.locked():
                actor.gate.release()
        for actor in self._actors:
            assert actor.thread is not None
            actor.thread.join()
        if self.failure is not None:
            raise self.failure

    def step(self, seconds: float = 0.0) -> None:
        """The calling actor lets others go first, and does not go on before `seconds` have passed."""
        actor = self.here()
        if actor is None:
            return  # the checks after the run
        if self._over.is_set():
            raise Stopped
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise Broken(f"still not at its end after {MOST_STEPS} steps")
        self.now += self.rng.random() * STEP_SECONDS
        actor.wakes = self.now + seconds
        if seconds == 0.0 and self.rng.random() < self._keep_going:
            self._let_happen()
            return
        self._pass_on(actor)

    def _pass_on(self, actor: Actor | None) -> None:
        """Gives the baton to whom the seed says, and waits for it to come back."""
        following = self._choose()
        if following is actor and actor is not None:
            return
        if following is not None:
            following.gate.release()
        if actor is not None:
            actor.gate.acquire()
            if self._over.is_set():
                raise Stopped

    def _choose(self) -> Actor | None:
        alive = [actor for actor in self._actors if not actor.ended]
        if not alive:
            return None
        self._let_happen()
        while not (ready := [actor for actor in alive if actor.wakes <= self.now]):
            self.now = min([actor.wakes for actor in alive] + [due[0] for due in self._due[:1]])
            self._let_happen()
        return self.rng.choice(ready)

    def _let_happen(self) -> None:
        while self._due and self._due[0][0] <= self.now:
            heapq.heappop(self._due)[2]()

    def _body(self, actor: Actor, work: Callable[[], None]) -> None:
        self._local.actor = actor
        actor.gate.acquire()
        try:
            if not self._over.is_set():
                work()
        except Stopped:
            return
        except BaseException as failure:  # noqa: BLE001 - the edge of a thread
            if self.failure is None:
                self.failure = failure
            self.note(f"FAILED: {type(failure).__name__}: {failure}")
            self._over.set()
            return
        if self._over.is_set():
            return
        actor.ended = True
        following = self._choose()
        if following is None:
            self._over.set()
        else:
            following.gate.release()


class SimClock:
    """See weighbridge.storage.clock.Clock: time that passes only by the baton. `check` runs before each sleep."""

    def __init__(self, baton: Baton, check: Callable[[], None]) -> None:
        self._baton = baton
        self._check = check

    def now_ns(self) -> int:
        return START_NS + int(self._baton.now * 1e9)

    def monotonic(self) -> float:
        return self._baton.now

    def sleep(self, seconds: float) -> None:
        self._check()
        self._baton.step(seconds)
