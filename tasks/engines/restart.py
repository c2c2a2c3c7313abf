"""Bringing an engine back that holds nobody knows what: a user's command that restarts it on the replica's `current`
folder, and the wait until it answers. Must not know hosts, nor what was being loaded."""

import time
from pathlib import Path

import structlog

from weighbridge.errors import EngineError
from weighbridge.tasks.engines.command import Command, check_program, parsed_command, run_command
from weighbridge.tasks.engines.contract import Engine
from weighbridge.tasks.engines.control import EngineDenied

log = structlog.get_logger("weighbridge.engine")

_ASK_SECONDS, _PAUSE_SECONDS = 30.0, 1.0


def await_engine(engine: Engine, *, seconds: float) -> Engine:
    """Waits at most `seconds` for an engine that is still starting, and returns it. Raises EngineError; at once what
    only a person can change: UsageError, EngineDenied."""
    until = time.monotonic() + seconds
    while True:
        try:
            engine.check(seconds=min(_ASK_SECONDS, seconds))
            return engine
        except EngineError as error:
            if isinstance(error, EngineDenied) or time.monotonic() >= until:
                raise
            log.info("waiting for the engine", engine=engine.name, error=str(error))
        time.sleep(_PAUSE_SECONDS)


class Restart:
    """A user's command that restarts the engine: "{path}" in it stands for the folder that the engine must load, which
    is in the environment too, as WEIGHBRIDGE_PATH. It returns once the engine is on its way, or up.

    Raises UsageError for a command that cannot be one, or whose program is not there.
    """

    def __init__(self, command: Command, engine: Engine, *, seconds: float) -> None:
        self._words = parsed_command("restart", command, filled=("path",))
        check_program("restart", self._words)
        self._engine = engine
        self._seconds = seconds

    def __call__(self, folder: Path) -> None:
        """Restarts the engine on a folder, and waits until it answers: `seconds` for each. Raises EngineError."""
        run_command("restart", self._words, {"path": str(folder)}, seconds=self._seconds)
        await_engine(self._engine, seconds=self._seconds)
