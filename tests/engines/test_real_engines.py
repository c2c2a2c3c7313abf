"""Real vLLM and SGLang servers follow versions, under load and under faults. One start serves many cases, in this
file's order; those that kill it come last."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.mischief import DiesAfter, LoadsTheOldOne, meddled, spoil, supervised
from tests.engines.real import (
    PLUGIN,
    PROMPTS,
    Fleet,
    Reference,
    Server,
    host_of,
    make_model,
    requests_all_along,
    sync,
    with_plugin,
)

from weighbridge.errors import EngineError, UsageError
from weighbridge.storage.replica import Replica, open_replica
from weighbridge.tasks.cutover import CutOverFailed
from weighbridge.tasks.engines.choose import open_engine
from weighbridge.tasks.engines.contract import Engine
from weighbridge.tasks.engines.control import Control, EngineDenied, Keys
from weighbridge.tasks.engines.guard import guarded
from weighbridge.tasks.engines.restart import Restart
from weighbridge.tasks.engines.spec import EngineSpec
from weighbridge.tasks.engines.vllm import VllmEngine
from weighbridge.tasks.host import Host
from weighbridge.tasks.host_attempt import HostAttempt

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

KEY = "an-engines-key"
BLOCKS = {"layers.0.self_attn.k_proj": 6, "model.norm": 1, "lm_head": 1, "embed": 1}  # what vLLM loads of each


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(kind)


@pytest.fixture(scope="module")
def fleet(kind: str, folder: Path) -> Fleet:
    return Fleet(folder / "trainer", make_model(kind, folder / "base", "--seed", "3"))


@pytest.fixture(scope="module")
def replica(fleet: Fleet, folder: Path) -> Iterator[Replica]:
    with open_replica(folder / "replica", store=fleet.run.store, base=fleet.run.base) as replica:
        yield replica


@pytest.fixture(scope="module")
def server(kind: str, replica: Replica, folder: Path) -> Iterator[Server]:
    plugin = (PLUGIN, with_plugin(folder / "plugin")) if kind == "vllm" else ((), {})
    options, environment = plugin
    server = Server(kind, replica.current, folder / "server.log", (*options, "--api-key", KEY), environment, KEY)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def host(fleet: Fleet, replica: Replica, server: Server) -> Host:
    return host_of(fleet, replica, adapter(server))


@pytest.fixture(scope="module")
def reference(kind: str) -> Iterator[Reference]:
    reference = Reference(kind)
    yield reference
    reference.stop()


def adapter(server: Server, *, key: str = KEY) -> Engine:
    return open_engine(EngineSpec(server.kind, url=server.url, api_key=key))


class WithoutPlugin(VllmEngine):
    """The adapter before a server that was started without our plugin."""

    def _ask_plugin(self, seconds: float) -> None:
        super()._ask_plugin(seconds)  # which makes the plugin forget what the engine holds
        self._has_plugin = False


def assert_serves(server: Server, reference: Reference, replica: Replica, version: int) -> None:
    """Token for token what `transformers` makes of the proven folder, under the right number."""
    assert replica.version == version
    assert adapter(server).read_version(seconds=10) == version
    assert [server.generate(prompt) for prompt in PROMPTS] == reference.tokens(replica.current)


def test_a_server_is_asked_whether_it_can_be_cut_over_before_anything_is(server: Server) -> None:
    adapter(server).check(seconds=30)
    with pytest.raises(EngineDenied, match="does not take the key"):
        adapter(server, key="wrong").check(seconds=30)


def test_five_versions_arrive_while_clients_keep_asking(
    fleet: Fleet, host: Host, replica: Replica, server: Server, reference: Reference
) -> None:
    if server.kind == "vllm":
        host.engine = WithoutPlugin(server.url, keys=Keys(KEY))
    seen = []
    with requests_all_along(server) as outcomes:
        for version in range(1, 6):
            assert fleet.step() == version
            attempt = sync(host, version)
            assert 0 < attempt.seconds["pause"] < 30
            assert_serves(server, reference, replica, version)
            seen.append([server.generate(prompt) for prompt in PROMPTS])
    assert [error for error in outcomes if isinstance(error, Exception)] == []
    assert len(outcomes) > 5
    assert len({str(tokens) for tokens in seen}) > 1, "no version changed a token: the test proves nothing"
    host.engine = adapter(server)  # from here on by the plugin, where there is one


@pytest.mark.parametrize(
    "block", ["layers.1.mlp.up_proj", "layers.0.self_attn.k_proj", "model.norm", "lm_head", "embed"]
)
def test_a_version_that_changes_a_block_is_served_whatever_else_was_loaded(
    fleet: Fleet, host: Host, replica: Replica, server: Server, reference: Reference, block: str
) -> None:
    version = fleet.step(scale=0.3, only=(block,))
    sync(host, version)
    assert_serves(server, reference, replica, version)
    if server.kind == "vllm" and block != "layers.1.mlp.up_proj":  # with which the plugin began
        assert f"version {version}: {BLOCKS[block]} of 25 tensors loaded" in server.log.read_text()


def test_versions_that_were_skipped_are_loaded_with_the_next(
    fleet: Fleet, host: Host, replica: Replica, server: Server, reference: Reference
) -> None:
    fleet.step(scale=0.3, only=("layers.0.mlp",))
    version = fleet.step(scale=0.3, only=("lm_head",))
    sync(host, version)
    assert_serves(server, reference, replica, version)
    if server.kind == "vllm":
        assert f"version {version}: 4 of 25 tensors loaded" in server.log.read_text()


def test_an_update_that_broke_off_in_the_engine_is_mended_by_the_next_load(
    fleet: Fleet, host: Host, replica: Replica, server: Server, reference: Reference
) -> None:
    for engine in (WithoutPlugin(server.url, keys=Keys(KEY)), adapter(server)) if server.kind == "vllm" else ():
        with pytest.raises(EngineError, match="500"):
            half_an_update(server)
        host.engine = engine
        version = fleet.step()
        sync(host, version)
        assert_serves(server, reference, replica, version)


def half_an_update(server: Server) -> None:
    control = Control(server.url, keys=Keys(KEY), remote=False)
    control.post("/pause", query={"mode": "keep", "clear_cache": "true"}, seconds=60)
    control.post("/start_weight_update", seconds=60)
    order = {"folder": str(server.log.parent / "nowhere"), "version": 0, "digests": {}}
    control.post("/update_weights", {"update_info": order}, seconds=60)


def test_a_load_that_the_server_only_says_it_did_is_found_by_its_own_checksum(
    fleet: Fleet, host: Host, replica: Replica, server: Server, reference: Reference
) -> None:
    spec = EngineSpec(server.kind, url=server.url, api_key=KEY, checksum=True)
    if server.kind == "vllm":  # whose checksum on a CPU leaves most weights out
        with pytest.raises(UsageError, match="leaves the linear layers out"):
            open_engine(spec).check(seconds=30)
        return
    sync(host, fleet.step())  # so that it is known what the engine holds
    before, version = replica.version, fleet.step()
    host.engine = LoadsTheOldOne(open_engine(spec), times=1)
    with pytest.raises(CutOverFailed, match="checksum of its weights is what it was") as failed:
        sync(host, version)
    assert failed.value.served == before
    assert_serves(server, reference, replica, before)
    sync(host, version)
    assert_serves(server, reference, replica, version)
    host.engine = adapter(server)


def test_an_empty_version_changes_the_number_and_reloads_nothing(
    fleet: Fleet, host: Host, replica: Replica, server: Server, reference: Reference
) -> None:
    version = fleet.step(scale=0.0)
    attempt = sync(host, version)
    assert "reload" not in attempt.seconds
    assert_serves(server, reference, replica, version)


@pytest.mark.parametrize("fault", ["truncated", "missing tensor", "wrong shape", "NaN"])
def test_a_checkpoint_changed_after_it_was_proven_is_noticed_before_the_reload(
    fleet: Fleet, host: Host, replica: Replica, server: Server, reference: Reference, fault: str
) -> None:
    before, version = replica.version, fleet.step()
    with (
        meddled(host, "switch", lambda folder: spoil(folder / "model.safetensors", fault)),
        pytest.raises(CutOverFailed) as failed,
    ):
        sync(host, version)
    assert failed.value.served == before
    assert_serves(server, reference, replica, before)
    sync(host, version)
    assert_serves(server, reference, replica, version)


@pytest.mark.parametrize("fault", ["missing tensor", "NaN"])
def test_a_checkpoint_that_is_changed_after_the_switch_is_not_what_answers(
    fleet: Fleet, host: Host, replica: Replica, server: Server, reference: Reference, fault: str
) -> None:
    before, version = replica.version, fleet.step()
    with (
        meddled(host, "after switch", lambda folder: spoil(folder / "model.safetensors", fault)),
        pytest.raises(CutOverFailed, match="changed by somebody") as failed,
    ):
        sync(host, version)
    assert failed.value.served == before
    assert_serves(server, reference, replica, before)
    replica.scrub()
    bring(host, version)
    assert_serves(server, reference, replica, version)


def test_a_server_that_hangs_fails_the_host_by_name_and_serves_again(
    fleet: Fleet, host: Host, replica: Replica, server: Server, reference: Reference
) -> None:
    version = fleet.step()
    host.engine_seconds = 5.0
    server.signal(signal.SIGSTOP)
    try:
        with pytest.raises(EngineError, match="did not answer within"):
            sync(host, version)
    finally:
        server.signal(signal.SIGCONT)
        host.engine_seconds = 60.0
    bring(host, version)
    assert_serves(server, reference, replica, version)


_DIES_PAUSED = """
import os, signal, sys
from pathlib import Path
from weighbridge.tasks.engines.choose import open_engine
from weighbridge.tasks.engines.guard import guarded
from weighbridge.tasks.engines.restart import Restart
from weighbridge.tasks.engines.spec import EngineSpec

