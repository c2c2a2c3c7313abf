"""What rots, vanishes or lies: found, mended by the cheapest way that ends bit-exact, and said."""

import json
import os
import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.faults.faulty_store import FaultyStore
from tests.replica.runs import WEIGHT_FILES, SmallRun, flip, spec, versions_in

from weighbridge.errors import DigestMismatch, ManifestCorrupt, PayloadCorrupt, ShardCorrupt
from weighbridge.storage.anchor_sources import anchor_from_store
from weighbridge.storage.audit.audit import audit
from weighbridge.storage.checkout import checkout
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.manifest import manifest_key, retired_key, shard_key
from weighbridge.storage.replica import bring_up, open_replica, verify_folder


@pytest.fixture
def replica(run: SmallRun, folder: Path) -> Path:
    """A replica at version 3 whose spare is at 2."""
    for _ in range(3):
        run.push()
        bring_up(folder, store=run.store, base=run.base)
    return folder


def rot(copy: Path, tensor: str, *, quietly: bool = False) -> None:
    """Flips a byte of a tensor in a copy; quietly: with the file's time put back, as a failing disk does it."""
    place = open_checkpoint(copy).tensors[tensor]
    path = copy / place.file
    stamp = path.stat().st_mtime_ns
    flip(path, place.start + place.spec.nbytes // 2)
    if quietly:
        os.utime(path, ns=(stamp, stamp))


def loaded(folder: Path) -> Path:
    return (folder / "current").resolve()


def spare(folder: Path) -> Path:
    return folder / "copies" / ({"a", "b"} - {loaded(folder).name}).pop()


@pytest.mark.parametrize("which", [loaded, spare])
def test_a_byte_changed_behind_our_back_is_noticed_and_one_part_made_again(
    run: SmallRun, replica: Path, which: object
) -> None:
    copy = loaded(replica) if which is loaded else spare(replica)
    rot(copy, "layers.0.attn.weight")
    with open_replica(replica, store=run.store, base=run.base) as opened:
        assert (opened.recovery.how, opened.recovery.repaired) == ("repaired", 1)
        assert any("layers.0.attn.weight" in note for note in opened.recovery.notes)
        assert opened.version == 3
    verify_folder(replica, run.lineage).demand()


def test_a_quietly_rotten_byte_never_reaches_the_next_version(run: SmallRun, replica: Path) -> None:
    rot(spare(replica), "embed.weight", quietly=True)
    run.push()
    result = bring_up(replica, store=run.store, base=run.base)
    assert (result.version, result.repaired, result.recovery.how) == (4, 1, "clean")
    assert versions_in(run, replica / "current") == {4}


def test_a_quietly_rotten_part_is_made_again_without_the_other_copy(run: SmallRun, folder: Path) -> None:
    for _ in range(3):
        run.push()
    bring_up(folder, store=run.store, base=run.base, copies=1)
    rot(loaded(folder), "embed.weight", quietly=True)
    run.push()
    result = bring_up(folder, store=run.store, base=run.base, copies=1)
    assert (result.version, result.repaired) == (4, 1)
    assert versions_in(run, folder / "current") == {4}


def test_making_a_part_again_reads_only_the_shards_that_hold_it(run: SmallRun, folder: Path) -> None:
    run.push("embed.weight")
    run.push("layers.0.attn.weight")
    run.push("embed.weight")
    bring_up(folder, store=run.store, base=run.base, copies=1)
    rot(loaded(folder), "embed.weight")
    store = FaultyStore(run.store)
    with open_replica(folder, store=store, base=run.base, copies=1) as opened:
        assert (opened.recovery.how, opened.recovery.repaired) == ("repaired", 1)
    read = {call[1] for call in store.calls if call[0] == "get_range"}
    assert read == {f"versions/{v:012d}/{run.lineage.manifest(v).shards[0].name}" for v in (1, 3)}


def test_scrub_finds_and_mends_what_rotted_quietly(run: SmallRun, replica: Path) -> None:
    rot(loaded(replica), "norm.weight", quietly=True)
    rot(spare(replica), "mask", quietly=True)
    assert not verify_folder(replica, run.lineage).ok
    result = bring_up(replica, store=run.store, base=run.base, scrub=True)
    assert (result.repaired, result.recovery.how) == (2, "repaired")
    verify_folder(replica, run.lineage).demand()


def test_a_flipped_byte_is_made_again_before_a_pull_goes_on_and_the_pull_says_which_tensor(
    run: SmallRun, folder: Path
) -> None:
    """One copy: so the store is the only source, and only the shards that hold the tensor are read."""
    run.push("embed.weight")
    run.push("layers.0.attn.weight")
    run.push("mask")
    bring_up(folder, store=run.store, base=run.base, copies=1)
    rot(loaded(folder), "layers.0.attn.weight")
    store = FaultyStore(run.store)
    result = bring_up(folder, store=store, base=run.base, copies=1, scrub=True)
    assert (result.repaired, result.recovery.how) == (1, "repaired")
    assert [n for n in result.recovery.notes if "1 parts of 1 tensors were made again (layers.0.attn.weight)" in n]
    read = {call[1] for call in store.calls if call[0] == "get_range"}
    assert read == {f"versions/{2:012d}/{run.lineage.manifest(2).shards[0].name}"}
    assert versions_in(run, folder / "current") == {3}


@pytest.mark.parametrize("trouble", ["collected", "gone", "damaged"])
def test_a_part_is_made_again_from_an_anchor_where_the_other_ways_are_closed(
    run: SmallRun, folder: Path, tmp_path: Path, trouble: str
) -> None:
    """The spare is at version 0, and so is the base: the deltas up to the anchor are of no use any more."""
    for _ in range(10):
        run.push()
    anchor_from_store(Lineage(run.store), 8, base=run.base, spool=tmp_path / "anchoring")
    bring_up(folder, store=run.store, base=run.base)
    for version in range(1, 6):
        manifest = run.lineage.manifest(version)
        if trouble == "collected":
            run.store.create(retired_key(manifest), b"{}")
        for index, shard in enumerate(manifest.shards):
            if trouble != "damaged":
                run.store.delete(shard_key(version, shard))
                continue
            path = run.shard_path(version, index)
            path.chmod(0o644)
            flip(path, path.stat().st_size - 1)
    shutil.rmtree(folder / "spool")
    rot(loaded(folder), "layers.0.attn.weight", quietly=True)
    result = bring_up(folder, store=run.store, base=run.base, scrub=True)
    assert (result.recovery.how, result.repaired, result.version) == ("repaired", 1, 10)
    assert versions_in(run, loaded(folder)) == {10}
    verify_folder(folder, run.lineage).demand()


def test_current_leads_to_the_older_copy_only_until_the_loaded_one_is_mended_and_the_log_says_so(
    run: SmallRun, folder: Path
) -> None:
    for _ in range(4):
        run.push()
    bring_up(folder, store=run.store, base=run.base)
    before = loaded(folder)
    rot(before, "layers.0.attn.weight", quietly=True)
    with capture_logs() as logs:
        result = bring_up(folder, store=run.store, base=run.base, scrub=True)
    assert (result.recovery.how, result.version, loaded(folder)) == ("repaired", 4, before)
    said = [(log["event"], log["copy"], log["version"]) for log in logs if log["event"].startswith("current")]
    assert said == [
        ("current leads to an older version until the loaded copy is mended", spare(folder).name, 0),
        ("current leads to the mended copy again", before.name, 4),
    ]


def test_a_corrupt_old_manifest_is_gone_round_by_an_anchor_and_named_by_the_audit(
    run: SmallRun, replica: Path, tmp_path: Path
) -> None:
    for _ in range(3):
        run.push()
    anchor_from_store(run.lineage, 5, base=run.base, spool=tmp_path / "spool")
    key = manifest_key(3)  # what the replica serves, too
    flip(Path(run.store.url) / key, 700)
    for place, base in ((tmp_path / "new", run.base), (tmp_path / "bare", None), (replica, run.base)):
        assert bring_up(place, store=run.store, base=base).version == 6
        assert versions_in(run, place / "current") == {6}
    checkout(6, tmp_path / "out", lineage=Lineage(run.store), base=run.base)
    assert versions_in(run, tmp_path / "out") == {6}
    with pytest.raises(ManifestCorrupt, match=key):
        checkout(4, tmp_path / "no", lineage=Lineage(run.store), base=run.base)
    assert audit(run.store).findings[0].key == key


def test_a_replica_whose_own_manifest_cannot_be_read_goes_on_from_what_it_holds(run: SmallRun, replica: Path) -> None:
    run.push()
    flip(Path(run.store.url) / manifest_key(3), 700)
    result = bring_up(replica, store=run.store, base=run.base)
    assert (result.version, result.recovery.how) == (4, "clean")
    assert versions_in(run, replica / "current") == {4}


def test_an_older_version_after_a_lost_copy_is_said(run: SmallRun, replica: Path) -> None:
    (loaded(replica) / WEIGHT_FILES[0]).unlink()
    with open_replica(replica, store=run.store, base=run.base) as opened:
        assert opened.version == 2
        assert "current leads to version 2, since the copy with version 3 was lost" in opened.recovery.notes


def test_strangers_in_the_spool_are_named_and_hold_nobody_up(run: SmallRun, replica: Path) -> None:
    for name in ("notes/a.safetensors", "000000000099/b.safetensors", "²/c.safetensors", "000000000001/d.safetensors"):
        path = replica / "spool" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"what is this?")
    faults = verify_folder(replica, run.lineage).all_faults
    assert len(faults) == 4 and all("no shard that was published" in fault for fault in faults)
    run.push()
    assert bring_up(replica, store=run.store, base=run.base).version == 4


