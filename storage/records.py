"""The hosts' records: one immutable object an attempt, and what they say together. A version's outcome is a function of
these records and nothing else."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from weighbridge.errors import CorruptData
from weighbridge.storage import strict_json
from weighbridge.storage.manifest import check_name
from weighbridge.storage.stores.contract import Store
from weighbridge.values import HostOutcome, HostRecord

SERVED = "served"
SUPERSEDED = "superseded"
_TYPES: Mapping[str, type] = {
    **dict.fromkeys(("run_id", "host", "attempt", "outcome", "stage", "state_digest", "engine", "error", "by"), str),
    **dict.fromkeys(("version", "from_version", "started_ns", "ended_ns", "fetched_bytes", "repaired"), int),
    "seconds": dict,
}


def record_key(record: HostRecord) -> str:
    """Where a record stands; unique to its attempt."""
    return f"hosts/{check_name('host', record.host)}/{record.version:012d}-{record.attempt}"


def write_record(store: Store, record: HostRecord) -> None:
    """Writes one record; repeating it is safe, since the name is unique to the attempt."""
    # An error's text may hold a file name that is no Unicode; it must not make the record unreadable.
    text = json.dumps(asdict(record), sort_keys=True, ensure_ascii=False, allow_nan=False)
    data = text.encode(errors="replace")
    store.put(record_key(record), data)


def read_records(store: Store, *, host: str | None = None, version: int | None = None) -> list[HostRecord]:
    """All records of a root, or those of one host or one version, by host, version and the time they ended.

    Raises CorruptData for a record that cannot be read.
    """
    hosts = [check_name("host", host)] if host is not None else list(store.folders("hosts"))
    keys = [info.key for name in hosts for info in store.list(f"hosts/{name}")]
    wanted = "" if version is None else f"/{version:012d}-"
    found = [_parse(store.get(key), key) for key in keys if wanted in key]
    return sorted(found, key=lambda r: (r.host, r.version, r.ended_ns))


def _parse(data: bytes, key: str) -> HostRecord:
    try:
        fields = strict_json.parse(data)
        if not isinstance(fields, dict):
            raise ValueError("it is no JSON object")
        record = HostRecord(**fields)
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
