"""What the vLLM plugin decides without vLLM, and how the adapter speaks to a server that has it, and to one that has
not. The rest is proven on real servers."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.replica.runs import SHAPES, SmallRun

from weighbridge.errors import EngineError, UsageError
from weighbridge.storage.replica import open_replica
from weighbridge.storage.replica.contents import tensor_digests
from weighbridge.tasks.engines.vllm import VllmEngine
from weighbridge.vllm_plugin.blocks import block_of, to_load
from weighbridge.vllm_plugin.folder import CheckpointFolder

NAMES = [
    "model.embed_tokens.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.mlp.experts.1.up_proj.weight",
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "lm_head.weight",
]


def test_a_block_is_what_an_engine_may_fuse() -> None:
    assert list(dict.fromkeys(map(block_of, NAMES))) == [
        "model.embed_tokens",
        "model.layers.0.input_layernorm",
        "model.layers.0.mlp",
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
        "lm_head",
    ]
    assert block_of("alone") == "alone"
    assert block_of("h.3") == "h"


def test_whole_blocks_are_loaded_when_one_of_their_tensors_differs() -> None:
    held = dict.fromkeys(NAMES, "a")
    assert to_load(NAMES, held, held) == []
    assert to_load(NAMES, held, {**held, NAMES[4]: "b"}) == NAMES[4:6]
    assert to_load(NAMES, held, {**held, NAMES[3]: "b", NAMES[7]: "b"}) == [*NAMES[2:4], NAMES[7]]
    assert to_load(NAMES, {}, held) == NAMES
    assert to_load(NAMES, held, {}) == NAMES, "without digests all of it has changed"
    assert to_load(NAMES, None, held) == NAMES


def test_a_folders_tensors_are_read_by_name_across_its_files(tmp_path: Path) -> None:
    tensors = {name: np.full(3, at, np.float32) for at, name in enumerate(NAMES)}
    save_file(dict(list(tensors.items())[:5]), tmp_path / "model-1.safetensors")
    save_file(dict(list(tensors.items())[5:]), tmp_path / "model-2.safetensors")
    folder = CheckpointFolder(tmp_path)
    assert sorted(folder.names) == sorted(NAMES)
    read = {name: tensor.tolist() for name, tensor in folder.read([NAMES[1], NAMES[6]])}
    assert read == {NAMES[1]: [1.0] * 3, NAMES[6]: [6.0] * 3}
    with pytest.raises(FileNotFoundError):
        CheckpointFolder(tmp_path / "nothing")


def test_a_copys_digests_are_those_of_its_tensors_and_another_folder_has_none(tmp_path: Path) -> None:
    run = SmallRun(tmp_path)
    with open_replica(tmp_path / "replica", store=run.store, base=run.base) as replica:
        before = tensor_digests(replica.current)
        run.push()
        replica.apply(replica.plan_and_fetch())
        assert tensor_digests(replica.current) == before
        replica.switch()
        after = tensor_digests(replica.current)
    assert set(before) == set(after) == set(SHAPES)
    changed = {name for name in SHAPES if not np.array_equal(run.versions[0][name], run.versions[1][name])}
    assert {name for name in SHAPES if before[name] != after[name]} == changed != set()
    assert tensor_digests(run.base) == {}


class Server(HTTPServer):
    """Answers 200 to everything, but for the routes in `refuses`, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, Any]] = []
        self.refuses: set[str] = set()
        self.answers: dict[str, Any] = {"/v1/models": {"data": [{"id": "it"}]}}

    @property
    def said(self) -> list[str]:
        return [body.get("method", route) for route, body in self.asked]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        self.send_response(500 if self.path in self.server.refuses else 200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_GET(self) -> None:
        body = json.dumps(self.server.answers.get(self.path.partition("?")[0], {})).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join(30)


_INIT, _START, _UPDATE, _FINISH = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)


def load(server: Server, folder: Path, *, times: int = 1) -> None:
    engine = VllmEngine(f"http://127.0.0.1:{server.server_port}")
    for _ in range(times):
        engine.reload(folder, 7, seconds=30)


def test_a_server_with_the_plugin_is_given_folder_version_and_digests(server: Server, tmp_path: Path) -> None:
    load(server, tmp_path, times=2)
    update = [_START, _UPDATE, _FINISH, "reset_encoder_cache", "reset_mm_cache"]
    assert server.said == [_INIT, *update, *update]
    order = {"folder": str(tmp_path), "version": 7, "digests": {}}
    assert server.asked[2] == (_UPDATE, {"update_info": order})


def test_a_server_without_it_reloads_the_folder(server: Server, tmp_path: Path) -> None:
    server.refuses = {_INIT}
    load(server, tmp_path, times=2)
    assert server.said == [_INIT, "reload_weights", "reload_weights"]
    assert server.asked[1][1]["kwargs"] == {"weights_path": str(tmp_path)}


@pytest.mark.parametrize("route", [_START, _UPDATE, _FINISH])
def test_an_update_that_fails_is_a_reload_and_what_the_engine_held_is_forgotten_before(
    server: Server, tmp_path: Path, route: str
) -> None:
    server.refuses = {route}
    load(server, tmp_path)
    assert server.said[-2:] == [_INIT, "reload_weights"]
    assert server.asked[-2][1] == {"init_info": {"weighbridge": 1, "forget": True}}


def test_a_reload_that_fails_too_is_told(server: Server, tmp_path: Path) -> None:
    server.refuses = {_UPDATE, "/collective_rpc"}
    with pytest.raises(EngineError, match="collective_rpc answered 500"):
        load(server, tmp_path)


@pytest.mark.parametrize(
    ("device", "config", "refused"),
    [
        ("cpu", {"tie_word_embeddings": True}, "old lm_head"),
        ("cpu", {"text_config": {"tie_word_embeddings": True}}, "old lm_head"),
        ("cpu", {"num_experts": 8}, "experts"),
        ("cpu", {"tie_word_embeddings": False}, ""),
        ("cuda", {"tie_word_embeddings": True, "num_experts": 8}, ""),
    ],
)
def test_models_that_vllm_reloads_wrongly_are_refused_at_the_start(
    server: Server, tmp_path: Path, device: str, config: dict[str, Any], refused: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    server.answers["/server_info"] = {
        "vllm_config": {"device_config": {"device": device}, "model_config": {"model": str(tmp_path)}}
    }
    engine = VllmEngine(f"http://127.0.0.1:{server.server_port}")
    if refused:
        with pytest.raises(UsageError, match=refused):
            engine.check(seconds=30)
    else:
        engine.check(seconds=30)
    assert refused or server.said == [_INIT]


def test_a_vllm_that_says_nothing_of_its_model_is_not_refused(server: Server) -> None:
    VllmEngine(f"http://127.0.0.1:{server.server_port}").check(seconds=30)
    assert server.said == [_INIT]
