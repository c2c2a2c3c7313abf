"""vLLM's OpenAI server, started with VLLM_SERVER_DEV_MODE=1: what its control routes really answer is in the tests that
run against it. Must not know replicas, stores or Prefect."""

from pathlib import Path

from weighbridge.errors import EngineError, UsageError
from weighbridge.tasks.engines.control import RouteMissing, version_in
from weighbridge.tasks.engines.server import ServerEngine


class VllmEngine(ServerEngine):
    """See Engine. Requests in flight are kept over the pause (`keep`) and go on with the new weights, from a cache that
    was dropped."""

    name = "vllm"

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

    def is_paused(self, *, seconds: float) -> bool | None:
        """See Engine."""
        return bool(self._control.get("/is_paused", seconds=seconds).get("is_paused"))

    def pause(self, *, seconds: float) -> None:
        """See Engine."""
        # A body is ignored here and would mean "abort"; the mode goes in the query.
        self._control.post("/pause", query={"mode": "keep", "clear_cache": "true"}, seconds=seconds)

    def reload(self, folder: Path, version: int, *, seconds: float) -> None:
        """See Engine."""
        # Never with its own `timeout`: when that runs out, the engine dies.
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._control.post("/collective_rpc", call, seconds=seconds)

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

    def resume(self, *, seconds: float) -> None:
        """See Engine."""
        self._control.post("/resume", seconds=seconds)
