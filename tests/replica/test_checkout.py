"""A checkout is a whole HF folder of any retained version, or nothing."""

from pathlib import Path

import pytest
from tests.faults.crash_disk import FullDisk
from tests.replica.runs import SmallRun, flip, tensors_of, versions_in

from weighbridge.errors import DiskFull, ReplicaError, ShardCorrupt, UsageError, VersionUnknown
from weighbridge.storage.checkout import checkout


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    """A run of four versions, one of them empty."""
    run = SmallRun(tmp_path / "run")
    run.push()
    run.push(changed=2000)
    run.push_nothing()
    run.push("mask")
    return run


@pytest.mark.parametrize("version", range(5))
def test_every_version_is_rebuilt_bit_for_bit_with_config_and_tokenizer(
    run: SmallRun, tmp_path: Path, version: int
) -> None:
    out = tmp_path / "out"
    result = checkout(version, out, lineage=run.lineage, base=run.base)
    assert version in versions_in(run, out)
    assert result.state_digest == run.lineage.manifest(version).state_digest
    assert {p.relative_to(out) for p in out.rglob("*")} == {p.relative_to(run.base) for p in run.base.rglob("*")}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]


def test_a_folder_with_something_in_it_is_refused(run: SmallRun, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="not empty"):
        checkout(1, tmp_path / "out", lineage=run.lineage, base=run.base)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_an_empty_folder_is_filled(run: SmallRun, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    checkout(1, tmp_path / "out", lineage=run.lineage, base=run.base)
    assert tensors_of(tmp_path / "out").keys() == run.versions[1].keys()


def test_a_failed_checkout_leaves_nothing(run: SmallRun, tmp_path: Path) -> None:
    shard = run.shard_path(1)
    shard.chmod(0o644)
    flip(shard, shard.stat().st_size - 1)
    with pytest.raises(ShardCorrupt):
        checkout(1, tmp_path / "out", lineage=run.lineage, base=run.base)
    with pytest.raises(DiskFull):
        checkout(0, tmp_path / "out", lineage=run.lineage, base=run.base, disk=FullDisk(12))
    with pytest.raises(VersionUnknown):
        checkout(9, tmp_path / "out", lineage=run.lineage, base=run.base)
    with pytest.raises(ReplicaError, match="base"):
        checkout(1, tmp_path / "out", lineage=run.lineage, base=None)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
