"""A GCS server that sends without an end is left, whether or not it was asked for a range."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from weighbridge.errors import StoreRefused
from weighbridge.storage.stores import Profile, open_store

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nConnection: close\r\n\r\n"


@pytest.fixture
def endless() -> Iterator[str]:
    """A server whose every answer has no length and no end."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(asker: socket.socket) -> None:
        with asker, suppress(OSError):
            asker.recv(1 << 16)
            asker.sendall(HEAD)
            while True:
                asker.sendall(bytes(1 << 16))

    def serve() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)


def test_an_answer_without_an_end_is_not_read_to_it(endless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("gs://bucket/run", profile=Profile(endpoint_url=endless, anonymous=True, call_seconds=60.0))
    with pytest.raises(StoreRefused, match="not what was published"):
        store.get("run.json", most=3 << 20)
    with pytest.raises(StoreRefused, match="more than the 10 bytes"):
        store.get_range("run.json", 0, 10)
