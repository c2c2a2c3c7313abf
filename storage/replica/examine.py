"""Judges one copy, and changes nothing: which version it holds, which parts and files are not right, or why it is of no
use. Looks at sizes and times first and digests only what they cast doubt on. Must not know how damage is mended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from weighbridge.errors import CheckpointError, ManifestCorrupt, VersionUnknown
from weighbridge.storage.checkpoint import Checkpoint
from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.replica.image import FolderImage
from weighbridge.storage.replica.journal import Journal, read_journal
from weighbridge.storage.replica.parallel import in_parallel
from weighbridge.storage.replica.scratch import Scratch
from weighbridge.storage.replica.site import Site
from weighbridge.storage.replica.state import CopyState, FileMark, listed, mark_file, read_state, touched
from weighbridge.storage.state import advance, base_digests
from weighbridge.values import PartKey

_LOADABLE = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf"})


@dataclass(frozen=True, slots=True)
class Finding:
    """What a copy holds. With `unusable` ("" if it is usable) nothing else counts: the copy must be seeded anew.

    `state` is clean, at the version that the copy holds or is nearest to; `bad` are the parts that differ from it,
    `files` the small files that do. `strays` are weight files that nobody published and that an engine might load.
    `journal` is whole and leads a dirty copy to where it was going; then `state` is still the dirty one.
    `fresh` says that the state file on disk says all that, `digested` how many parts were read.
    """

    copy: str
    unusable: str = ""
    state: CopyState | None = None
    bad: tuple[PartKey, ...] = ()
    files: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()
    journal: Journal | None = field(default=None, repr=False)
    fresh: bool = True
    digested: int = 0

    @property
    def right(self) -> bool:
        """Whether the copy is exactly what its state says, and needs nothing."""
        return not (self.unusable or self.bad or self.files or self.strays or self.journal) and self.fresh


def examine(site: Site, copy: str, *, thorough: bool) -> Finding:
    """Judges a copy; `thorough` digests everything. Raises what the store raises."""
    try:
        checkpoint = site.open(copy)
    except CheckpointError as error:
        return Finding(copy, unusable=str(error))
    state = _known_state(site, copy)
    if state is None:
        return _identify(site, copy, checkpoint)
    moved = set(touched(checkpoint.folder, state.files, state.files))
    weights = set(checkpoint.weight_files)
    if fault := _layout_fault(checkpoint, state, moved if state.clean and not thorough else set(state.files)):
        return Finding(copy, unusable=fault)
    strays = _strays(checkpoint, set(state.files))
    suspects = set(state.files) - weights if thorough or not state.clean else moved - weights
    small = tuple(sorted(name for name in suspects if not _same(checkpoint, name, state.files[name])))
    if not state.clean:
        if (journal := _usable_journal(site, state)) is not None:
            return Finding(copy, "", state, (), small, strays, journal)
        return _nearest(site, checkpoint, _ends(site, state), small, strays)
    if thorough or _stale(site, state):
        keys = list(site.parts)
    else:
        keys = [key for key in site.parts if checkpoint.tensors[key.tensor].file in moved]
    found = digest_parts(site, checkpoint, keys)
    bad = tuple(key for key, digest in found.items() if state.parts[key] != digest)
    fresh = not moved and not _stale(site, state)
    return Finding(copy, "", state, bad, small, strays, None, fresh, len(keys))


def digest_parts(site: Site, checkpoint: Checkpoint, keys: Sequence[PartKey]) -> dict[PartKey, bytes]:
    """Digests of some parts of a folder, in threads."""
    if len(keys) == len(site.parts):
        return checkpoint.digests(site.kind, threads=site.threads)[0]
    image = FolderImage(checkpoint, site.disk)
    scratch = Scratch()

    def one(key: PartKey) -> tuple[PartKey, bytes]:
        data = image.read(key, scratch.take(image.parts[key].nbytes))
        return key, digest_bytes(site.kind, data.data)

    return dict(in_parallel(one, keys, threads=site.threads))


def _stale(site: Site, state: CopyState) -> bool:
    """Whether the copy was written without waiting for the disk, in another boot."""
    return state.durability == "process" and state.boot_id != site.disk.boot_id()


def _known_state(site: Site, copy: str) -> CopyState | None:
    """The copy's state, if it is whole and of this replica and of versions that stand in this store."""
    state = read_state(site.layout.state(copy), replica_id=site.identity.replica_id, copy=copy)
    if state is None:
        return None
    try:
        known = is_of(site.lineage, state)
        if state.dirty_to is not None:
            site.lineage.manifest(state.dirty_to)
    except VersionUnknown:
        return None
    return state if known else None


def is_of(lineage: Lineage, state: CopyState) -> bool:
    """Whether a state names the version that stands in the store; by the next one, if its own manifest is unreadable.
    Raises VersionUnknown, ManifestCorrupt."""
    try:
        return lineage.manifest(state.version).digest == state.manifest
    except ManifestCorrupt:
        if state.version == lineage.head():
            raise
        return lineage.manifest(state.version + 1).parent_digest == state.manifest