def test_the_same_part_rotten_in_both_copies_is_made_again_from_the_base(run: SmallRun, replica: Path) -> None:
    rot(loaded(replica), "embed.weight")
    rot(spare(replica), "embed.weight")
    with open_replica(replica, store=run.store, base=run.base) as opened:
        assert (opened.recovery.repaired, opened.version) == (2, 3)
    verify_folder(replica, run.lineage).demand()


@pytest.mark.parametrize("damage", ["truncated", "garbage", "gone"])
@pytest.mark.parametrize("which", ["a", "b"])
def test_a_state_that_is_lost_is_found_again_from_the_bytes(
    run: SmallRun, replica: Path, which: str, damage: str
) -> None:
    state = replica / "state" / f"{which}.json"
    if damage == "gone":
        state.unlink()
    else:
        state.write_bytes(state.read_bytes()[:100] if damage == "truncated" else b"\x00" * 500)
    with open_replica(replica, store=run.store, base=run.base) as opened:
        assert opened.recovery.how == "digested"
        assert sorted(opened.held.values()) == [2, 3] and opened.version == 3
    verify_folder(replica, run.lineage).demand()


def test_lost_states_of_both_copies_and_rot_in_one_are_mended_together(run: SmallRun, replica: Path) -> None:
    rot(loaded(replica), "mask", quietly=True)
    for state in (replica / "state").iterdir():
        state.write_text("{}")
    with open_replica(replica, store=run.store, base=run.base) as opened:
        assert (opened.recovery.how, opened.recovery.repaired, opened.version) == ("repaired", 1, 3)
    verify_folder(replica, run.lineage).demand()


