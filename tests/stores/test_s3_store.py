"""The S3 store on a real server: the contract, and what only S3, its credentials and its servers can do to it."""

import gc
import os
import pickle
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.contract.store_tests import StoreTests
from tests.faults.proxy import FaultProxy, Rule
from tests.stores.raw import S3Raw
from tests.stores.servers import ACCESS_KEY, BUCKET, SECRET_KEY, Server, juicefs_gateway

from weighbridge.errors import ObjectExists, StoreError, StoreRefused, StoreUnfit
from weighbridge.storage.clock import SystemClock
from weighbridge.storage.commit import put_if_absent
from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.stores import Profile, Store, open_store
from weighbridge.storage.stores.probe import probe
from weighbridge.storage.transfer import fetch_object
from weighbridge.values import ShardInfo

pytestmark = pytest.mark.stores

ALWAYS = 10**6


@pytest.fixture(scope="module")
def bucket(s3_server: Server) -> str:
    return BUCKET


@pytest.fixture
def prefix() -> str:
    return f"runs/{uuid.uuid4().hex}"


@pytest.fixture
def store(bucket: str, prefix: str) -> Store:
    return open_store(f"s3://{bucket}/{prefix}")


@pytest.fixture
def raw(bucket: str, prefix: str) -> S3Raw:
    return S3Raw(bucket, prefix)


@pytest.fixture(scope="module")
def proxy(s3_server: Server) -> Iterator[FaultProxy]:
    proxy = FaultProxy(s3_server.url)
    yield proxy
    proxy.stop()


@pytest.fixture
def through(bucket: str, prefix: str, proxy: FaultProxy) -> Store:
    """The same root, through the proxy."""
    proxy.script()
    return open_store(f"s3://{bucket}/{prefix}", profile=Profile(endpoint_url=proxy.url, call_seconds=4.0))


class TestS3Store(StoreTests):
    race_commits = 20
    emptied_folders_linger = True

    @pytest.fixture
    def other(self, store: Store) -> Store:
        return open_store(store.url)

    @pytest.fixture
    def raw(self, raw: S3Raw) -> S3Raw:
        return raw


# credentials


def test_neither_a_pickle_nor_a_repr_carries_a_credential(store: Store) -> None:
    store.put("a", b"x")
    assert SECRET_KEY not in repr(store) + repr(vars(store))
    with pytest.raises(TypeError, match="open it where it is used"):
        pickle.dumps(store)


def test_credentials_that_are_replaced_are_read_anew(store: Store, raw: S3Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    raw.set("a", b"x")
    with monkeypatch.context() as expired:
        expired.setenv("AWS_SECRET_ACCESS_KEY", "not the right one")
        with pytest.raises(StoreRefused, match="credentials") as caught:
            store.get("a")
        assert "not the right one" not in str(caught.value)
    assert store.get("a") == b"x"


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_expired_is_renewed_once_within_the_call(
    through: Store, proxy: FaultProxy, raw: S3Raw, status: int
) -> None:
    raw.set("a", b"x")
    proxy.script(Rule("status", status=status))
    assert through.get("a") == b"x"
    proxy.script(Rule("status", status=status, times=ALWAYS))
    with pytest.raises(StoreRefused, match="Check the credentials"):
        through.get("a")
    assert len(proxy.seen) == 2


def test_no_credentials_at_all_is_said_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreRefused, match="no credentials were found"):
        store.get("a")


