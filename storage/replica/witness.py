"""What a replica remembers of its store for as long as it trusts keys: the newest version that it ever saw there, so
that an older or another history is noticed even after its copies were lost. Must not know how versions are reached."""

from dataclasses import asdict, dataclass
from pathlib import Path

from weighbridge.errors import RolledBack, VersionUnknown
from weighbridge.storage.clock import Clock
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import Disk
from weighbridge.storage.replica.sealed import read_sealed, seal

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Seen:
    """The newest version that a store showed: its run, its number, the digest of its manifest."""

    run_id: str
    version: int
    manifest: str


class Witness:
    """Looks at a store's head, and keeps what it saw in a file. Without trust in the lineage it does nothing."""

    def __init__(self, path: Path, lineage: Lineage, *, disk: Disk, clock: Clock) -> None:
        self._path, self._lineage, self._disk, self._clock = path, lineage, disk, clock

    def look(self, *, goes_back: bool = False, at_any_age: bool = False) -> None:
        """Compares the store with what it showed before, and remembers what it shows now.

        `goes_back` says that somebody asked for a store that was rewound, `at_any_age` that nothing new is begun.
        Raises RolledBack, Frozen, and what reading the newest manifest raises.
        """
        trust = self._lineage.trust
        if trust is None:
            return
        newest = self._lineage.newest()
        if not at_any_age:
            trust.check_age(newest, self._clock.now_ns())
        before = self._read()
        if before is not None and before.run_id == newest.run_id and not goes_back:
            self._compare(before)
        now = Seen(newest.run_id, newest.version, newest.digest)
        if now != before:
            self._disk.write_atomic(self._path, seal({"format": _FORMAT, **asdict(now)}))

    def _compare(self, before: Seen) -> None:
        try:
            digest = self._lineage.manifest(before.version).digest
        except VersionUnknown:
            digest = ""
        if digest != before.manifest:
            shows = "another version of that number" if digest else f"no more than version {self._lineage.head()}"
            raise RolledBack(
                f"{self._lineage.store.url} showed version {before.version} before, and shows {shows} now: it was "
                "rewound, or somebody holds versions back. Nothing was written; what is served stays. Check the store; "
                "if it was rewound on purpose, `weighbridge pull --rollback --version V`."
            )

    def _read(self) -> Seen | None:
        fields = read_sealed(self._path)
        if fields is None or fields.pop("format", None) != _FORMAT:
            return None
        try:
            return Seen(**fields)
        except TypeError:
            return None
