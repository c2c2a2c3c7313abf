"""The store at any other fsspec URL: the contract, on fsspec's store in memory, and clients that are not fit."""

import threading
import uuid
from collections.abc import Iterator

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tests.contract.store_tests import StoreTests

from weighbridge.errors import ObjectMissing, StoreError, StoreRefused, StoreUnfit, UsageError
from weighbridge.storage.stores import Profile, Store, open_store
from weighbridge.storage.stores.probe import probe


class MemoryRaw:
    def __init__(self, root: str) -> None:
        self.root = root
        self.fs = MemoryFileSystem()

    def set(self, key: str, data: bytes) -> None:
        self.fs.pipe_file(f"{self.root}/{key}", data)

    def get(self, key: str) -> bytes | None:
        return bytes(self.fs.cat_file(f"{self.root}/{key}")) if self.fs.isfile(f"{self.root}/{key}") else None

    def keys(self) -> list[str]:
        return sorted(path.removeprefix(self.root + "/") for path in self.fs.find(self.root))


class TestFsspecStore(StoreTests):
    race_commits = 20
    emptied_folders_linger = True

    @pytest.fixture
    def root(self) -> Iterator[str]:
        root = f"/{uuid.uuid4().hex}/run"
        yield root
        MemoryFileSystem.store.clear()

    @pytest.fixture
    def store(self, root: str) -> Store:
        return open_store(f"memory:/{root}")

    @pytest.fixture
    def other(self, root: str) -> Store:
        return open_store(f"memory:/{root}")

    @pytest.fixture
    def raw(self, root: str) -> MemoryRaw:
        return MemoryRaw(root)

    @pytest.mark.skip(reason="memory is not shared between processes")
    def test_writers_in_two_processes_have_one_winner_each_time(self, store: Store, raw: object) -> None: ...


def test_a_client_that_asks_and_then_writes_is_unfit_by_name() -> None:
    class Racy(MemoryFileSystem):
        protocol = "racy"
        pipe_file = fsspec.AbstractFileSystem.pipe_file

    fsspec.register_implementation("racy", Racy, clobber=True)
    with pytest.raises(StoreUnfit, match="racy://bucket/run"):
        probe(open_store("racy://bucket/run"))


def test_a_call_that_hangs_ends_at_its_deadline() -> None:
    release = threading.Event()

    class Hanging(MemoryFileSystem):
        protocol = "hanging"

        def info(self, path: str, **options: object) -> dict[str, object]:
            release.wait(10)
            return {}

    fsspec.register_implementation("hanging", Hanging, clobber=True)
    store = open_store("hanging://bucket/run", profile=Profile(call_seconds=0.1))
    with pytest.raises(StoreError, match="within") as caught:
        store.get("a")
    assert not isinstance(caught.value, ObjectMissing)
    release.set()


def test_a_scheme_that_nobody_knows_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="nosuch"):
        open_store("nosuch://bucket/run")


@pytest.mark.parametrize(
    "url", ["s3://key:secret@bucket/run", "gs://user@bucket/run", "s3://", "s3:///run", "s3://b//x"]
)
def test_a_url_with_a_credential_or_without_a_bucket_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


def test_an_object_that_is_no_small_object_is_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}/run")
    store.put("run.json", bytes(1001))
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *_: pytest.fail("it was read"))
    with pytest.raises(StoreRefused, match="not what was published"):
        store.get("run.json", most=1000)
