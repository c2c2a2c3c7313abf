"""Rows that no publisher writes, in manifests sealed all the same: a replica refuses them, and stays as it is."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.replica.runs import SmallRun, digest_tree

from weighbridge.errors import WeighbridgeError
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.manifest import from_bytes, manifest_key, to_bytes
from weighbridge.storage.replica import bring_up
from weighbridge.values import PartKey, PartRow

Twist = Callable[[PartRow], PartRow]
TWISTS: dict[str, Twist] = {
    "a tensor that the model has not": lambda row: replace(row, key=PartKey("../../evil", 0)),
    "a place beyond the tensor": lambda row: replace(row, key=PartKey(row.key.tensor, 256 << 20)),
    "another dtype": lambda row: replace(row, dtype="F64"),
    "a dtype of no known size": lambda row: replace(row, dtype="X9"),
    "an absurd shape": lambda row: replace(row, shape=(1 << 62, 1 << 62, 1 << 62)),
    "more dimensions than there are": lambda row: replace(row, shape=(1,) * 1000),
    "fewer bytes": lambda row: replace(row, nbytes=2),
    "more bytes": lambda row: replace(row, nbytes=256 << 20),
    "absurdly many bytes": lambda row: replace(row, nbytes=(1 << 63) - 1),
    "absurdly many changes": lambda row: replace(row, changed=(1 << 64) - 1),
    "another codec": lambda row: replace(row, codec="full"),
    "a codec that nobody knows": lambda row: replace(row, codec="../../evil"),
}


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> tuple[SmallRun, Path]:
    """A run at version 1, and a replica that is at version 0."""
    folder = tmp_path_factory.mktemp("hostile")
    run = SmallRun(folder)
    bring_up(folder / "replica", store=run.store, base=run.base)
    run.push()
    return run, folder / "replica"


@pytest.mark.parametrize("twist", TWISTS)
def test_a_row_that_no_publisher_writes_is_refused_and_nothing_is_written(
    twist: str, held: tuple[SmallRun, Path], tmp_path: Path
) -> None:
    run, folder = held
    path = Path(run.store.url) / manifest_key(1)
    right = path.read_bytes()
    manifest = from_bytes(right)
    before = digest_tree(folder / "copies")
    try:
        for row in (0, len(manifest.rows) - 1):
            rows = list(manifest.rows)
            rows[row] = TWISTS[twist](rows[row])
            path.write_bytes(to_bytes(replace(manifest, rows=tuple(rows)))[0])
            for replica in (tmp_path / f"new-{row}", folder)[: 1 if twist in HARMLESS else 2]:
                try:
                    bring_up(replica, store=run.store, base=run.base, lock_seconds=60)
                except WeighbridgeError:
                    continue
                assert twist in HARMLESS  # and did no harm: every byte is the one that was published
    finally:
        path.write_bytes(right)
    assert digest_tree(folder / "copies") == before
    assert Lineage(run.store).manifest(1) == manifest


HARMLESS = {"absurdly many changes", "an absurd shape"}
"""What a row says of these, people read and nothing else."""
