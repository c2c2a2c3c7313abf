"""What a push must bring, and the check of what it does bring by names, dtypes and shapes. Must not know torch: whoever
holds tensors says what they are."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from weighbridge.errors import GatherError, UsageError
from weighbridge.values import TensorSpec

CASTABLE = frozenset({"F32", "BF16", "F16"})
"""Dtypes that are converted to each other, to the base's: a trainer's masters against a served checkpoint."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """The base's tensors by name, and what a trainer may do otherwise.

    `aliases` maps the name under which a tied tensor is exported to the stored name whose bytes it must equal.
    `unchanged` are glob patterns (case matters) over stored names that need not come; one that comes is taken.
    """

    specs: Mapping[str, TensorSpec]
    aliases: Mapping[str, str] = field(default_factory=dict)
    unchanged: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        wrong = [f"{alias!r} is a stored tensor itself" for alias in self.aliases if alias in self.specs]
        wrong += [
            f"{alias!r} is tied to {name!r}, which the base does not have"
            for alias, name in self.aliases.items()
            if name not in self.specs
        ]
        if wrong:
            raise UsageError(
                f"aliases: {'; '.join(wrong)}. An alias maps a name that only the trainer uses to a name of the base."
            )

    def wants(self, name: str) -> TensorSpec | None:
        """What a tensor exported under this name must be; for a tied name, what it is tied to. None: not expected."""
        return self.specs.get(self.aliases.get(name, name))

    def may_stay_away(self, name: str) -> bool:
        """Whether an `unchanged` pattern matches a stored name."""
        return any(fnmatchcase(name, pattern) for pattern in self.unchanged)


@dataclass(frozen=True, slots=True)
class Come:
    """What came on one rank: the names as they were exported, and the digests of tied tensors."""

    names: frozenset[str]
    digests: Mapping[str, bytes]


class Tally:
    """Takes in what came, one tensor after the other, and remembers everything that is wrong. One thread, one push."""

    def __init__(self, expect: Expectation) -> None:
        self._expect = expect
        self._came: set[str] = set()
        self._elsewhere: frozenset[str] = frozenset()
        self._extra: list[str] = []
        self._twice: list[str] = []
        self._unfit: list[str] = []
        self._ties: dict[str, str] = {}
        self._digests: dict[str, bytes] = {}
        self._tied_to = frozenset(expect.aliases.values())

    @property
    def sound(self) -> bool:
        """Whether nothing was wrong so far."""
        return not (self._extra or self._twice or self._unfit)

    def admit(self, name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec | None:
        """Checks one tensor; gives what it has to become, or None when it is refused, which `settle` will say."""
        spec = self._expect.wants(name)
        if name in self._came:
            self._twice.append(name)
            return None
        self._came.add(name)
        if spec is None:
            self._extra.append(name)
            return None
        reasons = []
        if shape != spec.shape:
            reasons.append(f"shape {_shape(shape)}, but the base has {_shape(spec.shape)}")
        if dtype != spec.dtype and not {dtype, spec.dtype} <= CASTABLE:
            reasons.append(f"dtype {dtype}, but the base has {spec.dtype}")
        if reasons:
            self._unfit.append(f"{name}: {' and '.join(reasons)}")
            return None
        return spec

    def refuse(self, name: str, reason: str) -> None:
        """Records a tensor that cannot be taken whatever the base says."""
        (self._twice if name in self._came else self._unfit).append(name if name in self._came else f"{name}: {reason}")
        self._came.add(name)

    def suggest(self, name: str, stored: str) -> None:
        """Records that an unexpected tensor is the same memory as an expected one, so that the error can say so."""
        self._ties[name] = stored

    def needs_digest(self, name: str) -> bool:
        """Whether the bytes under this name are compared: those of a tied tensor, and of what it is tied to."""
        return name in self._expect.aliases or name in self._tied_to

    def prove(self, name: str, digest: bytes) -> None:
        """Records the digest of the bytes that came under this name, once converted to the base's dtype."""
        self._digests[name] = digest

    @property
    def brought(self) -> frozenset[str]:
        """The stored names that came, whatever they were."""
        return frozenset(name for name in self._came if name in self._expect.specs)

    def come(self) -> "Come":
        """What came here, for the other ranks of the trainer."""
        return Come(frozenset(self._came), dict(self._digests))

    def join(self, others: Iterable["Come"]) -> None:
        """Takes in what came on other ranks: a tensor is missing only when it came on none."""
        for other in others:
            self._elsewhere |= other.names
            for name, digest in other.digests.items():
                self._digests.setdefault(name, digest)

    def settle(self) -> None:
        """Everything came: raises GatherError, naming all that is wrong, unless nothing is."""
        missing = [
            name
            for name in self._expect.specs
            if name not in self._came and name not in self._elsewhere and not self._expect.may_stay_away(name)
        ]
        untied = [self._untied(alias, name) for alias, name in self._expect.aliases.items() if alias in self._digests]
        sections = [
            _section("missing", missing),
            _section("not in the base", self._extra),
            _section("came more than once", self._twice),
            _section("not as in the base", self._unfit),
            _section("not equal to what they are tied to", [reason for reason in untied if reason]),
        ]
        found = [section for section in sections if section]
        if found:
            raise GatherError(
                "the tensors pushed do not match the base. Nothing was published.\n"
                + "\n".join(found)
                + "".join(f"\n{hint}" for hint in self._hints(missing))
            )

    def _untied(self, alias: str, name: str) -> str:
        if name not in self._digests:
            came = name in self._came or name in self._elsewhere
            return "" if came else f"{alias}: {name} did not come, so they cannot be compared"
        return "" if self._digests[alias] == self._digests[name] else f"{alias}: its bytes differ from those of {name}"

    def _hints(self, missing: list[str]) -> Iterable[str]:
        if self._ties:
            pairs = ", ".join(f"{alias!r}: {name!r}" for alias, name in sorted(self._ties.items()))
            yield f"Tied tensors are stored once: pass aliases={{{pairs}}}."
        for prefix in ("module.", "_orig_mod."):
            if self._extra and missing and all(name.startswith(prefix) for name in self._extra):
                yield f"All names begin with {prefix!r}: push the module that is wrapped."
        if missing:
            yield "Tensors that the trainer never exports can be named by unchanged=[patterns]."


def _section(title: str, entries: list[str]) -> str:
    return f"{title} ({len(entries)}):" + "".join(f"\n  - {entry}" for entry in entries) if entries else ""


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) if shape else "of a scalar"
