"""A trainer that comes back: its snapshot is made by the shortest way, whatever was collected; its numbers go on."""

from pathlib import Path

import pytest
from tests.checkpoints import Weights, trained
from tests.faults.faulty_store import FaultyStore
from tests.storage.publishing import Run, assert_sound, bytes_of, push, snapshot_of

from weighbridge.errors import VersionRetired, WriterOvertaken
from weighbridge.storage.anchor_sources import anchor_from_store
from weighbridge.storage.checkout import checkout
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.manifest import retired_key, shard_key
from weighbridge.storage.replica import bring_up


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def states(run: Run) -> dict[int, Weights]:
    """Five versions, published by a trainer that is gone since."""
    states: dict[int, Weights] = {0: run.base_weights}
    publisher = run.open()
    for version in range(1, 6):
        states[version] = trained(states[version - 1], version)
        push(publisher, states[version])
    return states


def anchor(run: Run, version: int) -> None:
    anchor_from_store(Lineage(run.store), version, base=run.base, spool=run.folder / "anchoring")


def collect(run: Run, *versions: int) -> None:
    """What gc does."""
    for version in versions:
        manifest = Lineage(run.store).manifest(version)
        run.store.create(retired_key(manifest), b"{}")
        for shard in manifest.shards:
            run.store.delete(shard_key(version, shard))


def read_by(store: FaultyStore) -> set[int]:
    """The versions of which a publisher read shards."""
    return {int(key.split("/")[1]) for verb, key in store.calls if verb == "get_range"}


@pytest.mark.parametrize("anchored", [3, 5])
def test_a_trainer_resumes_over_retired_versions_from_an_anchor_and_goes_on_numbering(
    run: Run, states: dict[int, Weights], anchored: int
) -> None:
    anchor(run, anchored)
    collect(run, *range(1, anchored + 1))
    store = FaultyStore(run.store)
    resumed = run.open(store)
    assert (resumed.version, snapshot_of(resumed)) == (5, bytes_of(states[5]))
    assert read_by(store) == {*range(anchored, 6)}
    taken = resumed.take_over()
    assert taken is not None and taken.version == 6
    after = trained(states[5], 60)
    assert push(resumed, after).version == 7
    out = run.folder / "out"
    checkout(7, out, lineage=Lineage(run.store), base=run.base)
    assert {n: open_checkpoint(out).read(n).tobytes() for n in after} == bytes_of(after)
    assert run.spooled() == []


def test_weights_of_an_older_step_are_just_the_next_delta(run: Run, states: dict[int, Weights]) -> None:
    before = run.open()
    sixth = trained(states[5], 6)
    push(before, sixth)
    resumed = run.open()
    resumed.take_over()
    assert push(resumed, states[2]).version == 8
    for _ in range(2):
        with pytest.raises(WriterOvertaken):
            push(before, states[3])
    assert_sound(run, {**states, 6: sixth, 7: sixth, 8: states[2]})


def test_without_an_anchor_past_retired_versions_it_says_so_and_changes_nothing(
    run: Run, states: dict[int, Weights]
) -> None:
    collect(run, 1, 2)
    before = run.objects()
    with pytest.raises(VersionRetired, match="no anchor leads past"):
        run.open()
    assert run.objects() == before and Lineage(run.store).head() == max(states)


def test_a_replica_on_this_machine_spares_the_download_and_a_rotten_one_is_passed_over(
    run: Run, states: dict[int, Weights]
) -> None:
    replica = run.folder / "replica"
    bring_up(replica, store=run.store, base=run.base, version=4)
    store = FaultyStore(run.store)
    assert snapshot_of(run.open(store, replica=replica)) == bytes_of(states[5])
    assert read_by(store) == {5}

    path = (replica / "current" / "model.safetensors").resolve()
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    store = FaultyStore(run.store)
    assert snapshot_of(run.open(store, replica=replica)) == bytes_of(states[5])
    assert read_by(store) == {1, 2, 3, 4, 5}
    assert snapshot_of(run.open(replica=run.folder / "nowhere")) == bytes_of(states[5])


def test_a_version_that_is_collected_while_a_trainer_opens_sends_it_round_by_the_anchor(
    run: Run, states: dict[int, Weights]
) -> None:
    class Racing(FaultyStore):
        """gc collects all but the newest just when version 2 is asked for."""

        def get_range(self, key: str, start: int, length: int) -> bytes:
            if "000000000002/" in key and not Lineage(run.store).is_retired(2):
                anchor(run, 4)
                collect(run, 1, 2, 3, 4)
            return super().get_range(key, start, length)

    resumed = run.open(Racing(run.store))
    assert (resumed.version, snapshot_of(resumed)) == (5, bytes_of(states[5]))
    assert run.spooled() == []
