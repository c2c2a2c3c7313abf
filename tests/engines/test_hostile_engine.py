"""An engine that answers whatever it likes: every call ends in an EngineError, in good time and in bounded memory, and
says nothing of the key that it was given."""

import gzip
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.property.hostile import bounded

from weighbridge.errors import EngineError, UsageError, WeighbridgeError
from weighbridge.tasks.engines import http
from weighbridge.tasks.engines.canary import Canary
from weighbridge.tasks.engines.contract import Engine
from weighbridge.tasks.engines.control import Control, Keys
from weighbridge.tasks.engines.sglang import SglangEngine
from weighbridge.tasks.engines.vllm import VllmEngine

KEY = "sk-a-key-that-nobody-may-see"
Answer = Callable[[socket.socket, bytes], None]


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """A server of raw bytes, one connection a thread; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=one, args=[connection], daemon=True).start()

        def one(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                answer(connection, connection.recv(1 << 16))

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def says(body: bytes, *, status: str = "200 OK", headers: str = "") -> Answer:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{headers}\r\n".encode()
    return lambda connection, _: connection.sendall(head + body)


def ask(answer: Answer, *, seconds: float = 20.0) -> Any:
    with serving(answer) as url:
        return Control(url, keys=Keys(KEY), remote=False).get("/model_info", seconds=seconds)


def test_an_answer_that_never_ends_ends_at_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MOST_ANSWER_BYTES", 1 << 20)

    def endless(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        while True:
            connection.sendall(bytes(1 << 16))

    with bounded(more_bytes=64 << 20), pytest.raises(EngineError, match="more than"):
        ask(endless)


@pytest.mark.parametrize("where", ["headers", "body"])
def test_an_answer_that_drips_ends_at_its_deadline(where: str) -> None:
    def drip(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n" + (b"\r\n" if where == "body" else b"X-A: "))
        while True:
            connection.sendall(b"x")
            time.sleep(0.05)

    started = time.monotonic()
    with pytest.raises(EngineError, match="did not answer within"):
        ask(drip, seconds=0.5)
    assert time.monotonic() - started < 5


def test_what_an_engine_packs_is_not_unpacked() -> None:
    bomb = gzip.compress(b'{"a":"' + bytes(256 << 20) + b'"}')
    with bounded(more_bytes=64 << 20), pytest.raises(EngineError, match="no JSON"):
        ask(says(bomb, headers="Content-Encoding: gzip\r\n"))


@pytest.mark.parametrize("body", [b"[" * 100_000, b"\xff\xfe", b"{", b"<html>", b'{"a":1}{'])
def test_what_is_no_json_is_told_as_that(body: bytes) -> None:
    with pytest.raises(EngineError, match="no JSON"):
        ask(says(body))


@pytest.mark.parametrize("raw", [b"", b"\0" * 100, b"HTTP/1.1 999999999999 x\r\n\r\n", b"SSH-2.0\r\n"])
def test_what_is_no_http_is_told_as_that(raw: bytes) -> None:
    with pytest.raises(EngineError, match="could not be asked"):
        ask(lambda connection, _: connection.sendall(raw))


def test_a_redirect_is_not_followed() -> None:
    with pytest.raises(EngineError, match="302"):
        ask(says(b"", status="302 Found", headers="Location: http://169.254.169.254/\r\n"))


@pytest.mark.parametrize("status", ["200 OK", "500 Oops"])
def test_a_server_that_shows_what_it_was_sent_shows_no_key_in_an_error(status: str) -> None:
    def mirror(connection: socket.socket, asked: bytes) -> None:
        assert KEY.encode() in asked
        says(asked, status=status)(connection, asked)

    with pytest.raises(EngineError) as caught:
        ask(mirror)
    assert "authorization" in str(caught.value).lower()
    assert KEY not in str(caught.value)


ENGINES: dict[str, Callable[[str], Engine]] = {
    "vllm": lambda url: VllmEngine(url, keys=Keys(KEY), checksum=True, canary=Canary()),
    "sglang": lambda url: SglangEngine(url, keys=Keys(KEY), checksum=True, canary=Canary()),
}
VERBS: dict[str, Callable[[Engine, Path], Any]] = {
    "check": lambda engine, _: engine.check(seconds=9),
    "is_paused": lambda engine, _: engine.is_paused(seconds=9),
    "pause": lambda engine, _: engine.pause(seconds=9),
    "reload": lambda engine, folder: engine.reload(folder, 3, seconds=9),
    "flush": lambda engine, _: engine.flush(seconds=9),
    "set_version": lambda engine, _: engine.set_version(3, seconds=9),
    "read_version": lambda engine, _: engine.read_version(seconds=9),
    "checksum": lambda engine, _: engine.checksum(seconds=9),
    "probe": lambda engine, _: engine.probe(seconds=9),
    "resume": lambda engine, _: engine.resume(seconds=9),
}
BODIES: tuple[Any, ...] = (
    [], 7, "x", None, {}, [{"a": 1}], {"data": {"a": 1}}, {"data": [[]]}, {"data": ["x"]}, {"data": [{"id": 7}]},
    {"choices": {"a": 1}}, {"choices": ["x"]}, {"choices": [{"text": 7}]}, {"success": "true"}, {"success": 1},
    {"weight_version": 7}, {"weight_version": "9" * 30}, {"weight_version": "-1"}, {"weight_version": "\u0661"},
    {"checksums": [], "per_engine_checksum": {}}, {"vllm_config": 7}, {"vllm_config": []},
    {"vllm_config": {"device_config": {"device": "cpu"}, "model_config": {"model": 7}}},
)  # fmt: skip


@pytest.mark.parametrize("kind", ENGINES)
def test_whatever_an_engine_says_is_an_answer_or_an_error_of_ours(kind: str, tmp_path: Path) -> None:
    told: list[Any] = [None]

    def answer(connection: socket.socket, asked: bytes) -> None:
        says(json.dumps(told[0]).encode())(connection, asked)

    with serving(answer) as url:
        for told[0] in BODIES:
            for verb, act in VERBS.items():
                engine = ENGINES[kind](url)
                try:
                    said = act(engine, tmp_path)
                except WeighbridgeError:
                    continue
                assert said is None or isinstance(said, bool | int | str), (verb, told[0])
                assert verb != "checksum" and (verb != "flush" or kind == "sglang"), (verb, told[0])
                assert verb != "read_version" or said is None


def test_a_model_folder_that_an_engine_names_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    told = {
        "is_paused": False, "data": [{"id": "m"}],
        "vllm_config": {"device_config": {"device": "cpu"}, "model_config": {"model": str(tmp_path)}},
    }  # fmt: skip
    with serving(says(json.dumps(told).encode())) as url:
        started = time.monotonic()
        VllmEngine(url, keys=Keys(KEY)).check(seconds=9)
        assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "url",
    ["http://10.0.0.1:8000", "http://0.0.0.0:8000", "http://localhost.evil:8000", "http://[2001:db8::1]:8000",
     "http://127.0.0.1.evil:80", "http://2130706433:80"],
)  # fmt: skip
def test_an_engine_that_others_can_reach_is_spoken_to_only_if_that_was_said(url: str) -> None:
    with pytest.raises(UsageError, match="Nothing was started"):
        Control(url, keys=Keys(KEY), remote=False)
    assert Control(url, keys=Keys(KEY), remote=True).url == url
    for ours in ("http://127.0.0.1:8000", "http://localhost:8000", "http://[::1]:8000"):
        assert Control(ours, keys=Keys(KEY), remote=False).url == ours


@pytest.mark.parametrize(
    "url", ["ftp://127.0.0.1", "http://", "http://me:secret@127.0.0.1", "127.0.0.1:8000", "file:///x"]
)
def test_what_is_no_address_of_an_engine_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="no engine's address"):
        Control(url, keys=Keys(KEY), remote=True)
