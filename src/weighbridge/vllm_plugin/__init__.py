"""The vLLM plugin: a weight-transfer backend that loads from the host's replica only what differs from what the engine
holds. Runs inside vLLM's processes, whose environment may have nothing else of what weighbridge needs: imports nothing
of ours outside this folder."""

BACKEND = "weighbridge"
_CLASS = "ReplicaBackend"


def register() -> None:
    """vLLM's plugin entry point: makes `--weight-transfer-config '{"backend": "weighbridge"}'` known. May be called in
    each of vLLM's processes, and more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "weighbridge.vllm_plugin.backend", _CLASS)
