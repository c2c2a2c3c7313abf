"""Keeps the only copy of a replica out of reach while it is dirty. Must not know what is done to it meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager

from weighbridge.storage.replica.site import Site


@contextmanager
def secluded(site: Site, copy: str) -> Iterator[None]:
    """With one copy: moves its folder away, so that `current` leads nowhere and no engine can load a mix, and puts it
    back once the work is done. After a failure it stays away until the copy is mended. With two copies: nothing."""
    if site.identity.copies > 1:
        yield
        return
    visible, hidden = site.layout.copy(copy), site.layout.hidden(copy)
    if not hidden.is_dir():
        site.disk.rename(visible, hidden)
    yield
    site.disk.rename(hidden, visible)
