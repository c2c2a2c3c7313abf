"""deployments/ says what the code makes by itself: names, pools and entry points that import."""

import importlib
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from weighbridge.cli.app import app
from weighbridge.flows import names
from weighbridge.flows.server import SERVER_SETTINGS
from weighbridge.flows.upkeep import OF_HOST, UPKEEP
from weighbridge.settings import PREFIX, Settings

DEPLOYMENTS = Path(__file__).parents[1] / "deployments"


def test_prefect_yaml_has_the_deployments_that_the_code_makes_by_module_entry_points() -> None:
    stated = yaml.safe_load((DEPLOYMENTS / "prefect.yaml").read_text())["deployments"]
    found = {}
    for deployment in stated:
        module, _, flow = deployment["entrypoint"].partition(":")
        flow_name = getattr(importlib.import_module(module), flow).name
        every = [schedule["interval"] for schedule in deployment.get("schedules", ())]
        found[f"{flow_name}/{deployment['name']}"] = (deployment["work_pool"]["name"], every)
    wanted = {
        names.HOST_DEPLOYMENT: (names.HOSTS_POOL, []),
        names.PREPARE_DEPLOYMENT: (names.HOSTS_POOL, []),
        names.CUTOVER_DEPLOYMENT: (names.HOSTS_POOL, []),
        f"{names.ROLLOUT}/{names.ROLLOUT}": (names.STEWARD_POOL, []),
        f"{names.SYNC_CHECKPOINT}/{names.SYNC_CHECKPOINT}": (names.STEWARD_POOL, []),
    }
    for of, pool in [*((of, names.STEWARD_POOL) for of in UPKEEP), (OF_HOST, names.HOSTS_POOL)]:
        wanted[f"{of.flow.name}/{of.flow.name}"] = (pool, [] if of.every is None else [of.every.total_seconds()])
    assert found == wanted


def test_the_server_of_a_fleet_has_the_settings_of_the_embedded_one() -> None:
    """But for its address and its database, which are the fleet's own."""
    lines = (DEPLOYMENTS / "prefect-server.env").read_text().splitlines()
    stated = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    own = {"PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_SERVER_API_HOST", "PREFECT_SERVER_API_PORT"}
    ours = {**SERVER_SETTINGS}
    for only_here in ("PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT", "PREFECT_SERVER_LOGGING_LEVEL"):
        ours.pop(only_here)
    assert {name: value for name, value in stated.items() if name not in own} == ours
    documents = yaml.safe_load_all((DEPLOYMENTS / "kubernetes" / "server.yaml").read_text())
    assert next(one["data"] for one in documents if one["kind"] == "ConfigMap") == ours


def test_kubernetes_runs_commands_that_there_are_with_settings_that_there_are() -> None:
    for path in (DEPLOYMENTS / "kubernetes").glob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            for container in document.get("spec", {}).get("template", {}).get("spec", {}).get("containers", ()):
                for variable in container.get("env", ()):
                    name = variable["name"]
                    assert not name.startswith(PREFIX) or name.removeprefix(PREFIX).lower() in Settings.model_fields
                program, *words = container.get("command", ["none"])
                if program == "weighbridge":
                    app[words[0]]  # raises KeyError for a command that there is not


@pytest.mark.systemd
@pytest.mark.parametrize("unit", sorted(DEPLOYMENTS.glob("*.service")), ids=lambda unit: unit.stem)
def test_a_systemd_unit_is_one(unit: Path) -> None:
    assert shutil.which("systemd-analyze"), "systemd-analyze is not on this machine: apt-get install systemd"
    said = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    faults = [line for line in said.stderr.splitlines() if unit.name in line and "not executable" not in line]
    assert faults == []