def _layout_fault(checkpoint: Checkpoint, state: CopyState, suspects: set[str]) -> str:
    """Why the files' layout (headers, index) is not the one that was seeded, or ""."""
    for name in sorted((suspects & set(checkpoint.weight_files)) | (suspects & {checkpoint.index_file})):
        if not _same(checkpoint, name, state.files[name]):
            return f"{checkpoint.folder / name}: its header or index is not the one that was seeded"
    if checkpoint.index_file and checkpoint.index_file not in state.files:
        return f"{checkpoint.folder / checkpoint.index_file} appeared, and would decide what an engine loads"
    if set(checkpoint.weight_files) != {name for name, mark in state.files.items() if name.endswith(".safetensors")}:
        return f"{checkpoint.folder} has other weight files than were seeded"
    return ""


def _same(checkpoint: Checkpoint, name: str, mark: FileMark) -> bool:
    """Whether a file's size is the marked one, and its bytes outside of tensors too."""
    path = checkpoint.folder / name
    try:
        found = mark_file(path, head=mark.head if name in checkpoint.weight_files else None)
    except OSError:
        return False
    return (found.nbytes, found.digest) == (mark.nbytes, mark.digest)


def _strays(checkpoint: Checkpoint, known: set[str]) -> tuple[str, ...]:
    return tuple(
        sorted(n for n in listed(checkpoint.folder) - known if any(n.lower().endswith(end) for end in _LOADABLE))
    )


def _usable_journal(site: Site, state: CopyState) -> Journal | None:
    """The journal, if it is whole, leads where this copy was going, and surely reached the disk."""
    journal = read_journal(site.layout.journal)
    if journal is None or state.dirty_to is None:
        return None
    head = journal.head
    whose = (head.replica_id, head.copy, head.start, head.target)
    same_boot = head.boot_id == site.disk.boot_id()
    if whose != (state.replica_id, state.copy, state.version, state.dirty_to):
        return None
    if site.lineage.manifest(head.target).digest != head.manifest:
        return None
    return journal if same_boot or state.durability == "power" else None


def _ends(site: Site, state: CopyState) -> list[CopyState]:
    """The two clean states between which a dirty copy may be, the target first."""
    start = replace(state, dirty_to=None)
    if state.dirty_to is None or state.dirty_to == state.version:
        return [start]
    manifests = site.lineage.chain(state.version, state.dirty_to)
    rows = (row for manifest in manifests for row in manifest.rows)
    target = replace(start, version=state.dirty_to, manifest=manifests[-1].digest, parts=advance(state.parts, rows))
    return [target, start]


def _nearest(
    site: Site, checkpoint: Checkpoint, ends: Sequence[CopyState], files: tuple[str, ...], strays: tuple[str, ...]
) -> Finding:
    found = digest_parts(site, checkpoint, list(site.parts))
    wrong = [tuple(key for key, digest in found.items() if end.parts[key] != digest) for end in ends]
    best = min(range(len(ends)), key=lambda i: len(wrong[i]))
    return Finding(ends[best].copy, "", ends[best], wrong[best], files, strays, None, False, len(found))


def _identify(site: Site, copy: str, checkpoint: Checkpoint) -> Finding:
    """A copy of which nothing is known: the version from which the fewest parts differ is the one it is nearest to."""
    found = digest_parts(site, checkpoint, list(site.parts))
    version, parts = nearest_version(site.lineage, found)
    small = site.spool.small_files()
    expected = {*checkpoint.weight_files, *filter(None, [checkpoint.index_file]), *small}
    state = CopyState(
        replica_id=site.identity.replica_id,
        copy=copy,
        version=version,
        manifest=site.lineage.manifest(version).digest,
        dirty_to=None,
        durability=site.disk.durability,
        boot_id=site.disk.boot_id(),
        files={},
        parts=parts,
    )
    files = tuple(sorted(name for name, data in small.items() if _content(checkpoint, name) != data))
    bad = tuple(key for key, digest in found.items() if parts[key] != digest)
    return Finding(copy, "", state, bad, files, _strays(checkpoint, expected), None, False, len(found))


def nearest_version(lineage: Lineage, found: Mapping[PartKey, bytes]) -> tuple[int, dict[PartKey, bytes]]:
    """The version from which the fewest of the digests differ (the newest of several), and its digests by part."""
    base = lineage.manifest(0)
    parts = base_digests(base)
    differing = {key for key, digest in parts.items() if found.get(key) != digest}
    best, fewest = 0, len(differing)
    for manifest in lineage.walk(0, lineage.head()):
        for row in manifest.rows:
            (differing.discard if found.get(row.key) == row.after else differing.add)(row.key)
        if len(differing) <= fewest:
            best, fewest = manifest.version, len(differing)
    for manifest in lineage.walk(0, best):
        parts.update((row.key, row.after) for row in manifest.rows)
    return best, parts


def _content(checkpoint: Checkpoint, name: str) -> bytes | None:
    try:
        return (checkpoint.folder / name).read_bytes()
    except OSError:
        return None
