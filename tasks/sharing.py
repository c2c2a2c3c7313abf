"""How the ranks of a trainer divide what they push: each tensor is published by one of those that bring it, and
digested by the others. Runs in the caller's thread, and waits for no rank before its own source was run to its end: the
other may be waiting for us in a collective. Must not know kinds of tensors, stores or Prefect."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from weighbridge.errors import GatherError
from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.expectation import Come, Tally
from weighbridge.storage.ownership import assign, plan
from weighbridge.storage.parts import cut
from weighbridge.storage.ranks import FIRST, Alone, Ranks, Round
from weighbridge.values import PartKey, TensorSpec

if TYPE_CHECKING:
    from weighbridge.storage.codecs.contract import Bytes

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Gathered:
    """One tensor: what it is, and its bytes (one-dimensional uint8, contiguous, read-only, `spec.nbytes` long).

    `stable` says how long they stay as they are: until the push returns (a copy of their own, or memory of a model that
    the caller leaves alone until then), or, when it is False, only until the next one is asked for, since a generator
    may fill the same buffer again.
    """

    spec: TensorSpec
    data: Bytes
    stable: bool

    @property
    def name(self) -> str:
        """The stored name."""
        return self.spec.name

    def lasting(self) -> Bytes:
        """The bytes, copied unless they are stable: for a consumer that asks for the next one before it is done."""
        return self.data if self.stable else self.data.copy()


@dataclass(frozen=True, slots=True)
class _Heard:
    """What a rank says once it knows what came: the stored names, those that it publishes already, and those whose
    bytes it let go."""

    come: Come
    brought: frozenset[str]
    taken: frozenset[str]
    passed: frozenset[str]


class Sharing:
    """One push of one rank. `owners` are those of the last push, empty before the first, and are brought up to date.

    `saw` is told of every part that another rank publishes, with its digest here. Of a source that is not known ahead,
    tensors whose owner is not known wait in a window of `window_bytes`, until the owner has been heard of or, when it
    is full, this rank takes them itself.
    """

    def __init__(
        self,
        ranks: Ranks,
        shared: Round,
        specs: Mapping[str, TensorSpec],
        owners: dict[str, int],
        *,
        saw: Callable[[PartKey, bytes], None],
        digest_kind: str,
        window_bytes: int,
    ) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self._shared, self._specs, self._owners = shared, specs, owners
        self._are_settled = bool(owners)
        self._saw, self._kind = saw, digest_kind
        self._window: deque[Gathered] = deque()
        self._window_bytes, self._waiting_bytes = window_bytes, 0
        self._taken: set[str] = set()
        self._passed: set[str] = set()
        self.source_failed = False
        """Whether the source itself raised: then other ranks may wait for this one in a collective of it."""

    def watch(self, source: Iterable[Item]) -> Iterator[Item]:
        """The source, whose failure is remembered."""
        try:
            yield from source
        except Exception:
            self.source_failed = True
            raise

    def is_mine(self, name: str) -> bool:
        """Whether this rank publishes a tensor; known once `agree` returned."""
        return self._owners.get(name) == self.rank

    def expect_a_stream(self) -> None:
        """The source is not known ahead: without owners from an earlier push, a plan is what ranks go by."""
        if not self._are_settled:
            self._owners.update(plan(self._specs, self.size))

    def offer(self, item: Gathered) -> Iterator[Gathered]:
        """Takes in one tensor of a stream; yields what this rank is to publish now."""
        owns = self.is_mine(item.name)
        if owns and (self._are_settled or self._shared.claim(item.name) == self.rank):
            self._taken.add(item.name)
            yield item
        elif owns or self._are_settled:
            self.let_go(item)
        else:
            self._window.append(Gathered(item.spec, item.lasting(), stable=True))
            self._waiting_bytes += item.spec.nbytes
        while self._waiting_bytes > self._window_bytes:
            first = self._window.popleft()
            self._waiting_bytes -= first.spec.nbytes
            if self._shared.claim(first.name) == self.rank:
                self._taken.add(first.name)
                yield first
            else:
                self.let_go(first)

    def agree(self, tally: Tally) -> None:
        """Learns what came on all ranks, and who publishes it. Every rank calls it once its source, or its source's
        names, came to an end. Raises GatherError on all ranks when something is wrong on any."""
        mine = _Heard(tally.come(), tally.brought, frozenset(self._taken), frozenset(self._passed))
        heard: list[_Heard] = self._shared.exchange("come", mine)
        tally.join(other.come for other in heard)
        own: GatherError | None = None
        try:
            tally.settle()
        except GatherError as error:
            own = error
        for wrong in (own, *self._shared.exchange("verdict", own)):
            if wrong is not None:
                raise wrong
        before = {**self._owners, **{name: rank for rank, other in enumerate(heard) for name in other.taken}}
        found = assign(self._specs, [other.brought - other.passed for other in heard], before)
        lost = sorted(frozenset().union(*(other.brought for other in heard)) - found.keys())
        self._owners.clear()
        if lost:
            raise GatherError(
                f"ranks bring other tensors than at the last push: nobody kept {', '.join(lost[:3])}"
                f"{', ...' if len(lost) > 3 else ''} ({len(lost)}). Nothing was published; push again, and they are "
                "divided anew."
            )
        self._owners.update(found)

    def rest(self) -> Iterator[Gathered]:
        """What of the window this rank publishes, once all agreed."""
        while self._window:
            item = self._window.popleft()
            if self.is_mine(item.name):
                yield item
            else:
                self.let_go(item)

    def let_go(self, item: Gathered) -> None:
        """Notes the digests of a tensor that another rank publishes."""
        self._passed.add(item.name)
        for part in cut(item.spec):
            data = item.data[part.key.offset : part.key.offset + part.nbytes]
            self._saw(part.key, digest_bytes(self._kind, data.data))


def alone(specs: Mapping[str, TensorSpec]) -> Sharing:
    """One rank, which publishes all that it brings."""
    group = Alone()
    owners = dict.fromkeys(specs, FIRST)
    return Sharing(group, group.round(), specs, owners, saw=lambda *_: None, digest_kind="xxh3-128", window_bytes=0)
