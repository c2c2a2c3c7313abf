"""A training run with three hosts, as operators start them: `weighbridge` commands in one folder, and on each host an
engine that is a folder: it loads a version while a file `up` is in it. Folders are relative, so that no page of the UI
shows where they lie."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tests.flows.conftest import ROOT, until

from weighbridge.storage.records import SERVED, read_records
from weighbridge.storage.stores import open_store
from weighbridge.values import HostRecord

RUN = "grpo-7"
HOSTS = ("rollout-0", "rollout-1", "rollout-2")
_RELOAD = 'test -e "$1/up" || { echo "no engine answers"; exit 1; }\necho "$2" > "$1/version"\n'


class Fleet:
    """The folder of a run. Its hosts look at the store when they start, and then only when they are asked."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        self.store = open_store(str(folder / "store"))
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "WEIGHBRIDGE_"))}
        self._environment = {
            **inherited,
            "PYTHONPATH": str(ROOT / "src"),
            "WEIGHBRIDGE_HOME": str(home),
            "WEIGHBRIDGE_FOLLOW_SECONDS": "3600",
            "WEIGHBRIDGE_SYNC_DEADLINE": "300",
            "WEIGHBRIDGE_THREADS": "1",
        }
        self._hosts: list[subprocess.Popen[bytes]] = []
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "reload.sh").write_text(_RELOAD)
        weights, noise = _weights(), torch.Generator().manual_seed(11)
        _write(folder / "base", weights)
        for step in (10, 20):
            weights = {name: w + torch.randn(w.shape, generator=noise) * 3e-6 for name, w in weights.items()}
            _write(folder / f"step-{step}", weights)

    def start_hosts(self) -> None:
        """Starts a process a host, and waits until each serves the newest version."""
        for host in HOSTS:
            (self.folder / f"engine-{host}").mkdir()
            self.repair(host)
            options = ["--name", host, "--replica", f"replica-{host}"]
            options += ["--engine", "command", "--engine-command", f"sh reload.sh engine-{host} {{version}}"]
            with open(self.folder / f"log-{host}", "wb") as log:
                self._hosts.append(
                    subprocess.Popen(self._command("host", *options), **self._around, stdout=log, stderr=log)
                )
        for host in HOSTS:
            until(lambda host=host: self.records(host), what=f"{host} serves", seconds=180)
            assert [record.outcome for record in self.records(host)] == [SERVED]

    def sync(self, step: int, *hosts: str) -> subprocess.CompletedProcess[str]:
        """Publishes a checkpoint and brings hosts to it."""
        options = ["--run", RUN, "--label", f"step={step}", *(("--hosts", ",".join(hosts)) if hosts else ())]
        command = self._command("sync", f"step-{step}", *options)
        return subprocess.run(command, **self._around, capture_output=True, text=True, timeout=360, check=False)

    def break_down(self, host: str) -> None:
        """From now on the host's engine does not answer."""
        (self.folder / f"engine-{host}" / "up").unlink()

    def repair(self, host: str) -> None:
        """The host's engine answers again."""
        (self.folder / f"engine-{host}" / "up").touch()

    def engine_version(self, host: str) -> int:
        """What the host's engine has loaded."""
        return int((self.folder / f"engine-{host}" / "version").read_text())

    def records(self, host: str, version: int | None = None) -> list[HostRecord]:
        """What the store says that a host did, in the order in which it began."""
        return sorted(read_records(self.store, host=host, version=version), key=lambda record: record.started_ns)

    def stop(self) -> None:
        """Ends the hosts, by process id."""
        for process in self._hosts:
            process.terminate()
        for process in self._hosts:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _command(self, word: str, *options: str) -> list[str]:
        return [sys.executable, "-m", "weighbridge", word, *options, "--store", "store", "--base", "base"]

    @property
    def _around(self) -> dict[str, object]:
        return {"cwd": self.folder, "env": self._environment, "stdin": subprocess.DEVNULL}


def _weights() -> dict[str, torch.Tensor]:
    """A llama of four small layers: 4.2 million elements."""
    shapes = {"model.embed_tokens": (4096, 256)}
    for layer in range(4):
        shapes |= {f"model.layers.{layer}.self_attn.{one}_proj": (256, 256) for one in "qkvo"}
        shapes |= {f"model.layers.{layer}.mlp.up_proj": (1024, 256), f"model.layers.{layer}.mlp.down_proj": (256, 1024)}
    chance = torch.Generator().manual_seed(7)
    return {f"{name}.weight": torch.randn(shape, generator=chance) * 0.02 for name, shape in shapes.items()}


def _write(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    folder.mkdir()
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
