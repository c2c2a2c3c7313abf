"""The layouts by name."""

from collections.abc import Mapping

from weighbridge.errors import UsageError
from weighbridge.storage.peers.contract import Layout
from weighbridge.storage.peers.pull_weights import PullWeights
from weighbridge.storage.peers.skyrl import SkyRL
from weighbridge.storage.peers.trl import Trl

LAYOUTS: Mapping[str, Layout] = {layout.name: layout for layout in (PullWeights(), SkyRL(), Trl())}


def get_layout(name: str) -> Layout:
    """The layout of a name. Raises UsageError."""
    try:
        return LAYOUTS[name]
    except KeyError:
        raise UsageError(f"no layout {name!r} is known here: {', '.join(LAYOUTS)}. Nothing was started.") from None
