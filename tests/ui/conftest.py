"""A browser, a fleet, and where pictures go. The browser comes first: without one nothing else need be started."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.flows.conftest import ROOT, home, server
from tests.ui.browser import Browser
from tests.ui.fleet import Fleet

__all__ = ["home", "server"]


@pytest.fixture
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


@pytest.fixture
def fleet(browser: Browser, home: Path, tmp_path: Path) -> Iterator[Fleet]:
    started = Fleet(tmp_path / "run", home)
    try:
        yield started
    finally:
        started.stop()


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Where pictures are written: `make test-ui PICTURES=docs/images` makes those of the docs."""
    return ROOT / os.environ["PICTURES"] if os.environ.get("PICTURES") else tmp_path / "pictures"
