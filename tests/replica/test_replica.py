"""A replica's ordinary life: seeded, brought from version to version, switched, rolled back, pulled."""

import os
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from tests.replica.runs import SHAPES, SmallRun, digest_tree, tensors_of, versions_in, write_base
from tests.storage.publishing import Run, push

from weighbridge.errors import (
    DigestMismatch,
    ForeignRun,
    LineageError,
    ReplicaAhead,
    ReplicaError,
    ReplicaLocked,
    UsageError,
    VersionRetired,
    VersionUnknown,
)
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.manifest import manifest_key
from weighbridge.storage.replica import bring_up, open_replica, verify_folder
from weighbridge.storage.replica.replica import Replica
from weighbridge.storage.stores import open_store


def advance(replica: Replica, version: int | None = None, *, rollback: bool = False) -> int:
    replica.apply(replica.fetch(replica.plan(version, rollback=rollback)))
    return replica.switch()


def test_a_new_replica_is_seeded_with_two_real_copies_of_the_base(run: SmallRun, folder: Path) -> None:
    with open_replica(folder, store=run.store, base=run.base) as replica:
        assert replica.version == 0
        assert replica.recovery.how == "seeded"
        assert replica.current == folder / "current"
        assert replica.held == {"a": 0, "b": 0}
        assert replica.state_digest == run.lineage.run.base_digest
    for name in ("a", "b", "../current"):
        assert versions_in(run, folder / "copies" / name) == {0}
        assert (folder / "copies" / name / "config.json").read_bytes() == (run.base / "config.json").read_bytes()
        assert (folder / "copies" / name / "tokenizer" / "vocab.txt").read_text() == "a b c"
    inodes = {p.stat().st_ino for top in (run.base, folder / "copies") for p in top.rglob("*.safetensors")}
    assert len(inodes) == 6
    assert not (folder / "current").readlink().is_absolute()


def test_state_is_private_and_weights_are_readable_by_the_engine(run: SmallRun, folder: Path) -> None:
    bring_up(folder, store=run.store, base=run.base)
    assert (folder / "state").stat().st_mode & 0o777 == 0o700
    assert (folder / "state" / "a.json").stat().st_mode & 0o777 == 0o600
    weights = next((folder / "current").glob("*.safetensors"))
    assert weights.stat().st_mode & 0o444 == 0o444 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_version_is_applied_to_the_spare_and_served_only_after_the_switch(run: SmallRun, folder: Path) -> None:
    run.push()
    with open_replica(folder, store=run.store, base=run.base) as replica:
        fetched = replica.fetch(replica.plan())
        applied = replica.apply(fetched)
        assert (applied.version, applied.reload, applied.repaired) == (1, True, 0)
        assert applied.parts == sum(1 for name in SHAPES if run.versions[0][name].size)
        assert applied.state_digest == run.lineage.manifest(1).state_digest
        assert replica.version == 0 and versions_in(run, replica.current) == {0}
        assert replica.switch() == 1
        assert replica.version == 1 and versions_in(run, replica.current) == {1}
        assert not (folder / "journal").exists()


def test_one_changed_byte_is_a_reload(run: SmallRun, folder: Path) -> None:
    run.push("mask", changed=1)
    with open_replica(folder, store=run.store, base=run.base) as replica:
        fetched = replica.plan_and_fetch()
        assert fetched.plan.reload and replica.apply(fetched).reload


