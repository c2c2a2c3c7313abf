"""vLLM's OpenAI server, started with VLLM_SERVER_DEV_MODE=1: what its control routes really answer is in the tests that
run against it. Must not know replicas, stores or Prefect."""

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from weighbridge.errors import EngineError, UsageError
from weighbridge.storage.replica.contents import tensor_digests
from weighbridge.tasks.engines.control import RouteMissing, version_in
from weighbridge.tasks.engines.server import ServerEngine

log = structlog.get_logger("weighbridge.engine")

_MOST_CONFIG_BYTES = 4 << 20


class VllmEngine(ServerEngine):
    """See Engine. Requests in flight are kept over the pause (`keep`) and go on with the new weights, from a cache that
    was dropped."""

    name = "vllm"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._has_plugin: bool | None = None
        """Whether the server was started with our weight-transfer backend; None: not asked yet."""

    def check(self, *, seconds: float) -> None:
        """See Engine. Wants the development routes, and an answer to a request with the key."""
        try:
            self._control.get("/is_paused", seconds=seconds)
            self._control.get("/weight_info", seconds=seconds)
        except RouteMissing as missing:
            raise UsageError(
                f"{missing} Start vLLM with VLLM_SERVER_DEV_MODE=1, release 0.32 or newer, listening on loopback. "
                "Nothing was changed."
            ) from missing
        self._canary.find_model(self._control, seconds=seconds)
        self._refuse_what_is_reloaded_wrongly(seconds)
        self._ask_plugin(seconds)

    def _refuse_what_is_reloaded_wrongly(self, seconds: float) -> None:
        """Models of which vLLM says that they were reloaded, and then serves other weights (seen on the CPU build)."""
        try:
            config = self._control.get("/server_info?config_format=json", seconds=seconds)["vllm_config"]
            device, folder = config["device_config"]["device"], Path(config["model_config"]["model"])
            model = json.loads(_small_file(folder / "config.json"))
            text: dict[str, Any] = model.get("text_config") or model
        except (EngineError, AttributeError, KeyError, TypeError, OSError, ValueError, RecursionError) as error:
            log.warning("vLLM does not say which model it serves on what; it was not looked at", error=str(error))
            return
        if config.get("speculative_config") is not None:
            log.warning("a draft model keeps the weights that it was started with, and is accepted less and less")
        if device == "cpu" and self._has_checksum:
            raise UsageError(
                "vLLM on a CPU leaves the linear layers out of its checksum, so a version that changes nothing else "
                "would seem not to be loaded. Nothing was changed. Unset engine_checksum here."
            )
        if device == "cpu" and (fault := _reloaded_wrongly_on_cpu(text)):
            raise UsageError(
                f"vLLM on a CPU {fault}, and says that all went well. Nothing was changed. Use an untied, dense model, "
                "SGLang, or a GPU."
            )

    def is_paused(self, *, seconds: float) -> bool | None:
        """See Engine."""
        return bool(self._control.get("/is_paused", seconds=seconds).get("is_paused"))

    def pause(self, *, seconds: float) -> None:
        """See Engine."""
        # A body is ignored here and would mean "abort"; the mode goes in the query.
        self._control.post("/pause", query={"mode": "keep", "clear_cache": "true"}, seconds=seconds)

    def reload(self, folder: Path, version: int, *, seconds: float) -> None:
        """See Engine. By our own backend where the server has it, which loads only what differs; else, and when that
        fails, all of it."""
        left = _countdown(seconds)
        if self._has_plugin is None:
            self._ask_plugin(left())
        if self._has_plugin:
            try:
                self._update(folder, version, left)
                return
            except EngineError as failure:
                log.warning("the engine's own update failed; reloading", version=version, error=str(failure))
                self._ask_plugin(left())  # which makes it forget what it held, and finds out whether it is still there
        # Never with its own `timeout`: when that runs out, the engine dies.
        self._call("reload_weights", left(), weights_path=str(folder))

    def _update(self, folder: Path, version: int, left: Callable[[], float]) -> None:
        order = {"folder": str(folder.resolve()), "version": version, "digests": tensor_digests(folder)}
        self._control.post("/start_weight_update", seconds=left())
        self._control.post("/update_weights", {"update_info": order}, seconds=left())
        self._control.post("/finish_weight_update", {"weight_version": None}, seconds=left())
        for cache in ("reset_encoder_cache", "reset_mm_cache"):  # a reload does this by itself
            self._call(cache, left())

    def _ask_plugin(self, seconds: float) -> None:
        """Whether our backend is there; one that is forgets what it knew the engine to hold."""
        try:
            order = {"init_info": {"weighbridge": 1, "forget": True}}
            self._control.post("/init_weight_transfer_engine", order, seconds=seconds)
            self._has_plugin = True
        except EngineError as no:
            log.info("vLLM reloads whole folders: it was started without our plugin", answer=str(no)[:200])
            self._has_plugin = False

    def _call(self, method: str, seconds: float, **given: str) -> None:
        self._control.post("/collective_rpc", {"method": method, "kwargs": given}, seconds=seconds)

    def flush(self, *, seconds: float) -> None:
        """See Engine. The status says nothing here: the body does."""
        query = {"reset_running_requests": "true"}
        answer = self._control.post("/reset_prefix_cache", query=query, seconds=seconds)
        if answer.get("success") is not True:
            raise EngineError(f"vLLM did not drop its prefix cache: {answer}; old and new weights would mix.")

    def set_version(self, version: int, *, seconds: float) -> None:
        """See Engine."""
        self._control.post("/update_weight_version", {"new_version": str(version)}, seconds=seconds)

    def read_version(self, *, seconds: float) -> int | None:
        """See Engine."""
        return version_in(self._control.get("/weight_info", seconds=seconds))

    def checksum(self, *, seconds: float) -> str | None:
        """See Engine. Over the parameters of all ranks."""
        if not self._has_checksum:
            return None
        answer = self._control.post("/weight_checker", {"action": "checksum"}, seconds=seconds)
        if not isinstance(found := answer.get("checksums"), dict) or not found:
            raise EngineError(f"vLLM gave no checksums of its weights: {str(answer)[:200]}")
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()

    def resume(self, *, seconds: float) -> None:
        """See Engine."""
        self._control.post("/resume", seconds=seconds)


def _reloaded_wrongly_on_cpu(model: dict[str, Any]) -> str:
    if model.get("tie_word_embeddings"):
        return "keeps the old lm_head of a model with tied embeddings when it reloads"
    if any(model.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return "reloads the experts of this model wrongly"
    return ""


def _small_file(path: Path) -> bytes:
    """The start of a file that an engine named, if it is one: to open anything else could wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no file")
        return file.read(_MOST_CONFIG_BYTES)


def _countdown(seconds: float) -> Callable[[], float]:
    """What is left of a deadline, for one call after the other."""
    until = time.monotonic() + seconds
    return lambda: max(0.001, until - time.monotonic())