def test_a_lost_identity_costs_a_digest_of_everything_and_no_download(run: SmallRun, replica: Path) -> None:
    flip(replica / "replica.json", 80)
    with open_replica(replica, store=run.store, base=run.base) as opened:
        assert opened.recovery.how == "digested" and opened.version == 3
    verify_folder(replica, run.lineage).demand()


@pytest.mark.parametrize("which", [loaded, spare])
def test_a_missing_weight_file_means_that_its_copy_is_seeded_anew(run: SmallRun, replica: Path, which: object) -> None:
    copy = loaded(replica) if which is loaded else spare(replica)
    (copy / WEIGHT_FILES[1]).unlink()
    with open_replica(replica, store=run.store, base=run.base) as opened:
        assert opened.recovery.how == "reseeded"
        assert versions_in(run, opened.current) == {opened.version}
        assert opened.version in (2, 3)
    assert bring_up(replica, store=run.store, base=run.base).version == 3
    verify_folder(replica, run.lineage).demand()


def test_everything_but_the_identity_gone_is_a_seed_and_a_pull(run: SmallRun, replica: Path) -> None:
    shutil.rmtree(replica / "copies")
    result = bring_up(replica, store=run.store, base=run.base)
    assert (result.recovery.how, result.version) == ("reseeded", 3)
    verify_folder(replica, run.lineage).demand()


