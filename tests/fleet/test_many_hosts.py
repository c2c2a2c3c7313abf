"""Many hosts, one server: no run is lost, none is refused, and all of them end."""

from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient
from tests.fleet.fleet import Fleet, host_runs, left_running, refusals, until

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("hosts", "each", "pushes"), [(8, 1, 5), (64, 16, 3)])
def test_every_host_ends_every_version_and_the_server_refuses_nothing(
    hosts: int, each: int, pushes: int, client: SyncPrefectClient, tmp_path: Path, home: Path
) -> None:
    refused = refusals(home)
    with Fleet(tmp_path, home, hosts=hosts, each=each) as fleet:
        fleet.trainer.warm()
        for version in range(1, pushes + 1):
            result = fleet.trainer.push(fleet.train())
            assert (result.version, result.outcome) == (version, "complete")
            assert fleet.all_serve()
            runs = host_runs(client, fleet.run_id, version)
            assert sorted(runs) == fleet.names
            assert {run.state_name for run in runs.values()} == {"Completed"}
        assert refusals(home) == refused
        until(lambda: not left_running(client), what="every run and every step of it has ended")
