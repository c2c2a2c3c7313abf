"""What a version says about itself that somebody should look at, as labels of its manifest: numbers that are none, and
tensors that should not have changed. Must not know how they were found."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from weighbridge.values import Label

NONFINITE = "alarm.nonfinite"
NONFINITE_IN = "alarm.nonfinite_in"
FROZEN = "alarm.frozen"
FROZEN_IN = "alarm.frozen_in"
_NAMED = 20


def alarm_labels(turned: Mapping[str, int], changed: Iterable[str], *, trainable: Sequence[str]) -> dict[str, Label]:
    """The labels, none when all is well. `turned` has by tensor how many elements turned NaN or infinite, `trainable`
    the patterns (case matters) of tensors that may change; with none of them all may."""
    labels: dict[str, Label] = {}
    if turned:
        labels[NONFINITE] = sum(turned.values())
        labels[NONFINITE_IN] = _listed([f"{tensor} ({count})" for tensor, count in sorted(turned.items())])
    if trainable:
        frozen = sorted({name for name in changed if not any(fnmatchcase(name, pattern) for pattern in trainable)})
        if frozen:
            labels[FROZEN] = len(frozen)
            labels[FROZEN_IN] = _listed(frozen)
    return labels


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
