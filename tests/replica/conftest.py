"""A small run for every test of the replica."""

from pathlib import Path

import pytest
from tests.replica.runs import SmallRun


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    """A run with nothing but its base."""
    return SmallRun(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the replica goes."""
    return tmp_path / "replica"
