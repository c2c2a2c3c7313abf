"""Where everything of a replica lies in its folder, and replica.json, which says whose it is. Must not know what the
copies hold.

    replica.json          identity: replica, run, base, digest kind, copies; sealed
    lock                  held by the one process that owns the replica; names it meanwhile
    copies/a, copies/b    whole HF folders
    current               relative link to the copy that an engine loads
    state/a.json, ...     what each copy holds: version, clean or dirty, digests by part, how its files look; sealed
    journal               patches about to be written, while they are
    spool/V/<shard>       fetched shards
    aside/                files found in a copy that nobody published
    mirror/               what a neighbour published, said again as a run of our own; see docs/PEERS.md
    seen.json             the newest version that the store ever showed, where keys are trusted; sealed
"""

import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from weighbridge.storage.digests import DIGESTS
from weighbridge.storage.localdisk import TEMPORARY_SUFFIX
from weighbridge.storage.replica.sealed import read_sealed, seal

COPIES = ("a", "b")
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of one replica."""

    folder: Path

    @property
    def identity(self) -> Path:
        """replica.json."""
        return self.folder / "replica.json"

    @property
    def lock(self) -> Path:
        """The lock file."""
        return self.folder / "lock"

    @property
    def current(self) -> Path:
        """The link to the copy that an engine loads: always the path to give it."""
        return self.folder / "current"

    @property
    def copies(self) -> Path:
        """The folder of the copies."""
        return self.folder / "copies"

    @property
    def states(self) -> Path:
        """The folder of the copies' states."""
        return self.folder / "state"

    @property
    def journal(self) -> Path:
        """The journal of the apply under way."""
        return self.folder / "journal"

    @property
    def spool(self) -> Path:
        """The folder of fetched shards."""
        return self.folder / "spool"

    @property
    def aside(self) -> Path:
        """Where files go that were found in a copy and that nobody published."""
        return self.folder / "aside"

    @property
    def mirror(self) -> Path:
        """The store of a run that says again what a neighbour published."""
        return self.folder / "mirror"

    @property
    def seen(self) -> Path:
        """What the store showed last."""
        return self.folder / "seen.json"

    def strangers(self) -> list[str]:
        """What lies in the folder, as relative names, and no replica puts there. Without its identity a folder is a
        replica's, of which a crash left some, only if this is empty: then nothing in it is anybody else's."""
        ours = {self.identity, self.lock, self.current, self.copies, self.states, self.journal, self.spool, self.aside}
        ours |= {self.seen, self.mirror}
        names = {path.name for path in ours}
        found = [path for path in _inside(self.folder) if path.name.removesuffix(TEMPORARY_SUFFIX) not in names]
        states = {self.state(name).name for name in COPIES}
        found += [path for path in _inside(self.states) if path.name.removesuffix(TEMPORARY_SUFFIX) not in states]
        found += [path for path in _inside(self.spool) if not (len(path.name) == 12 and path.name.isdecimal())]
        return sorted(str(path.relative_to(self.folder)) for path in found)

    def copy(self, name: str) -> Path:
        """A copy's folder."""
        return self.copies / name

    def seeding(self, name: str) -> Path:
        """Where a copy is seeded until it is proven."""
        return self.copies / f".seeding-{name}"

    def hidden(self, name: str) -> Path:
        """Where the only copy lies while it is dirty, so that nothing can load it."""
        return self.copies / f".dirty-{name}"

    def state(self, name: str) -> Path:
        """A copy's state."""
        return self.states / f"{name}.json"

    def pointed(self) -> str | None:
        """The copy that `current` points to, or None when it points to none of ours."""
        try:
            target = self.current.readlink()
        except OSError:
            return None
        return target.name if target.parts in {("copies", name) for name in COPIES} else None


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose replica a folder is: fields of replica.json. `replica_id` is new for every replica ever made."""

    replica_id: str
    run_id: str
    base_digest: str
    digest_kind: str
    copies: int

    @classmethod
    def new(cls, *, run_id: str, base_digest: str, digest_kind: str, copies: int) -> "Identity":
        """The identity of a replica that is made now."""
        return cls(uuid.uuid4().hex, run_id, base_digest, digest_kind, copies)

    def to_bytes(self) -> bytes:
        """replica.json's bytes."""
        return seal({"format": _FORMAT, **asdict(self)})

    @property
    def names(self) -> tuple[str, ...]:
        """The copies that this replica keeps."""
        return COPIES[: self.copies]


def _inside(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []


def read_identity(path: Path) -> Identity | None:
    """The identity in a replica.json, or None when there is none or it is garbage."""
    fields = read_sealed(path)
    if fields is None or fields.pop("format", None) != _FORMAT:
        return None
    try:
        identity = Identity(**fields)
    except TypeError:
        return None
    texts = (identity.replica_id, identity.run_id, identity.base_digest, identity.digest_kind)
    known = all(isinstance(text, str) for text in texts) and identity.digest_kind in DIGESTS
    return identity if known and identity.copies in (1, 2) else None
