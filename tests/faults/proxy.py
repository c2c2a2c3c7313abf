"""A scripted HTTP proxy between a client and a real server. Rules say what goes wrong with which request; everything
else passes untouched (the Host header too, so that signatures stay valid). Must not know what store is behind it."""

import asyncio
import fnmatch
import socket
import struct
import threading
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

Action = Literal[
    "status",  # answers `status` itself; the server never sees the request
    "delay",  # waits `seconds`, then passes it on
    "throttle",  # the answer trickles, `seconds` in all
    "close early",  # closes the connection without an answer; the server never sees the request
    "reset",  # the same, with a reset
    "lose",  # the server carries it out, and its whole answer is lost in a reset
    "reset mid body",  # half of the answer's body, then a reset
    "truncate",  # half of the answer's body, then a clean close
    "flip answer",  # one bit of the answer's body is flipped
    "flip request",  # one bit of the request's body is flipped
    "never answer",  # holds the connection, and the server never sees the request
    "never reply",  # the server carries it out, and the connection is held
]
ACTIONS: tuple[Action, ...] = (
    *("status", "delay", "throttle", "close early", "reset", "lose", "reset mid body", "truncate"),
    *("flip answer", "flip request", "never answer", "never reply"),
)  # fmt: skip

_MOST = 1 << 30


@dataclass(slots=True)
class Rule:
    """Spoils the first `times` requests, after `skip` of them, whose method and target (path and query) match globs."""

    action: Action
    method: str = "*"
    target: str = "*"
    header: str = ""
    """If given, a header that the request must have, in small letters."""
    times: int = 1
    skip: int = 0
    status: int = 503
    seconds: float = 0.5
    hits: int = field(default=0, init=False)

    def takes(self, request: "_Message") -> bool:
        method, target, _ = request.start.decode("latin1").split(" ", 2)
        if not (fnmatch.fnmatchcase(method, self.method) and fnmatch.fnmatchcase(target, self.target)):
            return False
        if (self.header and request.header(self.header) is None) or self.hits >= self.times:
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.hits += 1
        return True


@dataclass(slots=True)
class _Message:
    start: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def header(self, name: str) -> bytes | None:
        return next((v for n, v in self.headers if n.decode("latin1").lower() == name), None)

    def head(self, *, length: int | None) -> bytes:
        """The head with a body's length in place of chunks."""
        kept = [(n, v) for n, v in self.headers if n.lower() not in (b"transfer-encoding", b"expect", b"connection")]
        if length is not None:
            kept = [(n, v) for n, v in kept if n.lower() != b"content-length"]
            kept.append((b"Content-Length", str(length).encode()))
        return b"".join((self.start, b"\r\n", *(n + b": " + v + b"\r\n" for n, v in kept), b"\r\n"))


class FaultProxy:
    """Listens on a free loopback port, in a thread of its own, until `stop`. `seen` lists requests as (method, target,
    the rule's action or None)."""

    def __init__(self, upstream: str) -> None:
        at = urlsplit(upstream)
        assert at.hostname and at.port
        self._upstream = (at.hostname, at.port)
        self.rules: list[Rule] = []
        self.seen: list[tuple[str, str, str | None]] = []
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._work, name="fault proxy", daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def script(self, *rules: Rule) -> None:
        """From now on these rules, and a fresh list of what was seen."""
        self.rules, self.seen = list(rules), []

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20))
        self.port: int = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client or the test has gone
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; False when the connection ends with it."""
        request = await _read(reader, writer, request=True)
        method, target, _ = request.start.decode("latin1").split(" ", 2)
        rule = next((rule for rule in self.rules if rule.takes(request)), None)
        action = rule.action if rule else None
        self.seen.append((method, target, action))
        match action:
            case "status":
                writer.write(f"HTTP/1.1 {rule.status} Scripted\r\nContent-Length: 0\r\n\r\n".encode())  # type: ignore[union-attr]
                await writer.drain()
                return True
            case "close early":
                return False
            case "reset":
                return _reset(writer)
            case "never answer":
                await reader.read(1)  # until the client gives up
                return False
            case "delay":
                await asyncio.sleep(rule.seconds)  # type: ignore[union-attr]
            case "flip request":
                request.body = _flipped(request.body)
        answer = await self._ask(request)
        if action == "lose":
            return _reset(writer)
        if action == "never reply":
            await reader.read(1)
            return False
        return await self._reply(writer, method, answer, rule)

    async def _reply(self, writer: asyncio.StreamWriter, method: str, answer: _Message, rule: Rule | None) -> bool:
        action = rule.action if rule else None
        body = _flipped(answer.body) if action == "flip answer" else answer.body
        writer.write(answer.head(length=None if method == "HEAD" else len(body)))
        if action in ("reset mid body", "truncate"):
            writer.write(body[: len(body) // 2])
            await writer.drain()
            return _reset(writer) if action == "reset mid body" or not body else False
        if action == "throttle":
            pieces = 10
            for number in range(pieces):
                writer.write(body[len(body) * number // pieces : len(body) * (number + 1) // pieces])
                await writer.drain()
                await asyncio.sleep(rule.seconds / pieces)  # type: ignore[union-attr]
        else:
            writer.write(body)
        await writer.drain()
        return True

    async def _ask(self, request: _Message) -> _Message:
        """The server's answer, over a connection of its own. Addresses in it lead through here again."""
        reader, writer = await asyncio.open_connection(*self._upstream, limit=1 << 20)
        try:
            head = request.head(length=len(request.body) if request.body else None)
            writer.write(head[:-2] + b"Connection: close\r\n\r\n" + request.body)
            await writer.drain()
            answer = await _read(reader, writer, request=False, bodiless=request.start.startswith(b"HEAD "))
        finally:
            writer.close()
        here, there = f"127.0.0.1:{self.port}".encode(), "{}:{}".format(*self._upstream).encode()
        answer.headers = [(n, v.replace(there, here) if n.lower() == b"location" else v) for n, v in answer.headers]
        return answer


async def _read(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, request: bool, bodiless: bool = False
) -> _Message:
    head = await reader.readuntil(b"\r\n\r\n")
    start, *lines = head[:-4].split(b"\r\n")
    if not request and start.split(b" ")[1] == b"100":
        return await _read(reader, writer, request=False, bodiless=bodiless)
    pairs = [line.partition(b":") for line in lines]
    message = _Message(start, [(name.strip(), value.strip()) for name, _, value in pairs], b"")
    if request and message.header("expect"):
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    if bodiless or (not request and start.split(b" ")[1] in (b"204", b"304")):
        return message
    length = message.header("content-length")
    if (message.header("transfer-encoding") or b"").lower() == b"chunked":
        message.body = await _chunks(reader)
    elif length is not None:
        message.body = await reader.readexactly(int(length))
    elif not request:
        message.body = await reader.read(_MOST)
    return message


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":  # trailers
        pass
    return bytes(body)


def _flipped(body: bytes) -> bytes:
    if not body:
        return body
    spoilt = bytearray(body)
    spoilt[len(spoilt) // 2] ^= 0x04
    return bytes(spoilt)


def _reset(writer: asyncio.StreamWriter) -> bool:
    """Ends the connection with a reset, so that what was sent may be lost too."""
    held: socket.socket = writer.get_extra_info("socket")
    held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False
