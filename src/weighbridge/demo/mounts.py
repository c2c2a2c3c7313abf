"""How a demo's host reaches the store, in a way that can be taken away and put back from outside: a link to a
directory, or a wire to an object store's endpoint. Must not know hosts or versions."""

import contextlib
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from weighbridge.errors import UsageError

_BLOCK = 64 << 10


class Mount(Protocol):
    """One host's way to the store."""

    @property
    def url(self) -> str:
        """What the host is told as its store."""
        ...

    @property
    def environment(self) -> Mapping[str, str]:
        """What the host finds in its environment besides."""
        ...

    def pull_out(self) -> None:
        """From now on every fetch fails."""
        ...

    def plug_in(self) -> None:
        """All is well (again)."""
        ...


def mount_of(store: str, folder: Path, *, endpoint: str | None) -> Mount:
    """A mount of a store: a link at `folder` to a directory, a wire for an object store with an endpoint."""
    if "://" not in store:
        return Links(Path(store).absolute(), folder)
    if endpoint is None:
        raise UsageError(
            f"the demo on {store} needs WEIGHBRIDGE_STORE_ENDPOINT, so that it can cut a host's wire to it."
        )
    return Wire(store, endpoint)


class Links:
    """A directory seen through a link, which leads to a bare folder while it is pulled out, as a mount point does."""

    def __init__(self, store: Path, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._bare = folder.with_name(f"{folder.name}-bare")
        self.environment: Mapping[str, str] = {}
        self._bare.mkdir(parents=True)
        self.plug_in()

    @property
    def url(self) -> str:
        """See Mount."""
        return str(self._folder)

    def pull_out(self) -> None:
        """See Mount."""
        self._lead_to(self._bare)

    def plug_in(self) -> None:
        """See Mount."""
        self._store.mkdir(parents=True, exist_ok=True)
        self._lead_to(self._store)

    def _lead_to(self, place: Path) -> None:
        draft = self._folder.with_name(f"{self._folder.name}-draft")
        draft.symlink_to(place)
        draft.replace(self._folder)  # at once: a host never finds nothing


class Wire:
    """A TCP forwarder on loopback to an endpoint; pulled out, it hangs up on everybody."""

    def __init__(self, store: str, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme != "http" or parts.hostname is None:
            raise UsageError(f"the demo cuts wires of plain http endpoints only, not of {endpoint}")
        self.url = store
        self._target = (parts.hostname, parts.port or 80)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._port: int = self._server.getsockname()[1]
        self._plugged = True
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def environment(self) -> Mapping[str, str]:
        """See Mount. Short calls, so that a cut wire is noticed within seconds."""
        return {"WEIGHBRIDGE_STORE_ENDPOINT": f"http://127.0.0.1:{self._port}", "WEIGHBRIDGE_STORE_CALL_SECONDS": "5"}

    def pull_out(self) -> None:
        """See Mount."""
        with self._lock:
            self._plugged = False
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def plug_in(self) -> None:
        """See Mount."""
        with self._lock:
            self._plugged = True

    def _accept(self) -> None:
        while True:
            caller, _ = self._server.accept()
            if not self._plugged:
                caller.close()
                continue
            try:
                called = socket.create_connection(self._target, timeout=10)
            except OSError:
                caller.close()
                continue
            called.settimeout(None)
            with self._lock:
                self._open |= {caller, called}
            for one, other in ((caller, called), (called, caller)):
                threading.Thread(target=self._forward, args=(one, other), daemon=True).start()

    def _forward(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(_BLOCK):
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open -= {one, other}