def test_a_changed_config_is_put_right_from_the_store(run: SmallRun, replica: Path) -> None:
    (loaded(replica) / "config.json").write_text("{}")
    (loaded(replica) / "tokenizer" / "vocab.txt").unlink()
    with open_replica(replica, store=run.store, base=None) as opened:
        assert opened.recovery.how == "repaired"
    assert (replica / "current" / "config.json").read_text() == '{"model_type": "llama"}'
    verify_folder(replica, run.lineage).demand()


def test_a_weight_file_that_nobody_published_is_moved_out_of_the_engines_way(run: SmallRun, replica: Path) -> None:
    (loaded(replica) / "model-00003-of-00003.safetensors").write_bytes(b"surprise")
    (loaded(replica) / "notes.txt").write_text("left by an engine")
    assert not verify_folder(replica, run.lineage).ok
    with open_replica(replica, store=run.store, base=run.base) as opened:
        assert opened.recovery.how == "repaired"
    assert not (replica / "current" / "model-00003-of-00003.safetensors").exists()
    assert [p.read_bytes() for p in (replica / "aside").iterdir()] == [b"surprise"]
    assert (replica / "current" / "notes.txt").exists()
    verify_folder(replica, run.lineage).demand()


@pytest.mark.parametrize("target", ["copies/b", "nowhere", "", "copies"])
def test_a_current_link_that_leads_astray_is_put_right(run: SmallRun, replica: Path, target: str) -> None:
    (replica / "current").unlink()
    if target:
        (replica / "current").symlink_to(target)
    assert bring_up(replica, store=run.store, base=run.base).version == 3
    assert versions_in(run, replica / "current") == {3}


def test_a_file_changed_between_two_steps_is_noticed_before_the_next(run: SmallRun, replica: Path) -> None:
    run.push()
    with open_replica(replica, store=run.store, base=run.base) as opened:
        fetched = opened.fetch(opened.plan())
        rot(spare(replica), "embed.weight")
        opened.apply(fetched)
        assert opened.recovery.repaired == 1
        assert opened.switch() == 4
    assert versions_in(run, replica / "current") == {4}


def test_a_rotten_shard_in_the_spool_is_fetched_again(run: SmallRun, replica: Path) -> None:
    run.push()
    with open_replica(replica, store=run.store, base=run.base) as opened:
        opened.fetch(opened.plan())
    for shard in (replica / "spool" / "000000000004").iterdir():
        flip(shard, shard.stat().st_size - 1)
    assert not verify_folder(replica, run.lineage).ok
    assert bring_up(replica, store=run.store, base=run.base).version == 4
    verify_folder(replica, run.lineage).demand()


def test_a_shard_that_rots_between_fetch_and_apply_is_fetched_again(run: SmallRun, replica: Path) -> None:
    run.push()
    with open_replica(replica, store=run.store, base=run.base) as opened:
        fetched = opened.fetch(opened.plan())
        for shard in (replica / "spool" / "000000000004").iterdir():
            flip(shard, shard.stat().st_size - 1)
        opened.apply(fetched)
        assert opened.switch() == 4
    assert versions_in(run, replica / "current") == {4}


def test_a_shard_damaged_in_the_store_is_refused_and_nothing_is_written(run: SmallRun, replica: Path) -> None:
    run.push()
    shard = run.shard_path(4)
    shard.chmod(0o644)
    flip(shard, shard.stat().st_size - 1)
    with pytest.raises(ShardCorrupt):
        bring_up(replica, store=run.store, base=run.base)
    assert versions_in(run, replica / "current") == {3}
    verify_folder(replica, run.lineage).demand()


