"""Runs seeds of the simulator one after the other, in a process for each CPU, and stops at the first that fails: says
which, shows the end of its trace, and how to run it alone.

    python -m tests.simulator.soak --seeds 2000 --first 200 --minutes 120
    python -m tests.simulator.soak --seed 4711              the whole trace of one
"""

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from tests.simulator.simulation import Simulation

_SHOWN_LINES = 60


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one seed went. `failure` is "" when every promise held."""

    seed: int
    steps: int
    failure: str
    trace: tuple[str, ...]


def run_seed(seed: int) -> Outcome:
    """Runs one seed to its end, whatever that is."""
    simulation = Simulation(seed)
    failure = ""
    try:
        simulation.run()
    except Exception:  # noqa: BLE001 - the edge of a process: it is shown
        failure = traceback.format_exc()
    return Outcome(seed, len(simulation.trace), failure, tuple(simulation.trace) if failure else ())


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns 0 when every seed that was run held, 1 when one did not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--minutes", type=float, default=10.0, help="begin no more seeds after that")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, help="run this one alone, and show all of its trace")
    asked = parser.parse_args(arguments)
    if asked.seed is not None:
        return _run_alone(asked.seed)
    began, done, steps = time.monotonic(), 0, 0
    for outcome in _outcomes(range(asked.first, asked.first + asked.seeds), asked.jobs):
        done, steps = done + 1, steps + outcome.steps
        if outcome.failure:
            _show(outcome)
            return 1
        minutes = (time.monotonic() - began) / 60
        if done % 100 == 0:
            _say(f"{done} seeds, {steps} steps, {minutes:.1f} minutes: every promise held")
        if minutes > asked.minutes:
            _say(f"the {asked.minutes:g} minutes are over")
            break
    _say(f"{done} seeds from {asked.first} on, {steps} steps: every promise held")
    return 0


def _outcomes(seeds: range, jobs: int) -> Iterator[Outcome]:
    if jobs <= 1:
        yield from map(run_seed, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(run_seed, seeds)


def _run_alone(seed: int) -> int:
    simulation = Simulation(seed)
    try:
        simulation.run()
    finally:
        _say("\n".join(simulation.trace))
    _say(f"seed {seed}: every promise held")
    return 0


def _show(outcome: Outcome) -> None:
    _say("\n".join(("...", *outcome.trace[-_SHOWN_LINES:])))
    _say(outcome.failure)
    _say(f"SEED {outcome.seed} FAILED. Alone, with its whole trace: make soak SEED={outcome.seed}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
