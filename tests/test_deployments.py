"""deployments/ says what the code makes by itself: names, pools and entry points that import."""

import importlib
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from weighbridge.flows import names
from weighbridge.flows.upkeep import OF_HOST, UPKEEP

DEPLOYMENTS = Path(__file__).parents[1] / "deployments"


def test_prefect_yaml_has_the_deployments_that_the_code_makes_by_module_entry_points() -> None:
    stated = yaml.safe_load((DEPLOYMENTS / "prefect.yaml").read_text())["deployments"]
    found = {}
    for deployment in stated:
        module, _, flow = deployment["entrypoint"].partition(":")
        flow_name = getattr(importlib.import_module(module), flow).name
        every = [schedule["interval"] for schedule in deployment.get("schedules", ())]
        found[f"{flow_name}/{deployment['name']}"] = (deployment["work_pool"]["name"], every)
    upkeep = {of.flow.name: (names.STEWARD_POOL, [of.every.total_seconds()]) for of in UPKEEP}
    upkeep[OF_HOST.flow.name] = (names.HOSTS_POOL, [OF_HOST.every.total_seconds()])
    assert found == {names.HOST_DEPLOYMENT: (names.HOSTS_POOL, []), **{f"{n}/{n}": of for n, of in upkeep.items()}}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on this machine")
def test_the_systemd_unit_is_one() -> None:
    unit = DEPLOYMENTS / "weighbridge-host.service"
    said = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    faults = [line for line in said.stderr.splitlines() if unit.name in line and "not executable" not in line]
    assert faults == []
