"""Draws a run's figures with matplotlib, which is an extra: nothing else here needs it."""

from collections.abc import Sequence
from pathlib import Path

from weighbridge.errors import UsageError
from weighbridge.storage.history.stats import VersionStats

_DOTS_PER_INCH = 120


def draw(figures: Sequence[VersionStats], path: Path, *, title: str) -> None:
    """Three charts over versions, one above the other, as a PNG. Raises UsageError without matplotlib, or figures."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("a chart needs matplotlib: pip install 'weighbridge[charts]'. Nothing was written.") from error
    if not figures:
        raise UsageError("there is no version to draw yet: nothing was published after the base. Nothing was written.")
    versions = [s.version for s in figures]
    sheet = Figure(figsize=(9, 9), layout="constrained")
    changed, wire, times = sheet.subplots(3, 1, sharex=True)
    changed.set(title=title, ylabel="changed elements, %")
    changed.plot(versions, [100 * s.density for s in figures])
    wire.set(ylabel="bytes on the wire", yscale="symlog")
    wire.plot(versions, [s.wire_bytes for s in figures])
    ratio = wire.twinx()
    ratio.set(ylabel="model / wire")
    ratio.plot(versions, [s.ratio for s in figures], color="tab:orange")
    times.set(xlabel="version", ylabel="seconds, median of hosts")
    for name in ("fetch", "apply", "pause"):
        times.plot(versions, [getattr(s, f"{name}_seconds") for s in figures], label=name)
    times.legend()
    try:
        sheet.savefig(path, format="png", dpi=_DOTS_PER_INCH)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from error
