"""What a person reads in the UI of a sync: the version's weigh bill and the hosts' table. Must not decide anything; an
artifact that cannot be written is not worth a sync."""

import re
from collections.abc import Mapping, Sequence

import structlog
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from weighbridge.flows.connection import UNREACHABLE
from weighbridge.storage.audit.report import Audit
from weighbridge.values import HostOutcome, Manifest
from weighbridge.visible import visible

log = structlog.get_logger("weighbridge.artifacts")

HOST_PHASES = ("fetch", "apply", "pause", "drain", "reload")
"""What the hosts' table shows of a host's times; "drain" and "reload" are the engine's own, within the pause."""

HOSTS_KEY = "weighbridge-hosts"
BILL_KEY = "weighbridge-bill"
AUDIT_KEY = "weighbridge-audit"

_MARKDOWN = re.compile(r"[\\`*_\[\]()<>#!|~]")


def show_bill(manifest: Manifest, seconds: Mapping[str, float]) -> None:
    """Leaves the weigh bill of a version on the current run."""
    try:
        create_markdown_artifact(bill(manifest, seconds), key=BILL_KEY, description=f"version {manifest.version}")
    except UNREACHABLE as error:
        log.warning("weigh bill not shown", version=manifest.version, error=str(error))


def show_hosts(version: int, hosts: Sequence[HostOutcome]) -> None:
    """Leaves the table of hosts on the current run."""
    try:
        create_table_artifact(hosts_table(hosts), key=HOSTS_KEY, description=f"version {version}")
    except UNREACHABLE as error:
        log.warning("hosts' table not shown", version=version, error=str(error))


def show_audit(found: Audit) -> None:
    """Leaves what an audit read and found on the current run."""
    try:
        create_markdown_artifact(audit_page(found), key=AUDIT_KEY, description=f"head {found.head}")
    except UNREACHABLE as error:
        log.warning("audit not shown", error=str(error))


def audit_page(found: Audit) -> str:
    """An audit as markdown: what is right, what is not, and what nothing proves."""
    counts = ("manifests", "shards", "anchors", "records", "segments", "marks", "nbytes")
    lines = [f"## Version {found.head}: {'everything is right' if found.ok else 'something is not right'}", ""]
    lines += ["| right | |", "| --- | --- |", *(f"| {name} | {getattr(found, name):,} |" for name in counts), ""]
    lines += [f"- **{_cell(finding.key)}**: {_cell(finding.what)}" for finding in found.findings]
    return "\n".join([*lines, *(f"- not proven: {_cell(note)}" for note in found.notes)])


def bill(manifest: Manifest, seconds: Mapping[str, float]) -> str:
    """The weigh bill as markdown: what changed, what it weighs on the wire, and the time of each phase in seconds."""
    changed, wire = manifest.changed_elements, manifest.wire_bytes
    rows = [
        (
            "changed",
            f"{changed:,} of {manifest.model_elements:,} elements ({_share(changed, manifest.model_elements)})",
        ),
        ("tensors", f"{len({row.key.tensor for row in manifest.rows}):,} of {manifest.tensors:,}"),
        ("on the wire", f"{wire:,} bytes in {len(manifest.shards)} shard{'s' * (len(manifest.shards) != 1)}"),
        ("a changed element", f"{wire / changed:.2f} bytes" if changed else "nothing changed"),
        ("against the model", f"1 : {manifest.model_bytes / wire:,.0f}" if wire else f"{manifest.model_bytes:,} : 0"),
        ("state", f"`{manifest.state_digest[:16]}`"),
        ("manifest", f"`{manifest.digest[:16]}`"),
        *((phase, f"{taken:.3f} s") for phase, taken in seconds.items()),
        *((f"label {_cell(name)}", _cell(value)) for name, value in sorted(manifest.labels.items())),
    ]
    lines = [f"## Version {manifest.version} of {manifest.run_id}", "", "| | |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows)])


def hosts_table(hosts: Sequence[HostOutcome]) -> list[dict[str, str]]:
    """One row a host: what became of it, what it serves, how long it took, and why not if so."""
    return [
        {
            "host": host.host,
            "outcome": host.outcome,
            "serves": str(host.version) if host.version >= 0 else "?",
            **{phase: f"{host.seconds[phase]:.3f} s" for phase in HOST_PHASES if phase in host.seconds},
            "why": host.error,
        }
        for host in hosts
    ]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.3%}" if whole else "-"


def _cell(value: object) -> str:
    """Somebody's words as text: neither a table's border, nor a picture or a link that the UI would follow."""
    return _MARKDOWN.sub(r"\\\g<0>", visible(str(value).replace("\n", " ")))
