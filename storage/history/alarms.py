"""What in a run's history somebody should look at now. Only reads; who is told is decided elsewhere."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from weighbridge.storage.alarm_labels import FROZEN, FROZEN_IN, NONFINITE, NONFINITE_IN
from weighbridge.storage.history.questions import HostLine
from weighbridge.storage.history.reader import History

RECENT = 10
"""For so many versions what a version says of itself is an alarm; then it is history."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """`kind` is "unchanged", "nonfinite", "frozen" or "behind", `version` the newest that it is about, `host` the host
    if it is about one."""

    kind: str
    version: int
    host: str
    what: str


def alarms(
    history: History, hosts: Iterable[HostLine], *, unchanged: int, allowed_staleness: int | None
) -> tuple[Alarm, ...]:
    """Every alarm of a run as it stands: `unchanged` or more versions in a row, up to the head, without a changed byte;
    what the last RECENT versions say of themselves (numbers that turned NaN or infinite, tensors outside the trainable
    set that changed); hosts that are more than `allowed_staleness` versions behind (None: any lag is allowed)."""
    found = []
    row = _unchanged(history)
    if row >= unchanged:
        what = f"the last {row} versions changed not one byte: does the trainer push what it trains?"
        found.append(Alarm("unchanged", history.head, "", what))
    found += _labelled(history)
    for host in hosts:
        if allowed_staleness is not None and host.lag > allowed_staleness:
            serves = f"serves version {host.version}" if host.version >= 0 else "serves nothing that was published"
            what = f"host {host.host} {serves}, {host.lag} behind the head; {allowed_staleness} are allowed"
            found.append(Alarm("behind", history.head, host.host, what))
    return tuple(found)


def _labelled(history: History) -> Iterator[Alarm]:
    recent = history.versions(max(1, history.head - RECENT + 1), history.head, columns=("version", "labels"))
    for row in reversed(recent.to_pylist()):
        labels = json.loads(row["labels"])
        if NONFINITE in labels:
            where = labels.get(NONFINITE_IN)
            what = f"version {row['version']}: {labels[NONFINITE]} elements turned NaN or infinite: {where}"
            yield Alarm("nonfinite", row["version"], "", what)
        if FROZEN in labels:
            what = f"version {row['version']}: tensors outside the trainable set changed: {labels.get(FROZEN_IN)}"
            yield Alarm("frozen", row["version"], "", what)


def _unchanged(history: History) -> int:
    """How many versions up to the head, in a row, changed nothing; looks back only while it must."""
    count, step = 0, 1
    while count < history.head:
        last = history.head - count
        changed = history.versions(max(1, last - step + 1), last, columns=("changed",)).column("changed").to_pylist()
        for number in reversed(changed):
            if number:
                return count
            count += 1
        if len(changed) < step:
            return count
        step *= 2
    return count
