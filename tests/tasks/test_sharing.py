"""Ranks as threads: what is divided, committed and refused, without torch.distributed or Prefect. What only processes
can show is in tests/front/test_ranks.py."""

import copyreg
import pickle
import random
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import xxhash
from tests.checkpoints import Weights, state_digest_of, tiny_weights, trained
from tests.storage.publishing import Run, snapshot_of

from weighbridge.errors import CommitConflict, CommitStateUnknown, DiskFull, GatherError, RankLost, StoreError
from weighbridge.storage.batching import batches
from weighbridge.storage.expectation import Expectation
from weighbridge.storage.feed import Feed, FeedBroken
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.ownership import assign, plan
from weighbridge.storage.publication import Publication
from weighbridge.storage.publisher import Publisher
from weighbridge.tasks.gather import gather
from weighbridge.tasks.publish_here import publish_here
from weighbridge.tasks.sharing import Sharing
from weighbridge.tasks.torch_ranks import as_message
from weighbridge.values import Manifest, TensorSpec

LATEST_SECONDS = 60.0
SHARD_BYTES = 1600


@dataclass
class Board:
    """What the ranks of one group said, by round."""

    size: int
    said: dict[tuple[object, ...], bytes] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)


class ThreadRanks:
    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank, self.size, self.begun = board, rank, board.size, 0

    def round(self) -> "ThreadRound":
        self.begun += 1
        return ThreadRound(self.board, self.rank, self.begun)


class ThreadRound:
    def __init__(self, board: Board, rank: int, number: int) -> None:
        self.board, self.rank, self.number = board, rank, number

    def post(self, topic: str, value: Any) -> None:
        with self.board.changed:
            self.board.said.setdefault((self.number, topic, self.rank), pickle.dumps(value))
            self.board.changed.notify_all()

    def take(self, topic: str, rank: int, *, heed: bool = True, more_seconds: float = 0.0) -> Any:
        key, failed = (self.number, topic, rank), (self.number, "failed")
        with self.board.changed:
            said = self.board.said
            if not self.board.changed.wait_for(lambda: key in said or (heed and failed in said), LATEST_SECONDS):
                raise RankLost(topic)
            if key not in said:
                self.check()
            return pickle.loads(said[key])

    def exchange(self, topic: str, value: Any) -> list[Any]:
        self.post(topic, value)
        return [self.take(topic, rank) for rank in range(self.board.size)]

    def check(self) -> None:
        if (self.number, "failed") in self.board.said:
            raise pickle.loads(self.board.said[self.number, "failed"])

    def claim(self, name: str) -> int:
        with self.board.changed:
            return int(pickle.loads(self.board.said.setdefault((self.number, "own", name), pickle.dumps(self.rank))))

    def fail(self, error: BaseException) -> None:
        with self.board.changed:
            self.board.said.setdefault((self.number, "failed"), pickle.dumps(as_message(error)))
            self.board.changed.notify_all()

    def leave(self, error: BaseException | None = None) -> None:
        pass