kind, url, key, folder, stage = sys.argv[1:]
spec = EngineSpec(kind, url=url, api_key=key)
with guarded(spec, Path(folder)) as guard:
    engine = open_engine(spec)
    guard.pausing(engine.read_version(seconds=10), seconds=0 if stage == "hung" else 60)
    engine.pause(seconds=30)
    if stage == "loading":
        guard.loading()
    if stage == "hung":
        os.kill(os.getpid(), signal.SIGSTOP)
        sys.exit(7 if not guard.loading() else 1)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_host_killed_while_its_engine_is_paused_leaves_it_serving_the_old_version(
    replica: Replica, server: Server, reference: Reference, folder: Path
) -> None:
    assert not die(server, folder, "paused")
    assert_serves(server, reference, replica, replica.version)


def test_a_host_that_hangs_while_its_engine_is_paused_is_overruled_and_gives_the_engine_nothing(
    replica: Replica, server: Server, reference: Reference, folder: Path
) -> None:
    process = subprocess.Popen(dying_host(server, folder, "hung"))
    try:
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        assert server.generate("The", 1, seconds=120), "answers once it is resumed"
        assert_serves(server, reference, replica, replica.version)
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(120) == 7
    finally:
        process.kill()


def test_a_host_killed_in_the_reload_leaves_it_paused_and_the_next_one_settles_it(
    fleet: Fleet, replica: Replica, server: Server, reference: Reference, folder: Path
) -> None:
    assert die(server, folder, "loading")
    again = host_of(fleet, replica, adapter(server))
    again.engine_in_doubt = True  # as the mark says
    bring(again, replica.version)
    assert_serves(server, reference, replica, replica.version)


