"""What docs/ENGINES.md says of kinds of models, on the server that takes them: SGLang reloads tied embeddings and
experts exactly on a CPU. vLLM's CPU build does not, and is refused (test_vllm_plugin.py)."""

from pathlib import Path

import pytest
from tests.engines.real import PROMPTS, Fleet, Reference, Server, host_of, make_model, sync

from weighbridge.storage.replica import open_replica
from weighbridge.tasks.engines.choose import open_engine
from weighbridge.tasks.engines.spec import EngineSpec

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


@pytest.mark.parametrize("option", ["--tied", "--moe"])
def test_tied_embeddings_and_experts_are_reloaded_exactly_by_sglang(option: str, tmp_path: Path) -> None:
    base = make_model("sglang", tmp_path / "base", "--seed", "5", option)
    fleet, reference = Fleet(tmp_path / "trainer", base), Reference("sglang")
    with open_replica(tmp_path / "replica", store=fleet.run.store, base=base) as replica:
        server = Server("sglang", replica.current, tmp_path / "server.log")
        try:
            server.start()
            before = [server.generate(prompt) for prompt in PROMPTS]
            host = host_of(fleet, replica, open_engine(EngineSpec("sglang", url=server.url)))
            for version in (1, 2):
                assert fleet.step(scale=0.3) == version
                sync(host, version)
                served = [server.generate(prompt) for prompt in PROMPTS]
                assert served == reference.tokens(replica.current)
                assert served != before, "no version changed a token: the test proves nothing"
        finally:
            server.kill()
            reference.stop()
