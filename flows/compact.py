"""Compact: a run's history brought up to date, by number of the run alone. Safe beside a trainer, hosts and another
one of itself. Must not know how segments are made."""

from weighbridge.errors import CorruptData
from weighbridge.flows import names
from weighbridge.flows.context import store_here
from weighbridge.flows.ours import our_flow
from weighbridge.storage.history.compact import compact as bring_up_to_date


@our_flow(name=names.COMPACT, flow_run_name="compact {run}")
def compact(run: str) -> int:
    """Writes what segments are due, and removes those that no reader takes; returns how many were written.

    Ends Failed, after doing all that it can, when a manifest or a record could not be read; the message names it.
    """
    done = bring_up_to_date(store_here(run))
    if done.faults:
        raise CorruptData(f"{len(done.written)} segments written; {'; '.join(map(str, done.faults))}")
    return len(done.written)
