"""What the adapters of inference servers have in common: an address, keys, and a canary over the OpenAI routes. Must
not know any server's control routes."""

from weighbridge.tasks.engines.canary import Canary
from weighbridge.tasks.engines.control import Control, Keys


class ServerEngine:
    """The part of an Engine that is the same for every server of this kind."""

    maps_files = False
    """A reload copies the files into the model's own memory."""

    def __init__(
        self,
        url: str,
        *,
        keys: Keys | None = None,
        remote: bool = False,
        canary: Canary | None = None,
        checksum: bool = False,
    ) -> None:
        self._control = Control(url, keys=keys or Keys(), remote=remote)
        self._canary = canary or Canary()
        self._has_checksum = checksum

    def probe(self, *, seconds: float) -> None:
        """See Engine."""
        self._canary.sing(self._control, seconds=seconds)
