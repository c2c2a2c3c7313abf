"""Servers shared by the tests of this folder: started at the first use, with one bucket, ended with the session."""

import importlib.util
import os
from collections.abc import Iterator

import pytest
from tests.stores.servers import BUCKET, Server, fake_gcs, seaweedfs

collect_ignore_glob = [] if importlib.util.find_spec("boto3") else ["test_*.py"]  # the group `stores` is not installed


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Server]:
    with seaweedfs() as server, environment(server):
        from tests.stores.raw import S3Raw

        S3Raw(BUCKET, "").client.create_bucket(Bucket=BUCKET)
        yield server


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[Server]:
    with fake_gcs() as server, environment(server):
        from tests.stores.raw import GCSRaw

        GCSRaw(server.url, BUCKET, "").make_bucket()
        yield server


class environment:  # noqa: N801
    """Environment variables for the while of a session, as a client process would find them."""

    def __init__(self, server: Server) -> None:
        self._wanted = server.environment
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> None:
        self._before = {name: os.environ.get(name) for name in self._wanted}
        os.environ.update(self._wanted)

    def __exit__(self, *error: object) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