def test_memory_of_an_apply_is_bounded_by_the_parts_in_hand(tmp_path: Path, folder: Path) -> None:
    names = [f"layers.{n}.w" for n in range(16)]
    base = {
        name: np.random.default_rng(n).integers(0, 255, 2 << 20, np.uint8).view(np.float16)
        for n, name in enumerate(names)
    }
    published = Run(tmp_path / "large", base_weights=base)
    model = sum(data.nbytes for data in base.values())
    stepped = {name: data.copy() for name, data in base.items()}
    for data in stepped.values():
        data.view(np.uint8)[::4096] ^= 1
    push(published.open(), stepped)
    bring_up(folder, store=published.store, base=published.base, version=0)
    tracemalloc.start()
    try:
        bring_up(folder, store=published.store, base=published.base, threads=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < model / 2


def test_the_spare_lags_and_folds_the_deltas_it_missed(run: SmallRun, folder: Path) -> None:
    with open_replica(folder, store=run.store, base=run.base) as replica:
        for version in range(1, 6):
            run.push()
            assert advance(replica) == version
            assert versions_in(run, replica.current) == {version}
            assert sorted(replica.held.values()) == [version - 1, version]


def test_many_deltas_folded_at_once_equal_the_same_deltas_one_by_one(run: SmallRun, folder: Path) -> None:
    for _ in range(7):
        run.push(changed=400)
    result = bring_up(folder, store=run.store, base=run.base)
    assert (result.outcome, result.from_version, result.version) == ("applied", 0, 7)
    assert versions_in(run, folder / "current") == {7}


def test_a_shard_travels_once_although_two_copies_need_it(run: SmallRun, folder: Path) -> None:
    with open_replica(folder, store=run.store, base=run.base) as replica:
        run.push()
        first = replica.fetch(replica.plan())
        replica.apply(first)
        replica.switch()
        run.push()
        plan = replica.plan()
        assert plan.start == 0 and len(plan.deltas) == 2
        assert plan.fetch_bytes == run.lineage.manifest(2).wire_bytes
        assert replica.fetch(plan).downloaded_bytes == run.lineage.manifest(2).wire_bytes


def test_shards_that_no_copy_needs_any_more_are_removed(run: SmallRun, folder: Path) -> None:
    with open_replica(folder, store=run.store, base=run.base) as replica:
        for _ in range(4):
            run.push()
            advance(replica)
            replica.tidy()
        assert sorted(int(p.name) for p in (folder / "spool").iterdir()) == [0, 4]


def test_progress_reaches_the_whole_and_never_two_at_once(run: SmallRun, folder: Path) -> None:
    run.push()
    seen: list[tuple[int, int]] = []
    bring_up(folder, store=run.store, base=run.base, on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (run.lineage.manifest(1).wire_bytes, run.lineage.manifest(1).wire_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_an_empty_version_moves_the_number_and_reloads_nothing(run: SmallRun, folder: Path) -> None:
    run.push()
    bring_up(folder, store=run.store, base=run.base)
    before = {name: digest_tree(folder / "copies" / name) for name in ("a", "b")}
    run.push_nothing()
    run.push_nothing()
    with open_replica(folder, store=run.store, base=run.base) as replica:
        plan = replica.plan()
        applied = replica.apply(replica.fetch(plan))
        assert (plan.action, applied.reload, applied.version) == ("renumber", False, 3)
        assert replica.version == 1
        assert replica.switch() == 3
        assert applied.state_digest == run.lineage.manifest(3).state_digest
    assert before == {name: digest_tree(folder / "copies" / name) for name in ("a", "b")}
    run.push()
    assert bring_up(folder, store=run.store, base=run.base).version == 4
    assert versions_in(run, folder / "current") == {4}


def test_an_older_target_is_superseded_and_the_same_one_needs_nothing(run: SmallRun, folder: Path) -> None:
    run.push()
    run.push()
    bring_up(folder, store=run.store, base=run.base)
    assert bring_up(folder, store=run.store, base=run.base, version=1).outcome == "superseded"
    assert bring_up(folder, store=run.store, base=run.base, version=2).outcome == "current"
    assert versions_in(run, folder / "current") == {2}


def test_a_roll_back_that_was_asked_for_reaches_any_version(run: SmallRun, folder: Path) -> None:
    for _ in range(4):
        run.push()
        bring_up(folder, store=run.store, base=run.base)
    assert bring_up(folder, store=run.store, base=run.base, version=3, rollback=True).version == 3
    assert bring_up(folder, store=run.store, base=run.base, version=1, rollback=True).version == 1
    assert versions_in(run, folder / "current") == {1}
    assert bring_up(folder, store=run.store, base=run.base).version == 4
    assert versions_in(run, folder / "current") == {4}


def test_a_roll_back_without_a_version_is_refused(run: SmallRun, folder: Path) -> None:
    with open_replica(folder, store=run.store, base=run.base) as replica, pytest.raises(LineageError, match="name it"):
        replica.plan(rollback=True)


def test_falling_back_serves_the_last_good_copy_and_the_next_plan_only_switches(run: SmallRun, folder: Path) -> None:
    run.push()
    with open_replica(folder, store=run.store, base=run.base) as replica:
        advance(replica)
        assert replica.fall_back() == 0
        assert versions_in(run, replica.current) == {0}
        plan = replica.plan(1)
        assert (plan.action, plan.fetch_bytes) == ("switch", 0)
        replica.apply(replica.fetch(plan))
        assert replica.switch() == 1
        assert versions_in(run, replica.current) == {1}


@pytest.mark.parametrize("copies", [1, 2])
def test_falling_back_where_no_byte_changed_goes_to_no_older_version(run: SmallRun, folder: Path, copies: int) -> None:
    run.push()
    bring_up(folder, store=run.store, base=run.base, copies=copies)
    run.push_nothing()
    with open_replica(folder, store=run.store, base=run.base, copies=copies) as replica:
        for version in (2, 2):  # an empty version, then nothing at all
            assert advance(replica) == version
            assert (replica.fall_back(), versions_in(run, replica.current)) == (version, {1, 2})


def test_applying_again_what_is_applied_does_nothing(run: SmallRun, folder: Path) -> None:
    run.push()
    with open_replica(folder, store=run.store, base=run.base) as replica:
        fetched = replica.fetch(replica.plan())
        assert replica.apply(fetched).parts > 0
        again = replica.apply(fetched)
        assert (again.parts, again.version, again.reload) == (0, 1, True)
        assert replica.switch() == 1


def test_a_plan_of_yesterday_is_refused(run: SmallRun, folder: Path) -> None:
    run.push()
    with open_replica(folder, store=run.store, base=run.base) as replica:
        fetched = replica.fetch(replica.plan())
        replica.apply(fetched)
        replica.switch()
        with pytest.raises(ReplicaError, match="plan again"):
            replica.apply(fetched)


def test_a_switch_without_an_apply_is_refused(run: SmallRun, folder: Path) -> None:
    with open_replica(folder, store=run.store, base=run.base) as replica, pytest.raises(ReplicaError, match="apply"):
        replica.switch()


def test_a_version_that_was_never_published_is_unknown(run: SmallRun, folder: Path) -> None:
    with open_replica(folder, store=run.store, base=run.base) as replica, pytest.raises(VersionUnknown):
        replica.plan(3)


def test_a_second_owner_is_told_who_holds_the_replica(run: SmallRun, folder: Path) -> None:
    with (
        open_replica(folder, store=run.store, base=run.base),
        pytest.raises(ReplicaLocked, match=f"process {os.getpid()}"),
        open_replica(folder, store=run.store, base=run.base, lock_seconds=0.1),
    ):
        pass
    assert (folder / "lock").read_bytes() == b""
    with open_replica(folder, store=run.store, base=run.base, lock_seconds=0):
        pass


def test_a_dead_owners_lock_file_holds_nobody_up(run: SmallRun, folder: Path) -> None:
    bring_up(folder, store=run.store, base=run.base)
    (folder / "lock").write_text('{"pid": 1, "host": "gone"}')
    bring_up(folder, store=run.store, base=run.base, lock_seconds=0)


def test_a_folder_that_holds_something_else_is_left_alone(run: SmallRun, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="not a replica"), open_replica(home, store=run.store, base=run.base):
        pass
    assert [p.name for p in home.iterdir()] == ["thesis.txt"]


def test_what_a_power_cut_left_of_an_unsynced_replica_is_made_a_replica_again(run: SmallRun, folder: Path) -> None:
    bring_up(folder, store=run.store, base=run.base, durability="process")
    (folder / "replica.json").unlink()
    (folder / "current").unlink()
    shutil.rmtree(folder / "copies")
    assert bring_up(folder, store=run.store, base=run.base, durability="process").version == run.head


def test_a_folder_that_only_looks_a_little_like_a_replica_is_left_alone(run: SmallRun, folder: Path) -> None:
    (folder / "spool").mkdir(parents=True)
    (folder / "spool" / "printer-queue").write_text("a letter")
    with pytest.raises(UsageError, match="printer-queue"), open_replica(folder, store=run.store, base=run.base):
        pass
    assert (folder / "spool" / "printer-queue").read_text() == "a letter"


def test_a_new_replica_without_a_base_says_what_to_give(run: SmallRun, folder: Path) -> None:
    with pytest.raises(ReplicaError, match="base"), open_replica(folder, store=run.store, base=None):
        pass
    with open_replica(folder, store=run.store, base=run.base) as replica:
        assert replica.version == 0


def test_a_base_folder_of_another_model_is_refused_and_nothing_is_replaced(
    run: SmallRun, folder: Path, tmp_path: Path
) -> None:
    other = SmallRun(tmp_path / "other", seed=9)
    with pytest.raises(DigestMismatch, match="base"), open_replica(folder, store=run.store, base=other.base):
        pass
    assert not (folder / "current").exists()


def test_a_replica_of_another_run_is_refused_and_seeded_anew_only_when_told_to(
    run: SmallRun, folder: Path, tmp_path: Path
) -> None:
    run.push()
    bring_up(folder, store=run.store, base=run.base)
    before = {name: digest_tree(folder / name) for name in ("copies", "state", "spool")}
    other = SmallRun(tmp_path / "other", seed=9, run_id="run-2")
    other.push()
    refused = pytest.raises(ForeignRun, match=r"of run run-1 .*holds run run-2.*Nothing was changed.*--reseed")
    with refused, open_replica(folder, store=other.store, base=other.base):
        pass
    with refused:
        bring_up(folder, store=other.store, base=other.base, scrub=True)
    assert {name: digest_tree(folder / name) for name in before} == before
    result = bring_up(folder, store=other.store, base=other.base, foreign="reseed")
    assert result.recovery.how == "reseeded" and any("run-1" in note for note in result.recovery.notes)
    assert versions_in(other, folder / "current") == {1}
    assert verify_folder(folder, other.lineage).ok


def test_a_replica_ahead_of_its_store_is_recognised(run: SmallRun, folder: Path, tmp_path: Path) -> None:
    run.push()
    run.push()
    bring_up(folder, store=run.store, base=run.base)
    twin = SmallRun(tmp_path / "twin")  # the same run and base, restored from before version 1
    before = {name: digest_tree(folder / name) for name in ("copies", "state", "spool")}
    for wanted in ({}, {"scrub": True}, {"rollback": True}, {"foreign": "reseed"}, {"version": 0}):
        with pytest.raises(ReplicaAhead, match=r"version 2 .*head is 0.*Nothing was changed.*--rollback --version 0"):
            bring_up(folder, store=twin.store, base=twin.base, **wanted)  # type: ignore[arg-type]
    with pytest.raises(ReplicaAhead), open_replica(folder, store=twin.store, base=twin.base):
        pass
    with pytest.raises(VersionUnknown):
        bring_up(folder, store=twin.store, base=twin.base, version=1, rollback=True)
    assert {name: digest_tree(folder / name) for name in before} == before
    assert versions_in(run, folder / "current") == {2}
    result = bring_up(folder, store=twin.store, base=twin.base, version=0, rollback=True)
    assert result.version == 0 and result.recovery.how == "reseeded"
    assert versions_in(twin, folder / "current") == {0}


@pytest.mark.parametrize("copies", [1, 2])
def test_a_replica_one_version_ahead_of_a_rewound_store_goes_back_when_told_to(
    run: SmallRun, folder: Path, copies: int
) -> None:
    for _ in range(8):
        run.push()
        bring_up(folder, store=run.store, base=run.base, copies=copies)
    run.store.delete(manifest_key(8))
    with pytest.raises(ReplicaAhead, match=r"version 8 .*head is 7"):
        bring_up(folder, store=run.store, base=run.base, copies=copies)
    assert versions_in(run, folder / "current") == {8}
    result = bring_up(folder, store=run.store, base=run.base, copies=copies, version=7, rollback=True)
    assert result.version == 7 and versions_in(run, folder / "current") == {7}
    assert verify_folder(folder, Lineage(run.store)).ok


@pytest.mark.parametrize("copies", [1, 2])
def test_a_store_that_was_rewound_and_continued_by_another_writer_is_recognised(
    run: SmallRun, folder: Path, tmp_path: Path, copies: int
) -> None:
    run.push()
    shutil.copytree(run.store.url, tmp_path / "twin" / "store")
    run.push()
    bring_up(folder, store=run.store, base=run.base, copies=copies)
    twin = open_store(str(tmp_path / "twin" / "store"))  # restored from after version 1, where another went on
    other = SmallRun.going_on(run, twin, version=1)
    other.push()
    other.push()
    with pytest.raises(ReplicaAhead, match=r"another version 2 .*head is 3.*another writer.*Nothing was changed"):
        bring_up(folder, store=twin, base=run.base, copies=copies)
    assert versions_in(run, folder / "current") == {2}
    result = bring_up(folder, store=twin, base=run.base, copies=copies, version=3, rollback=True)
    assert result.version == 3 and versions_in(other, folder / "current") == {3}
    assert bring_up(folder, store=twin, base=run.base, copies=copies).outcome == "current"


def test_what_a_refused_seed_made_is_removed(run: SmallRun, folder: Path, tmp_path: Path) -> None:
    write_base(tmp_path / "other", seed=5)
    with pytest.raises(DigestMismatch, match="do not have the run's bytes"):
        bring_up(folder, store=run.store, base=tmp_path / "other")
    assert not [path.name for path in folder.rglob("*seeding*")]


def test_one_copy_is_out_of_reach_while_it_is_dirty_and_is_back_after(run: SmallRun, folder: Path) -> None:
    run.push()
    with open_replica(folder, store=run.store, base=run.base, copies=1) as replica:
        assert advance(replica) == 1
        assert replica.held == {"a": 1}
        assert versions_in(run, replica.current) == {1}
        with pytest.raises(ReplicaError, match="one copy"):
            replica.fall_back()
        assert advance(replica, 0, rollback=True) == 0
        assert versions_in(run, replica.current) == {0}


def test_a_replica_may_give_up_its_second_copy_and_take_it_back(run: SmallRun, folder: Path) -> None:
    run.push()
    bring_up(folder, store=run.store, base=run.base)
    bring_up(folder, store=run.store, base=run.base, copies=1)
    assert [p.name for p in (folder / "copies").iterdir()] == ["a"]
    assert versions_in(run, folder / "current") == {1}
    bring_up(folder, store=run.store, base=run.base, copies=2)
    assert versions_in(run, folder / "copies" / "b") == {1}


def test_a_retired_version_is_told_after_a_bounded_number_of_plans(run: SmallRun, folder: Path) -> None:
    bring_up(folder, store=run.store, base=run.base)
    run.push()
    run.shard_path(1).unlink()
    run.store.create("versions/000000000001/retired", b"1")
    with pytest.raises(VersionRetired, match=r"is retired.*ask for the head"):
        bring_up(folder, store=run.store, base=run.base)
    assert versions_in(run, folder / "current") == {0}


@pytest.mark.parametrize("kind", ["xxh3-128", "blake3"])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_kind_of_digest_and_any_number_of_threads_end_alike(
    tmp_path: Path, folder: Path, kind: str, threads: int
) -> None:
    run = SmallRun(tmp_path / "run", digest_kind=kind)
    for _ in range(3):
        run.push(changed=1000)
    bring_up(folder, store=run.store, base=run.base, threads=threads)
    assert versions_in(run, folder / "current") == {3}


def test_a_replica_keeps_the_files_of_its_base(tmp_path: Path, folder: Path) -> None:
    run = SmallRun(tmp_path / "run")
    assert tensors_of(run.base).keys() == SHAPES.keys()
    bring_up(folder, store=run.store, base=run.base)
    here = {p.name: p.stat().st_size for p in (folder / "current").glob("*.safetensors")}
    assert here == {p.name: p.stat().st_size for p in run.base.glob("*.safetensors")}


def test_large_changes_are_journalled_as_whole_parts(run: SmallRun, folder: Path) -> None:
    new = {name: np.roll(data, 3) for name, data in run.versions[0].items()}
    run.commit(new)
    run.push(changed=3000)
    bring_up(folder, store=run.store, base=run.base)
    assert versions_in(run, folder / "current") == {2}
