"""`status`, `log`, `show`, `diff`: questions to the store, which need neither the trainer nor Prefect."""

from typing import Annotated

from cyclopts import Parameter

from weighbridge.cli.options import Json, Store, settings_of, store_of
from weighbridge.cli.report import print_json, print_line, print_table, share, size
from weighbridge.storage import history
from weighbridge.storage.lineage import Lineage


def _lineage(store: str | None) -> Lineage:
    lineage = Lineage(store_of(settings_of(("store",), store=store)))
    _ = lineage.run  # a root without a run is an error, not an empty answer
    return lineage


def log(
    *, store: Store = None, limit: Annotated[int | None, Parameter(name=["--limit", "-n"])] = None, json: Json = False
) -> None:
    """The versions of a run, newest first.

    Parameters
    ----------
    limit
        At most so many.
    """
    lines = history.log(_lineage(store), limit=limit)
    if json:
        for line in lines:
            print_json(line)
        return
    print_table(
        ("version", "kind", "created", "changed", "density", "wire", "of model", "labels", "digest"),
        (
            (
                line.version,
                line.kind,
                line.created,
                line.changed_elements,
                share(line.density),
                size(line.wire_bytes),
                share(line.wire_bytes / line.model_bytes if line.model_bytes else 0),
                " ".join(f"{k}={v}" for k, v in line.labels.items()),
                line.digest[:12],
            )
            for line in lines
        ),
    )


def show(version: int, *, store: Store = None, json: Json = False) -> None:
    """One version: what changed, and what every host made of it.

    Parameters
    ----------
    version
        The version's number.
    """
    detail = history.show(_lineage(store), version)
    if json:
        print_json(detail)
        return
    line = detail.line
    print_line(
        f"version {line.version} ({line.kind}), {detail.outcome}, created {line.created} by writer {line.writer}"
    )
    print_line(f"digest {line.digest}  state {line.state_digest}")
    print_line(f"{line.changed_elements} elements changed ({share(line.density)}), {size(line.wire_bytes)} on the wire")
    if detail.hosts:
        print_table(
            ("host", "outcome", "stage", "from", "fetched", "pause s", "ended", "error"),
            (
                (
                    r.host,
                    r.outcome,
                    r.stage,
                    r.from_version,
                    size(r.fetched_bytes),
                    f"{r.seconds.get('pause', 0.0):.3f}",
                    history.iso(r.ended_ns),
                    r.error,
                )
                for r in detail.hosts
            ),
        )
    _print_changes(detail.tensors)


def diff(older: int, newer: int, *, store: Store = None, json: Json = False) -> None:
    """What changed between two versions, tensor by tensor.

    Parameters
    ----------
    older
        The version to start from.
    newer
        The version to end at.
    """
    changes = history.diff(_lineage(store), older, newer)
    if json:
        for change in changes:
            print_json(change)
        return
    _print_changes(changes)


def status(*, store: Store = None, json: Json = False) -> None:
    """The hosts: which version each serves, how far behind it is, how its last sync went."""
    lineage = _lineage(store)
    lines = history.status(lineage)
    if json:
        head = lineage.head()
        outcome = history.outcome(lineage, head)
        print_json({"run": lineage.run.run_id, "head": head, "outcome": outcome, "hosts": lines})
        return
    head = lineage.head()
    print_line(f"run {lineage.run.run_id}, head {head} ({history.outcome(lineage, head)})")
    print_table(
        ("host", "serves", "behind", "last", "outcome", "stage", "at", "error"),
        ((h.host, h.version, h.lag, h.last_version, h.outcome, h.stage, h.at, h.error) for h in lines),
    )


def _print_changes(changes: tuple[history.TensorChange, ...]) -> None:
    print_table(
        ("tensor", "dtype", "shape", "changed", "versions", "codec", "digest"),
        (
            (c.tensor, c.dtype, "x".join(map(str, c.shape)), c.changed, c.steps, ",".join(c.codecs), c.after[:12])
            for c in changes
        ),
    )
