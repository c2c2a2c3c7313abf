"""SGLang's server: what its control routes really answer is in the tests that run against it. Must not know replicas,
stores or Prefect."""

import json
from pathlib import Path

import structlog

from weighbridge.errors import EngineError, UsageError
from weighbridge.tasks.engines.canary import Canary
from weighbridge.tasks.engines.control import Keys, RouteMissing, version_in
from weighbridge.tasks.engines.server import ServerEngine
from weighbridge.tasks.engines.spec import Pulls

log = structlog.get_logger("weighbridge.engines")


class SglangEngine(ServerEngine):
    """See Engine. Requests in flight are put back into the queue (`retract`) and computed anew with the new weights."""

    name = "sglang"

    def __init__(
        self,
        url: str,
        *,
        keys: Keys | None = None,
        remote: bool = False,
        canary: Canary | None = None,
        checksum: bool = False,
        pulls: Pulls | None = None,
    ) -> None:
        super().__init__(url, keys=keys, remote=remote, canary=canary, checksum=checksum)
        self._pulls = pulls

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
        folder = self._pulled(version, seconds=seconds) or folder
        order = {
            "model_path": str(folder),
            "weight_version": str(version),
            "flush_cache": True,
            "abort_all_requests": False,
        }
        answer = self._control.post("/update_weights_from_disk", order, seconds=seconds)
        if answer.get("success") is not True:
            raise EngineError(f"SGLang did not load {folder}: {answer.get('message', answer)}")

    def _pulled(self, version: int, *, seconds: float) -> Path | None:
        """The checkpoint that the server itself brought to a version; None where it has no such route, or keeps another
        version there: it never goes back, and says nothing of it. The replica's folder is loaded then."""
        if self._pulls is None:
            return None
        order = {
            "local_checkpoint_dir": str(self._pulls.into),
            "source_dir": self._pulls.source,
            "target_version": version,
        }
        try:
            answer = self._control.post("/pull_weights", order, seconds=seconds)
        except RouteMissing:
            log.info("the server pulls no weights itself; it loads the replica's folder")
            return None
        if answer.get("success") is not True:
            raise EngineError(f"SGLang did not pull version {version}: {answer.get('message', answer)}")
        held = _held(self._pulls.into)
        if held != version:
            log.warning("the server holds another version than it was asked to pull", asked=version, held=held)
            return None
        return self._pulls.into

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

    def checksum(self, *, seconds: float) -> str | None:
        """See Engine. Over the parameters of all ranks."""
        if not self._has_checksum:
            return None
        answer = self._control.post("/weights_checker", {"action": "checksum"}, seconds=seconds)
        if not isinstance(found := answer.get("per_engine_checksum"), str):
            raise EngineError(f"SGLang gave no checksum of its weights: {str(answer)[:200]}")
        return found

    def resume(self, *, seconds: float) -> None:
        """See Engine."""
        self._control.post("/continue_generation", seconds=seconds)


def _held(folder: Path) -> int | None:
    """The version to which a server of this kind brought a checkpoint, by the mark that it keeps there."""
    try:
        return int(json.loads((folder / ".weight_sync" / "state.json").read_bytes())["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