def test_a_wrong_digest_that_was_published_is_refused_and_nothing_is_written(run: SmallRun, replica: Path) -> None:
    new = {name: data.copy() for name, data in run.versions[-1].items()}
    new["embed.weight"][::7] ^= 1
    new["mask"][3] ^= 1
    run.commit(new, lie="embed.weight")
    with pytest.raises((DigestMismatch, PayloadCorrupt), match=r"embed\.weight"):
        bring_up(replica, store=run.store, base=run.base)
    assert versions_in(run, replica / "current") == {3}
    assert not list(replica.glob("journal*"))
    verify_folder(replica, run.lineage).demand()


def test_verify_finds_any_changed_byte_of_a_replica(run: SmallRun, replica: Path) -> None:
    run.push("mask")
    with open_replica(replica, store=run.store, base=run.base) as opened:
        opened.fetch(opened.plan())
    files = sorted(p for p in replica.rglob("*") if p.is_file() and not p.is_symlink() and p.stat().st_size)
    assert len(files) == 2 * 5 + 3 + 4  # two copies; identity and states; shards of versions 0, 3 and 4
    verify_folder(replica, run.lineage).demand()
    for path in files:
        before, stamp = path.read_bytes(), path.stat().st_mtime_ns
        for offset in {0, 9, len(before) // 3, len(before) // 2, len(before) - 1}:
            flip(path, min(offset, len(before) - 1))
            os.utime(path, ns=(stamp, stamp))
            assert not verify_folder(replica, run.lineage).ok, (path, offset)
            path.write_bytes(before)
        os.utime(path, ns=(stamp, stamp))
    verify_folder(replica, run.lineage).demand()


def test_verify_changes_nothing(run: SmallRun, replica: Path) -> None:
    rot(loaded(replica), "embed.weight")
    (spare(replica) / "config.json").unlink()
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in replica.rglob("*") if p.is_file()}
    report = verify_folder(replica, run.lineage)
    assert len(report.all_faults) == 2 and not report.ok
    after = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in replica.rglob("*") if p.is_file()}
    before.pop(replica / "lock"), after.pop(replica / "lock")
    assert before == after


def test_a_plain_folder_is_told_its_version_or_what_differs(run: SmallRun, replica: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(replica / "current", plain)
    report = verify_folder(plain, run.lineage)
    assert report.ok and report.folders[0].version == 3
    assert report.folders[0].state_digest == run.lineage.manifest(3).state_digest
    rot(plain, "layers.1.scale")
    report = verify_folder(plain, run.lineage)
    assert report.folders[0].version == 3 and "layers.1.scale" in report.all_faults[0]
    with pytest.raises(DigestMismatch, match=r"layers\.1\.scale"):
        report.demand()
    rot(plain, "layers.1.scale")
    (plain / "config.json").write_text("{}")
    assert "config.json" in verify_folder(plain, run.lineage).all_faults[0]


def test_states_name_every_file_and_part(run: SmallRun, replica: Path) -> None:
    digest, body = (replica / "state" / "a.json").read_bytes().split(b"\n", 1)
    fields = json.loads(body)
    assert len(digest) == 64
    assert set(fields["files"]) == {
        *WEIGHT_FILES, "model.safetensors.index.json", "config.json", "tokenizer/vocab.txt"
    }  # fmt: skip
    assert {name for name, _, _ in fields["parts"]} == set(run.versions[0])
    assert spec("layers.1.nothing").nbytes == 0


def test_a_file_of_which_only_the_time_changed_is_looked_at_once_and_then_known(run: SmallRun, replica: Path) -> None:
    with open_replica(replica, store=run.store, base=run.base) as opened:
        os.utime(loaded(replica) / "config.json")
        assert not opened.is_untouched()
        opened.settle()
        assert opened.is_untouched()
        before = opened.recovery
        opened.settle()
        assert opened.recovery is before
