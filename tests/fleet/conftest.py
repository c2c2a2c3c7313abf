"""One embedded server for the fleet's tests, which says in its log what it could not serve."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient
from tests.fleet.fleet import logging_refusals

from weighbridge.flows.connection import connected
from weighbridge.flows.server import ServerInfo, ensure_server, stop_server


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    # Not under pytest's own folder, whose permissions it tightens at every session, under a running PostgreSQL.
    folder = Path(tempfile.mkdtemp(prefix="weighbridge-fleet-"))
    try:
        yield folder
    finally:
        stop_server(folder)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def server(home: Path) -> Iterator[ServerInfo]:
    with pytest.MonkeyPatch.context() as patch, logging_refusals():
        patch.delenv("PREFECT_API_URL", raising=False)
        yield ensure_server(home)


@pytest.fixture
def client(server: ServerInfo) -> Iterator[SyncPrefectClient]:
    with connected(server.api_url) as found:
        yield found
