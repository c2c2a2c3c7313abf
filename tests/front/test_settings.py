"""Where settings come from, and how what cannot be right is told: as one error, never as a traceback."""

from pathlib import Path

import pytest

from weighbridge import WeightSync
from weighbridge.errors import UsageError
from weighbridge.settings import load_settings


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_names_in_the_environment_are_told_apart_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHBRIDGE_HOSTS", "rollout-0, rollout-1")
    assert load_settings({}).hosts == ("rollout-0", "rollout-1")
    assert load_settings({"hosts": ["a"]}).hosts == ("a",)


def test_a_relative_home_is_one_place_whatever_folder_a_server_runs_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHBRIDGE_HOME", "here")
    assert load_settings({}).home == tmp_path / "here"


def test_a_command_that_an_engine_runs_may_be_one_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHBRIDGE_PATH", "/replica/current")
    monkeypatch.setenv("WEIGHBRIDGE_VERSION", "7")
    assert load_settings({}).engine == "none"


@pytest.mark.parametrize(
    ("variable", "value"), [("ALIASES", "no JSON"), ("THREADS", "many"), ("NONSENSE", "1"), ("POLICY", "1.5")]
)
def test_a_variable_that_cannot_be_right_is_a_usage_error(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"WEIGHBRIDGE_{variable}", value)
    with pytest.raises(UsageError, match=r"(?i)nothing was started"):
        load_settings({})


def test_a_cluster_without_its_kind_and_a_layout_from_a_model_that_nobody_holds_are_contradictions() -> None:
    with pytest.raises(UsageError, match="dask or ray"):
        load_settings({"encode_address": "tcp://10.0.0.1:8786"})
    with pytest.raises(UsageError, match="cannot be right: a layout is written"):
        load_settings({"encode_on": "ray", "layout": "trl"})
    with pytest.raises(UsageError, match="right: no layout pullweights is known: pull-weights, skyrl, trl"):
        load_settings({"layout": "pullweights"})


@pytest.mark.parametrize(
    "given",
    [
        {"transport": "collective"},
        {"transport_address": "10.0.0.1:29600"},
        {"transport": "collective", "transport_address": "10.0.0.1"},
        {"transport": "collective", "transport_address": "10.0.0.1:29600", "encode_on": "ray"},
    ],
)
def test_a_transport_that_leads_nowhere_is_a_contradiction(given: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="transport"):
        load_settings(given)


def test_where_the_first_rank_listens_is_a_host_and_a_port() -> None:
    at = load_settings({"transport": "collective", "transport_address": "[fd00::1]:29600"}).listens
    assert at is not None and (at.host, at.port) == ("fd00::1", 29600)
    assert load_settings({}).listens is None


def test_a_cluster_whose_extra_is_not_installed_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weighbridge.flows.elsewhere.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"weighbridge\[dask\]"):
        WeightSync("store", "base", encode_on="dask")


@pytest.mark.parametrize("text", ["store = [", "nonsense = 1"])
def test_a_file_that_cannot_be_right_is_a_usage_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "weighbridge.toml").write_text(text)
    with pytest.raises(UsageError, match=r"(?i)nothing was started"):
        load_settings({})
