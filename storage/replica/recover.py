"""Brings every copy of a replica to a clean state by the cheapest way that ends bit-exact, and says which: the journal,
single parts made again, or a copy seeded anew. Must not know plans or targets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog

from weighbridge.errors import CorruptData, LineageError, ObjectMissing, ReplicaError, what_happened
from weighbridge.storage.localdisk import PRIVATE_FOLDER, SHARED_FILE
from weighbridge.storage.replica.apply import write_journalled
from weighbridge.storage.replica.examine import Finding, digest_parts, examine
from weighbridge.storage.replica.journal import drop_journal
from weighbridge.storage.replica.layout import COPIES
from weighbridge.storage.replica.repair import repair_parts
from weighbridge.storage.replica.seclusion import secluded
from weighbridge.storage.replica.seed import seed_from_anchor, seed_from_base, seed_from_copy
from weighbridge.storage.replica.site import Site
from weighbridge.storage.replica.state import CopyState, read_state

_log = structlog.get_logger("weighbridge.replica")

CLEAN, JOURNAL, DIGESTED, REPAIRED = "clean", "journal", "digested", "repaired"
SEEDED, RESEEDED = "seeded", "reseeded"
_WEIGHT = (CLEAN, JOURNAL, DIGESTED, REPAIRED, SEEDED, RESEEDED)


@dataclass(frozen=True, slots=True)
class Recovery:
    """What opening, or scrubbing, a replica had to do: `how` is the dearest way that any copy needed.

    "clean": nothing. "journal": an apply that was cut short was finished. "digested": a copy's state was lost or in
    doubt, and all its bytes turned out right. "repaired": `repaired` parts, or files, were made again. "seeded": copies
    of a new replica were made. "reseeded": a copy was of no use and was made anew. `digested` counts the parts that
    were read to find out; `notes` says it all for people.
    """

    how: str
    repaired: int
    digested: int
    notes: tuple[str, ...]

    def then(self, later: "Recovery") -> "Recovery":
        """This recovery and one after it, as one."""
        how = max(self.how, later.how, key=_WEIGHT.index)
        notes = (*self.notes, *later.notes)
        return Recovery(how, self.repaired + later.repaired, self.digested + later.digested, notes)


def recover(
    site: Site, *, thorough: bool = False, first: bool = False, toward: int | None = None
) -> tuple[dict[str, CopyState], Recovery]:
    """Mends every copy, repairs the `current` link, and removes what a crash left over.

    `thorough` digests everything; `first` says that the replica is new, so that seeding is no damage; without a base
    folder it is seeded from an anchor, up to version `toward`. Raises DiskFull, ReplicaError with neither base nor
    anchor, and what the store raises; the copy that is loaded is never made worse by that.
    """
    _clear(site)
    findings = [examine(site, name, thorough=thorough) for name in site.identity.names]
    loaded = site.layout.pointed()
    served = _served(site, loaded, findings)
    # What is right comes first: it is a source for the rest. The loaded copy is seeded anew only after the others.
    findings.sort(key=lambda f: (not f.right, bool(f.unusable), f.copy == loaded))
    states: dict[str, CopyState] = {}
    hows: list[str] = []
    notes: list[str] = []
    repaired = 0
    for finding in findings:
        known = {f.copy: f.state for f in findings if f.state is not None and f.state.clean and not f.unusable}
        sources = [state for name, state in (known | states).items() if name != finding.copy]
        state, how, mended, note = _restore(site, finding, list(states.values()), sources, first=first, toward=toward)
        states[finding.copy] = state
        hows.append(how)
        repaired += mended
        notes += [note] if note else []
        _relink(site, states, {f.copy for f in findings if not (f.unusable or f.bad)}, served)
    now = site.layout.pointed()
    if loaded in states and now in states and loaded != now and states[loaded].version >= states[now].version:
        site.disk.point(site.layout.current, f"copies/{loaded}")
        _log.info("current leads to the mended copy again", copy=loaded, version=states[loaded].version)
    now = site.layout.pointed()
    if served is not None and now in states and states[now].version < served:
        notes.append(f"current leads to version {states[now].version}, since the copy with version {served} was lost")
    drop_journal(site.layout.journal, disk=site.disk)
    for name in set(COPIES) - set(states):  # the replica kept two copies once
        site.disk.unlink(site.layout.state(name))
        site.disk.remove_tree(site.layout.copy(name))
    how = max(hows, key=_WEIGHT.index)
    recovery = Recovery(how, repaired, sum(f.digested for f in findings), tuple(notes))
    if how != CLEAN:
        _log.warning("replica recovered", how=how, repaired=repaired, notes=notes, folder=str(site.layout.folder))
    return states, recovery


def _served(site: Site, loaded: str | None, findings: Sequence[Finding]) -> int | None:
    """The version that `current` led to, by what was found there, else by the word of a copy of no use."""
    found = next((f.state for f in findings if f.copy == loaded), None)
    if found is None and loaded is not None:
        found = read_state(site.layout.state(loaded), replica_id=site.identity.replica_id, copy=loaded)
    return None if found is None else found.version


def _clear(site: Site) -> None:
    """Removes half-made folders, and puts the only copy back in its place if it is clean, or keeps it hidden."""
    layout = site.layout
    for name in site.identity.names:
        if layout.seeding(name).exists():
            site.disk.remove_tree(layout.seeding(name))
        if layout.hidden(name).is_dir() and layout.copy(name).is_dir():
            site.disk.remove_tree(layout.hidden(name))


def _restore(
    site: Site,
    finding: Finding,
    others: Sequence[CopyState],
    sources: Sequence[CopyState],
    *,
    first: bool,
    toward: int | None,
) -> tuple[CopyState, str, int, str]:
    """Mends one copy: its state, by which way, how many parts were made again, and a note.

    `others` are right as a whole, `sources` may have bad parts of their own: whatever is taken from them is proven.
    """
    copy = finding.copy
    if finding.unusable or finding.state is None:
        state = _seed(site, copy, others, toward)
        if first:
            return state, SEEDED, 0, f"copy {copy} was seeded with version {state.version}"
        return state, RESEEDED, 0, f"copy {copy} was seeded anew with version {state.version}: {finding.unusable}"
    _put_aside(site, finding)
    _restore_files(site, finding)
    if finding.journal is not None:
        state, mended = _finish_journal(site, finding, sources)
        note = f"copy {copy}: the apply of version {state.version} was finished from the journal"
        return state, REPAIRED if mended else JOURNAL, mended, note
    if len(finding.bad) * 2 > len(site.parts) and (others or site.base is not None):
        state = _seed(site, copy, others, toward)
        return state, RESEEDED, 0, f"copy {copy} was seeded anew with version {state.version}: most parts were wrong"
    if finding.bad:
        try:
            state = repair_parts(site, _marked(site, finding.state), finding.bad, sources)
        except (CorruptData, LineageError, ObjectMissing, ReplicaError) as error:
            state = _seed(site, copy, others, toward)
            return (
                state,
                RESEEDED,
                0,
                f"copy {copy} was seeded anew with version {state.version}: {what_happened(error)}",
            )
        names = sorted({key.tensor for key in finding.bad})
        note = f"copy {copy}: {len(finding.bad)} parts of {len(names)} tensors were made again ({', '.join(names[:3])})"
        return state, REPAIRED, len(finding.bad), note
    if finding.right:
        _reveal(site, copy)
        return finding.state, CLEAN, 0, ""
    state = site.save(_marked(site, finding.state))
    _reveal(site, copy)
    if finding.files or finding.strays:
        return state, REPAIRED, 0, f"copy {copy}: files put right: {', '.join((*finding.files, *finding.strays))}"
    return state, DIGESTED, 0, f"copy {copy} was digested and holds version {state.version}"


def _seed(site: Site, copy: str, others: Sequence[CopyState], toward: int | None) -> CopyState:
    for other in sorted(others, key=lambda state: -state.version):
        try:
            return seed_from_copy(site, copy, other)
        except (CorruptData, LineageError) as error:
            _log.warning("a copy is no source for another", copy=other.copy, error=str(error))
    return seed_from_anchor(site, copy, upto=toward) if site.base is None else seed_from_base(site, copy)


def _finish_journal(site: Site, finding: Finding, sources: Sequence[CopyState]) -> tuple[CopyState, int]:
    """Writes a journal again. Parts that do not end right after that are made again."""
    dirty, journal = finding.state, finding.journal
    assert dirty is not None and journal is not None and dirty.dirty_to is not None
    manifests = site.lineage.chain(dirty.version, dirty.dirty_to)
    target = manifests[-1]
    with secluded(site, dirty.copy):
        state, _ = write_journalled(site, dirty, target, manifests)
    found = digest_parts(site, site.open(dirty.copy), [part.key for part in journal.parts])
    bad = [key for key, digest in found.items() if state.parts[key] != digest]
    return (repair_parts(site, state, bad, sources) if bad else state), len(bad)


def _marked(site: Site, state: CopyState) -> CopyState:
    """The state with fresh marks of all files that belong to the copy, in this boot."""
    checkpoint = site.open(state.copy)
    names = {*checkpoint.weight_files, *filter(None, [checkpoint.index_file]), *site.spool.small_files()}
    names |= set(state.files)
    return replace(
        state,
        dirty_to=None,
        durability=site.disk.durability,
        boot_id=site.disk.boot_id(),
        files=site.stamp(checkpoint, names),
    )


def _put_aside(site: Site, finding: Finding) -> None:
    """Moves files that an engine might load, and nobody published, out of the copy. They are not ours to delete."""
    for name in finding.strays:
        site.disk.make_folder(site.layout.aside, mode=PRIVATE_FOLDER)
        target = site.layout.aside / f"{finding.copy}-{site.clock.now_ns()}-{name.replace('/', '_')}"
        site.disk.rename(site.folder(finding.copy) / name, target)


def _restore_files(site: Site, finding: Finding) -> None:
    small = site.spool.small_files() if finding.files else {}
    for name in finding.files:
        if name not in small:
            raise ReplicaError(
                f"{site.folder(finding.copy) / name} was damaged, and version 0 has no such file. Nothing was changed; "
                f"remove {site.layout.state(finding.copy)}, and the copy is proven and accepted without it."
            )
        path = site.folder(finding.copy) / name
        site.disk.make_folder(path.parent)
        site.disk.write_atomic(path, small[name], mode=SHARED_FILE)


def _reveal(site: Site, copy: str) -> None:
    if site.layout.hidden(copy).is_dir():
        site.disk.rename(site.layout.hidden(copy), site.layout.copy(copy))


def _relink(site: Site, states: dict[str, CopyState], unharmed: set[str], served: int | None) -> None:
    """Points `current` to a clean copy if it points to none, or to one that has still to be mended: maybe to an older
    version than the one that was `served`, since an engine that loads meanwhile must not load a mix."""
    loaded = site.layout.pointed()
    if loaded in states or loaded in unharmed:
        return
    best = max(states.values(), key=lambda state: state.version)
    site.disk.point(site.layout.current, f"copies/{best.copy}")
    if served is None or best.version >= served:
        _log.info("current was pointed to a good copy", copy=best.copy, version=best.version, before=loaded)
    else:
        _log.warning(
            "current leads to an older version until the loaded copy is mended",
            copy=best.copy,
            version=best.version,
            before=loaded,
            served=served,
        )