class Group:
    """Publishers of one run, one a rank."""

    def __init__(self, run: Run, size: int, **options: Any) -> None:
        self.run, self.size, board = run, size, Board(size)
        spools = [run.folder / f"spool-{uuid.uuid4().hex}" for _ in range(size)]
        self.publishers: list[Publisher] = self.on_each(
            lambda rank: run.open(ranks=ThreadRanks(board, rank), spool=spools[rank], **options)
        )

    def on_each(self, work: Callable[[int], Any]) -> list[Any]:
        """What every rank came to; raises the first rank's error when all failed alike."""
        with ThreadPoolExecutor(self.size) as pool:
            done = [pool.submit(work, rank) for rank in range(self.size)]
        errors = [one.exception(0) for one in done]
        assert len({type(error) for error in errors}) == 1, errors
        if errors[0] is not None:
            raise errors[0]
        return [one.result() for one in done]

    def push(self, sources: Callable[[int], object], *, window_bytes: int = SHARD_BYTES) -> Manifest:
        manifests: list[Manifest] = self.on_each(lambda rank: self._push(rank, sources(rank), window_bytes))
        assert len({manifest.digest for manifest in manifests}) == 1
        return manifests[0]

    def _push(self, rank: int, source: object, window_bytes: int) -> Manifest:
        publisher = self.publishers[rank]
        publication = Publication(publisher, publisher.begin(), Feed(in_flight=2), {}, threads=1)
        attempt, failures = publication.attempt, []

        def publish() -> None:
            try:
                publish_here(publication)
            except BaseException as failure:  # noqa: BLE001 - this thread's edge
                publication.give_up(failure)
                failures.append(failure)

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            sharing = Sharing(
                publisher.ranks, attempt.round, publisher.specs, publisher.owners,
                saw=attempt.saw, digest_kind=publisher.digest_kind, window_bytes=window_bytes,
            )  # fmt: skip
            gathered = gather(source, Expectation(publisher.specs), sharing)  # type: ignore[arg-type]
            for batch in batches(((item.spec, item.lasting()) for item in gathered), shard_bytes=SHARD_BYTES):
                publication.feed.put(batch)
            publication.feed.close()
        except FeedBroken:
            pass
        except BaseException as failure:  # noqa: BLE001 - raised below, once the other thread is done
            attempt.round.fail(failure)
            publication.feed.fail(failure)
            failures.insert(0, failure)
        thread.join(LATEST_SECONDS)
        if failures:
            attempt.round.check()
            raise failures[0]
        assert publication.manifest is not None
        return publication.manifest

    def held(self) -> list[set[str]]:
        images = [publisher._snapshot.image for publisher in self.publishers]
        return [{name for name in image.specs if image.holds(name)} for image in images]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def part_of(weights: Weights, rank: int, size: int = 3) -> dict[str, Any]:
    return {name: array for number, (name, array) in enumerate(weights.items()) if number % size == rank}


def state_of(run: Run, version: int) -> str:
    return Lineage(run.store).manifest(version).state_digest


V1, V2, V3 = (trained(tiny_weights(), seed) for seed in (1, 2, 3))


@pytest.mark.parametrize("as_stream", [False, True])
@pytest.mark.parametrize("window_bytes", [0, 1 << 20])
def test_each_rank_publishes_its_part_and_the_version_is_whole(run: Run, as_stream: bool, window_bytes: int) -> None:
    group = Group(run, 3)
    for version, weights in enumerate((V1, V2, V3), 1):
        parts = [part_of(weights, rank) for rank in range(3)]
        group.push(lambda rank: iter(parts[rank].items()) if as_stream else parts[rank], window_bytes=window_bytes)  # noqa: B023
        assert state_of(run, version) == state_digest_of(weights)
    assert group.held() == [set(part_of(V1, rank)) for rank in range(3)]
    assert run.spooled() == []


@pytest.mark.parametrize("as_stream", [False, True])
def test_what_all_ranks_bring_is_divided_among_them_and_published_once(run: Run, as_stream: bool) -> None:
    group = Group(run, 3)
    for weights in (V1, V2):
        sources = [iter(weights.items()) if as_stream else weights for _ in range(3)]
        manifest = group.push(sources.__getitem__, window_bytes=1 << 20)
        assert manifest.state_digest == state_digest_of(weights)
        assert len({row.key for row in manifest.rows}) == len(manifest.rows)
    held = group.held()
    assert sum(map(len, held)) == len(V1) and set().union(*held) == set(V1)
    assert max(sum(V1[name].nbytes for name in names) for names in held) < sum(a.nbytes for a in V1.values()) / 2


def test_renumbering_ranks_and_reordering_names_changes_no_committed_byte(tmp_path: Path) -> None:
    found = []
    for turn in range(3):
        group = Group(Run(tmp_path / str(turn)), 3)
        parts = [part_of(V1, (rank + turn) % 3) for rank in range(3)]
        shuffled = [dict(random.Random(turn).sample(list(part.items()), len(part))) for part in parts]
        shuffled[(1 - turn) % 3]["mask"] = V1["mask"]  # so it is on two ranks
        manifest = group.push(shuffled.__getitem__)
        found.append((manifest.rows, [(shard.nbytes, shard.digest) for shard in manifest.shards]))
    assert found[0] == found[1] == found[2]


