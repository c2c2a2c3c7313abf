"""What every kind of store must keep, as one suite: a kind subclasses it and gives fixtures. `raw` reads and writes
the same root without the store under test, so that a store cannot vouch for itself."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from tests.contract.racer import race, race_key
from tests.faults.faulty_store import Fault, FaultyStore
from tests.faults.virtual_clock import VirtualClock

from weighbridge.errors import ObjectExists, ObjectMissing, StoreError, UsageError
from weighbridge.storage.clock import SystemClock
from weighbridge.storage.commit import put_if_absent
from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.stores import Store
from weighbridge.storage.stores.probe import probe
from weighbridge.storage.transfer import fetch_object, upload_file
from weighbridge.values import ShardInfo

REPOSITORY = Path(__file__).resolve().parents[2]


class Raw(Protocol):
    """The root seen past the store under test."""

    def set(self, key: str, data: bytes) -> None: ...

    def get(self, key: str) -> bytes | None: ...

    def keys(self) -> list[str]: ...


class StoreTests:
    """Subclasses give the fixtures `store` (a fresh root), `other` (a second instance on it) and `raw`; `racer_command`
    is how a racing process opens the same root, by its URL."""

    race_commits = 200
    race_writers = 8
    emptied_folders_linger = False
    """Some servers remove a folder a while after its last object."""

    def may_linger(self, folder: str) -> set[str]:
        return {folder} if self.emptied_folders_linger else set()

    def racer_environment(self, store: Store) -> dict[str, str]:
        return {}

    @pytest.fixture
    def raw(self) -> Raw:
        raise AssertionError("a subclass gives this")

    # create

    def test_what_is_created_is_what_stands_in_the_store(self, store: Store, raw: Raw) -> None:
        store.create("versions/000000000001/manifest.arrow", b"first")
        assert raw.get("versions/000000000001/manifest.arrow") == b"first"
        assert raw.keys() == ["versions/000000000001/manifest.arrow"]

    def test_a_second_create_is_refused_and_the_first_bytes_stay(self, store: Store, other: Store, raw: Raw) -> None:
        store.create("run.json", b"first")
        for writer in (store, other):
            with pytest.raises(ObjectExists):
                writer.create("run.json", b"second")
        assert raw.get("run.json") == b"first"

    def test_a_create_meets_what_somebody_else_put_there(self, store: Store, raw: Raw) -> None:
        raw.set("run.json", b"somebody else's")
        with pytest.raises(ObjectExists):
            store.create("run.json", b"ours")
        assert raw.get("run.json") == b"somebody else's"

    def test_an_empty_create_is_refused_because_some_clients_overwrite_silently(self, store: Store, raw: Raw) -> None:
        with pytest.raises(UsageError):
            store.create("run.json", b"")
        assert raw.keys() == []

    def test_a_reader_sees_all_of_a_created_object_or_nothing(self, store: Store, other: Store) -> None:
        data = os.urandom(2 << 20)
        seen: list[bytes] = []
        done = threading.Event()

        def read() -> None:
            last_look = False
            while not last_look:
                last_look = done.is_set()
                for number in range(5):
                    try:
                        seen.append(digest_bytes("xxh3-128", other.get(f"o/{number}")))
                    except ObjectMissing:
                        continue

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for number in range(5):
                store.create(f"o/{number}", data)
        finally:
            done.set()
            reader.join()
        assert set(seen) == {digest_bytes("xxh3-128", data)}

    # put, get, size

    def test_a_put_can_be_repeated(self, store: Store, raw: Raw) -> None:
        store.put("versions/1/abc-00000.safetensors", b"once")
        store.put("versions/1/abc-00000.safetensors", b"once more")
        assert raw.get("versions/1/abc-00000.safetensors") == b"once more"

    @pytest.mark.parametrize("nbytes", [0, 1, (5 << 20) + 3])
    def test_a_file_arrives_byte_for_byte(self, store: Store, raw: Raw, tmp_path: Path, nbytes: int) -> None:
        data = os.urandom(nbytes)
        (tmp_path / "shard").write_bytes(data)
        for _ in range(2):
            store.put_file("versions/1/abc-00000.safetensors", tmp_path / "shard")
        assert raw.get("versions/1/abc-00000.safetensors") == data
        assert store.size("versions/1/abc-00000.safetensors") == nbytes

    def test_a_file_that_is_not_there_is_a_usage_error(self, store: Store, raw: Raw, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="nowhere"):
            store.put_file("a", tmp_path / "nowhere")
        assert raw.keys() == []

    def test_what_is_there_is_got_whole_or_in_ranges(self, store: Store, raw: Raw) -> None:
        data = bytes(range(256)) * 40
        raw.set("a/b", data)
        assert store.get("a/b") == data
        assert store.size("a/b") == len(data)
        assert store.get_range("a/b", 0, len(data)) == data
        assert store.get_range("a/b", 300, 77) == data[300:377]
        assert store.get_range("a/b", len(data) - 1, 1) == data[-1:]

    @pytest.mark.parametrize(("start", "length"), [(0, 11), (5, 6), (10, 1), (50, 5)])
    def test_a_range_beyond_the_end_is_an_error_never_short_bytes(
        self, store: Store, raw: Raw, start: int, length: int
    ) -> None:
        raw.set("a", b"0123456789")
        with pytest.raises(StoreError) as caught:
            store.get_range("a", start, length)
        assert not isinstance(caught.value, ObjectMissing)

    def test_what_is_not_there_is_missing_and_named(self, store: Store, raw: Raw) -> None:
        raw.set("a/b", b"x")
        for key in ("a/c", "c", "a/b/c"):
            with pytest.raises(ObjectMissing, match=key):
                store.get(key)
            with pytest.raises(ObjectMissing):
                store.get_range(key, 0, 1)
            with pytest.raises(ObjectMissing):
                store.size(key)

    def test_a_folder_is_not_an_object(self, store: Store, raw: Raw) -> None:
        raw.set("a/b", b"x")
        with pytest.raises(ObjectMissing):
            store.get("a")
        with pytest.raises(ObjectMissing):
            store.size("a")

    def test_keys_with_odd_characters_are_keys(self, store: Store, raw: Raw) -> None:
        for key in ("hosts/rollout 0/1", "hosts/größe+50%/2", "hosts/a#b?c=d&e/3", "hosts/a*[b]/4"):
            store.create(key, key.encode())
            assert raw.get(key) == key.encode()
            assert store.get(key) == key.encode()
            assert store.size(key) == len(key.encode())
            assert [o.key for o in store.list(key.rsplit("/", 1)[0])] == [key]
            store.delete(key)
            assert raw.get(key) is None

    @pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", ".", "a/../b", "a/./b", "a\0b", "a\nb", "a\\b", "x" * 300])
    def test_what_is_no_key_is_a_usage_error_everywhere(self, store: Store, raw: Raw, tmp_path: Path, key: str) -> None:
        (tmp_path / "f").write_bytes(b"x")
        for call in (
            lambda: store.create(key, b"x"),
            lambda: store.put(key, b"x"),
            lambda: store.put_file(key, tmp_path / "f"),
            lambda: store.get(key),
            lambda: store.get_range(key, 0, 1),
            lambda: store.size(key),
            lambda: store.delete(key),
            lambda: list(store.list(key or "/")),
            lambda: list(store.folders(key or "/")),
        ):
            with pytest.raises(UsageError):
                call()
        assert raw.keys() == []

    # list, folders, delete

    def test_a_listing_has_every_object_under_a_folder_in_key_order(self, store: Store, raw: Raw) -> None:
        keys = ["a-b/0", "a.txt", "a/b", "a/b.c/d", "a/b.c/e/f", "a/z", "ab/c", "z"]
        for number, key in enumerate(reversed(keys)):
            raw.set(key, b"x" * number)
        assert [o.key for o in store.list("")] == sorted(keys)
        assert [o.key for o in store.list("a")] == ["a/b", "a/b.c/d", "a/b.c/e/f", "a/z"]
        assert [o.key for o in store.list("a/b.c")] == ["a/b.c/d", "a/b.c/e/f"]
        assert {o.key: o.nbytes for o in store.list("")} == {k: n for n, k in enumerate(reversed(keys))}

    def test_a_listing_carries_the_stores_own_time(self, store: Store) -> None:
        store.put("a", b"x")
        store.put("b", b"x")
        first, second = (o.modified_ns for o in store.list(""))
        assert abs(first - SystemClock().now_ns()) < 3600 * 10**9  # loopback stores share our clock, roughly
        assert abs(second - first) < 60 * 10**9

    def test_an_empty_or_unknown_folder_lists_nothing(self, store: Store, raw: Raw) -> None:
        assert list(store.list("")) == []
        assert list(store.folders("")) == []
        raw.set("a/b", b"x")
        for prefix in ("a/b", "b", "a/b/c"):
            assert list(store.list(prefix)) == []
            assert list(store.folders(prefix)) == []

    def test_folders_are_named_sorted_and_only_one_level_deep(self, store: Store, raw: Raw) -> None:
        for key in ("versions/2/m", "versions/10/m", "versions/10/x/y", "versions/loose", "hosts/h/1", "run.json"):
            raw.set(key, b"x")
        assert list(store.folders("")) == ["hosts", "versions"]
        assert list(store.folders("versions")) == ["10", "2"]
        assert list(store.folders("versions/10")) == ["x"]
        assert list(store.folders("versions/2")) == []

    def test_a_listing_can_begin_after_a_key_that_need_not_be_there(self, store: Store, raw: Raw) -> None:
        for key in ("h/1-a", "h/2-a", "h/2-b", "h/3/x", "v/1/m", "v/2/m", "v/2/n", "v/3/m"):
            raw.set(key, b"x")
        assert [o.key for o in store.list_after("h", "h/2")] == ["h/2-a", "h/2-b", "h/3/x"]
        assert [o.key for o in store.list_after("h", "h/2-a")] == ["h/2-b", "h/3/x"]
        assert [o.key for o in store.list_after("h", "")] == ["h/1-a", "h/2-a", "h/2-b", "h/3/x"]
        assert [o.key for o in store.list_after("h", "h/4")] == []
        assert list(store.folders_after("v", "1")) == ["2", "3"]
        assert list(store.folders_after("v", "2x")) == ["3"]
        assert list(store.folders_after("v", "")) == ["1", "2", "3"]

    def test_a_deleted_object_is_gone_and_so_is_its_folder(self, store: Store, raw: Raw) -> None:
        store.create("versions/1/manifest", b"x")
        store.create("versions/2/manifest", b"x")
        store.delete("versions/1/manifest")
        store.delete("versions/1/manifest")
        store.delete("never/was")
        assert raw.keys() == ["versions/2/manifest"]
        assert set(store.folders("versions")) - self.may_linger("1") == {"2"}
        with pytest.raises(ObjectMissing):
            store.get("versions/1/manifest")
        store.create("versions/1/manifest", b"again")
        assert raw.get("versions/1/manifest") == b"again"

    def test_nothing_is_answered_from_a_cache(self, store: Store, other: Store, raw: Raw) -> None:
        raw.set("versions/1/m", b"x")
        assert list(store.folders("versions")) == ["1"]
        assert [o.key for o in store.list("")] == ["versions/1/m"]
        with pytest.raises(ObjectMissing):
            store.size("versions/2/m")
        with pytest.raises(ObjectMissing):
            store.get("versions/2/m")
        other.create("versions/2/m", b"new")
        assert store.size("versions/2/m") == 3
        assert store.get("versions/2/m") == b"new"
        assert list(store.folders("versions")) == ["1", "2"]
        assert [o.key for o in store.list("versions")] == ["versions/1/m", "versions/2/m"]
        other.delete("versions/2/m")
        assert set(store.folders("versions")) - self.may_linger("2") == {"1"}
        assert [o.key for o in store.list("versions")] == ["versions/1/m"]
        with pytest.raises(ObjectMissing):
            store.size("versions/2/m")

    # what is built on it

    def test_the_probe_passes_and_leaves_nothing(self, store: Store, raw: Raw) -> None:
        probe(store)
        assert raw.keys() == []

    def test_a_commit_whose_reply_is_lost_is_recognised_as_ours(self, store: Store, raw: Raw) -> None:
        faulty = FaultyStore(store, Fault("create", "lose"))
        assert put_if_absent(faulty, "versions/1/manifest", b"ours", clock=VirtualClock())
        assert not put_if_absent(faulty, "versions/1/manifest", b"theirs", clock=VirtualClock())
        assert raw.get("versions/1/manifest") == b"ours"

    def test_a_shard_goes_up_and_comes_down_proved(self, store: Store, raw: Raw, tmp_path: Path) -> None:
        data = os.urandom((17 << 20) + 5)
        (tmp_path / "shard").write_bytes(data)
        upload_file(store, "versions/1/s", tmp_path / "shard", clock=SystemClock())
        info = ShardInfo("s", len(data), digest_bytes("xxh3-128", data))
        fetch_object(store, "versions/1/s", tmp_path / "got", info=info, digest_kind="xxh3-128", clock=SystemClock())
        assert (tmp_path / "got").read_bytes() == data
        assert raw.keys() == ["versions/1/s"]

    def test_threads_share_an_instance(self, store: Store, raw: Raw) -> None:
        for number in range(8):
            raw.set(f"a/{number}", bytes([number]) * 1000)
        got: dict[int, bytes] = {}

        def read(number: int) -> None:
            for _ in range(5):
                got[number] = store.get(f"a/{number}")

        threads = [threading.Thread(target=read, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == {n: bytes([n]) * 1000 for n in range(8)}

    def test_racing_writers_have_one_winner_each_time_and_leave_no_gap(self, store: Store, raw: Raw) -> None:
        writers = [f"w{n}" for n in range(self.race_writers)]
        self.check_race(race(store, writers, self.race_commits), raw)

    def test_writers_in_two_processes_have_one_winner_each_time(self, store: Store, raw: Raw) -> None:
        self.race_processes(store, [store.url, store.url], raw)

    def race_processes(self, store: Store, urls: list[str], raw: Raw) -> None:
        each = self.race_writers // len(urls)
        racers = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.contract.racer", url, str(self.race_commits)]
                + [f"p{process}w{n}" for n in range(each)],
                cwd=REPOSITORY,
                env={**os.environ, **self.racer_environment(store)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for process, url in enumerate(urls)
        ]
        try:
            for racer in racers:
                assert racer.stdout is not None
                assert racer.stdout.readline() == "ready\n"
            for racer in racers:
                assert racer.stdin is not None
                racer.stdin.write("go\n")
                racer.stdin.flush()
            won: dict[str, list[int]] = {}
            for racer in racers:
                output, _ = racer.communicate(timeout=120)
                won.update(json.loads(output))
        finally:
            for racer in racers:
                racer.kill()
                racer.wait()
        self.check_race(won, raw)

    def check_race(self, won: dict[str, list[int]], raw: Raw) -> None:
        winners = [(number, writer) for writer, numbers in won.items() for number in numbers]
        assert sorted(number for number, _ in winners) == list(range(self.race_commits))
        for number, writer in winners:
            assert raw.get(race_key(number)) == f"{writer}:{number}".encode()
        assert raw.keys() == [race_key(number) for number in range(self.race_commits)]


class FolderRaw:
    """A root in a directory, seen through plain files."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def set(self, key: str, data: bytes) -> None:
        (self.root / key).parent.mkdir(parents=True, exist_ok=True)
        (self.root / key).write_bytes(data)

    def get(self, key: str) -> bytes | None:
        try:
            return (self.root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def keys(self) -> list[str]:
        return sorted(self._files())

    def _files(self) -> Iterator[str]:
        for path in self.root.rglob("*"):
            if path.is_file():
                yield str(path.relative_to(self.root))
