"""A worker without a server looks again and again, and says so once."""

import asyncio
import threading
from functools import partial
from pathlib import Path

import pytest

from weighbridge.errors import OrchestrationError
from weighbridge.flows import keep_working as keeping
from weighbridge.flows.keep_working import Work, keep_working
from weighbridge.storage.backoff import Backoff


def test_that_there_is_no_server_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, told, looks = threading.Event(), list[bool](), list[bool]()

    def look(home: Path | None, *, start: bool) -> str:
        looks.append(start)
        if len(looks) == 5:
            stop.set()
        raise OrchestrationError("there is none")

    monkeypatch.setattr(keeping, "find_api", look)
    monkeypatch.setattr(keeping, "_RECONNECT", partial(Backoff, first_seconds=0.001, most_seconds=0.002))
    given = {"flows": {}, "limit": 1, "order": lambda _: 0, "prepare": lambda _: None, "tell": told.append}
    work = Work(pool="p", queue="q", place="here", **given)  # type: ignore[arg-type]
    asyncio.run(keep_working(work, home=tmp_path, poll_seconds=1.0, stop=stop))
    assert looks == [True, False, False, False, False]
    assert told == [False]