def test_one_rank_and_three_commit_the_same_state(tmp_path: Path) -> None:
    alone = Group(Run(tmp_path / "one"), 1).push(lambda _: V1)
    together = Group(Run(tmp_path / "three"), 3).push(lambda _: V1)
    assert alone.state_digest == together.state_digest
    rows = [sorted((r.key, r.after, r.changed, r.codec) for r in m.rows) for m in (alone, together)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("as_stream", [False, True])
@pytest.mark.parametrize("changed", [False, True])
def test_a_replica_that_ran_apart_is_refused_with_both_digests(run: Run, as_stream: bool, changed: bool) -> None:
    group = Group(run, 3)
    group.push(lambda _: V1)
    right = dict(V2 if changed else V1)
    wrong = {**right, "embed.weight": trained(right, 9)["embed.weight"]}
    owner = next(rank for rank, names in enumerate(group.held()) if "embed.weight" in names)
    apart = (owner + 1) % 3
    before = run.objects()
    sources = [wrong if rank == apart else right for rank in range(3)]
    with pytest.raises(GatherError) as caught:
        group.push(lambda rank: iter(sources[rank].items()) if as_stream else sources[rank])
    for state in (right, wrong):
        assert xxhash.xxh3_128_hexdigest(state["embed.weight"].tobytes()) in str(caught.value)
    assert run.objects() == before
    assert group.push(lambda _: V2).state_digest == state_digest_of(V2)


def test_ranks_that_bring_other_tensors_than_before_are_divided_anew(run: Run) -> None:
    group = Group(run, 3)
    group.push(lambda rank: part_of(V1, rank))
    manifest = group.push(lambda rank: part_of(V2, (rank + 1) % 3))
    assert manifest.state_digest == state_digest_of(V2)
    assert group.held() == [set(part_of(V1, (rank + 1) % 3)) for rank in range(3)]
    with pytest.raises(GatherError, match="push again"):  # of a stream the bytes are gone once that is noticed
        group.push(lambda rank: iter(part_of(V3, rank).items()))
    assert group.push(lambda rank: iter(part_of(V3, rank).items())).state_digest == state_digest_of(V3)


def test_a_tensor_that_no_rank_brings_is_missing_on_all(run: Run) -> None:
    group = Group(run, 3)
    before = run.objects()
    with pytest.raises(GatherError, match=r"missing \(1\):\n  - mask"):
        group.push(lambda rank: {name: array for name, array in part_of(V1, rank).items() if name != "mask"})
    assert run.objects() == before


def test_an_unknown_commit_is_settled_by_the_next_push_of_all_ranks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(run, 3)
    import weighbridge.storage.attempt as module

    real = module.put_if_absent

    def land_and_lose_the_reply(*given: Any, **more: Any) -> bool:
        real(*given, **more)
        raise CommitStateUnknown("no answer")

    with monkeypatch.context() as patched, pytest.raises(CommitStateUnknown):
        patched.setattr(module, "put_if_absent", land_and_lose_the_reply)
        group.push(lambda rank: part_of(V1, rank))
    assert group.push(lambda rank: part_of(V2, rank)).version == 2
    assert [state_of(run, version) for version in (1, 2)] == [state_digest_of(V1), state_digest_of(V2)]


def test_another_writers_commit_is_a_conflict_on_all_ranks_which_then_follow_it(run: Run) -> None:
    group = Group(run, 3)
    group.push(lambda rank: part_of(V1, rank))
    fresh, other = Group(run, 3), Group(run, 1)
    attempts = fresh.on_each(lambda rank: fresh.publishers[rank].begin())
    other.push(lambda _: V2)
    for attempt in attempts:
        attempt.round.post("report", attempt.report())
    with pytest.raises(CommitConflict):
        fresh.publishers[0].commit(attempts[0], {})
    assert fresh.push(lambda rank: part_of(V3, rank)).version == 3
    assert state_of(run, 3) == state_digest_of(V3)


def test_resumed_ranks_bring_only_their_part_of_the_head(run: Run) -> None:
    first = Group(run, 3)
    for weights in (V1, V2):
        first.push(lambda rank: part_of(weights, rank))  # noqa: B023
    again = Group(run, 2)
    assert again.held() == [set(), set()]
    assert again.push(lambda rank: part_of(V3, rank, 2)).state_digest == state_digest_of(V3)
    assert again.held() == [set(part_of(V3, rank, 2)) for rank in range(2)]


def test_a_shard_that_cannot_be_uploaded_on_one_rank_ends_all(run: Run) -> None:
    group = Group(run, 3)
    before = run.objects()

    def no_store(_: int) -> int:
        raise StoreError("not today")

    real = group.publishers[2].begin

    def begin() -> Any:
        attempt = real()
        attempt.upload = no_store  # type: ignore[method-assign]
        return attempt

    group.publishers[2].begin = begin  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="not today"):
        group.push(lambda rank: part_of(V1, rank))
    assert run.objects() == before


