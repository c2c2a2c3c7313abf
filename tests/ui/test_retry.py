"""What a person does about a failed host, in the UI of the real server, by a real browser."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.flows.conftest import ROOT, until
from tests.ui.browser import Browser
from tests.ui.fleet import HOSTS, Fleet

from weighbridge.flows.server import ServerInfo
from weighbridge.storage.records import outcome_of, read_records

pytestmark = [pytest.mark.ui, pytest.mark.timeout(1200)]

MOST_BYTES = 150_000
_SYNC_INCOMPLETE = 15


def test_a_failed_host_is_one_red_run_whose_retry_heals_the_version(
    browser: Browser, server: ServerInfo, fleet: Fleet, pictures: Path
) -> None:
    failing = HOSTS[1]
    assert fleet.sync(10).returncode == 0
    fleet.start_hosts()
    fleet.break_down(failing)
    said = fleet.sync(20, *HOSTS)
    assert (said.returncode, "1 of 3 hosts do not serve it" in said.stderr) == (_SYNC_INCOMPLETE, True), said.stderr
    assert [fleet.engine_version(host) for host in HOSTS] == [2, 1, 2]
    assert [record.outcome for record in fleet.records(failing, 2)] == ["failed"]
    assert outcome_of(read_records(fleet.store, version=2)) == "partial"

    open_run(browser, server, "sync v2")
    browser.wait_says("PartialRollout")
    browser.click("Subflow Runs", shows="publish v2")
    browser.click("publish v2", shows="Runs\npublish v2")
    browser.click("Artifacts", shows="weighbridge-bill")
    browser.click("weighbridge-bill", shows="Version 2 of grpo-7")
    browser.wait_says("against the model", "label step", "20")
    take(browser, pictures / "ui-weigh-bill.png", fleet)

    open_run(browser, server, "rollout of v2")
    browser.wait_says("PartialRollout", "rollout is partial", "no engine answers")
    take_graph(browser, pictures / "ui-rollout-partial.png", fleet)
    browser.click("Subflow Runs", shows="3 Flow runs")
    states = {host: shown_state(browser.text(), f"v2 on {host}") for host in HOSTS}
    assert states == {HOSTS[0]: "Completed", failing: "Failed", HOSTS[2]: "Completed"}

    browser.click(f"v2 on {failing}", shows=f"Runs\nv2 on {failing}")
    browser.click("Details", shows="Flow Run ID")
    browser.wait_says("CutOverFailed: the engine failed to")
    fleet.repair(failing)
    browser.click("Retry", shows=f"This will retry flow run v2 on {failing}.")
    take(browser, pictures / "ui-retry.png", fleet)
    browser.click("Retry", shows="Retrying run")

    until(lambda: len(fleet.records(failing, 2)) == 2, what="the host's second attempt")
    assert [record.outcome for record in fleet.records(failing, 2)] == ["failed", "served"]
    assert outcome_of(read_records(fleet.store, version=2)) == "healed"
    assert [fleet.engine_version(host) for host in HOSTS] == [2, 2, 2]
    held = load_file(fleet.folder / f"replica-{failing}" / "current" / "model.safetensors")
    published = load_file(fleet.folder / "step-20" / "model.safetensors")
    assert held.keys() == published.keys()
    assert all(held[name].equal(tensor) for name, tensor in published.items())

    browser.wait_says(f"Runs\nv2 on {failing}", "Completed", f"{failing} serves version 2", loading=True)
    open_run(browser, server, "rollout of v2")
    browser.wait_says("Healed", loading=True)
    take_graph(browser, pictures / "ui-healed.png", fleet)
    open_run(browser, server, "sync v2")
    browser.wait_says("Healed", loading=True)
    browser.click("Details", shows="Every host serves this version or a newer one now.")


def open_run(browser: Browser, server: ServerInfo, name: str) -> None:
    browser.open(f"{server.ui_url}/runs")
    browser.click(name, shows=f"Runs\n{name}")


def shown_state(text: str, run: str) -> str:
    """The state in a list of runs: after the run's name and its tags."""
    lines = text.splitlines()
    after = lines[lines.index(run) + 1 :]
    return next(line for line in after if line in ("Completed", "Failed", "Crashed", "Running", "Pending"))


def take_graph(browser: Browser, path: Path, fleet: Fleet) -> None:
    """A picture of a run with its graph, which is drawn after everything else."""
    browser.load()
    browser.wait_fetched("/graph-v2")
    browser.wait_says("Beginning subflow run")
    take(browser, path, fleet)


def take(browser: Browser, path: Path, fleet: Fleet) -> None:
    browser.picture(path)
    assert path.stat().st_size < MOST_BYTES
    assert not any(str(folder) in browser.text() for folder in (ROOT, fleet.folder, Path.home()))
