"""`compact`: the history's segments brought up to date, so that questions about long runs stay quick."""

from typing import Annotated

from cyclopts import Parameter

from weighbridge import logs
from weighbridge.cli.options import Json, LogJson, Store, settings_of, store_of
from weighbridge.cli.report import print_faults, print_json, print_line
from weighbridge.storage.history.compact import compact as bring_up_to_date


def compact(
    *,
    store: Store = None,
    mend: Annotated[
        bool, Parameter(negative=(), help="Read all segments first; make anew those that are not what they were.")
    ] = False,
    json: Json = False,
    log_json: LogJson = False,
) -> None:
    """Bring the history's segments up to date. Safe at any time, beside anybody."""
    settings = settings_of(("store",), store=store)
    logs.to_stderr(json_lines=log_json or settings.log_json)
    done = bring_up_to_date(store_of(settings), mend=mend)
    if json:
        print_json(
            {
                "head": done.head,
                "written": done.written,
                "removed": done.removed,
                "unreadable": list(map(str, done.faults)),
            }
        )
    else:
        print_line(f"head {done.head}: {len(done.written)} segments written, {len(done.removed)} removed")
    print_faults(done.faults)
