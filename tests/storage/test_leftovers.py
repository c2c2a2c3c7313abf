"""What dead attempts leave: all of it is found once it is old enough, and nothing live ever is."""

import os
import time
from pathlib import Path

import pytest
from tests.checkpoints import as_tensors, trained
from tests.storage.publishing import Run, assert_sound, fill, push

from weighbridge.errors import UsageError
from weighbridge.storage.leftovers import Leftover, collect, collect_parts, find_leftovers
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.manifest import version_folder
from weighbridge.storage.stores.contract import Unfinished
from weighbridge.storage.stores.keys import temp_name


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def found(run: Run, *, grace_seconds: float = 3600.0) -> list[Leftover]:
    return list(find_leftovers(run.store, Lineage(run.store), grace_seconds=grace_seconds))


def age(path: Path, *, hours: float) -> None:
    then = time.time() - hours * 3600
    os.utime(path, (then, then))


def test_a_store_in_order_has_none(run: Run) -> None:
    weights = trained(run.base_weights, 1)
    push(run.open(), weights)
    assert found(run, grace_seconds=0.0) == []
    assert_sound(run, {0: run.base_weights, 1: weights})


def test_the_shards_of_an_attempt_that_lost_its_version_are_orphans_and_go(run: Run) -> None:
    loser, winner = run.open(), run.open()
    weights = trained(run.base_weights, 1)
    dead = fill(loser, as_tensors(trained(run.base_weights, 2)))  # and then it is killed
    push(winner, weights)
    leftovers = found(run)
    assert {leftover.key for leftover in leftovers} == {
        f"{version_folder(1)}/{shard.info.name}" for shard in dead.shards
    }
    assert {leftover.kind for leftover in leftovers} == {"orphan shard"}
    assert all(leftover.nbytes > 0 for leftover in leftovers)
    for leftover in leftovers:
        collect(run.store, leftover)
        collect(run.store, leftover)
    assert found(run) == []
    assert_sound(run, {0: run.base_weights, 1: weights})


def test_folders_above_the_head_are_never_touched_however_old(run: Run) -> None:
    publisher = run.open()
    attempt = fill(publisher, as_tensors(trained(run.base_weights, 1)))
    for path in (run.folder / "root" / version_folder(1)).iterdir():
        age(path, hours=10_000)
    assert found(run, grace_seconds=0.0) == []
    publisher.commit(attempt, {})
    assert Lineage(run.store).head() == 1
    assert found(run, grace_seconds=0.0) == []


def test_a_shard_under_a_version_whose_manifest_is_damaged_stays(run: Run) -> None:
    push(run.open(), trained(run.base_weights, 1))
    manifest = run.folder / "root" / version_folder(1) / "manifest.arrow"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    run.store.put(f"{version_folder(1)}/{'ab' * 16}-00000.safetensors", b"x")
    assert found(run, grace_seconds=0.0) == []


def test_what_is_not_named_like_a_shard_is_somebody_elses_and_stays(run: Run) -> None:
    push(run.open(), trained(run.base_weights, 1))
    run.store.put(f"{version_folder(1)}/retired", b"x")
    run.store.put(f"{version_folder(1)}/notes.txt", b"x")
    run.store.put("versions/readme/a.txt", b"x")
    run.store.put(f"versions/1/{'ab' * 16}-00000.safetensors", b"x")
    assert found(run, grace_seconds=0.0) == []


def test_the_shards_of_an_anchor_under_way_stay_for_the_grace(run: Run) -> None:
    push(run.open(), trained(run.base_weights, 1))
    key = f"{version_folder(1)}/anchor-{'ab' * 16}-00000.safetensors"
    run.store.put(key, b"x")
    assert found(run) == []
    age(run.folder / "root" / key, hours=2)
    assert [leftover.key for leftover in found(run)] == [key]


def test_old_temp_files_and_probes_go_and_young_ones_stay(run: Run) -> None:
    push(run.open(), trained(run.base_weights, 1))
    root = run.folder / "root"
    (root / "probe").mkdir(exist_ok=True)
    for name in (f"{version_folder(1)}/{temp_name()}", f"{version_folder(2)}/{temp_name()}", "probe/0123"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"half")
    assert found(run) == []
    for path in root.rglob("*"):
        if path.is_file():
            age(path, hours=2)
    leftovers = found(run)
    assert sorted(leftover.kind for leftover in leftovers) == ["probe", "unfinished write", "unfinished write"]
    assert all(7000 < leftover.age_seconds < 7400 for leftover in leftovers)
    for leftover in leftovers:
        collect(run.store, leftover)
    assert found(run, grace_seconds=0.0) == []


def test_an_object_is_not_discarded_as_an_unfinished_write(run: Run) -> None:
    with pytest.raises(UsageError):
        run.store.discard(Unfinished("run.json", "run.json", 0, 0))


def test_part_files_of_given_up_fetches_are_collected_with_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "cache" / "1").mkdir(parents=True)
    (tmp_path / "cache" / "1" / "a.safetensors.part").write_bytes(b"12345")
    (tmp_path / "cache" / "1" / "b.safetensors").write_bytes(b"whole")
    assert collect_parts(tmp_path / "cache", disk=LocalDisk("process")) == 5
    assert collect_parts(tmp_path / "nowhere", disk=LocalDisk("process")) == 0
    assert [path.name for path in (tmp_path / "cache" / "1").iterdir()] == ["b.safetensors"]