def dying_host(server: Server, folder: Path, stage: str) -> list[str]:
    return [sys.executable, "-c", _DIES_PAUSED, server.kind, server.url, KEY, str(folder), stage]


def die(server: Server, folder: Path, stage: str) -> bool:
    """A host that dies in its cut over; waits for its guard's end, and says whether that left a mark."""
    assert subprocess.run(dying_host(server, folder, stage), check=False, timeout=120).returncode == -9
    with guarded(EngineSpec(server.kind, url=server.url, api_key=KEY), folder) as guard:
        assert guard is not None
        marked = guard.marked()
        if marked:
            guard.settled(resumed=True)  # for the tests that follow
        return marked


@pytest.mark.parametrize("verb", ["pause", "reload", "set_version", "resume"])
def test_an_engine_that_dies_in_a_cut_over_fails_the_host_by_name_and_its_supervisor_starts_it_on_proven_weights(
    fleet: Fleet, host: Host, replica: Replica, server: Server, reference: Reference, verb: str
) -> None:
    before, version = replica.version, fleet.step()
    host.engine = DiesAfter(host.engine, verb, server)
    with pytest.raises(CutOverFailed, match="could not be asked") as failed:
        sync(host, version)
    assert failed.value.served in (None, version if verb == "resume" else None)
    server.start()
    assert replica.version in (before, version)
    assert [server.generate(prompt) for prompt in PROMPTS] == reference.tokens(replica.current)
    host.engine = adapter(server)
    bring(host, version)
    assert_serves(server, reference, replica, version)


