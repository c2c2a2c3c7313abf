"""`status`, `log`, `show`, `diff`, `blame`, `hosts`: questions to the store, which need neither trainer nor Prefect.
What cannot be read is named on standard error, and the rest is answered."""

from collections.abc import Iterable, Mapping
from typing import Annotated

from cyclopts import Parameter

from weighbridge.cli.options import Arrow, Json, Limit, Store, checked_limit, settings_of, store_of
from weighbridge.cli.report import (
    given_away,
    print_faults,
    print_json,
    print_line,
    print_table,
    share,
    size,
    write_arrow,
)
from weighbridge.storage.history import questions
from weighbridge.storage.history.alarms import alarms
from weighbridge.storage.history.questions import Blame, HostLine, TensorChange, VersionLine
from weighbridge.storage.history.reader import History
from weighbridge.storage.history.stats import VersionStats
from weighbridge.values import HostRecord, Label


def open_history(store: str | None) -> History:
    """The history of the run that the settings name. Raises LineageError: a root without a run is no empty answer."""
    history = History(store_of(settings_of(("store",), store=store)))
    _ = history.lineage.run
    return history


def log(*, store: Store = None, limit: Limit = None, json: Json = False, arrow: Arrow = None) -> None:
    """The versions of a run, newest first."""
    limit = checked_limit(limit)
    history = open_history(store)
    lines = questions.log(history, limit=limit)
    if not given_away(VersionLine, lines, json=json, arrow=arrow):
        print_table(
            ("version", "kind", "created", "changed", "density", "wire", "of model", "forms", "labels", "digest"),
            (
                (
                    line.version,
                    line.kind,
                    line.created,
                    line.changed_elements,
                    share(line.density),
                    size(line.wire_bytes),
                    share(line.wire_bytes / line.model_bytes if line.model_bytes else 0),
                    forms(line),
                    _labels(line.labels),
                    line.digest[:12],
                )
                for line in lines
            ),
        )
    print_faults(history.faults)


def show(version: int, *, store: Store = None, json: Json = False, arrow: Arrow = None) -> None:
    """One version: what changed, and what every host made of it.

    Parameters
    ----------
    version
        The version's number.
    arrow
        Gets the tensors.
    """
    history = open_history(store)
    detail = questions.show(history, version)
    if arrow is not None:
        write_arrow(arrow, TensorChange, detail.tensors)
    if json:
        print_json(detail)
    elif arrow is None:
        line = detail.line
        print_line(
            f"version {line.version} ({line.kind}), {detail.outcome}, created {line.created} by writer {line.writer}"
            + (", retired" if line.retired else "")
            + (", has an anchor" if line.has_anchor else "")
        )
        print_line(f"digest {line.digest}  state {line.state_digest}")
        print_line(
            f"{line.changed_elements} elements changed ({share(line.density)}), {size(line.wire_bytes)} on the wire"
        )
        if detail.hosts:
            _print_records(detail.hosts)
        _print_changes(detail.tensors)
    print_faults(history.faults)


def diff(older: int, newer: int, *, store: Store = None, json: Json = False, arrow: Arrow = None) -> None:
    """What changed between two versions, tensor by tensor.

    Parameters
    ----------
    older
        The version to start from.
    newer
        The version to end at.
    """
    history = open_history(store)
    changes = questions.diff(history, older, newer)
    if not given_away(TensorChange, changes, json=json, arrow=arrow):
        _print_changes(changes)
    print_faults(history.faults)


def blame(tensor: str, *, store: Store = None, limit: Limit = None, json: Json = False, arrow: Arrow = None) -> None:
    """The versions that changed a tensor, newest first.

    Parameters
    ----------
    tensor
        Its name in the checkpoint.
    """
    limit = checked_limit(limit)
    history = open_history(store)
    found = questions.blame(history, tensor)[:limit]
    if not given_away(Blame, found, json=json, arrow=arrow):
        print_table(
            ("version", "created", "changed", "bytes", "codec", "labels", "digest"),
            (
                (b.version, b.created, b.changed, b.nbytes, ",".join(b.codecs), _labels(b.labels), b.after[:12])
                for b in found
            ),
        )
    print_faults(history.faults)


def hosts(
    *,
    store: Store = None,
    host: Annotated[str | None, Parameter(help="Only this host's.")] = None,
    limit: Limit = None,
    json: Json = False,
    arrow: Arrow = None,
) -> None:
    """Who served what, when, and how long the pause was: every attempt of every host, newest first."""
    limit = checked_limit(limit)
    history = open_history(store)
    found = questions.hosts(history, host=host, limit=limit)
    if not given_away(HostRecord, found, json=json, arrow=arrow):
        _print_records(found)
    print_faults(history.faults)


def status(*, store: Store = None, json: Json = False, arrow: Arrow = None) -> None:
    """The hosts: which version each serves, how far behind it is, how its last sync went; and the alarms."""
    settings = settings_of(("store",), store=store)
    history = open_history(store)
    lines = questions.status(history)
    run, head = history.lineage.run.run_id, history.head
    outcome = questions.outcome(history, head)
    raised = alarms(history, lines, unchanged=settings.alarm_unchanged, allowed_staleness=settings.allowed_staleness)
    if arrow is not None:
        write_arrow(arrow, HostLine, lines)
    if json:
        unreadable = list(map(str, history.faults))
        answer = {"run": run, "head": head, "outcome": outcome, "hosts": lines}
        print_json({**answer, "alarms": raised, "unreadable": unreadable})
    elif arrow is None:
        print_line(f"run {run}, head {head} ({outcome})")
        for alarm in raised:
            print_line(f"ALARM {alarm.kind}: {alarm.what}")
        print_table(
            ("host", "serves", "behind", "last", "outcome", "stage", "at", "error"),
            ((h.host, h.version, h.lag, h.last_version, h.outcome, h.stage, h.at, h.error) for h in lines),
        )
    print_faults(history.faults)


def forms(line: VersionLine | VersionStats) -> str:
    """What is kept of a version beside its manifest, in words."""
    return " ".join(word for word, is_so in (("retired", line.retired), ("anchor", line.has_anchor)) if is_so)


def _labels(labels: Mapping[str, Label]) -> str:
    return " ".join(f"{name}={value}" for name, value in labels.items())


def _print_records(records: Iterable[HostRecord]) -> None:
    print_table(
        ("host", "version", "outcome", "stage", "from", "fetched", "engine", "pause s", "reload s", "ended", "error"),
        (
            (
                r.host,
                r.version,
                r.outcome,
                r.stage,
                r.from_version,
                size(r.fetched_bytes),
                r.engine,
                f"{r.seconds.get('pause', 0.0):.3f}",
                f"{r.seconds.get('reload', 0.0):.3f}",
                questions.iso(r.ended_ns),
                r.error,
            )
            for r in records
        ),
    )


def _print_changes(changes: Iterable[TensorChange]) -> None:
    print_table(
        ("tensor", "dtype", "shape", "changed", "bytes", "versions", "codec", "digest"),
        (
            (
                c.tensor,
                c.dtype,
                "x".join(map(str, c.shape)),
                c.changed,
                c.nbytes,
                c.steps,
                ",".join(c.codecs),
                c.after[:12],
            )
            for c in changes
        ),
    )
