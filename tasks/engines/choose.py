"""Which engine a host has: by name, or a user's own class as `module:Class`. Must not know settings' sources."""

import importlib
from collections.abc import Callable

from weighbridge.errors import UsageError
from weighbridge.tasks.engines.command import CommandEngine
from weighbridge.tasks.engines.contract import VERBS, Engine
from weighbridge.tasks.engines.none import NoEngine
from weighbridge.tasks.engines.spec import EngineSpec


def open_engine(spec: EngineSpec) -> Engine:
    """The engine of a spec; nothing is asked of it yet. A user's class is called with the URL, or with nothing when
    there is none.

    Raises UsageError for a kind that is not known, a URL or a command that is missing, a class that lacks a verb.
    """
    if spec.kind == "none":
        return NoEngine()
    if spec.kind == "command":
        if spec.command is None:
            raise UsageError("engine 'command' needs the command that reloads it. Nothing was started.")
        return CommandEngine(spec.command, maps_files=spec.maps_files)
    if ":" in spec.kind:
        kind = _users_own(spec.kind)
        engine: Engine = kind(spec.url) if spec.url else kind()
        return engine
    if spec.kind not in ("vllm", "sglang"):
        raise UsageError(
            f"engine {spec.kind!r} is not known here: none, command, vllm, sglang, module:Class. Nothing was started."
        )
    if spec.url is None:
        raise UsageError(f"engine {spec.kind!r} needs engine_url, where its server listens. Nothing was started.")
    # Only here, since an HTTP client takes its time to import, and most that ask for an engine's kind speak to none.
    from weighbridge.tasks.engines.canary import Canary
    from weighbridge.tasks.engines.control import Keys
    from weighbridge.tasks.engines.sglang import SglangEngine
    from weighbridge.tasks.engines.vllm import VllmEngine

    keys, canary = Keys(spec.api_key, spec.admin_key), Canary(spec.prompt)
    if spec.kind == "vllm":
        return VllmEngine(spec.url, keys=keys, remote=spec.remote, canary=canary, checksum=spec.checksum)
    return SglangEngine(
        spec.url, keys=keys, remote=spec.remote, canary=canary, checksum=spec.checksum, pulls=spec.pulls
    )


def _users_own(name: str) -> Callable[..., Engine]:
    module, _, attribute = name.partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"engine {name!r} cannot be loaded: {error}. Nothing was started.") from error
    if missing := [verb for verb in VERBS if not callable(getattr(kind, verb, None))]:
        raise UsageError(f"engine {name!r} lacks {', '.join(missing)}; see tasks/engines/contract.py. Nothing started.")
    found: Callable[..., Engine] = kind
    return found
