"""An engine behind commands: whatever reloads it, as an argument list with {path} and {version} in it. Runs no shell,
so that nothing in a path or a number is ever interpreted; whoever wants one writes `sh -c`."""

import os
import shlex
import shutil
import signal
import string
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from weighbridge.errors import EngineError, UsageError

_TAIL_BYTES = 2000

Command = str | Sequence[str]


class CommandEngine:
    """See Engine. Only `reload` is needed; the others are skipped when not given.

    Each is a command line (split as a shell would, run without one) or an argument list; in every argument "{path}"
    stands for the folder to load and "{version}" for its number, and both are in the environment too, as
    WEIGHBRIDGE_PATH and WEIGHBRIDGE_VERSION. Exit code 0 means done. `read_version` must print a number.
    Raises UsageError for a command that cannot be one.
    """

    name = "command"

    def __init__(
        self,
        reload: Command,
        *,
        pause: Command | None = None,
        flush: Command | None = None,
        set_version: Command | None = None,
        read_version: Command | None = None,
        checksum: Command | None = None,
        resume: Command | None = None,
        probe: Command | None = None,
        maps_files: bool = False,
    ) -> None:
        given = {
            "reload": reload,
            "pause": pause,
            "flush": flush,
            "set_version": set_version,
            "read_version": read_version,
            "checksum": checksum,
            "resume": resume,
            "probe": probe,
        }
        self._commands = {verb: parsed_command(verb, command) for verb, command in given.items() if command is not None}
        self._places: dict[str, str] = {"path": "", "version": ""}
        self.maps_files = maps_files

    def check(self, *, seconds: float) -> None:
        """See Engine. Raises UsageError for a program that is not there."""
        for verb, words in self._commands.items():
            check_program(verb, words)

    def is_paused(self, *, seconds: float) -> bool | None:
        """See Engine. A command does not say."""
        return None

    def pause(self, *, seconds: float) -> None:
        """See Engine."""
        self._call("pause", seconds)

    def reload(self, folder: Path, version: int, *, seconds: float) -> None:
        """See Engine."""
        self._places = {"path": str(folder), "version": str(version)}
        self._call("reload", seconds)

    def flush(self, *, seconds: float) -> None:
        """See Engine."""
        self._call("flush", seconds)

    def set_version(self, version: int, *, seconds: float) -> None:
        """See Engine."""
        self._places = {**self._places, "version": str(version)}
        self._call("set_version", seconds)

    def read_version(self, *, seconds: float) -> int | None:
        """See Engine. None when no command was given."""
        if "read_version" not in self._commands:
            return None
        said = self._call("read_version", seconds).strip()
        try:
            return int(said)
        except ValueError:
            raise EngineError(f"the engine's read_version command printed {said[-200:]!r}, not a version.") from None

    def checksum(self, *, seconds: float) -> str | None:
        """See Engine. What the command prints; None when none was given."""
        return self._call("checksum", seconds).strip() or None

    def resume(self, *, seconds: float) -> None:
        """See Engine."""
        self._call("resume", seconds)

    def probe(self, *, seconds: float) -> None:
        """See Engine."""
        self._call("probe", seconds)

    def _call(self, verb: str, seconds: float) -> str:
        if verb not in self._commands:
            return ""
        return run_command(verb, self._commands[verb], self._places, seconds=seconds)


def check_program(verb: str, words: Sequence[str]) -> None:
    """Raises UsageError for a command whose program is not there."""
    if "{" not in words[0] and shutil.which(words[0]) is None:
        raise UsageError(f"the engine's {verb} command cannot be run: there is no program {words[0]!r}.")


def run_command(verb: str, words: Sequence[str], places: Mapping[str, str], *, seconds: float) -> str:
    """Runs a command as `parsed_command` gave it, with its places filled in; returns the start of what it said.

    Raises EngineError, which names the verb, for one that cannot be run, fails, or takes longer (and is then killed).
    """
    arguments = [word.format_map(places) for word in words]
    environment = {f"WEIGHBRIDGE_{place.upper()}": value for place, value in places.items()}
    # A file, not a pipe: a daemon that the command leaves behind may keep it open without holding us up.
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                arguments,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError(f"the engine's {verb} command could not be run: {arguments[0]}: {error}") from error
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise EngineError(
                f"the engine's {verb} command did not end within {seconds:g} s and was killed: "
                f"{shlex.join(arguments)}{_tail(output)}"
            ) from None
        if code != 0:
            raise EngineError(f"the engine's {verb} command ended with {code}: {shlex.join(arguments)}{_tail(output)}")
        output.seek(0)
        return output.read(_TAIL_BYTES).decode(errors="replace")


def parsed_command(verb: str, command: Command, *, filled: Sequence[str] = ("path", "version")) -> tuple[str, ...]:
    """A command's words, its places still in them. Raises UsageError for what cannot be a command."""
    try:
        words = tuple(shlex.split(command)) if isinstance(command, str) else tuple(command)
        places = {place for word in words for _, place, _, _ in string.Formatter().parse(word) if place is not None}
    except ValueError as error:
        raise UsageError(
            f"engine command {verb!r} cannot be read: {error}. Write a brace as {{{{ or }}}} when it stands for itself."
        ) from None
    if not words:
        raise UsageError(f"engine command {verb!r} is empty.")
    if unknown := places - set(filled):
        known = " and ".join(f"{{{place}}}" for place in filled)
        raise UsageError(f"engine command {verb!r} names {sorted(unknown)}; only {known} can be filled in.")
    return words


def _tail(output: BinaryIO) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _TAIL_BYTES))
    said = output.read().decode(errors="replace").strip()
    return f"; the end of what it said:\n{said}" if said else "; it said nothing"
