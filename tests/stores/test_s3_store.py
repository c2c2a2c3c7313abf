"""The S3 store on a real server: the contract, and what only S3 can do to it."""

import uuid
from collections.abc import Iterator

import pytest
from tests.contract.store_tests import StoreTests
from tests.stores.raw import S3Raw
from tests.stores.servers import Server

from weighbridge.storage.stores import Store, open_store

pytestmark = pytest.mark.stores

BUCKET = "weighbridge-test"


@pytest.fixture(scope="session")
def bucket(s3_server: Server) -> str:
    S3Raw(BUCKET, "").client.create_bucket(Bucket=BUCKET)
    return BUCKET


@pytest.fixture
def prefix() -> str:
    return f"runs/{uuid.uuid4().hex}"


@pytest.fixture
def store(bucket: str, prefix: str) -> Store:
    return open_store(f"s3://{bucket}/{prefix}")


@pytest.fixture
def raw(bucket: str, prefix: str) -> Iterator[S3Raw]:
    return S3Raw(bucket, prefix)


class TestS3Store(StoreTests):
    race_commits = 20
    emptied_folders_linger = True

    @pytest.fixture
    def other(self, store: Store) -> Store:
        return open_store(store.url)

    @pytest.fixture
    def raw(self, raw: S3Raw) -> S3Raw:
        return raw
