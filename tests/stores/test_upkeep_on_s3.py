"""Anchors, retention and the audit on a real S3 server: what is collected is gone there, what is kept is rebuilt."""

import uuid
from pathlib import Path

import pytest
from tests.checkpoints import trained
from tests.storage.publishing import Run, bytes_of, push
from tests.stores.servers import BUCKET, Server

from weighbridge.errors import VersionRetired
from weighbridge.storage.anchor_sources import anchor_from_store
from weighbridge.storage.audit.audit import audit
from weighbridge.storage.checkout import checkout
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.clock import SystemClock
from weighbridge.storage.gc import run_gc
from weighbridge.storage.history.compact import compact
from weighbridge.storage.kept import keep
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.replica.pull import bring_up
from weighbridge.storage.stores import open_store

pytestmark = [pytest.mark.stores, pytest.mark.timeout(180)]


def held(folder: Path) -> dict[str, bytes]:
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.view(name).tobytes() for name in checkpoint.tensors}


def test_old_versions_go_and_every_kept_one_is_rebuilt(s3_server: Server, tmp_path: Path) -> None:
    run = Run(tmp_path, clock=SystemClock())
    run.store = open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}")
    publisher, states = run.open(), [run.base_weights]
    for version in range(1, 8):
        states.append(trained(states[-1], version))
        push(publisher, states[-1])
    away = tmp_path / "away"
    bring_up(away, store=run.store, base=run.base, version=2)

    keep(Lineage(run.store), 3, "best", clock=SystemClock())
    anchor_from_store(Lineage(run.store), 5, base=run.base, spool=tmp_path / "anchoring")
    before = {info.key for info in run.store.list("versions")}
    result = run_gc(Lineage(run.store), keep=2, clock=SystemClock(), grace_seconds=0)
    result.demand()
    assert [str(form) for form in result.collected] == ["version 4", "version 5"]
    gone = before - {info.key for info in run.store.list("versions")}
    assert gone and all(key.startswith(("versions/000000000004/", "versions/000000000005/")) for key in gone)
    again = run_gc(Lineage(run.store), keep=2, clock=SystemClock(), grace_seconds=0)
    assert (again.collected, again.failures, again.deleted_objects) == ([], [], 0)

    for version in (1, 2, 3, 6, 7):
        checkout(version, tmp_path / f"out-{version}", lineage=Lineage(run.store), base=run.base)
        assert held(tmp_path / f"out-{version}") == bytes_of(states[version])
    with pytest.raises(VersionRetired):
        checkout(4, tmp_path / "out-4", lineage=Lineage(run.store), base=run.base)
    for folder, base in ((away, run.base), (tmp_path / "bare", None)):  # away for long; and without the base
        assert bring_up(folder, store=run.store, base=base).version == 7
        assert held(folder / "current") == bytes_of(states[7])
    compact(run.store)
    audit(run.store).demand()
