"""Proves a folder against what was published, and changes nothing in it: a replica, every file of it, or any HF folder.
Must not mend: `Replica.scrub` does."""

from dataclasses import dataclass
from pathlib import Path

from weighbridge.errors import DigestMismatch, VersionUnknown, WeighbridgeError
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.clock import Clock, SystemClock
from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.lock import owned
from weighbridge.storage.replica.examine import examine, nearest_version
from weighbridge.storage.replica.fetch import Spool, read_small_files
from weighbridge.storage.replica.journal import read_journal
from weighbridge.storage.replica.layout import Identity, Layout, read_identity
from weighbridge.storage.replica.site import Site
from weighbridge.storage.replica.state import read_state
from weighbridge.storage.state import state_digest
from weighbridge.values import ShardInfo


@dataclass(frozen=True, slots=True)
class FolderReport:
    """What one HF folder was found to hold. `version` is the one it holds, or is nearest to; -1 when it is of no use.

    `faults` says in words everything that is not right, and is empty when every byte is.
    """

    folder: Path
    version: int
    state_digest: str
    parts: int
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What was verified: each HF folder, and the faults of what lies around them in a replica."""

    folder: Path
    folders: tuple[FolderReport, ...]
    faults: tuple[str, ...] = ()

    @property
    def all_faults(self) -> tuple[str, ...]:
        """Everything that is not right, in words."""
        return (*self.faults, *(fault for one in self.folders for fault in one.faults))

    @property
    def ok(self) -> bool:
        """Whether every byte is right."""
        return not self.all_faults

    def demand(self) -> None:
        """Raises DigestMismatch, naming all faults, unless every byte is right."""
        if not self.ok:
            listing = "".join(f"\n  - {fault}" for fault in self.all_faults)
            raise DigestMismatch(
                f"{self.folder} is not what was published:{listing}\nNothing was changed; scrub or pull a replica to "
                "mend it, check out any other folder anew."
            )


def verify_folder(
    folder: Path, lineage: Lineage, *, threads: int = 2, lock_seconds: float = 10.0, clock: Clock | None = None
) -> Report:
    """Digests a replica's copies, or a plain HF folder, and compares with the store, byte for byte.

    Raises ReplicaLocked while another process works on the replica, CheckpointError for a folder that is neither.
    """
    layout = Layout(folder.absolute())
    if not (layout.identity.exists() or layout.copies.is_dir()):
        return Report(folder, (_verify_plain(folder, lineage, threads),))
    clock = clock or SystemClock()
    with owned(layout.lock, disk=LocalDisk(), clock=clock, seconds=lock_seconds):
        return _verify_replica(layout, lineage, threads, clock)


def _verify_plain(folder: Path, lineage: Lineage, threads: int) -> FolderReport:
    checkpoint = open_checkpoint(folder)
    found, _ = checkpoint.digests(lineage.run.digest_kind, threads=threads)
    version, parts = nearest_version(lineage, found)
    faults = _differing(folder, {key.tensor for key in parts.keys() | found.keys() if parts.get(key) != found.get(key)})
    small = read_small_files(lineage)
    for name, data in small.items():
        if name not in checkpoint.files or (folder / name).read_bytes() != data:
            faults.append(f"{folder / name} is not version 0's")
    return FolderReport(folder, version, state_digest(found), len(found), tuple(faults))


def _differing(folder: Path, tensors: set[str]) -> list[str]:
    if not tensors:
        return []
    names = sorted(tensors)
    return [f"{folder}: {len(names)} tensors differ from every version: {', '.join(names[:5])}"]


def _verify_replica(layout: Layout, lineage: Lineage, threads: int, clock: Clock) -> Report:
    faults: list[str] = []
    identity = read_identity(layout.identity)
    if identity is None:
        return Report(layout.folder, (), (f"{layout.identity} is missing or not as it was written",))
    run = lineage.run
    if (identity.run_id, identity.base_digest) != (run.run_id, run.base_digest):
        return Report(layout.folder, (), (f"{layout.folder} is a replica of run {identity.run_id} or another base",))
    disk = LocalDisk()
    spool = Spool(layout.spool, lineage, disk=disk, clock=clock, threads=threads)
    site = Site(layout, identity, lineage, spool, None, disk, clock, threads)
    folders = tuple(_verify_copy(site, identity, name) for name in identity.names)
    if layout.pointed() not in identity.names:
        faults.append(f"{layout.current} does not lead to a copy")
    if layout.journal.exists() and read_journal(layout.journal) is None:
        faults.append(f"{layout.journal} is not as it was written")
    faults += _spool_faults(site)
    return Report(layout.folder, folders, tuple(faults))


def _verify_copy(site: Site, identity: Identity, copy: str) -> FolderReport:
    folder = site.folder(copy)
    state = read_state(site.layout.state(copy), replica_id=identity.replica_id, copy=copy)
    if state is None:
        fault = f"{site.layout.state(copy)} is missing or not as it was written"
        return FolderReport(folder, -1, "", 0, (fault,))
    try:
        finding = examine(site, copy, thorough=True)
    except WeighbridgeError as error:
        return FolderReport(folder, -1, "", 0, (f"{folder} could not be examined: {error}",))
    if finding.unusable or finding.state is None:
        return FolderReport(folder, -1, "", 0, (finding.unusable or f"{folder} holds no version",))
    faults = _differing(folder, {key.tensor for key in finding.bad})
    faults += [f"{folder / name} is not as it was published" for name in finding.files]
    faults += [f"{folder / name} was published by nobody, and an engine might load it" for name in finding.strays]
    if not state.clean:
        faults.append(f"{folder} is dirty: an apply from version {state.version} to {state.dirty_to} was cut short")
    version = finding.state.version
    if finding.state.state_digest != site.lineage.manifest(version).state_digest:
        faults.append(f"{site.layout.state(copy)} names other digests than version {version}")
    return FolderReport(folder, version, finding.state.state_digest, finding.digested, tuple(faults))


def _spool_faults(site: Site) -> list[str]:
    faults = []
    for path in sorted(site.layout.spool.glob("*/*.safetensors")):
        shard = _published(site.lineage, path)
        if shard is None:
            faults.append(f"{path} is no shard that was published; nothing reads it, and it may be removed")
        elif digest_bytes(site.kind, path.read_bytes()) != shard.digest:
            faults.append(f"{path} is not the shard that was published; the next fetch replaces it")
    return faults


def _published(lineage: Lineage, path: Path) -> ShardInfo | None:
    """What the store says of a file in the spool, or None when it says nothing."""
    folder = path.parent.name
    if not (folder.isascii() and folder.isdigit()):
        return None
    try:
        manifest = lineage.manifest(int(folder))
        shards = (*manifest.shards, *(lineage.anchor(int(folder)).shards if path.name.startswith("anchor-") else ()))
    except VersionUnknown:
        return None
    return next((shard for shard in shards if shard.name == path.name), None)
