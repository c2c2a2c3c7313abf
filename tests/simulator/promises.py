"""The five promises once all is over, checked by readers of their own: the whole chain, every version rebuilt, each
host at the head, every record true, nothing of anybody else gone, nothing of ours left lying about."""

from collections.abc import Sequence
from pathlib import Path

from tests.replica.runs import tensors_of
from tests.simulator.baton import Broken
from tests.simulator.host import SimHost, notes_of
from tests.simulator.store import SimStore
from tests.simulator.truth import FOREIGN, Truth

from weighbridge.storage.anchor_sources import rebuilding
from weighbridge.storage.checkout import checkout
from weighbridge.storage.clock import SystemClock
from weighbridge.storage.leftovers import collect, find_leftovers
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.records import SERVED, read_records
from weighbridge.storage.replica import verify_folder


def check_all(truth: Truth, hosts: Sequence[SimHost], place: Path) -> None:
    """Raises Broken, naming the promise, for the first that does not hold."""
    store = SimStore(truth.objects)
    lineage = Lineage(store)
    _check_chain(truth, lineage)
    for host in hosts:
        _check_host(truth, host, lineage)
    _check_history(truth, hosts, store, lineage)
    _check_versions(truth, lineage, place)
    _check_leftovers(truth, store, lineage)


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


def _check_chain(truth: Truth, lineage: Lineage) -> None:
    _demand(lineage.head() == truth.head, f"the head is {lineage.head()}, and {truth.head} versions were committed")
    for _ in lineage.walk(0, truth.head):
        pass
    seen: list[str] = []
    for writer in truth.writers[1:]:
        _demand(writer not in seen[:-1] or seen[-1] == writer, f"writer {writer} went on after it was overtaken")
        if not seen or seen[-1] != writer:
            seen.append(writer)


def _check_host(truth: Truth, host: SimHost, lineage: Lineage) -> None:
    machine = host.machine
    found = truth.held_by(machine.replica / "current")
    _demand(found is not None and truth.head in found, f"{machine.name} ended with {found}, not with {truth.head}")
    # A shard that rotted in the spool is no fault until it is needed.
    faults = [f for f in verify_folder(machine.replica, lineage, threads=1).all_faults if "/spool/" not in f]
    _demand(not faults, f"{machine.name}: {faults}")
    _demand(host.serving.answers_with(truth.head), f"{machine.name}'s engine holds {host.serving.loaded}")
    _demand(notes_of(machine).exists(), f"a file that was not ours is gone from {machine.name}")
    temporary = [
        str(path.relative_to(machine.root))
        for path in sorted(machine.root.rglob("*"))
        if path.name.startswith(".") or path.suffix in (".tmp", ".unfinished") or path.name == "journal"
    ]
    _demand(not temporary, f"{machine.name} still has {temporary}")


def _check_history(truth: Truth, hosts: Sequence[SimHost], store: SimStore, lineage: Lineage) -> None:
    records = read_records(store)
    for record in records:
        if record.outcome == SERVED:
            wanted = lineage.manifest(record.version).state_digest
            _demand(record.state_digest == wanted, f"{record.host} says it served another version {record.version}")
    for host in hosts:
        name = host.machine.name
        served = {record.version for record in records if record.host == name and record.outcome == SERVED}
        _demand(truth.head in served, f"{name} serves version {truth.head}, and no record says so")
        unserved = sorted(served - set(host.serving.served))
        _demand(not unserved, f"records say that {name} served {unserved}, and its engine never did")


def _check_versions(truth: Truth, lineage: Lineage, place: Path) -> None:
    """Rebuilds every version that can be, and from anchors without a base; and the head by a real checkout."""
    truth.demand_kept("all is over")
    for version in range(truth.head + 1):
        if truth.is_rebuildable(version):
            _rebuild(truth, lineage, place, version, truth.base)
    hinted = set(lineage.anchors())  # the store may have gone between an anchor and its hint; nobody goes by that one
    for version in truth.anchors():
        if version in hinted:
            _rebuild(truth, lineage, place, version, None)
    checkout(truth.head, place / "head", lineage=lineage, base=truth.base, threads=1, disk=LocalDisk("process"))
    wanted = {name: data.tobytes() for name, data in truth.versions[truth.head].items()}
    _demand(tensors_of(place / "head") == wanted, "the head was checked out with other bytes")


def _rebuild(truth: Truth, lineage: Lineage, place: Path, version: int, base: Path | None) -> None:
    disk, wanted = LocalDisk("process"), truth.versions[version]
    with rebuilding(
        lineage, version, base=base, spool=place / "rebuilt", disk=disk, clock=SystemClock(), threads=1
    ) as rebuild:
        found = all(rebuild.part(key).tobytes() == wanted[key.tensor].tobytes() for key in rebuild.keys)
    _demand(found, f"version {version} was rebuilt with other bytes")


def _check_leftovers(truth: Truth, store: SimStore, lineage: Lineage) -> None:
    for leftover in list(find_leftovers(store, lineage, grace_seconds=-1.0)):
        collect(store, leftover)
    marks = ("manifest.arrow", "anchor.arrow", "retired", "anchor-retired")
    named = {"run.json", *FOREIGN}
    for version in range(truth.head + 1):
        named |= {f"versions/{version:012d}/{name}" for name in marks} | truth.shards(version)
    above = f"versions/{truth.head + 1:012d}/"
    elsewhere = ("hosts/", "kept/", "anchors/", above)
    strange = [key for key in store.objects.data if key not in named and not key.startswith(elsewhere)]
    _demand(not strange, f"the store still holds {strange}, which nobody will ask for")
