"""Real vLLM and SGLang servers on the CPU, what `transformers` says of the same folder, and a run with one host before
them. Servers listen on free loopback ports and end by process id. Needs what `make test-engines` installs."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tests.storage.publishing import Run, push_tensors
from tests.stores.servers import free_ports

from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.clock import SystemClock
from weighbridge.storage.publisher import Publisher
from weighbridge.storage.replica import Replica
from weighbridge.tasks.engines.contract import Engine
from weighbridge.tasks.host import Host
from weighbridge.tasks.host_attempt import HostAttempt
from weighbridge.values import TensorSpec

ROOT = Path(__file__).parents[2]
TOOLS = Path(__file__).parent / "servers"
PROMPTS = ("The quick brown fox", "reinforcement learning of", "a", "delta delta delta synchronisation")
TOKENS = 12
START_SECONDS = 300.0

_VLLM = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
_SGLANG = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}


def python_of(kind: str) -> Path:
    """The interpreter of an engine's own environment. Fails by name where it is missing: nothing is skipped here."""
    python = ROOT / f".venv-{kind}" / "bin" / "python"
    if not python.exists():
        raise FileNotFoundError(f"{python} is missing: run `make test-engines`, which installs {kind}")
    return python


def with_plugin(folder: Path) -> dict[str, str]:
    """The environment in which an engine finds our vLLM plugin, as if weighbridge were installed beside it: the source,
    and the entry points that pyproject.toml declares."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    about = folder / f"weighbridge-{project['version']}.dist-info"
    about.mkdir(parents=True)
    (folder / "weighbridge").symlink_to(ROOT / "src" / "weighbridge")
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: weighbridge\nVersion: {project['version']}\n")
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {where}\n" for name, where in points.items())
        for group, points in project["entry-points"].items()
    )
    (about / "entry_points.txt").write_text("\n".join(groups))
    return {"PYTHONPATH": str(folder)}


PLUGIN = ("--weight-transfer-config", '{"backend": "weighbridge"}')


def make_model(kind: str, folder: Path, *options: str) -> Path:
    """A tiny random model with a tokenizer."""
    done = subprocess.run(
        [python_of(kind), TOOLS / "make_model.py", folder, *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@dataclass
class Server:
    """A server process that can be killed and started again, as a supervisor would."""

    kind: str
    model: Path
    log: Path
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    key: str = ""
    port: int = 0
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts it, and waits until it serves; again at the same address."""
        self.port = self.port or free_ports(1)[0]
        common = ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"]
        if self.kind == "vllm":
            command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model), *common]
            command += ["--max-model-len", "256", "--max-num-seqs", "8", "--enforce-eager", "--block-size", "32"]
            wanted = _VLLM
        else:
            command = ["-m", "sglang.launch_server", "--model-path", str(self.model), *common, "--device", "cpu"]
            command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--context-length"]
            command += ["512", "--max-total-tokens", "4096", "--max-running-requests", "8"]
            command += ["--disable-overlap-schedule", "--skip-server-warmup"]
            wanted = _SGLANG
        ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment = {**ours, **wanted, "HF_HUB_OFFLINE": "1", **self.environment}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(python_of(self.kind)), *command, *self.options],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # the engine's own children end with it
            )
        until = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200:
                    return
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < until, self.log.read_text()[-3000:]
            time.sleep(0.5)

    def signal(self, number: int) -> None:
        """Sends a signal to the server and its children."""
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Ends it at once."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            self.process.wait(30)
            self.process = None

    def generate(self, prompt: str, tokens: int = TOKENS, *, seconds: float = 60.0) -> list[int]:
        """Token ids after a prompt, greedy."""
        if self.kind == "vllm":
            order: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
            order |= {"ignore_eos": True, "return_token_ids": True}
            return list(self._ask("/v1/completions", order, seconds)["choices"][0]["token_ids"])
        order = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}
        return list(self._ask("/generate", order, seconds)["output_ids"])

    def _ask(self, route: str, order: dict[str, Any], seconds: float) -> Any:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        answer = httpx.post(f"{self.url}{route}", json=order, timeout=seconds, trust_env=False, headers=headers)
        answer.raise_for_status()
        return answer.json()


class Reference:
    """`transformers` in a process of its own, asked about folders."""

    def __init__(self, kind: str) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            [str(python_of(kind)), str(TOOLS / "greedy.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def tokens(self, folder: Path) -> list[list[int]]:
        """Greedy token ids after each of PROMPTS."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"folder": str(folder.resolve()), "prompts": PROMPTS, "tokens": TOKENS}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: list[list[int]] = json.loads(self._process.stdout.readline())
        return answer

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(10)


class Fleet:
    """A trainer and one host with a real engine: `step` publishes, `sync` brings the host there."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.run = Run(folder, clock=SystemClock())
        self.run.base = base
        self.publisher: Publisher = self.run.open(base=base)
        self.seed = 0

    def step(self, *, scale: float = 0.05, poison: float | None = None, only: Sequence[str] = ("",)) -> int:
        """Publishes the weights after a step: some elements of every tensor move, or of those whose names hold one of
        `only`. Returns the version."""
        self.seed += 1
        rng = np.random.default_rng(self.seed)
        at = open_checkpoint(self.run.base)
        state = self.state() if self.seed > 1 else {name: at.view(name).copy() for name in at.tensors}
        for name, data in state.items():
            if not any(words in name for words in only):
                continue
            words = data.view(np.uint16)
            hit = rng.random(words.size) < scale
            words[hit] ^= rng.integers(0, 1 << 7, int(hit.sum()), np.uint16)  # the mantissa: never NaN, never huge
            if poison is not None:
                words[:1] = np.float32(poison).view(np.uint32) >> 16
        self._state = {name: data.copy() for name, data in state.items()}
        tensors = ((TensorSpec(n, "BF16", at.tensors[n].spec.shape, d.size), d) for n, d in state.items())
        return push_tensors(self.publisher, tensors).version

    def state(self) -> dict[str, Any]:
        """The published bytes, by tensor."""
        return {name: data.copy() for name, data in self._state.items()}


def host_of(fleet: Fleet, replica: Replica, engine: Engine, *, seconds: float = 60.0) -> Host:
    """The host, as its process would make it."""
    return Host(
        name="host-0", run_id="run-1", store=fleet.run.store, replica=replica, engine=engine, engine_seconds=seconds
    )


def sync(host: Host, version: int) -> HostAttempt:
    """All steps of one attempt."""
    attempt = HostAttempt(host, version)
    attempt.fetch()
    attempt.apply()
    attempt.verify()
    attempt.cut_over()
    attempt.record_served()
    return attempt


@contextlib.contextmanager
def requests_all_along(server: Server) -> Iterator[list[object]]:
    """Clients that never stop asking; the list has what each answer was, an exception for one that failed."""
    outcomes: list[object] = []
    ended = threading.Event()

    def ask(number: int) -> None:
        while not ended.is_set():
            try:
                outcomes.append(server.generate(PROMPTS[number % len(PROMPTS)], 24))
            except Exception as error:  # noqa: BLE001 - whatever it was, the test shows it
                outcomes.append(error)
            ended.wait(0.3)  # two cores serve them, the engine and the reference

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield outcomes
    finally:
        ended.set()
        for thread in threads:
            thread.join(90)
