"""The same work on many items, in threads, with a bounded number in flight. Must not know what the work is."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(work: Callable[[Item], Result], items: Iterable[Item], *, threads: int) -> Iterator[Result]:
    """Results as they are ready, in any order; at most `threads` + 1 items are under way or waiting to be taken.

    The first failure is raised, and an iterator that is closed early stops too; both wait for the work under way. One
    thread means the caller's own, in order: what a simulator needs.
    """
    if threads <= 1:
        yield from map(work, items)
        return
    left = iter(items)
    with ThreadPoolExecutor(threads, thread_name_prefix="replica") as pool:
        running: set[Future[Result]] = set()
        try:
            while True:
                for item in left:
                    running.add(pool.submit(work, item))
                    if len(running) > threads:
                        break
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
