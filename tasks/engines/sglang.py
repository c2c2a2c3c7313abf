"""SGLang's server: what its control routes really answer is in the tests that run against it. Must not know replicas,
stores or Prefect."""

from pathlib import Path

from weighbridge.errors import EngineError, UsageError
from weighbridge.tasks.engines.control import RouteMissing, version_in
from weighbridge.tasks.engines.server import ServerEngine


class SglangEngine(ServerEngine):
    """See Engine. Requests in flight are put back into the queue (`retract`) and computed anew with the new weights."""

    name = "sglang"

    def check(self, *, seconds: float) -> None:
        """See Engine. The model's path is readable with the normal key, a flush only with the admin's."""
        try:
            self._control.get("/model_info", seconds=seconds, admin=False)
        except RouteMissing as missing:
            raise UsageError(
                f"{missing} It is no SGLang server of release 0.5 or newer. Nothing was changed."
            ) from missing
        self._canary.find_model(self._control, seconds=seconds)

    def is_paused(self, *, seconds: float) -> bool | None:
        """See Engine. SGLang does not say."""
        return None

    def pause(self, *, seconds: float) -> None:
        """See Engine."""
        self._control.post("/pause_generation", {"mode": "retract"}, seconds=seconds)

    def reload(self, folder: Path, version: int, *, seconds: float) -> None:
        """See Engine. Sets the version and drops the cache in the same call."""
        order = {
            "model_path": str(folder),
            "weight_version": str(version),
            "flush_cache": True,
            "abort_all_requests": False,
        }
        answer = self._control.post("/update_weights_from_disk", order, seconds=seconds)
        if answer.get("success") is not True:
            raise EngineError(f"SGLang did not load {folder}: {answer.get('message', answer)}")

    def flush(self, *, seconds: float) -> None:
        """See Engine. The reload did, and failed unless the cache was dropped."""

    def set_version(self, version: int, *, seconds: float) -> None:
        """See Engine."""
        order = {"new_version": str(version), "abort_all_requests": False}
        answer = self._control.post("/update_weight_version", order, seconds=seconds)
        if answer.get("success") is not True:
            raise EngineError(f"SGLang did not take version {version}: {answer.get('message', answer)}")

    def read_version(self, *, seconds: float) -> int | None:
        """See Engine."""
        return version_in(self._control.get("/model_info", seconds=seconds, admin=False))

    def resume(self, *, seconds: float) -> None:
        """See Engine."""
        self._control.post("/continue_generation", seconds=seconds)
