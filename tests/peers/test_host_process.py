"""A host as people start it, `weighbridge host --layout`, with no Prefect server in reach: it follows a root in which a
neighbour's layout stands alone, and serves each version to the bit."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.checkpoints import trained
from tests.flows.conftest import until
from tests.peers.test_writing import export, run_for
from tests.replica.runs import tensors_of
from tests.storage.publishing import bytes_of, push

from weighbridge.storage.peers.registry import LAYOUTS
from weighbridge.storage.stores import open_store

pytestmark = pytest.mark.fleet


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_host_process_follows_a_root_of_a_neighbours_layout_alone(layout: str, tmp_path: Path) -> None:
    run = run_for(layout, tmp_path)
    theirs, current = tmp_path / "theirs", tmp_path / "R" / "current"
    publisher = run.open(exports=[export(run, layout, store=open_store(str(theirs)))])
    weights = trained(run.base_weights, 1)
    push(publisher, weights)
    options = {"store": theirs, "base": run.base, "replica": tmp_path / "R", "ready-file": tmp_path / "ready"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    settings = {
        "HOME": str(tmp_path),
        "PREFECT_API_URL": "http://127.0.0.1:9/api",  # nobody listens
        "WEIGHBRIDGE_HOME": str(tmp_path / "home"),
        "WEIGHBRIDGE_DURABILITY": "process",
        "WEIGHBRIDGE_FOLLOW_SECONDS": "0.5",
    }
    command = [sys.executable, "-m", "weighbridge", "host", "--name", "h", "--layout", layout, *words]
    with (tmp_path / "log").open("wb") as log:
        host = subprocess.Popen(command, cwd=tmp_path, env=os.environ | settings, stdout=log, stderr=log)
    try:

        def serves() -> bool:
            assert host.poll() is None, (tmp_path / "log").read_text()
            return current.exists() and tensors_of(current) == bytes_of(weights)

        until((tmp_path / "ready").exists, what="the host's start")
        until(serves, what="version 1")
        for version in (2, 3):
            weights = trained(weights, version)
            push(publisher, weights)
            until(serves, what=f"version {version}")
        assert not (theirs / "versions").exists() and not (theirs / "run.json").exists()
    finally:
        host.send_signal(signal.SIGTERM)
        assert host.wait(90) == 0, (tmp_path / "log").read_text()
