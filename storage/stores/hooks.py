"""Steps that some stores want of their own: a volume that must be committed after a publish, or reloaded before a read.
Named in the settings of the host or trainer itself, as a shell command or `module:function`. Must not know a store."""

import contextlib
import importlib
import os
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from weighbridge.errors import StoreError, UsageError

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_TAIL = 2000


@dataclass(frozen=True, slots=True)
class HookEvent:
    """What a hook is told; a command finds it in WEIGHBRIDGE_EVENT, _STORE and _VERSION. `version` is the one just
    published, or the one about to be read (-1: the newest)."""

    event: Literal["published", "read"]
    store: str
    version: int


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks of one store; "" is none. `seconds` bounds a command; a function bounds itself."""

    after_publish: str = ""
    before_read: str = ""
    seconds: float = 60.0

    def __post_init__(self) -> None:
        """Finds functions right away, so that a misspelt one is told at the start. Raises UsageError."""
        for hook in (self.after_publish, self.before_read):
            if _FUNCTION.fullmatch(hook):
                _function(hook)

    def published(self, store: str, version: int) -> None:
        """Runs after a version's commit. Raises StoreError; the version stands all the same."""
        self._run(self.after_publish, HookEvent("published", store, version))

    def reading(self, store: str, version: int = -1) -> None:
        """Runs before a host looks for a version. Raises StoreError; nothing was read yet."""
        self._run(self.before_read, HookEvent("read", store, version))

    def _run(self, hook: str, event: HookEvent) -> None:
        if not hook:
            return
        if _FUNCTION.fullmatch(hook):
            _call(hook, event)
        else:
            self._command(hook, event)

    def _command(self, command: str, event: HookEvent) -> None:
        told = {
            "WEIGHBRIDGE_EVENT": event.event,
            "WEIGHBRIDGE_STORE": event.store,
            "WEIGHBRIDGE_VERSION": str(event.version),
        }
        process = subprocess.Popen(
            command,
            shell=True,
            env={**os.environ, **told},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=self.seconds)
        except subprocess.TimeoutExpired as late:
            raise _failed(command, event, f"it did not end within {self.seconds:.0f} s") from late
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started and left in its group goes with it
            process.wait()
        if process.returncode:
            raise _failed(command, event, f"it ended with {process.returncode}: {output[-_TAIL:].strip()}")


def _call(hook: str, event: HookEvent) -> None:
    function = _function(hook)
    try:
        function(event)
    except Exception as error:  # somebody else's code: whatever it raises is told as the hook's failure
        raise _failed(hook, event, f"it raised {type(error).__name__}: {error}") from error


def _function(hook: str) -> Callable[[HookEvent], object]:
    module, _, name = hook.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"the hook {hook!r} names no function: {error}. Write module:function.") from error
    if not callable(function):
        raise UsageError(f"the hook {hook!r} is not a function. Write module:function, or a command.")
    found: Callable[[HookEvent], object] = function
    return found


def _failed(hook: str, event: HookEvent, why: str) -> StoreError:
    kept = "The version is committed and stands" if event.event == "published" else "Nothing was read or changed"
    return StoreError(f"the hook {hook!r} of {event.store} failed: {why}. {kept}; repair the hook and run it again.")
