"""`demo`: the main job on this machine."""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from weighbridge import logs
from weighbridge.cli.options import Json
from weighbridge.cli.report import print_json, print_line
from weighbridge.errors import DigestMismatch, UsageError


def demo(
    *,
    steps: Annotated[int, Parameter(help="RL-like steps, each with a push.")] = 6,
    keep: Annotated[bool, Parameter(negative=(), help="Leave the server and the hosts up for a look.")] = False,
    engine: Annotated[Literal["none", "vllm"], Parameter(help="vllm: host-0 has a real engine.")] = "none",
    engine_python: Annotated[Path | None, Parameter(help="The Python of an environment that has vLLM.")] = None,
    store: Annotated[str | None, Parameter(help="A URL to use instead of a directory of the demo's own.")] = None,
    json: Json = False,
) -> None:
    """A small model trains here, three hosts in processes of their own follow it, and every byte is proven.

    Takes under three minutes and 4 GB on two cores. In step 3 a host is killed in mid-apply, in step 4 another loses
    the store; both heal. Exits with 9 when one byte differs. With --engine vllm a vLLM server is started on host-0's
    replica and shows, after each version, how a text's log-probability moved.
    """
    if steps < 1:
        raise UsageError(f"{steps} steps: the demo needs at least one. Nothing was started.")
    # The run's own log, in the UI, has every line; the terminal is for the story.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "ERROR")
    logs.configure()
    from weighbridge.demo.engine import find_vllm
    from weighbridge.demo.run import run_demo
    from weighbridge.demo.story import print_bill, print_hosts

    vllm = find_vllm(engine_python) if engine == "vllm" else None
    # Being asked to end must also end what was started: hosts and server are stopped on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    result = run_demo(steps=steps, keep=keep, store=store, say=_aloud if json else print_line, vllm=vllm)
    if json:
        print_json(result)
    else:
        print_bill(result.bill, result.model_bytes)
        print_hosts(dict(result.hosts), dict(result.versions))
        wire = sum(weighed.wire_bytes for weighed in result.bill)
        print_line(
            f"{len(result.bill)} versions crossed in {wire:,} bytes a host; whole models would have been "
            f"{len(result.bill) * result.model_bytes:,}. {result.seconds:.0f} s in all."
        )
    if not result.ok:
        raise DigestMismatch(
            f"a host does not hold the trainer's weights: {dict(result.hosts)}, {dict(result.versions)}"
        )
    if keep:
        home = result.folder / "home"
        _aloud(f"UI: {result.ui_url}   (up, with the hosts, for a look)")
        _aloud(f"try: weighbridge log --store {result.store}")
        hosts = " ".join(map(str, result.pids))
        _aloud(f"end: kill {hosts}; WEIGHBRIDGE_HOME={home} weighbridge server stop; rm -r {result.folder}")
    elif not json:
        print_line("The UI went with the server; `weighbridge demo --keep` leaves it up.")


def _aloud(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
