"""The backend itself: one update is `start`, one `update_weights` with a folder and its tensors' digests, `finish`; it
holds what it loaded last, and loads the blocks that differ. Whatever fails leaves the engine to a plain reload."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from weighbridge.vllm_plugin.blocks import to_load
from weighbridge.vllm_plugin.folder import CheckpointFolder

logger = init_logger("vllm.weighbridge")  # below vLLM's own, whose handlers and level it shares

_LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"


@dataclass
class ReplicaInitInfo(WeightTransferInitInfo):
    """Asked before a plain reload, and to find out whether this backend is there: no other takes `weighbridge`."""

    weighbridge: int
    forget: bool = False


@dataclass
class ReplicaUpdateInfo(WeightTransferUpdateInfo):
    """A folder on this machine, the version that it holds, and the digest of each of its tensors."""

    folder: str
    version: int
    digests: dict[str, str] = field(default_factory=dict)


class ReplicaBackend(WeightTransferEngine[ReplicaInitInfo, ReplicaUpdateInfo]):
    """See vLLM's WeightTransferEngine. Holds a model's tensors by digest from its first update on."""

    init_info_cls = ReplicaInitInfo
    update_info_cls = ReplicaUpdateInfo
    supports_draft_weight_update = False  # the replica is the model's, not its draft's

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, str] | None = None
        self._next: dict[str, str] | None = None
        # What a layer counts as loaded when all of its tensors were: less than its size where it is padded.
        self._whole: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()

    def init_transfer_engine(self, init_info: ReplicaInitInfo) -> None:
        """Nothing to set up; `forget` says that the engine is about to be loaded past this backend."""
        if init_info.forget:
            self._held = None

    def start_weight_update(self) -> None:
        """Lets the layers collect what comes for them; refuses where only a plain reload is right."""
        if self.model_config.quantization is not None:
            raise NotImplementedError(f"weights quantized by {self.model_config.quantization} are reloaded whole")
        self._held, self._next = None, self._held  # known again once the update has ended well
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base's, which synchronizes an accelerator that may not be there."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ReplicaUpdateInfo) -> None:
        """Loads the blocks that differ from what is held; all, when that is not known or not enough."""
        begun = time.perf_counter()
        folder, held = CheckpointFolder(Path(update_info.folder)), self._next
        chosen = to_load(folder.names, held, update_info.digests)
        self._load(folder.read(chosen))
        if len(chosen) < len(folder.names) and (unfinished := self._unfinished()):
            logger.warning("%s got only a part of its tensors; loading all of them", ", ".join(unfinished))
            rest = set(folder.names) - set(chosen)
            self._load(folder.read(rest))
            chosen = folder.names
        if len(chosen) == len(folder.names):
            self._learn_whole()
        self._next = dict(update_info.digests)
        logger.info(
            "version %d: %d of %d tensors loaded from %s in %.3f s%s",
            update_info.version,
            len(chosen),
            len(folder.names),
            update_info.folder,
            time.perf_counter() - begun,
            "" if held is not None else "; what the engine held was not known",
        )

    def finish_weight_update(self) -> None:
        """Puts back the layers of which nothing was loaded, as they were."""
        with _not_said(_LAYERWISE, "Failed to load weights"):
            finalize_layerwise_reload(self.model, self.model_config)
        self._held = self._next

    def shutdown(self) -> None:
        """Nothing to let go of."""

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.model.load_weights(tensors)

    def _partial(self) -> Iterator[tuple[torch.nn.Module, int]]:
        """Layers that wait for more, with how much they have. Attention layers always wait for the end."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load() and info.load_numel > 0 and not is_deferred_attention_layer(layer):
                yield layer, info.load_numel

    def _unfinished(self) -> list[str]:
        return [type(layer).__name__ for layer, loaded in self._partial() if self._whole.get(layer) != loaded]

    def _learn_whole(self) -> None:
        self._whole.update(dict(self._partial()))


@contextmanager
def _not_said(name: str, words: str) -> Iterator[None]:
    """Keeps one line of a logger back: it is true of every layer that did not change, and alarms whoever reads it."""

    def other(record: logging.LogRecord) -> bool:
        return words not in str(record.msg)

    said: logging.Logger = logging.getLogger(name)
    keep: Callable[[logging.LogRecord], bool] = other
    said.addFilter(keep)
    try:
        yield
    finally:
        said.removeFilter(keep)
