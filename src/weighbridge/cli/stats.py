"""`stats`: a run in figures, as a table and as a chart."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from weighbridge.cli.history import forms, open_history
from weighbridge.cli.options import Arrow, Json, Limit, Store, checked_limit
from weighbridge.cli.report import given_away, print_faults, print_line, print_table, share, size
from weighbridge.storage.history.stats import VersionStats
from weighbridge.storage.history.stats import stats as figures


def stats(
    *,
    store: Store = None,
    limit: Limit = None,
    json: Json = False,
    arrow: Arrow = None,
    png: Annotated[Path | None, Parameter(help="Draw a chart into this file; needs weighbridge[charts].")] = None,
) -> None:
    """Density, ratio and times over versions, oldest first."""
    limit = checked_limit(limit)
    history = open_history(store)
    found = figures(history, limit=limit)
    if png is not None:
        from weighbridge.cli.chart import draw

        draw(found, png, title=history.lineage.run.run_id)
        print_line(f"drew {len(found)} versions into {png}")
    elif not given_away(VersionStats, found, json=json, arrow=arrow):
        print_table(
            (
                "version",
                "changed",
                "density",
                "wire",
                "model/wire",
                "step s",
                "hosts",
                "fetch s",
                "apply s",
                "pause s",
                "forms",
            ),
            (
                (
                    s.version,
                    s.changed,
                    share(s.density),
                    size(s.wire_bytes),
                    f"{s.ratio:.0f}",
                    f"{s.step_seconds:.1f}",
                    s.hosts,
                    f"{s.fetch_seconds:.3f}",
                    f"{s.apply_seconds:.3f}",
                    f"{s.pause_seconds:.3f}",
                    forms(s),
                )
                for s in found
            ),
        )
    print_faults(history.faults)
