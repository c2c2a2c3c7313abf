"""A trainer that broadcasts and a host that receives, each as a user starts it: `WeightSync`, `weighbridge host`, and
the run between them in Prefect."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.checkpoints import tiny_weights, trained, write_checkpoint
from tests.flows.conftest import until
from tests.stores.servers import free_ports

from weighbridge import WeightSync
from weighbridge.errors import UsageError
from weighbridge.flows.server import ServerInfo
from weighbridge.storage.records import read_records
from weighbridge.storage.stores import open_store

ROOT = Path(__file__).parents[2]


@pytest.mark.fleet
def test_a_push_reaches_its_host_by_the_group_and_the_record_says_so(
    tmp_path: Path, server: ServerInfo, home: Path
) -> None:
    base, store, ready = write_checkpoint(tmp_path / "base", tiny_weights()), tmp_path / "store", tmp_path / "ready"
    address = f"127.0.0.1:{free_ports(1)[0]}"
    told = {"WEIGHBRIDGE_TRANSPORT": "collective", "WEIGHBRIDGE_TRANSPORT_ADDRESS": address}
    trainer = {"transport": "collective", "transport_address": address, "transport_window": 90.0}
    with WeightSync(store, base, ["near"], home=home, sync_deadline=180.0, **trainer) as sync:  # type: ignore[arg-type]
        sync.push(tiny_weights(), wait=False)  # claims the root, for the host to find; empty, so nothing is broadcast
        command = [sys.executable, "-m", "weighbridge", "host", "--name", "near", "--store", str(store)]
        command += ["--base", str(base), "--replica", str(tmp_path / "replica"), "--ready-file", str(ready)]
        with (tmp_path / "host.log").open("w") as log:
            path = {"PYTHONPATH": str(ROOT / "src"), "WEIGHBRIDGE_HOME": str(home)}
            host = subprocess.Popen(command, env={**os.environ, **told, **path}, stderr=log)
        try:
            until(ready.exists, what="a host that is ready")
            result = sync.push(trained(tiny_weights(), 1))
            with pytest.raises(UsageError, match="transport_address"):
                WeightSync(store, base, home=home, **trainer).warm()  # type: ignore[arg-type]
        finally:
            host.terminate()
            host.wait(90)
    assert result.outcome == "complete" and [one.outcome for one in result.hosts] == ["served"]
    record = [one for one in read_records(open_store(str(store)), version=2) if one.host == "near"][-1]
    assert "receive" in record.seconds and record.fetched_bytes == result.wire_bytes
    said = (tmp_path / "host.log").read_text()
    assert "received" in said, said[-3000:]
