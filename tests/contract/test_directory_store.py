"""The directory store: the contract, and what only a file system can do to it."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest
from tests.contract.store_tests import FolderRaw, StoreTests

from weighbridge.errors import ObjectExists, StoreError, StoreRefused, StoreUnfit, UsageError
from weighbridge.storage.stores import Store, open_store
from weighbridge.storage.stores.contract import Unfinished
from weighbridge.storage.stores.directory import DirectoryStore
from weighbridge.storage.stores.keys import temp_name


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "a root" / "run-7"


class TestDirectoryStore(StoreTests):
    @pytest.fixture
    def store(self, root: Path) -> Store:
        return open_store(str(root))

    @pytest.fixture
    def other(self, root: Path) -> Store:
        return open_store(root.as_uri())

    @pytest.fixture
    def raw(self, root: Path) -> FolderRaw:
        return FolderRaw(root)


@pytest.fixture
def store(root: Path) -> DirectoryStore:
    return DirectoryStore(root)


def files(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


def failing(code: int):  # type: ignore[no-untyped-def]
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_path_and_a_file_url_open_the_same_root(root: Path) -> None:
    open_store(str(root)).create("a", b"x")
    assert open_store(root.as_uri()).get("a") == b"x"
    assert open_store(root.as_uri()).url == str(root)


@pytest.mark.parametrize("url", ["", " ", "nosuch://x/y", "file://elsewhere/x", "S3//x", "a\0b"])
def test_a_url_that_is_none_is_a_usage_error_or_a_plain_path(url: str) -> None:
    if url == "S3//x":
        assert open_store(url).url.endswith("/S3/x")
        return
    with pytest.raises(UsageError):
        open_store(url)


def test_a_file_cannot_be_a_root(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        open_store(str(tmp_path / "f"))


def test_reading_makes_nothing(store: DirectoryStore, root: Path) -> None:
    list(store.list(""))
    with pytest.raises(StoreError):
        store.get("a")
    store.delete("a")
    assert not root.exists()


def test_a_link_whose_reply_was_lost_is_our_own(
    store: DirectoryStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def link_then_exists(source: Path, target: Path) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")  # an NFS client that repeats a request says so

    monkeypatch.setattr(os, "link", link_then_exists)
    store.create("a", b"ours")
    assert (root / "a").read_bytes() == b"ours"
    assert files(root) == ["a"]


def test_somebody_elses_object_with_two_links_is_not_ours(store: DirectoryStore, root: Path) -> None:
    root.mkdir(parents=True)
    (root / "a").write_bytes(b"theirs")
    os.link(root / "a", root / "backup")
    with pytest.raises(ObjectExists):
        store.create("a", b"ours")
    assert files(root) == ["a", "backup"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_links_is_unfit(
    store: DirectoryStore, root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "link", failing(code))
    with pytest.raises(StoreUnfit, match="cannot link"):
        store.create("a", b"ours")
    assert files(root) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("verb", ["create", "put", "put_file"])
def test_a_full_disk_is_one_clear_refusal_and_leaves_nothing_behind(
    store: DirectoryStore, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, verb: str
) -> None:
    store.create("before", b"kept")
    (tmp_path / "shard").write_bytes(b"x" * 1000)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", failing(code))
        with pytest.raises(StoreRefused, match="no room for a/b"):
            {
                "create": lambda: store.create("a/b", b"x"),
                "put": lambda: store.put("a/b", b"x"),
                "put_file": lambda: store.put_file("a/b", tmp_path / "shard"),
            }[verb]()
    assert files(root) == ["before"]
    store.create("a/b", b"there is room again")
    assert store.get("a/b") == b"there is room again"


def test_a_directory_that_denies_us_is_refused_with_what_to_check(
    store: DirectoryStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create("a", b"x")
    monkeypatch.setattr(os, "open", failing(errno.EROFS))
    with pytest.raises(StoreRefused, match="mounted writable"):
        store.create("b", b"x")


def test_another_failure_is_a_store_error_that_may_pass(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", failing(errno.EIO))
    with pytest.raises(StoreError) as caught:
        store.create("a", b"x")
    assert not isinstance(caught.value, StoreRefused | StoreUnfit | ObjectExists)


def test_a_file_that_was_replaced_on_another_machine_is_opened_afresh(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", b"x")
    real, stale = os.fstat, [True]

    def fstat(descriptor: int) -> os.stat_result:
        if stale:
            stale.pop()
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(descriptor)

    monkeypatch.setattr(os, "fstat", fstat)
    assert store.get("a") == b"x"
    assert not stale


def test_temp_files_of_a_dead_writer_are_not_listed_and_can_be_found(store: DirectoryStore, root: Path) -> None:
    store.create("versions/1/manifest", b"x")
    dead = root / "versions" / "1" / temp_name()
    dead.write_bytes(b"half of a sha")
    assert [o.key for o in store.list("")] == ["versions/1/manifest"]
    assert list(store.folders("versions/1")) == []
    (found,) = store.unfinished()
    assert (found.key, found.nbytes) == (f"versions/1/{dead.name}", 13)
    store.discard(found)
    store.discard(found)
    assert files(root) == ["manifest"]
    with pytest.raises(UsageError):
        store.discard(Unfinished("", "versions/1/manifest", 0, 0))


def test_a_temp_files_name_cannot_be_a_key(store: DirectoryStore) -> None:
    with pytest.raises(UsageError):
        store.put(f"versions/1/{temp_name()}", b"x")


def test_modes_are_what_the_umask_leaves_so_that_a_group_can_share_a_root(store: DirectoryStore, root: Path) -> None:
    before = os.umask(0o002)
    try:
        store.create("versions/1/manifest", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((root / "versions/1/manifest").stat().st_mode) == 0o664
    assert stat.S_IMODE((root / "versions/1").stat().st_mode) == 0o775


def test_data_is_synced_before_its_name_and_every_new_folder_with_it(
    store: DirectoryStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir(parents=True)
    events: list[str] = []
    real_fsync, real_link = os.fsync, os.link

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append("sync data" if path.is_file() else f"sync {path.relative_to(root)}")
        real_fsync(descriptor)

    def link(source: Path, target: Path) -> None:
        events.append("link")
        real_link(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    store.create("versions/1/manifest", b"x")
    assert events == ["sync .", "sync versions", "sync data", "link", "sync versions/1"]


def test_a_delete_that_empties_a_folder_does_not_disturb_a_writer_who_fills_it(store: DirectoryStore) -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            store.put("shared/folder/old", b"x")
            store.delete("shared/folder/old")

    other = threading.Thread(target=churn)
    other.start()
    try:
        for number in range(100):
            store.create(f"shared/folder/{number}", b"x")
            store.delete(f"shared/folder/{number}")
    finally:
        stop.set()
        other.join()


def test_the_root_may_be_reached_through_a_symbolic_link(root: Path, tmp_path: Path) -> None:
    root.mkdir(parents=True)
    (tmp_path / "alias").symlink_to(root)
    store = open_store(str(tmp_path / "alias"))
    store.create("versions/1/manifest", b"x")
    assert [o.key for o in store.list("")] == ["versions/1/manifest"]
    assert (root / "versions/1/manifest").read_bytes() == b"x"
