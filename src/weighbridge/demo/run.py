"""The demo: the main job on one machine, for real. A model trains, its versions cross to three hosts in processes of
their own under Prefect, two accidents happen, and in the end every byte on disk is compared with the trainer's."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weighbridge.cli.options import store_of
from weighbridge.demo.engine import Said, VllmServer, told
from weighbridge.demo.hosts import DemoFailed, HostProcess
from weighbridge.demo.mounts import mount_of
from weighbridge.demo.story import Say, Weighed, weigh
from weighbridge.errors import SyncIncomplete
from weighbridge.settings import load_settings
from weighbridge.values import PushResult

if TYPE_CHECKING:
    from torch import Tensor

    from weighbridge.demo.trainer import Trainer
    from weighbridge.weight_sync import WeightSync

HOSTS = ("host-0", "host-1", "host-2")
KILLED_AT, UNPLUGGED_AT = 3, 4
PRETRAIN_SECONDS = 30.0
_READY_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo came to. `hosts` says "bit-exact", or what differs; `versions` what each serves."""

    ok: bool
    version: int
    hosts: Mapping[str, str]
    versions: Mapping[str, int]
    bill: tuple[Weighed, ...]
    model_bytes: int
    folder: Path
    store: str
    ui_url: str
    pids: tuple[int, ...]
    seconds: float


def run_demo(
    *,
    steps: int,
    keep: bool,
    say: Say,
    store: str | None = None,
    pretrain_seconds: float = PRETRAIN_SECONDS,
    vllm: Path | None = None,
) -> DemoResult:
    """Runs the demo in a folder of its own and cleans up after itself, unless `keep` leaves server and hosts up.

    `store` is a URL to use instead of a directory in that folder; what the demo put there stays. `vllm` is the Python
    of an environment with vLLM: then host-0 has a real engine, which is asked after each version.

    Raises DemoFailed, naming what is kept for a look, and whatever a push raises.
    """
    folder = Path(tempfile.mkdtemp(prefix="weighbridge-demo-"))
    demo = _Demo(folder, say, store or str(folder / "store"), vllm)
    ended_well = False
    try:
        result = demo.play(steps, pretrain_seconds)
        ended_well = result.ok
        return result
    finally:
        if not (keep and ended_well):
            demo.clean_up()
        if ended_well and not keep:
            shutil.rmtree(folder, ignore_errors=True)
        elif not ended_well:
            say(f"Kept for a look: {folder} (hosts' logs are host-*/log)")


