"""Scrub: upkeep of a host's replica, carried out by the host's own worker: every byte of both copies is digested, and
what rotted is made again. Waits for its turn, so that it never meets a sync."""

from typing import Any

from prefect.client.schemas.objects import State
from prefect.states import Completed

from weighbridge.flows import names
from weighbridge.flows.context import host_here
from weighbridge.flows.ours import our_flow


@our_flow(name=names.SCRUB, flow_run_name="scrub of {host}")
def scrub(run: str, host: str) -> State[Any]:
    """Proves a host's replica, byte for byte, and mends it."""
    here = host_here(host, run)
    with here.turn:
        found = here.replica.scrub()
    said = f"{host}: {found.how}, {found.digested} parts digested, {found.repaired} made again."
    return Completed(message=" ".join([said, *(f"{note}." for note in found.notes)]))
