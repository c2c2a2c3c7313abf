"""What a person says of an engine, as one value. Must not know how any engine is spoken to."""

from dataclasses import dataclass, field
from pathlib import Path

from weighbridge.tasks.engines.command import Command


@dataclass(frozen=True, slots=True)
class Pulls:
    """`source` is a root with versions of layout pull-weights, as the server sees it; `into` the checkpoint on this
    machine that the server patches with them."""

    source: str
    into: Path


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """All that it takes to speak to an engine, from this process or from its guard. Keys are shown nowhere."""

    kind: str
    """none, command, vllm, sglang, or `module:Class`."""
    url: str | None = None
    command: Command | None = None
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    remote: bool = False
    prompt: str = "The"
    maps_files: bool = False
    """Of a command's engine: whether it keeps the files that it loaded mapped."""
    checksum: bool = False
    """Of a server: whether each load is held against its own checksum of the weights."""
    pulls: Pulls | None = None
    """Of SGLang: where the server itself may fetch versions, and what it makes of them."""
