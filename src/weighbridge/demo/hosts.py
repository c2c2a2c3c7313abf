"""The demo's hosts: real `weighbridge host` processes, each with a replica of its own, and the two accidents that
befall them. Everything is done to them from outside, as an operator or bad luck would; what was started is stopped by
process id."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from weighbridge.demo.mounts import Mount
from weighbridge.errors import WeighbridgeError
from weighbridge.storage.replica.layout import Layout

_LOOK_SECONDS = 0.0005


class DemoFailed(WeighbridgeError, RuntimeError):
    """The demo could not do what it set out to do; its folder is kept for a look."""


class HostProcess:
    """One host. It sees the store through its mount, which an accident may take away."""

    def __init__(self, name: str, *, mount: Mount, base: Path, folder: Path, home: Path) -> None:
        self.name = name
        self.replica = folder / name / "replica"
        self.mount = mount
        self.log = folder / name / "log"
        self._base, self._home = base, home
        self.engine: tuple[str, ...] = ()
        """Options of `weighbridge host` that name its engine; it has none by default."""
        self._ready = folder / name / "ready.json"
        self._process: subprocess.Popen[bytes] | None = None
        self.deaths = 0
        self.log.parent.mkdir(parents=True, exist_ok=True)

    @property
    def pid(self) -> int:
        """The process that serves this host now."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts the process; `wait_ready` says when it serves."""
        self._ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "weighbridge", "host", "--name", self.name, "--store", self.mount.url]
        command += ["--base", str(self._base), "--replica", str(self.replica), "--ready-file", str(self._ready)]
        command += self.engine
        environment = {
            **os.environ,
            **self.mount.environment,
            "WEIGHBRIDGE_HOME": str(self._home),
            "WEIGHBRIDGE_THREADS": "1",
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def wait_ready(self, *, seconds: float) -> None:
        """Waits until the host is connected. Raises DemoFailed when it ends first, or is not ready in time."""
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while not (self._ready.exists() and json.loads(self._ready.read_text()).get("connected")):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise DemoFailed(f"{self.name} did not become ready; its log is {self.log}")
            time.sleep(0.05)

    def stop(self, *, seconds: float = 20.0) -> None:
        """Ends the process: asked first, then made to."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._wait()

    def kill_in_mid_apply(self, *, seconds: float) -> bool:
        """Kills the process with SIGKILL while its replica's journal stands: patches proven, not all of them written.

        Waits for that, `seconds` at the most, and says whether it came. The journal stands for some milliseconds only,
        so the process is frozen first and looked at again.
        """
        journal, deadline = Layout(self.replica).journal, time.monotonic() + seconds
        while time.monotonic() < deadline:
            if journal.exists():
                os.kill(self.pid, signal.SIGSTOP)
                if journal.exists():
                    os.kill(self.pid, signal.SIGKILL)
                    self._wait()
                    self.deaths += 1
                    return True
                os.kill(self.pid, signal.SIGCONT)
            time.sleep(_LOOK_SECONDS)
        return False

    def _wait(self, seconds: float | None = None) -> None:
        assert self._process is not None
        self._process.wait(seconds)
