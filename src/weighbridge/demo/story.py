"""What the demo tells while it runs, and the two tables it ends with. Must not know how anything is done."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weighbridge.cli.report import print_table, share, size
from weighbridge.values import HostOutcome, PushResult

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Weighed:
    """One line of the weigh bill. Seconds of fetch, apply and pause are the slowest host's."""

    version: int
    changed: int
    density: float
    wire_bytes: int
    bytes_per_changed: float
    times_smaller: float
    gather: float
    encode: float
    commit: float
    fetch: float
    apply: float
    pause: float
    total: float
    outcome: str


def weigh(result: PushResult, hosts: Sequence[HostOutcome], outcome: str) -> Weighed:
    """What a push came to, with what its hosts said in the end."""

    def slowest(phase: str) -> float:
        return max((host.seconds.get(phase, 0.0) for host in hosts), default=0.0)

    return Weighed(
        version=result.version,
        changed=result.changed_elements,
        density=result.density,
        wire_bytes=result.wire_bytes,
        bytes_per_changed=result.wire_bytes / result.changed_elements if result.changed_elements else 0.0,
        times_smaller=result.model_bytes / result.wire_bytes if result.wire_bytes else 0.0,
        gather=result.seconds.get("gather", 0.0),
        encode=result.seconds.get("encode", 0.0),
        commit=result.seconds.get("commit", 0.0),
        fetch=slowest("fetch"),
        apply=slowest("apply"),
        pause=slowest("pause"),
        total=result.seconds.get("total", 0.0),
        outcome=outcome,
    )


def print_bill(bill: Sequence[Weighed], model_bytes: int) -> None:
    """The weigh bill: a line a version."""
    print_table(
        ("version", "changed", "of all", "wire", "bytes/changed", "model is", "gather", "encode", "commit", "fetch",
         "apply", "pause", "push", "outcome"),
        (
            (w.version, f"{w.changed:,}", share(w.density), size(w.wire_bytes), f"{w.bytes_per_changed:.2f}",
             f"{w.times_smaller:.0f}x larger",
             *(f"{seconds:.2f} s" for seconds in (w.gather, w.encode, w.commit, w.fetch, w.apply)),
             f"{1000 * w.pause:.0f} ms", f"{w.total:.1f} s", w.outcome)
            for w in bill
        ),
        title=f"Weigh bill: what crossed, for a model of {size(model_bytes)}",
    )  # fmt: skip


def print_hosts(found: dict[str, str], versions: dict[str, int]) -> None:
    """The hosts' table: what their disks hold, re-read and compared with the trainer's own weights."""
    print_table(
        ("host", "serves", "its disk, against the trainer's weights"),
        ((host, f"version {versions[host]}", word) for host, word in found.items()),
        title="Hosts",
    )
