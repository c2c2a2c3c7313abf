"""What befalls a cut over on a real engine: files that somebody touches, a process that dies after a verb."""

import contextlib
import os
import shlex
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file
from tests.engines.real import Server

from weighbridge.tasks.engines.contract import Engine
from weighbridge.tasks.host import Host


class DiesAfter:
    """An engine whose process is killed right after a verb has done its work."""

    def __init__(self, engine: Engine, verb: str, server: Server) -> None:
        self._engine, self._verb, self._server = engine, verb, server

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        if name != self._verb:
            return found

        def call(*given: Any, **named: Any) -> Any:
            done = found(*given, **named)
            self._server.kill()
            return done

        return call


class LoadsTheOldOne:
    """An engine that is given the folder of the other copy, the first `times`, under the new version's number."""

    def __init__(self, engine: Engine, *, times: int) -> None:
        self._engine, self._times = engine, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def reload(self, folder: Path, version: int, *, seconds: float) -> None:
        if self._times > 0:
            self._times -= 1
            folder = next(copy for copy in folder.resolve().parent.iterdir() if copy != folder.resolve())
        self._engine.reload(folder, version, seconds=seconds)


class Meddled:
    """A replica whose files somebody touches in the cut over: those of the spare copy, or of the current one."""

    def __init__(self, replica: Any, at: str, meddle: Callable[[Path], None]) -> None:
        self._replica, self._at, self._meddle = replica, at, meddle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)

    def switch(self) -> int:
        if self._at == "switch":
            copies = (self._replica.current.parent / "copies").iterdir()
            self._meddle(next(copy for copy in copies if copy != self._replica.current.resolve()))
        version = int(self._replica.switch())
        if self._at == "after switch":
            self._meddle(self._replica.current)
        return version


@contextlib.contextmanager
def meddled(host: Host, at: str, meddle: Callable[[Path], None]) -> Iterator[None]:
    """For a while, somebody meddles."""
    replica = host.replica
    host.replica = Meddled(replica, at, meddle)
    try:
        yield
    finally:
        host.replica = replica


@contextlib.contextmanager
def supervised(server: Server, folder: Path) -> Iterator[str]:
    """A supervisor that restarts a server when the command says so; yields the command."""
    bell = folder / "restart"
    bell.unlink(missing_ok=True)
    os.mkfifo(bell)

    def answer() -> None:
        if bell.read_text() == "restart":
            server.kill()
            server.start()

    supervisor = threading.Thread(target=answer)
    supervisor.start()
    try:
        yield shlex.join(["sh", "-c", f"printf restart > {bell}"])
    finally:
        with contextlib.suppress(OSError), os.fdopen(os.open(bell, os.O_WRONLY | os.O_NONBLOCK), "w"):
            pass  # nobody rang: it goes home
        supervisor.join(300)


def spoil(file: Path, fault: str) -> None:
    """What a person or a disk may do to a checkpoint."""
    if fault == "truncated":
        with file.open("rb+") as data:
            data.truncate(file.stat().st_size // 2)
        return
    tensors = load_file(file)
    name = sorted(tensors)[0]
    if fault == "missing tensor":
        del tensors[name]
    elif fault == "wrong shape":
        tensors[name] = tensors[name][:1].contiguous()
    else:
        tensors[name][:] = float(np.nan)
    save_file(tensors, file, metadata={"format": "pt"})
