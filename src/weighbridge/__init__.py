"""weighbridge: lossless delta weight sync for RL post-training, run by Prefect.

Lazy: importing a part of the house (`weighbridge.storage.codecs`, say) loads neither Prefect nor torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weighbridge import errors as errors
    from weighbridge.pending import PendingPush as PendingPush
    from weighbridge.run import open_run as open_run
    from weighbridge.values import HostOutcome as HostOutcome
    from weighbridge.values import PushResult as PushResult
    from weighbridge.weight_sync import WeightSync as WeightSync

__version__ = "0.1.0"
__all__ = ["HostOutcome", "PendingPush", "PushResult", "WeightSync", "__version__", "errors", "open_run"]

_HOMES = {
    "HostOutcome": "weighbridge.values",
    "PendingPush": "weighbridge.pending",
    "PushResult": "weighbridge.values",
    "WeightSync": "weighbridge.weight_sync",
    "open_run": "weighbridge.run",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "errors":
        return importlib.import_module("weighbridge.errors")
    raise AttributeError(f"module 'weighbridge' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
