"""The GCS store on a fake server: the contract, and what only GCS can do to it."""

import os
import pickle
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.contract.store_tests import StoreTests
from tests.faults.proxy import Action, FaultProxy, Rule
from tests.stores.raw import GCSRaw
from tests.stores.servers import BUCKET, Server

from weighbridge.errors import ObjectExists, StoreError, StoreRefused
from weighbridge.storage.clock import SystemClock
from weighbridge.storage.commit import put_if_absent
from weighbridge.storage.stores import Profile, Store, open_store

pytestmark = pytest.mark.stores

ALWAYS = 10**6


@pytest.fixture
def prefix() -> str:
    return f"runs/{uuid.uuid4().hex}"


@pytest.fixture
def store(gcs_server: Server, prefix: str) -> Store:
    return open_store(f"gs://{BUCKET}/{prefix}")


@pytest.fixture
def raw(gcs_server: Server, prefix: str) -> GCSRaw:
    return GCSRaw(gcs_server.url, BUCKET, prefix)


@pytest.fixture(scope="module")
def proxy(gcs_server: Server) -> Iterator[FaultProxy]:
    proxy = FaultProxy(gcs_server.url)
    yield proxy
    proxy.stop()


@pytest.fixture
def through(prefix: str, proxy: FaultProxy) -> Store:
    """The same root, through the proxy."""
    proxy.script()
    return open_store(f"gs://{BUCKET}/{prefix}", profile=Profile(endpoint_url=proxy.url, call_seconds=4.0))


class TestGCSStore(StoreTests):
    race_commits = 20

    @pytest.fixture
    def other(self, store: Store) -> Store:
        return open_store(store.url)

    @pytest.fixture
    def raw(self, raw: GCSRaw) -> GCSRaw:
        return raw


def test_a_store_does_not_travel(store: Store) -> None:
    store.put("a", b"x")
    with pytest.raises(TypeError, match="open it where it is used"):
        pickle.dumps(store)


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_expired_is_renewed_once_within_the_call(
    through: Store, proxy: FaultProxy, raw: GCSRaw, status: int
) -> None:
    raw.set("a", b"x")
    proxy.script(Rule("status", status=status))
    assert through.get("a") == b"x"
    proxy.script(Rule("status", status=status, times=ALWAYS))
    with pytest.raises(StoreRefused, match="Check the application default credentials"):
        through.get("a")
    assert len(proxy.seen) == 2


def test_a_missing_bucket_is_one_clear_error(gcs_server: Server, tmp_path: Path) -> None:
    store = open_store("gs://no-such-bucket/run")
    (tmp_path / "shard").write_bytes(b"x" * (6 << 20))
    for call in (
        lambda: store.create("a", b"x"),
        lambda: store.put_file("a", tmp_path / "shard"),
        lambda: list(store.list("")),
    ):
        with pytest.raises(StoreRefused, match="no bucket 'no-such-bucket'"):
            call()


def test_answers_are_told_apart(through: Store, proxy: FaultProxy) -> None:
    proxy.script(Rule("status", method="POST", status=412))
    with pytest.raises(ObjectExists):
        through.create("a", b"ours")
    proxy.script(Rule("status", method="POST", status=507))
    with pytest.raises(StoreRefused, match="no room"):
        through.put("a", b"ours")
    proxy.script(Rule("status", method="POST", status=429, times=3))
    assert put_if_absent(through, "a", b"ours", clock=SystemClock())
    assert [method for method, _, _ in proxy.seen].count("POST") == 4


def test_no_call_outlives_its_deadline_on_a_silent_server(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x" * 1000)
    (tmp_path / "large").write_bytes(b"x" * (6 << 20))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        store = open_store(f"gs://{BUCKET}/run", profile=Profile(endpoint_url=url, anonymous=True, call_seconds=1.0))
        calls: list[Callable[[], object]] = [
            lambda: store.create("a", b"x"),
            lambda: store.put_file("a", tmp_path / "small"),
            lambda: store.put_file("a", tmp_path / "large"),
            lambda: store.get("a"),
            lambda: store.get_range("a", 0, 10),
            lambda: store.size("a"),
            lambda: list(store.list("")),
            lambda: store.delete("a"),
        ]

        def timed(call: Callable[[], object]) -> float:
            began = time.monotonic()
            with pytest.raises(StoreError, match="did not answer"):
                call()
            return time.monotonic() - began

        with ThreadPoolExecutor(len(calls)) as pool:
            assert max(pool.map(timed, calls)) < 15.0


@pytest.mark.parametrize(("action", "sent"), [("lose", 3), ("reset", 4)])
def test_an_upload_goes_on_where_the_store_says(
    through: Store, proxy: FaultProxy, raw: GCSRaw, tmp_path: Path, action: Action, sent: int
) -> None:
    data = os.urandom(17 << 20)
    (tmp_path / "shard").write_bytes(data)
    proxy.script(Rule(action, method="PUT", skip=2))
    through.put_file("a", tmp_path / "shard")
    assert len([1 for method, _, _ in proxy.seen if method == "PUT"]) >= sent
    assert raw.get("a") == data


def test_a_failed_upload_leaves_no_object(through: Store, proxy: FaultProxy, raw: GCSRaw, tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(os.urandom(17 << 20))
    proxy.script(Rule("status", method="PUT", status=500, skip=1, times=ALWAYS))
    with pytest.raises(StoreError):
        through.put_file("a", tmp_path / "shard")
    assert raw.keys() == []
