"""The direct way between a trainer and its hosts, from the settings of either. Must not know how it works."""

from collections.abc import Callable, Sequence
from pathlib import Path

from weighbridge.settings import Settings
from weighbridge.storage.localdisk import Disk
from weighbridge.storage.ranks import Ranks
from weighbridge.tasks.collective.receiver import Receiver
from weighbridge.tasks.collective.sender import Sender, Terms


def open_sender(
    settings: Settings, ranks: Ranks, spool: Path, *, disk: Disk, hosts: Callable[[], Sequence[str]]
) -> Sender | None:
    """This rank's sender, if versions are broadcast. Raises UsageError for an address that cannot be listened at."""
    if settings.listens is None:
        return None
    terms = Terms(settings.listens, settings.transport_backend, settings.transport_window, settings.transport_seconds)
    return Sender(terms, ranks, folder=spool / "transport", disk=disk, hosts=hosts)


def open_receiver(settings: Settings) -> Receiver | None:
    """A host's receiver, if its trainer broadcasts."""
    if settings.listens is None:
        return None
    return Receiver(settings.listens, settings.transport_backend, settings.transport_seconds)
