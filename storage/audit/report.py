"""What an audit found. Must not know how."""

from dataclasses import dataclass, field

from weighbridge.errors import CorruptData, what_happened


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not what it must be: the object's key, and what is wrong with it."""

    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.key}: {self.what}"


@dataclass(slots=True)
class Audit:
    """What was read and proven, by number of objects, and what was not: `findings` in the order in which they were met,
    the first break first; `notes` name what nothing proves and nothing needs (what dead attempts left, strangers)."""

    head: int
    manifests: int = 0
    shards: int = 0
    anchors: int = 0
    records: int = 0
    segments: int = 0
    marks: int = 0
    nbytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything is what it must be."""
        return not self.findings

    def found(self, key: str, what: str) -> None:
        """Adds a finding."""
        self.findings.append(_finding(key, what))

    def broke(self, key: str, what: str) -> None:
        """Adds the break of the chain, before what other objects said against it already."""
        self.findings.insert(0, _finding(key, what))

    def demand(self) -> None:
        """Raises CorruptData, naming the first break, unless there is none."""
        if self.findings:
            more = f" ({len(self.findings) - 1} more follow from it or stand beside it)" if self.findings[1:] else ""
            raise CorruptData(f"the audit broke at {self.findings[0]}{more}. Nothing was changed; restore it.")


def _finding(key: str, what: str) -> Finding:
    """Says no more than what is wrong: the rest stands once, in `Audit.demand`."""
    told = what_happened(what)
    return Finding(key, told.removeprefix(f"{key}: ").removeprefix(f"{key} "))