def test_no_rank_begins_a_push_before_all_have_left_the_one_before(run: Run) -> None:
    group = Group(run, 3)
    begun, first = [], threading.Event()

    def begin(rank: int) -> None:
        if rank == 2:
            assert not first.wait(0.2)  # it is still busy with what it did before
        group.publishers[rank].begin()
        begun.append(rank)
        first.set()

    group.on_each(begin)
    assert sorted(begun) == [0, 1, 2]


@pytest.mark.parametrize("size", [1, 3])
def test_a_snapshot_may_lie_in_a_file(run: Run, size: int) -> None:
    group = Group(run, size, snapshot="mmap", threads=1)
    for weights in (V1, V2):
        group.push(lambda rank: part_of(weights, rank, size))  # noqa: B023
    found = [snapshot_of(publisher) for publisher in group.publishers] if size == 1 else []
    assert all(state == {name: array.tobytes() for name, array in V2.items()} for state in found)
    files = list(run.folder.glob("spool-*/snapshot/snapshot"))
    assert len(files) == size
    assert sum(file.stat().st_blocks * 512 for file in files) <= size * (sum(a.nbytes for a in V2.values()) + 8192)


def test_a_full_disk_under_a_mapped_snapshot_is_an_error_and_not_a_signal(run: Run) -> None:
    class Full(LocalDisk):
        def reserve(self, path: Path, offset: int, nbytes: int) -> None:
            raise DiskFull("no room for the snapshot")

    with pytest.raises(DiskFull, match="no room for the snapshot"):
        run.open(snapshot="mmap", disk=Full("process"))


# Who owns what


SPECS = {name: TensorSpec(name, "U8", (size,), size) for name, size in zip("abcdefgh", range(9, 1, -1), strict=True)}


def test_every_tensor_has_one_owner_among_those_that_bring_it() -> None:
    brought = [{"a", "b", "c"}, {"c", "d"}, {"d", "e", "a"}]
    owners = assign(SPECS, brought, {})
    assert set(owners) == set("abcde")
    assert all(name in brought[owner] for name, owner in owners.items())


def test_what_all_bring_is_divided_by_bytes() -> None:
    owners = plan(SPECS, 4)
    carried = [sum(SPECS[name].nbytes for name, owner in owners.items() if owner == rank) for rank in range(4)]
    assert max(carried) - min(carried) <= 2


def test_the_owner_before_keeps_what_it_brings() -> None:
    owners = assign(SPECS, [set(SPECS), set(SPECS)], {"a": 1, "b": 1, "h": 5})
    assert owners["a"] == owners["b"] == 1
    assert set(owners) == set(SPECS)


def test_renumbering_the_ranks_moves_no_tensor_to_another_bringer() -> None:
    rng = random.Random(5)
    for _ in range(50):
        brought = [set(rng.sample(sorted(SPECS), rng.randint(0, 8))) for _ in range(4)]
        order = rng.sample(range(4), 4)
        one, other = assign(SPECS, brought, {}), assign(SPECS, [brought[rank] for rank in order], {})
        assert {n: brought[r] for n, r in one.items()} == {n: brought[order[r]] for n, r in other.items()}


def test_an_error_is_sent_as_itself_where_pickle_was_taught_to_follow_what_led_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Dask's `distributed` teaches it, for every exception of the process."""

    def with_its_cause(error: BaseException) -> Any:
        return type(error), (*error.args, pickle.dumps(error.__context__))

    for kind in (GatherError, StoreError):
        monkeypatch.setitem(copyreg.dispatch_table, kind, with_its_cause)
    first, second = GatherError("mask is missing"), StoreError("cut off", 5)
    first.__context__, second.__context__ = second, first
    second.add_note("twice")
    with pytest.raises(RecursionError):
        pickle.dumps(first)
    for error in (first, second):
        sent = as_message(error)
        assert (type(sent), sent.args, vars(sent)) == (type(error), error.args, vars(error))
    assert type(as_message(GatherError(threading.Lock()))) is RuntimeError
