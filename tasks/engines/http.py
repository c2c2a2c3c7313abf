"""One HTTP request whose whole answer comes within a deadline and a bound: httpx counts each read alone, so a server
that drips could hold a caller for ever, and unpacks whatever it is sent. Must not know what is asked for."""

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import httpcore

MOST_ANSWER_BYTES = 64 << 20
"""A checksum of each of a model's parameters takes a tenth of it."""

FAILURES = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol, UnicodeError)
"""What `Http.ask` raises beside TimeoutError."""


class Http:
    """A server that is asked again and again. No proxy and no .netrc of the environment, no redirects: none has a place
    between a host and its own engine. Thread-safe."""

    def __init__(self) -> None:
        self._deadline = _Deadline()
        self._pool = httpcore.ConnectionPool(network_backend=self._deadline, max_connections=4)

    def ask(
        self, method: str, url: str, *, headers: Mapping[str, str], content: bytes, seconds: float
    ) -> tuple[int, bytes]:
        """The status and the bytes of an answer, not unpacked. Raises TimeoutError, FAILURES."""
        self._deadline.of_this_thread.until = time.monotonic() + seconds
        data = bytearray()
        # What comes packed nevertheless is no JSON, and told so.
        asked = [*headers.items(), ("Accept-Encoding", "identity"), ("Accept", "application/json")]
        limits = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), seconds)}
        try:
            with self._pool.stream(method, url, headers=asked, content=content, extensions=limits) as answer:
                for piece in answer.iter_stream():
                    data += piece
                    if len(data) > MOST_ANSWER_BYTES:
                        raise httpcore.RemoteProtocolError(f"it answers more than {MOST_ANSWER_BYTES:,} bytes")
                return answer.status, bytes(data)
        except httpcore.TimeoutException as error:
            raise TimeoutError(str(error)) from error


class _Deadline(httpcore.NetworkBackend):
    """Connections that know until when everything must have happened."""

    def __init__(self) -> None:
        self.of_this_thread = threading.local()
        self._backend = httpcore.SyncBackend()

    def left(self, timeout: float | None) -> float:
        left: float = self.of_this_thread.until - time.monotonic()
        if left <= 0:
            raise httpcore.ReadTimeout("its time is up")
        return left if timeout is None else min(timeout, left)

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        stream = self._backend.connect_tcp(host, port, self.left(timeout), local_address, socket_options)
        return _Stream(stream, self)


class _Stream(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream, deadline: _Deadline) -> None:
        self._stream, self._deadline = stream, deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._deadline.left(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._deadline.left(timeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Stream(
            self._stream.start_tls(ssl_context, server_hostname, self._deadline.left(timeout)), self._deadline
        )

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
