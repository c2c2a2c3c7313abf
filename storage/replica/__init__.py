"""A host's replica: see `replica.py`, which composes the steps, and `pull.py`, which does all of them in one call."""

from weighbridge.storage.replica.plan import Plan
from weighbridge.storage.replica.pull import PullResult, bring_up
from weighbridge.storage.replica.recover import Recovery
from weighbridge.storage.replica.replica import Applied, Fetched, Replica, open_replica
from weighbridge.storage.replica.verify import FolderReport, Report, verify_folder

__all__ = [
    "Applied",
    "Fetched",
    "FolderReport",
    "Plan",
    "PullResult",
    "Recovery",
    "Replica",
    "Report",
    "bring_up",
    "open_replica",
    "verify_folder",
]
