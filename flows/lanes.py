"""Lanes: threads that stay connected to Prefect from push to push, since connecting anew costs half a second each time
(settings, a client, its TLS context). Must not know what runs in them."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from weighbridge.errors import OrchestrationError
from weighbridge.flows.connection import UNREACHABLE, connected, find_api

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job(Generic[T]):
    work: Callable[[], T]
    answer: Future[T]

    def run(self) -> bool:
        """Runs the work and answers; whether the connection is still good for another."""
        try:
            self.answer.set_result(self.work())
        except (OrchestrationError, *UNREACHABLE) as lost:
            self.answer.set_exception(lost)
            return False
        except BaseException as failure:  # noqa: BLE001 - this thread's edge: whoever asked gets it
            self.answer.set_exception(failure)
        return True


class Lanes:
    """As many lanes as pieces of work overlap: usually one, two while a rollout goes on beside the next push."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._idle: list[_Lane] = []
        self._all: list[_Lane] = []

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Runs work in a connected thread. The future raises OrchestrationError when Prefect cannot be reached."""
        with self._lock:
            if self._idle:
                lane = self._idle.pop()
            else:
                lane = _Lane(self._home, self._give_back)
                self._all.append(lane)
        return lane.submit(work)

    def close(self) -> None:
        """Ends all lanes, after the work that is under way."""
        with self._lock:
            lanes, self._all, self._idle = self._all, [], []
        for lane in lanes:
            lane.close()

    def _give_back(self, lane: "_Lane") -> None:
        with self._lock:
            if lane in self._all:
                self._idle.append(lane)


class _Lane:
    def __init__(self, home: Path, give_back: "Callable[[_Lane], None]") -> None:
        self._home = home
        self._give_back = give_back
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        # A daemon: a trainer that dies must not be kept alive; one that ends in order closes its WeightSync.
        self._thread = threading.Thread(target=self._serve, name="weighbridge-sync", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        answer: Future[T] = Future()
        self._jobs.put(_Job(work, answer))
        return answer

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        job = self._jobs.get()
        while job is not None:
            try:
                with connected(find_api(self._home)):
                    while job is not None and self._runs_well(job):
                        job = self._jobs.get()
            except BaseException as lost:  # noqa: BLE001 - this thread's edge: whoever waits must be answered
                if job is not None and not job.answer.done():
                    job.answer.set_exception(lost)
                    self._give_back(self)
            if job is not None:
                job = self._jobs.get()

    def _runs_well(self, job: _Job[Any]) -> bool:
        try:
            return job.run()
        finally:
            self._give_back(self)
