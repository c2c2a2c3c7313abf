"""The GCS store on a fake server: the contract, and what only GCS can do to it."""

import uuid

import pytest
from tests.contract.store_tests import StoreTests
from tests.stores.raw import GCSRaw
from tests.stores.servers import Server

from weighbridge.storage.stores import Store, open_store

pytestmark = pytest.mark.stores

BUCKET = "weighbridge-test"


@pytest.fixture(scope="session")
def server(gcs_server: Server) -> Server:
    GCSRaw(gcs_server.url, BUCKET, "").make_bucket()
    return gcs_server


@pytest.fixture
def prefix() -> str:
    return f"runs/{uuid.uuid4().hex}"


@pytest.fixture
def store(server: Server, prefix: str) -> Store:
    return open_store(f"gs://{BUCKET}/{prefix}")


@pytest.fixture
def raw(server: Server, prefix: str) -> GCSRaw:
    return GCSRaw(server.url, BUCKET, prefix)


class TestGCSStore(StoreTests):
    race_commits = 20

    @pytest.fixture
    def other(self, store: Store) -> Store:
        return open_store(store.url)

    @pytest.fixture
    def raw(self, raw: GCSRaw) -> GCSRaw:
        return raw
