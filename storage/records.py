"""The hosts' records: one immutable object an attempt, and what they say together. A version's outcome is a function of
these records and nothing else."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace

import structlog

from weighbridge.errors import CorruptData, ObjectTooLarge
from weighbridge.storage.manifest import check_name
from weighbridge.storage.sealed_json import MOST_SEALED_BYTES, seal, unseal
from weighbridge.storage.stores.contract import Store
from weighbridge.values import HostOutcome, HostRecord

log = structlog.get_logger("weighbridge.records")

SERVED = "served"
SUPERSEDED = "superseded"
_MOST_ERROR = 16_000
"""Characters that a record keeps of why a host failed."""

_FOLDER = "hosts"
_TYPES: Mapping[str, type] = {
    **dict.fromkeys(("run_id", "host", "attempt", "outcome", "stage", "state_digest", "engine", "error", "by"), str),
    **dict.fromkeys(("version", "from_version", "started_ns", "ended_ns", "fetched_bytes", "repaired", "head"), int),
    "seconds": dict,
}
_KEY = re.compile(r"hosts/(?P<host>[^/]+)/(?P<head>[0-9]{12})-(?P<version>[0-9]{12})-(?P<attempt>[^/]+)")


def record_key(record: HostRecord) -> str:
    """Where a record stands; unique to its attempt, and in the order of `head`, so that a host's newest come last."""
    host = check_name("host", record.host)
    return f"{_FOLDER}/{host}/{record.head:012d}-{record.version:012d}-{record.attempt}"


def write_record(store: Store, record: HostRecord) -> None:
    """Writes one record; repeating it is safe, since the name is unique to the attempt."""
    if len(record.error) > _MOST_ERROR:
        record = replace(record, error=f"{record.error[:_MOST_ERROR]} ...")
    store.put(record_key(record), seal(asdict(record)))


def record_hosts(store: Store) -> list[str]:
    """The hosts that ever reported, by name; one that is just about to may be among them."""
    return list(store.folders(_FOLDER))


def record_keys(store: Store, host: str, *, head: int = -1, upto: int | None = None) -> Iterator[str]:
    """The keys of a host's records with at least this `head`, and at most `upto`, in its order."""
    folder = f"{_FOLDER}/{check_name('host', host)}"
    after = f"{folder}/{head:012d}" if head >= 0 else ""
    for info in store.list_after(folder, after):
        if upto is not None and head_of(info.key) > upto:
            break
        yield info.key


def version_of(key: str) -> int:
    """The version that a record's key names; -1 for a key that no host writes."""
    match = _KEY.fullmatch(key)
    return int(match["version"]) if match else -1


def head_of(key: str) -> int:
    """The `head` that a record's key names; -1 for a key that no host writes."""
    match = _KEY.fullmatch(key)
    return int(match["head"]) if match else -1


def read_record(store: Store, key: str) -> HostRecord:
    """One record, proven by its own digest. Raises CorruptData, naming it."""
    try:
        with suppress(CorruptData):  # a bit that flipped on the way is not there the second time; one in the store is
            return parse_record(store.get(key, most=MOST_SEALED_BYTES), key)
        return parse_record(store.get(key, most=MOST_SEALED_BYTES), key)
    except ObjectTooLarge as error:
        raise CorruptData(str(error)) from error


def read_records(
    store: Store,
    *,
    host: str | None = None,
    version: int | None = None,
    on_corrupt: Callable[[CorruptData], object] | None = None,
) -> list[HostRecord]:
    """All records of a root, or those of one host or one version, by host, version and the time they ended.

    Raises CorruptData for a record that cannot be read, unless `on_corrupt` takes it; the others are read then.
    """
    found = []
    for name in [host] if host is not None else record_hosts(store):
        for key in record_keys(store, name, head=-1 if version is None else version):
            if version is None or version_of(key) == version:
                try:
                    found.append(read_record(store, key))
                except CorruptData as error:
                    if on_corrupt is None:
                        raise
                    on_corrupt(error)
    return sorted(found, key=lambda r: (r.host, r.version, r.ended_ns))


def pass_over(fault: CorruptData) -> None:
    """For `on_corrupt`: goes on without a record that cannot be read, and says so."""
    log.warning("a host's record cannot be read, and does not count", error=str(fault))


def parse_record(data: bytes, key: str) -> HostRecord:
    """A record from its bytes, proven by its own digest. Raises CorruptData, naming `key`."""
    try:
        record = HostRecord(**unseal(data))
        wrong = [name for name, kind in _TYPES.items() if type(getattr(record, name)) is not kind]
        if wrong or not all(type(s) in (int, float) for s in record.seconds.values()):
            raise ValueError(f"not of their type: {', '.join(wrong) or 'seconds'}")
        if record_key(record) != key:
            raise ValueError("it names another host, version or attempt")
    except (ValueError, TypeError) as error:
        raise CorruptData(f"{key} is not a host's record: {error}. Nothing was read from it.") from error
    return record


def latest(records: Iterable[HostRecord]) -> dict[str, HostRecord]:
    """The record that counts for each host: one that served wins over any that did not, else the last that ended."""
    best: dict[str, HostRecord] = {}
    for record in records:
        known = best.get(record.host)
        if known is None or (record.outcome == SERVED, record.ended_ns) > (known.outcome == SERVED, known.ended_ns):
            best[record.host] = record
    return best


def outcome_of(records: Sequence[HostRecord]) -> str:
    """A version's outcome from all its records: "published" (no host was asked), "complete", "healed" or "partial".

    Healed means that every host made it in the end, though an attempt failed. A superseded host went on to a newer
    version, which is no failure.
    """
    if not records:
        return "published"
    counted = latest(records)
    if any(r.outcome not in (SERVED, SUPERSEDED) for r in counted.values()):
        return "partial"
    return "healed" if any(r.outcome not in (SERVED, SUPERSEDED) for r in records) else "complete"


def host_outcome(record: HostRecord) -> HostOutcome:
    """What a push reports of one record."""
    serves = record.version if record.outcome == SERVED else record.from_version
    return HostOutcome(record.host, record.outcome, serves, dict(record.seconds), record.error)
