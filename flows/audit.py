"""Audit: a run's store read and proven, by number of the run alone; red when something in it is not what it must be.
Only reads. Must not know how anything is proven."""

from weighbridge.flows import names
from weighbridge.flows.artifacts import show_audit
from weighbridge.flows.context import store_here
from weighbridge.flows.ours import our_flow
from weighbridge.storage.audit.audit import audit as prove


@our_flow(name=names.AUDIT, flow_run_name="audit {run}")
def audit(run: str, chain: bool = False) -> int:
    """Proves everything (`chain`: the manifests and segments alone), and leaves what was found as an artifact; returns
    the head. Ends Failed, naming the first break."""
    found = prove(store_here(run), chain=chain)
    show_audit(found)
    found.demand()
    return found.head