def test_a_reader_may_read_and_is_refused_to_write(
    store: Store, raw: S3Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw.set("a", b"x")
    (tmp_path / "shard").write_bytes(b"x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY + "-reader")
    assert store.get("a") == b"x"
    for write in (
        lambda: store.create("b", b"x"),
        lambda: store.put("b", b"x"),
        lambda: store.put_file("b", tmp_path / "shard"),
        lambda: probe(store),
    ):
        with pytest.raises(StoreRefused, match="does not let these credentials"):
            write()
    assert raw.keys() == ["a"]


# answers


def test_a_missing_bucket_is_one_clear_error(s3_server: Server) -> None:
    store = open_store("s3://no-such-bucket/run")
    for call in (lambda: store.get("a"), lambda: list(store.list("")), lambda: list(store.folders(""))):
        with pytest.raises(StoreRefused, match="no bucket 'no-such-bucket'"):
            call()


def test_a_conflict_that_will_pass_is_not_taken_for_a_lost_race(through: Store, proxy: FaultProxy) -> None:
    proxy.script(Rule("status", method="PUT", status=409, times=ALWAYS))
    with pytest.raises(StoreError) as caught:
        through.create("a", b"ours")
    assert not isinstance(caught.value, ObjectExists | StoreRefused)
    proxy.script(Rule("status", method="PUT", status=409, times=2))
    assert put_if_absent(through, "a", b"ours", clock=SystemClock())


def test_a_precondition_that_failed_is_an_object_that_exists(through: Store, proxy: FaultProxy) -> None:
    proxy.script(Rule("status", method="PUT", status=412))
    with pytest.raises(ObjectExists):
        through.create("a", b"ours")


def test_a_full_store_is_refused_and_a_slow_one_is_tried_again(through: Store, proxy: FaultProxy) -> None:
    proxy.script(Rule("status", method="PUT", status=507, times=ALWAYS))
    with pytest.raises(StoreRefused, match="no room"):
        through.put("a", b"x")
    proxy.script(Rule("status", method="PUT", status=503, times=3))
    assert put_if_absent(through, "a", b"ours", clock=SystemClock())
    assert len(proxy.seen) >= 4


def test_a_server_that_does_not_know_conditions_is_unfit(through: Store, proxy: FaultProxy) -> None:
    proxy.script(Rule("status", method="PUT", status=501, times=ALWAYS))
    with pytest.raises(StoreUnfit, match=through.url):
        probe(through)


def test_a_server_that_ignores_conditions_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with juicefs_gateway() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        S3Raw(BUCKET, "").client.create_bucket(Bucket=BUCKET)
        store = open_store(f"s3://{BUCKET}/run", profile=Profile(endpoint_url=server.url))
        with pytest.raises(StoreUnfit, match=server.url):
            probe(store)
        assert list(store.list("")) == []


# deadlines


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and requests, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_no_call_outlives_its_deadline_on_a_silent_server(silent: str, bucket: str, tmp_path: Path) -> None:
    store = open_store(f"s3://{bucket}/run", profile=Profile(endpoint_url=silent, call_seconds=1.0, part_bytes=5 << 20))
    (tmp_path / "small").write_bytes(b"x" * 1000)
    (tmp_path / "large").write_bytes(b"x" * (6 << 20))
    calls: list[Callable[[], object]] = [
        lambda: store.create("a", b"x"),
        lambda: store.put("a", b"x" * (1 << 20)),
        lambda: store.put_file("a", tmp_path / "small"),
        lambda: store.put_file("a", tmp_path / "large"),
        lambda: store.get("a"),
        lambda: store.get_range("a", 0, 10),
        lambda: store.size("a"),
        lambda: list(store.list("")),
        lambda: list(store.folders("")),
        lambda: store.delete("a"),
        lambda: list(store.unfinished()),
    ]

    def timed(call: Callable[[], object]) -> float:
        began = time.monotonic()
        with pytest.raises(StoreError, match="did not answer"):
            call()
        return time.monotonic() - began

    with ThreadPoolExecutor(len(calls)) as pool:
        assert max(pool.map(timed, calls)) < 10.0


def test_a_commit_on_a_silent_server_is_unknown_at_its_deadline(silent: str, bucket: str) -> None:
    store = open_store(f"s3://{bucket}/run", profile=Profile(endpoint_url=silent, call_seconds=1.0))
    began = time.monotonic()
    with pytest.raises(StoreError, match="is not known"):
        put_if_absent(store, "a", b"x", clock=SystemClock(), deadline_seconds=3.0)
    assert time.monotonic() - began < 15.0


# uploads and downloads


def test_an_upload_that_was_left_is_found_and_discarded(store: Store, raw: S3Raw) -> None:
    begun = raw.client.create_multipart_upload(Bucket=raw.bucket, Key=f"{raw.prefix}/versions/1/a")
    (found,) = store.unfinished()
    assert (found.key, found.handle) == ("versions/1/a", begun["UploadId"])
    assert abs(found.began_ns - time.time_ns()) < 3600 * 10**9
    store.discard(found)
    store.discard(found)
    assert list(store.unfinished()) == []


def test_a_failed_upload_leaves_nothing_unfinished(
    through: Store, proxy: FaultProxy, raw: S3Raw, tmp_path: Path
) -> None:
    (tmp_path / "shard").write_bytes(b"x" * (17 << 20))
    proxy.script(Rule("status", method="PUT", target="*partNumber=2*", status=500, times=ALWAYS))
    with pytest.raises(StoreError, match="could not write"):
        through.put_file("a", tmp_path / "shard")
    assert list(through.unfinished()) == []
    assert raw.keys() == []


def test_an_upload_whose_last_reply_is_lost_is_not_sent_again(
    through: Store, proxy: FaultProxy, raw: S3Raw, tmp_path: Path
) -> None:
    data = os.urandom(17 << 20)
    (tmp_path / "shard").write_bytes(data)
    proxy.script(Rule("lose", method="POST", target="*uploadId=*"))
    through.put_file("a", tmp_path / "shard")
    assert sum("partNumber" in target for _, target, _ in proxy.seen) == 3
    assert raw.get("a") == data
    assert list(through.unfinished()) == []


def test_a_part_that_fails_is_sent_again_alone(through: Store, proxy: FaultProxy, raw: S3Raw, tmp_path: Path) -> None:
    data = os.urandom(17 << 20)
    (tmp_path / "shard").write_bytes(data)
    proxy.script(Rule("status", target="*partNumber=2*", status=400, times=2))
    through.put_file("a", tmp_path / "shard")
    assert sum("partNumber" in target for _, target, _ in proxy.seen) == 5
    assert raw.get("a") == data


def test_a_version_of_twenty_shards_is_downloaded_once_by_each_of_four_hosts(
    through: Store, proxy: FaultProxy, raw: S3Raw, tmp_path: Path
) -> None:
    shards = {f"abc-{n:05d}": os.urandom(100_000) for n in range(20)}
    for name, data in shards.items():
        raw.set(name, data)
    proxy.script()

    def host(number: int) -> bool:
        for name, data in shards.items():
            info = ShardInfo(name, len(data), digest_bytes("xxh3-128", data))
            path = tmp_path / f"host-{number}" / name
            fetch_object(through, name, path, info=info, digest_kind="xxh3-128", clock=SystemClock())
        return all((tmp_path / f"host-{number}" / name).read_bytes() == data for name, data in shards.items())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(host, range(4)))
    assert len(proxy.seen) == 4 * 20


@pytest.mark.parametrize(("checksums", "sent"), [("when_supported", 1), ("when_required", 0)])
def test_a_profile_leaves_out_checksums_that_a_gateway_does_not_want(
    bucket: str, prefix: str, proxy: FaultProxy, checksums: str, sent: int
) -> None:
    profile = Profile(endpoint_url=proxy.url, addressing="path", checksums=checksums)  # type: ignore[arg-type]
    store = open_store(f"s3://{bucket}/{prefix}", profile=profile)
    rule = Rule("delay", header="x-amz-checksum-crc32", seconds=0.0, times=ALWAYS)
    proxy.script(rule)
    store.create("a", b"x")
    assert store.get("a") == b"x"
    assert rule.hits == sent


# processes


def test_a_forked_child_opens_a_connection_of_its_own(store: Store, raw: S3Raw) -> None:
    raw.set("a", b"x")
    assert store.get("a") == b"x"
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, store.get("a"))
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        assert answer.read() == b"x"
    os.waitpid(child, 0)
    began = time.monotonic()
    assert store.get("a") == b"x"
    assert time.monotonic() - began < 5.0, "the child must leave its parent's connections alone"


def test_a_store_that_is_dropped_ends_its_thread(bucket: str) -> None:
    store = open_store(f"s3://{bucket}/dropped")
    store.put("a", b"x")
    (mine,) = [thread for thread in threading.enumerate() if thread.name == f"store {store.url}"]
    del store
    gc.collect()
    mine.join(5.0)
    assert not mine.is_alive()