def test_an_engine_that_its_supervisor_restarts_while_a_version_is_fetched_and_applied_starts_on_the_old_one(
    fleet: Fleet, host: Host, replica: Replica, server: Server, reference: Reference
) -> None:
    before, version = replica.version, fleet.step()
    attempt = HostAttempt(host, version)
    server.kill()
    starting = threading.Thread(target=server.start)
    starting.start()
    attempt.fetch()
    while (
        starting.is_alive()
    ):  # it reads its files at some moment of its start: applied to, again and again, until then
        attempt.apply()
        attempt.fetch()
    starting.join()
    attempt.apply()
    attempt.verify()
    assert replica.version == before
    assert [server.generate(prompt) for prompt in PROMPTS] == reference.tokens(replica.current)
    attempt.cut_over()
    assert_serves(server, reference, replica, version)


@pytest.mark.parametrize("fault", ["truncated", "wrong shape"])
def test_a_file_that_no_engine_can_load_under_a_paused_one_ends_in_the_old_weights_or_a_failed_host(
    fleet: Fleet, host: Host, replica: Replica, server: Server, reference: Reference, folder: Path, fault: str
) -> None:
    before, version = replica.version, fleet.step()
    with (
        supervised(server, folder) as command,
        meddled(host, "after switch", lambda folder: spoil(folder / "model.safetensors", fault)),
        pytest.raises(CutOverFailed) as failed,
    ):
        host.restart = Restart(command, host.engine, seconds=300)
        sync(host, version)
    restarted = "It was restarted on" in str(failed.value)
    assert (failed.value.served is None) == restarted, "left paused, or its process ended: then it starts anew"
    assert failed.value.served in (None, before)
    if not restarted:
        assert [server.generate(prompt) for prompt in PROMPTS] == reference.tokens(replica.current)
    host.restart = None
    replica.scrub()
    bring(host, version)
    assert_serves(server, reference, replica, version)


def test_a_server_that_died_before_the_cut_over_fails_the_host_by_name(
    fleet: Fleet, host: Host, server: Server
) -> None:
    version = fleet.step()
    server.kill()
    with pytest.raises(EngineError, match="could not be asked"):
        sync(host, version)


def test_a_vllm_without_its_development_routes_is_refused_at_the_start(
    kind: str, server: Server, replica: Replica, folder: Path
) -> None:
    if kind == "sglang":  # has its routes always, and was asked with the wrong key at the start
        return
    plain = Server(kind, replica.current, folder / "plain.log", (), {"VLLM_SERVER_DEV_MODE": "0"})
    plain.start()
    try:
        with pytest.raises(UsageError, match="VLLM_SERVER_DEV_MODE=1"):
            adapter(plain).check(seconds=30)
    finally:
        plain.kill()


def bring(host: Host, version: int) -> None:
    """What a later attempt does: the steps that are still to do."""
    if host.replica.version != version:
        sync(host, version)
    else:
        HostAttempt(host, version).cut_over()
