"""A directory that two machines share, by two FUSE mounts of one volume with a client and a cache each: the contract,
written through one and looked at through the other."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.contract.store_tests import FolderRaw, StoreTests
from tests.stores.servers import juicefs

from weighbridge.storage.stores import Store, open_store

pytestmark = [
    pytest.mark.stores,
    pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="needs /dev/fuse"),
]


@pytest.fixture(scope="module")
def mounts() -> Iterator[Sequence[Path]]:
    with juicefs(2) as points:
        yield points


class TestSharedDirectory(StoreTests):
    race_commits = 50

    @pytest.fixture
    def run(self, request: pytest.FixtureRequest) -> str:
        return f"run-{abs(hash(request.node.name))}"

    @pytest.fixture
    def store(self, mounts: Sequence[Path], run: str) -> Store:
        return open_store(str(mounts[0] / run))

    @pytest.fixture
    def other(self, mounts: Sequence[Path], run: str) -> Store:
        return open_store(str(mounts[1] / run))

    @pytest.fixture
    def raw(self, mounts: Sequence[Path], run: str) -> FolderRaw:
        return FolderRaw(mounts[0] / run)

    def test_writers_on_two_machines_have_one_winner_each_time(
        self, store: Store, other: Store, raw: FolderRaw
    ) -> None:
        self.race_processes(store, [store.url, other.url], raw)
