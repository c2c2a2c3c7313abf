"""The feed between the trainer's thread and those that encode: bounded, and no wait outlives a failure."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import pytest

from weighbridge.storage.batching import Batch
from weighbridge.storage.feed import Feed, FeedBroken

T = TypeVar("T")

LONG = 20.0  # a wait that never ends fails the test instead of hanging it


class Watched(Feed):
    """Says when a thread begins to wait on it."""

    def __init__(self, *, in_flight: int) -> None:
        super().__init__(in_flight=in_flight)
        self.waiting = threading.Semaphore(0)
        wait_for = self._changed.wait_for

        def watched(predicate: Callable[[], T], timeout: float | None = None) -> T:
            if not predicate():
                self.waiting.release()
            return wait_for(predicate, timeout)

        self._changed.wait_for = watched  # type: ignore[method-assign]

    def await_a_wait(self) -> None:
        assert self.waiting.acquire(timeout=LONG)


def in_thread(action: Callable[[], T]) -> "Future[T]":
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(action())
        except BaseException as failure:  # noqa: BLE001 - the test asks for it
            future.set_exception(failure)

    threading.Thread(target=work, daemon=True).start()  # one that hangs must not keep the process from ending
    return future


def batch(index: int) -> Batch:
    return Batch(index, ())


def test_batches_come_in_the_order_in_which_they_were_put() -> None:
    feed = Feed(in_flight=3)
    for index in range(3):
        feed.put(batch(index))
    feed.close()
    assert [b.index for b in feed] == [0, 1, 2]


def test_putting_waits_until_one_in_flight_is_done() -> None:
    feed = Watched(in_flight=2)
    feed.put(batch(0))
    feed.put(batch(1))
    putting = in_thread(lambda: feed.put(batch(2)))
    feed.await_a_wait()
    taken = iter(feed)
    next(taken)
    assert not putting.done()  # taken is not done: its bytes are still read
    feed.done()
    putting.result(LONG)
    assert [next(taken).index, next(taken).index] == [1, 2]


def test_no_more_than_the_bound_is_ever_in_flight() -> None:
    feed, said_done = Feed(in_flight=3), itertools.count(1)
    done = [0]

    def encode() -> None:
        done[0] = max(done[0], next(said_done))  # counted before it is said, so never too few
        feed.done()

    def consume() -> list[int]:
        with ThreadPoolExecutor(1) as pool:
            return [taken.index for taken in feed if pool.submit(encode)]

    consuming = in_thread(consume)
    for index in range(500):
        feed.put(batch(index))
        assert index + 1 - done[0] <= 3
    feed.close()
    feed.drain()
    assert consuming.result(LONG) == list(range(500))
    assert done[0] == 500


def test_iterating_waits_for_a_batch_and_ends_when_the_feed_is_closed() -> None:
    feed = Watched(in_flight=1)
    taking = in_thread(lambda: [b.index for b in feed])
    feed.await_a_wait()
    feed.put(batch(0))
    feed.close()
    assert taking.result(LONG) == [0]


def test_a_feed_that_is_closed_at_once_gives_nothing() -> None:
    feed = Watched(in_flight=1)
    taking = in_thread(lambda: list(feed))
    feed.await_a_wait()
    feed.close()
    assert taking.result(LONG) == []
    feed.drain()


def test_draining_waits_until_all_are_done() -> None:
    feed = Watched(in_flight=2)
    feed.put(batch(0))
    feed.put(batch(1))
    feed.close()
    draining = in_thread(feed.drain)
    feed.await_a_wait()
    assert len(list(feed)) == 2
    feed.done()
    assert not draining.done()
    feed.done()
    draining.result(LONG)


def test_a_failing_encoder_ends_the_trainers_wait_for_room() -> None:
    feed, failure = Watched(in_flight=1), OSError("no room")
    feed.put(batch(0))
    putting = in_thread(lambda: feed.put(batch(1)))
    feed.await_a_wait()
    feed.fail(failure)
    with pytest.raises(FeedBroken) as broken:
        putting.result(LONG)
    assert broken.value.__cause__ is failure


def test_a_failing_encoder_ends_the_trainers_wait_for_the_rest() -> None:
    feed, failure = Watched(in_flight=1), OSError("no room")
    feed.put(batch(0))
    feed.close()
    draining = in_thread(feed.drain)
    feed.await_a_wait()
    feed.fail(failure)
    with pytest.raises(FeedBroken) as broken:
        draining.result(LONG)
    assert broken.value.__cause__ is failure


def test_a_failing_gather_ends_the_wait_for_batches() -> None:
    feed, failure = Watched(in_flight=1), ValueError("a tensor is missing")
    taking = in_thread(lambda: list(feed))
    feed.await_a_wait()
    feed.fail(failure)
    with pytest.raises(FeedBroken) as broken:
        taking.result(LONG)
    assert broken.value.__cause__ is failure


def test_after_a_failure_nothing_more_is_taken_or_handed_over() -> None:
    feed = Feed(in_flight=3)
    feed.put(batch(0))
    feed.fail(ValueError())
    feed.close()
    with pytest.raises(FeedBroken):
        feed.put(batch(1))
    with pytest.raises(FeedBroken):
        next(iter(feed))
    with pytest.raises(FeedBroken):
        feed.drain()
    feed.done()  # whoever was encoding may still say so


def test_the_first_failure_counts() -> None:
    feed, first = Feed(in_flight=1), KeyboardInterrupt()
    feed.fail(first)
    feed.fail(ValueError())
    with pytest.raises(FeedBroken) as broken:
        feed.drain()
    assert broken.value.__cause__ is first


def test_a_failure_ends_every_wait_at_once() -> None:
    feed = Watched(in_flight=1)
    feed.put(batch(0))
    assert next(iter(feed)).index == 0
    waits = [in_thread(lambda: feed.put(batch(1))), in_thread(feed.drain), in_thread(lambda: list(feed))]
    for _ in waits:
        feed.await_a_wait()
    feed.fail(ValueError())
    for wait in waits:
        assert isinstance(wait.exception(LONG), FeedBroken)
