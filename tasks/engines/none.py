"""The engine of a host without one: the replica is kept up, and whoever reads it reloads by itself."""

from pathlib import Path


class NoEngine:
    """See Engine. Agrees to everything and holds nothing."""

    name = "none"
    maps_files = False

    def check(self, *, seconds: float) -> None:
        """See Engine."""

    def is_paused(self, *, seconds: float) -> bool | None:
        """See Engine."""
        return None

    def pause(self, *, seconds: float) -> None:
        """See Engine."""

    def reload(self, folder: Path, version: int, *, seconds: float) -> None:
        """See Engine."""

    def flush(self, *, seconds: float) -> None:
        """See Engine."""

    def set_version(self, version: int, *, seconds: float) -> None:
        """See Engine."""

    def read_version(self, *, seconds: float) -> int | None:
        """See Engine."""
        return None

    def checksum(self, *, seconds: float) -> str | None:
        """See Engine."""
        return None

    def resume(self, *, seconds: float) -> None:
        """See Engine."""

    def probe(self, *, seconds: float) -> None:
        """See Engine."""