class _Demo:
    def __init__(self, folder: Path, say: Say, store: str, vllm: Path | None) -> None:
        self._engine = VllmServer(vllm, folder=folder) if vllm is not None else None
        self._said: Said | None = None
        self._folder = folder
        self._say = say
        self._home = folder / "home"
        self._store, self._base = store, folder / "base"
        self._settings = load_settings({"store": store})
        endpoint = self._settings.store_endpoint
        self._hosts = {
            name: HostProcess(
                name,
                mount=mount_of(store, folder / name / "mount", endpoint=endpoint),
                base=self._base,
                folder=folder,
                home=self._home,
            )
            for name in HOSTS
        }
        self._started = time.monotonic()

    def play(self, steps: int, pretrain_seconds: float) -> DemoResult:
        from weighbridge.flows.server import ensure_server
        from weighbridge.storage.codecs import warm
        from weighbridge.weight_sync import WeightSync

        with ThreadPoolExecutor(1) as beside:
            starting = beside.submit(ensure_server, self._home)
            # Numba compiles a kernel once a machine; hosts that start together would each compile their own.
            compiling = beside.submit(warm)
            trainer = self._pretrain(pretrain_seconds)
            server = starting.result()
            compiling.result()
        self._say(f"Prefect's server is up, on an embedded PostgreSQL. Watch along: {server.ui_url}")
        with WeightSync(
            self._store, self._base, HOSTS, home=self._home, spool=self._folder, sync_deadline=90.0
        ) as sync:
            self._seed(sync)
            bill = tuple(self._step(sync, trainer, number) for number in range(1, steps + 1))
        found = {name: _compare(host.replica / "current", trainer.state()) for name, host in self._hosts.items()}
        versions = self._versions()
        ok = all(word == "bit-exact" for word in found.values()) and set(versions.values()) == {steps}
        model_bytes = sum(tensor.nbytes for tensor in trainer.state().values())
        seconds = time.monotonic() - self._started
        return DemoResult(
            ok=ok,
            version=steps,
            hosts=found,
            versions=versions,
            bill=bill,
            model_bytes=model_bytes,
            folder=self._folder,
            store=self._store,
            ui_url=server.ui_url,
            pids=(*(host.pid for host in self._hosts.values()), *self._engine_pids()),
            seconds=seconds,
        )

    def _engine_pids(self) -> tuple[int, ...]:
        return () if self._engine is None else (self._engine.pid,)

    def clean_up(self) -> None:
        """Ends the hosts and the server, by process id."""
        from weighbridge.flows.server import stop_server

        for host in self._hosts.values():
            host.stop()
        if self._engine is not None:
            self._engine.stop()
        stop_server(self._home)

    def _pretrain(self, seconds: float) -> "Trainer":
        from weighbridge.demo.corpus import read_corpus
        from weighbridge.demo.trainer import Trainer

        self._say(f"Pre-training a small Llama on Python's own sources for {seconds:.0f} s: the base, version 0.")
        trainer = Trainer(read_corpus())
        report = trainer.pretrain(seconds=seconds)
        trainer.export(self._base)
        parameters = sum(tensor.numel() for tensor in trainer.state().values())
        self._say(
            f"  {parameters / 1e6:.1f} M parameters, {report.steps} steps: loss {report.loss_before:.2f} -> "
            f"{report.loss_after:.2f} nats a byte"
        )
        return trainer

    def _seed(self, sync: "WeightSync") -> None:
        self._say("Three hosts start, in processes of their own. Each copies the base once and proves it: version 0.")
        _ = sync.version  # claims the store, so that hosts find a run in it
        if self._engine is not None:
            self._start_engine(self._engine)
        for host in self._hosts.values():
            host.start()
        for host in self._hosts.values():
            host.wait_ready(seconds=_READY_SECONDS)
        sync.warm()
        self._ask_engine()

    def _start_engine(self, engine: VllmServer) -> None:
        """An engine loads a replica, so host-0's is made first, as `weighbridge pull` makes it."""
        from weighbridge.storage.replica import bring_up

        host = self._hosts["host-0"]
        self._say("vLLM starts on host-0's replica, which takes a minute or more.")
        bring_up(host.replica, store=store_of(self._settings), base=self._base)
        engine.start(host.replica / "current")
        host.engine = ("--engine", "vllm", "--engine-url", engine.url)

    def _ask_engine(self) -> None:
        if self._engine is not None:
            before, self._said = self._said, self._engine.ask()
            self._say(f"  {told(self._said, before)}")

    def _step(self, sync: "WeightSync", trainer: "Trainer", number: int) -> Weighed:
        report = trainer.step()
        self._say(
            f"Step {number}: reward {report.reward:.3f}, {100 * report.density:.2f} % of the weights changed. push:"
        )
        labels = {"step": number, "reward": round(report.reward, 4)}
        if number == KILLED_AT:
            result = self._push_through_a_kill(sync, trainer, labels)
        elif number == UNPLUGGED_AT:
            result = self._push_past_an_unplugged_host(sync, trainer, labels)
        else:
            result = sync.push(trainer.state(), labels=labels)
        weighed = self._weigh(result)
        self._say(
            f"  version {result.version} {weighed.outcome}: {result.wire_bytes:,} bytes crossed instead of "
            f"{result.model_bytes:,}, in {result.seconds['total']:.1f} s"
        )
        self._ask_engine()
        return weighed

    def _push_through_a_kill(self, sync: "WeightSync", trainer: "Trainer", labels: Mapping[str, float]) -> PushResult:
        victim = self._hosts["host-1"]
        self._say("  (accident: host-1 is killed with SIGKILL while it writes into its replica, and started again)")
        hunter = threading.Thread(target=self._kill_and_restart, args=(victim,))
        hunter.start()
        try:
            return sync.push(trainer.state(), labels=labels)
        finally:
            hunter.join()
            if victim.deaths != 1:
                raise DemoFailed("host-1 was to be killed in mid-apply, and was not")

    def _kill_and_restart(self, victim: HostProcess) -> None:
        if victim.kill_in_mid_apply(seconds=60.0):
            victim.start()

    def _push_past_an_unplugged_host(
        self, sync: "WeightSync", trainer: "Trainer", labels: Mapping[str, float]
    ) -> PushResult:
        victim = self._hosts["host-2"]
        self._say("  (accident: host-2 loses its mount of the store; its run fails, and is retried as a user would)")
        victim.mount.pull_out()
        try:
            return sync.push(trainer.state(), labels=labels)
        except SyncIncomplete as incomplete:
            if not isinstance(incomplete.result, PushResult):
                raise
            result = incomplete.result
        finally:
            victim.mount.plug_in()
        outcomes = ", ".join(f"{host.host} {host.outcome}" for host in result.hosts)
        self._say(f"  version {result.version} {result.outcome}: {outcomes}. The mount is back: weighbridge retry")
        command = [sys.executable, "-m", "weighbridge", "retry", str(result.version), "--store", self._store]
        environment = {**os.environ, "WEIGHBRIDGE_HOME": str(self._home)}
        said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        for line in said.stdout.splitlines():
            self._say(f"    {line}")
        if said.returncode != 0:
            raise DemoFailed(f"weighbridge retry failed: {said.stderr.strip()}")
        return result

    def _weigh(self, result: PushResult) -> Weighed:
        from weighbridge.storage.records import host_outcome, latest, outcome_of, read_records

        records = read_records(store_of(self._settings), version=result.version)
        return weigh(result, [host_outcome(r) for r in latest(records).values()], outcome_of(records))

    def _versions(self) -> dict[str, int]:
        from weighbridge.storage.history.questions import status
        from weighbridge.storage.history.reader import History

        return {line.host: line.version for line in status(History(store_of(self._settings)))}


def _compare(folder: Path, weights: "Mapping[str, Tensor]") -> str:
    """Reads a folder from disk, with the safetensors library, and compares every byte with the trainer's weights."""
    import torch
    from safetensors import safe_open

    differing, names = [], set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                names.add(name)
                ours, theirs = weights[name], opened.get_tensor(name)
                if ours.dtype != theirs.dtype or not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
                    differing.append(name)
    missing = weights.keys() - names
    return "bit-exact" if not differing and not missing else f"differs in {sorted({*differing, *missing})}"
