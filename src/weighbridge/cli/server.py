"""`server start | stop | where`: the embedded Prefect server of this machine."""

from weighbridge.cli.options import Json, settings_of
from weighbridge.cli.report import print_json, print_line
from weighbridge.errors import OrchestrationError
from weighbridge.flows.server import ServerInfo, ensure_server, stop_server, where_is


def start(*, json: Json = False) -> None:
    """Start the server (its UI and an embedded PostgreSQL included), or say where it already runs."""
    _say(ensure_server(settings_of().home), json=json)


def stop(*, json: Json = False) -> None:
    """Stop the server and its database. Runs and versions are kept."""
    stopped = stop_server(settings_of().home)
    if json:
        print_json({"stopped": stopped})
    else:
        print_line("stopped" if stopped else "it did not run")


def where(*, json: Json = False) -> None:
    """Where the server runs. Exits with 14 when it does not."""
    info = where_is(settings_of().home)
    if info is None:
        raise OrchestrationError("no embedded server runs here: `weighbridge server start` starts one.")
    _say(info, json=json)


def _say(info: ServerInfo, *, json: bool) -> None:
    if json:
        print_json({"api_url": info.api_url, "ui_url": info.ui_url, "pid": info.pid})
    else:
        print_line(f"UI {info.ui_url}")
        print_line(f"PREFECT_API_URL={info.api_url}")
