"""The demo's engine: a real vLLM server on host-0's replica, started from an environment that has vLLM, and what it
makes of a fixed text after each version. Stopped by process id."""

import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from weighbridge.demo.hosts import DemoFailed
from weighbridge.errors import UsageError

TEXT = "def main(argument):\n    return "
TOKENS = 16
_START_SECONDS = 600.0
_ASK_SECONDS = 120.0
_LOOK_SECONDS = 0.5
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class Said:
    """What an engine says of TEXT: its log-probability in nats, and the greedy tokens after it."""

    log_probability: float
    tokens: tuple[int, ...]
    text: str


def find_vllm(python: Path | None) -> Path:
    """The interpreter of an environment that has vLLM: the one given, else .venv-vllm here, else that of a `vllm` on
    the PATH. Raises UsageError, which says what is needed, when there is none."""
    beside = shutil.which("vllm")
    places = [python] if python is not None else [Path(".venv-vllm/bin/python")]
    if python is None and beside is not None:
        places.append(Path(beside).resolve().with_name("python"))
    for place in places:
        if place.exists():
            return place.absolute()  # not resolved: a link to another interpreter is how an environment is made
    raise UsageError(
        f"no vLLM was found ({', '.join(map(str, places))}), and the demo starts one of its own. Nothing was started. "
        "Give the Python of an environment that has vLLM 0.32 or newer with --engine-python; `make .venv-vllm/.ready` "
        "makes such an environment for machines without a GPU, from PyPI, in some minutes and 3.4 GB."
    )


class VllmServer:
    """A vLLM server on loopback that loads a replica's `current`."""

    def __init__(self, python: Path, *, folder: Path) -> None:
        self._python = python
        self._log = folder / "vllm.log"
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """The server's process."""
        assert self._process is not None
        return self._process.pid

    def start(self, current: Path) -> None:
        """Starts it. Raises DemoFailed, naming its log, when it ends or does not serve in time."""
        command = [str(self._python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(current)]
        command += ["--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4", "--enforce-eager"]
        command += ["--block-size", "32"]
        ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env={**ours, **_ENVIRONMENT}, stdout=log, stderr=log, start_new_session=True
            )
        until = time.monotonic() + _START_SECONDS
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > until:
                raise DemoFailed(f"vLLM did not start to serve; its log is {self._log}")
            time.sleep(_LOOK_SECONDS)

    def ask(self) -> Said:
        """What it says of TEXT now."""
        order = {"model": "demo", "prompt": TEXT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        order |= {"prompt_logprobs": 0, "return_token_ids": True}
        try:
            answer = httpx.post(f"{self.url}/v1/completions", json=order, timeout=_ASK_SECONDS, trust_env=False)
            choice = answer.raise_for_status().json()["choices"][0]
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise DemoFailed(f"vLLM did not answer: {error}; its log is {self._log}") from error
        # One entry a token of the text, none for the first; each names the token that stands there.
        each = [next(iter(place.values()))["logprob"] for place in choice["prompt_logprobs"] if place]
        return Said(sum(each), tuple(choice["token_ids"]), choice["text"])

    def stop(self) -> None:
        """Ends it with its children."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def _is_up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False


def told(now: Said, before: Said | None) -> str:
    """One line for a person: how the text's log-probability moved, and the tokens where they changed."""
    line = f"vLLM on host-0: log p(text) = {now.log_probability:.5f}"
    if before is None:
        return f"{line}; greedy after it: {now.text!r}"
    moved = f"{line} ({now.log_probability - before.log_probability:+.5f})"
    if now.tokens == before.tokens:
        return f"{moved}; the same {len(now.tokens)} greedy tokens"
    at = next(i for i, (new, old) in enumerate(zip(now.tokens, before.tokens, strict=True)) if new != old)
    return f"{moved}; greedy tokens differ from number {at + 1} on: {now.text!r}"
