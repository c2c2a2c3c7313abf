"""What people start by hand in the UI, by names and versions alone: a cut over of a prepared host, and the sync of a
checkpoint's folder that the run's steward was started with."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound
from safetensors.numpy import save_file
from tests.flows.conftest import ROOT, LocalHost, until
from tests.flows.small_run import SmallRun

from weighbridge.flows import names
from weighbridge.flows.dispatch import follow
from weighbridge.storage.lineage import Lineage

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]

Make = Callable[..., LocalHost]


def test_a_host_is_cut_over_by_hand_once_it_has_prepared_and_not_before(
    client: SyncPrefectClient, run: SmallRun, local_host: Make
) -> None:
    host = local_host().start().wait_ready()
    until(lambda: "probe" in host.engine.calls, what="the first load")
    version, calls = run.push().version, len(host.engine.calls)
    named = {"run": run.run_id, "version": version, "host": host.name}

    refused = carried_out(client, names.CUTOVER_DEPLOYMENT, queue=host.name, **named)
    assert refused.state is not None and refused.state.is_failed()
    assert f"{host.name} has not prepared version {version}" in str(refused.state.message)
    prepared = carried_out(client, names.PREPARE_DEPLOYMENT, queue=host.name, **named, hold_seconds=600.0)
    assert prepared.state_name == "Completed"
    assert (host.version, len(host.engine.calls)) == (version - 1, calls)

    done = carried_out(client, names.CUTOVER_DEPLOYMENT, queue=host.name, **named)
    assert (done.name, done.state_name) == (f"cut over v{version} on {host.name}", "Completed")
    assert f"reload {version}" in host.engine.calls[calls:]
    assert run.is_held_by(host.current)


@pytest.fixture
def steward(client: SyncPrefectClient, run: SmallRun, tmp_path: Path, home: Path) -> Iterator[Path]:
    """`weighbridge up` in a process of its own, with a checkpoint's folder; the folder."""
    checkpoint = tmp_path / "checkpoint"
    command = [sys.executable, "-m", "weighbridge", "up", "--store", run.store_url, "--base", str(run.base)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "WEIGHBRIDGE_HOME": str(home)}
    with open(tmp_path / "steward.log", "wb") as log:
        process = subprocess.Popen([*command, "--checkpoint", str(checkpoint)], env=environment, stdout=log, stderr=log)
    try:
        until(lambda: is_deployed(client, f"{names.SYNC_CHECKPOINT}/{run.run_id}"), what="the deployment")
        yield checkpoint
    finally:
        process.terminate()
        process.wait(60)


def test_a_steward_publishes_the_checkpoint_it_was_started_with_and_nobody_can_name_another(
    client: SyncPrefectClient, run: SmallRun, local_host: Make, steward: Path
) -> None:
    name = f"{names.SYNC_CHECKPOINT}/{run.run_id}"
    assert set(client.read_deployment_by_name(name).parameter_openapi_schema["properties"]) == {"run", "hosts"}
    host = local_host().start().wait_ready()
    for version in (1, 2):  # what the folder holds then, and then
        for tensor in run.tensors.values():
            tensor += np.float32(version)
        steward.mkdir(exist_ok=True)
        save_file(run.tensors, steward / "model.safetensors")
        done = carried_out(client, name, hosts=[host.name])
        assert done.state is not None and done.state.is_completed(), done.state
        assert f"version {version}: complete" in str(done.state.message)
        assert Lineage(run.store).head() == version
        assert run.is_held_by(host.current)


def carried_out(client: SyncPrefectClient, deployment: str, *, queue: str | None = None, **named: Any) -> FlowRun:
    """A run as the UI's Custom run makes it, once it has ended."""
    id_ = client.read_deployment_by_name(deployment).id
    asked = client.create_flow_run_from_deployment(id_, parameters=named, work_queue_name=queue)
    return follow(client, {"it": asked.id}, deadline_seconds=180)["it"]


def is_deployed(client: SyncPrefectClient, name: str) -> bool:
    try:
        return client.read_deployment_by_name(name) is not None
    except ObjectNotFound:
        return False
