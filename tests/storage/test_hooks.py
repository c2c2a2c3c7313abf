"""Hooks: what they are told, and what a failed or endless one does."""

import os
import threading
from pathlib import Path

import pytest

from weighbridge.errors import StoreError, UsageError
from weighbridge.storage.stores.hooks import HookEvent, Hooks

told: list[HookEvent] = []


def remember(event: HookEvent) -> None:
    told.append(event)


def fail(event: HookEvent) -> None:
    raise RuntimeError("the volume is busy")


def test_a_function_is_told_what_was_published_and_what_is_read() -> None:
    told.clear()
    hooks = Hooks(after_publish=f"{__name__}:remember", before_read=f"{__name__}:remember")
    hooks.published("/shared/run", 7)
    hooks.reading("/shared/run")
    assert told == [HookEvent("published", "/shared/run", 7), HookEvent("read", "/shared/run", -1)]


def test_a_command_finds_it_in_its_environment(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    command = f'echo "$WEIGHBRIDGE_EVENT $WEIGHBRIDGE_STORE $WEIGHBRIDGE_VERSION" > "{seen}"'
    Hooks(after_publish=command).published("s3://bucket/run", 12)
    assert seen.read_text() == "published s3://bucket/run 12\n"


def test_no_hook_does_nothing() -> None:
    Hooks().published("/shared/run", 1)
    Hooks().reading("/shared/run")


def test_a_failed_command_says_why_and_that_the_version_stands() -> None:
    with pytest.raises(StoreError, match=r"ended with 3: no volume[\s\S]*stands"):
        Hooks(after_publish="echo no volume >&2; exit 3").published("/shared/run", 1)


def test_a_failed_function_says_why_and_that_nothing_was_read() -> None:
    with pytest.raises(StoreError, match=r"the volume is busy.*Nothing was read"):
        Hooks(before_read=f"{__name__}:fail").reading("/shared/run")


def test_a_command_that_does_not_end_is_killed_with_what_it_started(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    with pytest.raises(StoreError, match="did not end within"):
        Hooks(before_read=f'sleep 600 & echo $! > "{noted}"; wait', seconds=1.0).reading("/shared/run")
    pause, tries = threading.Event(), 100
    while alive(int(noted.read_text())) and tries:
        pause.wait(0.05)  # the kernel takes a moment to end what was killed
        tries -= 1
    assert tries


def alive(pid: int) -> bool:
    """Whether a process runs; one that was killed and waits for its parent does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("hook", ["no.such.module:function", "os:no_such_function", "os:sep"])
def test_a_misspelt_function_is_told_at_the_start(hook: str) -> None:
    assert os.sep
    with pytest.raises(UsageError, match=hook):
        Hooks(before_read=hook)
