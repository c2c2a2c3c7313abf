"""Every reader of what others may have written ends in a typed error, or in what was written, within bounds of memory
and time: whatever stands in manifests, shards, records, states, journals and neighbours' documents."""

import json
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import pyarrow as pa
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save
from tests.checkpoints import tiny_weights, trained, write_checkpoint
from tests.faults.faulty_store import FaultyStore
from tests.peers import handmade
from tests.property.hostile import anything, bounded, damaged, many, refused, twisted
from tests.storage.long_runs import LongRun
from tests.storage.manifests import ZERO_DIGEST, ZERO_SIGNATURE, opened, some_manifest, written
from tests.storage.test_records import record

from weighbridge.errors import CorruptData, LineageError, ManifestCorrupt, StoreError, UsageError, WeighbridgeError
from weighbridge.storage import manifest as manifests
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.history.reader import History
from weighbridge.storage.kept import kept_key, kept_names
from weighbridge.storage.lineage import RUN_KEY, Lineage, RunInfo, parse_run
from weighbridge.storage.manifest import from_bytes, manifest_key, to_bytes
from weighbridge.storage.peers.payload import read_json
from weighbridge.storage.peers.registry import get_layout
from weighbridge.storage.records import parse_record, read_record, read_records, record_key, record_keys
from weighbridge.storage.replica.journal import read_journal
from weighbridge.storage.replica.layout import read_identity
from weighbridge.storage.replica.sealed import seal as seal_file
from weighbridge.storage.replica.state import read_state
from weighbridge.storage.retention import watermarks
from weighbridge.storage.sealed_json import seal, unseal
from weighbridge.storage.stores import contract as stores
from weighbridge.storage.stores import open_store

MANIFEST = to_bytes(some_manifest())[0]


def resealed(data: bytes) -> bytes:
    """A damaged manifest with the digest that its bytes have, as an enemy would give it."""
    old = from_bytes(MANIFEST).digest.encode()
    zeroed = data.replace(old, b"0" * 64)
    return zeroed if data.count(old) != 2 else data.replace(old, blake3.blake3(zeroed).hexdigest().encode())


@many
@given(data=damaged(MANIFEST))
def test_a_damaged_manifest_that_was_sealed_again_is_refused_or_is_one(data: bytes) -> None:
    with bounded():
        if not refused(lambda: from_bytes(resealed(data)), ManifestCorrupt):
            manifest = from_bytes(resealed(data))
            assert all(row.nbytes <= 256 << 20 for row in manifest.rows)


@many
@given(shards=anything, labels=anything, aliases=anything)
def test_a_manifest_with_anything_in_its_fields_is_refused_or_is_one(shards: Any, labels: Any, aliases: Any) -> None:
    batch, metadata = opened(MANIFEST)
    fields = {"shards": shards, "labels": labels, "aliases": aliases}
    metadata |= {name: json.dumps(value) for name, value in fields.items()}
    zeroed = {**metadata, "digest": ZERO_DIGEST, "signature": ZERO_SIGNATURE}
    digest = blake3.blake3(written(batch.replace_schema_metadata(zeroed))).hexdigest()
    refused(lambda: from_bytes(written(batch.replace_schema_metadata({**zeroed, "digest": digest}))), ManifestCorrupt)


def test_a_manifest_that_is_a_bomb_is_refused_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, metadata = opened(MANIFEST)
    names = pa.array(["a" * (100 << 20)] + ["b"] * (batch.num_rows - 1))
    bomb = batch.set_column(0, batch.schema.field(0), names).replace_schema_metadata(metadata)
    packed = written(bomb, pa.ipc.IpcWriteOptions(compression="zstd"))
    assert len(packed) < 1 << 20
    del bomb, names
    monkeypatch.setattr(pa.ipc, "RecordBatchFileReader", lambda _: pytest.fail("Arrow unpacks whatever it is given"))
    with bounded(more_bytes=64 << 20), pytest.raises(ManifestCorrupt, match="compressed"):
        from_bytes(packed)


@many
@given(
    text=st.recursive(st.just("1"), lambda inner: inner.map(lambda t: f"[{t}]") | inner.map(lambda t: f'{{"a":{t}}}'))
)
def test_nested_json_is_refused_or_read(text: str) -> None:
    refused(lambda: parse_run(text.encode(), "root"), LineageError)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "9" * 1_000_000, "[" * 200 + "]" * 200, '"\\ud800"']
)
def test_absurd_json_is_refused_in_good_time(text: str) -> None:
    with bounded(), pytest.raises(LineageError):
        parse_run(text.encode(), "root")


@many
@given(data=st.data())
def test_run_json_and_records_with_anything_in_them_are_refused_or_read(data: st.DataObject) -> None:
    run = json.loads(RunInfo("run-1", "blake3", "ab" * 32, 7).to_bytes())
    refused(lambda: parse_run(seal(data.draw(twisted(run))), "root"), LineageError)
    told = record(version=3, ended=4)
    fields = {name: getattr(told, name) for name in told.__slots__}
    made = data.draw(twisted({**fields, "seconds": dict(told.seconds)}))
    refused(lambda: parse_record(seal(made), record_key(told)), CorruptData)


@many
@given(data=st.data())
def test_states_and_identities_that_somebody_else_sealed_are_read_as_none_or_as_they_are(
    data: st.DataObject, tmp_path: Path
) -> None:
    state = {
        "format": 1, "replica_id": "r", "copy": "a", "version": 1, "manifest": "ab" * 32, "dirty_to": None,
        "durability": "power", "boot_id": "b", "files": {"m": [1, 2, 3, "ff"]}, "parts": [["t", 0, "AAAA"]],
    }  # fmt: skip
    path = tmp_path / "sealed"
    path.write_bytes(seal_file(data.draw(twisted(state).filter(lambda made: isinstance(made, dict)))))
    read_state(path, replica_id="r", copy="a")
    identity = {"format": 1, "replica_id": "r", "run_id": "x", "base_digest": "b", "digest_kind": "blake3", "copies": 2}
    path.write_bytes(seal_file(data.draw(twisted(identity).filter(lambda made: isinstance(made, dict)))))
    read_identity(path)


@many
@given(data=st.data())
def test_a_journal_that_somebody_else_sealed_is_none_or_its_patches_fit_together(
    data: st.DataObject, tmp_path: Path
) -> None:
    head = {
        "format": 1, "replica_id": "r", "copy": "a", "boot_id": "b", "start": 0, "target": 1, "manifest": "ab",
    }  # fmt: skip
    part = {"part": ["t", 0, "00", "11"], "patches": [[2, 2, 4], [1, -1, 8]]}
    body = struct.pack("<II", 1, 5) + bytes(4) + bytes(4) + bytes(8)
    frames, whole = [(head, b""), (part, body)], b""
    running = xxhash.xxh3_128()
    for fields, content in frames:
        text = json.dumps(data.draw(twisted(fields))).encode()
        text += b" " * (-len(text) % 8)
        frame = struct.pack("<QQ", len(text), len(content)) + text + content
        digest = xxhash.xxh3_128_digest(frame)
        running.update(digest)
        whole += frame + digest
    text = json.dumps({"parts": 1, "frames": running.hexdigest()}).encode()
    text += b" " * (-len(text) % 8)
    frame = struct.pack("<QQ", len(text), 0) + text
    path = tmp_path / "journal"
    path.write_bytes(whole + frame + xxhash.xxh3_128_digest(frame))
    journal = read_journal(path)
    for one in journal.parts if journal is not None else ():
        for patch in one.patches:
            assert patch.positions is None or patch.positions.size * patch.width == patch.values.size


OLD, NEW = tiny_weights(), trained(tiny_weights(), 1)
PEERS: dict[str, tuple[Callable[..., Path], str]] = {
    "pull-weights": (handmade.pull_weights, "model.safetensors.index.json"),
    "skyrl": (handmade.skyrl, "manifest.json"),
}


def read_all(layout: str, root: Path, base: Path) -> None:
    specs = open_checkpoint(base).specs()
    version = get_layout(layout).open(open_store(str(root)), 1, specs)
    for name in version.names:
        new = version.new_bytes(name, np.frombuffer(OLD[name].tobytes(), np.uint8))
        assert new.size == OLD[name].nbytes


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"), OLD)


@pytest.mark.parametrize("layout", PEERS)
@many
@given(data=st.data())
def test_a_neighbours_document_with_anything_in_it_is_refused_or_read(
    layout: str, data: st.DataObject, base: Path, tmp_path: Path
) -> None:
    write, name = PEERS[layout]
    root = tmp_path / layout
    folder = root / {"pull-weights": "weight_v000001", "skyrl": "delta-00000001"}[layout]
    if not folder.exists():
        write(root, 1, OLD, NEW)
        (folder / "right").write_bytes((folder / name).read_bytes())
    document = json.loads((folder / "right").read_bytes())
    (folder / name).write_text(json.dumps(data.draw(twisted(document))))
    with bounded():
        refused(lambda: read_all(layout, root, base), CorruptData, LineageError)


@pytest.mark.parametrize("layout", ["pull-weights", "skyrl", "trl"])
@many
@given(data=st.data())
def test_a_neighbours_damaged_file_is_refused_or_read(
    layout: str, data: st.DataObject, base: Path, tmp_path: Path
) -> None:
    root = tmp_path / layout
    if not root.exists():
        {"pull-weights": handmade.pull_weights, "skyrl": handmade.skyrl, "trl": handmade.trl}[layout](root, 1, OLD, NEW)
    file = min(root.rglob("*.safetensors"))
    right = file.with_suffix(".right")
    if not right.exists():
        right.write_bytes(file.read_bytes())
    file.write_bytes(data.draw(damaged(right.read_bytes())))
    with bounded():
        refused(lambda: read_all(layout, root, base), CorruptData, LineageError)


def packed(content: bytes, claims: int | None = None) -> bytes:
    """A zstd frame, which may claim another size than it has."""
    frame = bytearray(zstandard.ZstdCompressor(level=1).compress(content))
    if claims is not None:
        whole = zstandard.ZstdCompressor(level=1).compressobj(size=len(content))
        frame = bytearray(whole.compress(content) + whole.flush())
        assert frame[4] >> 6 == 2, "a size field of four bytes"
        frame[5:9] = claims.to_bytes(4, "little")
    return bytes(frame)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("bomb", ["honest", "claims less", "claims more"])
def test_a_neighbours_bomb_is_refused_before_memory_is_taken(
    encoding: str, bomb: str, base: Path, tmp_path: Path
) -> None:
    folder = handmade.pull_weights(tmp_path, 1, OLD, NEW, encoding)
    nbytes = OLD["embed.weight"].nbytes
    frame = {
        "honest": lambda: packed(bytes(1 << 30)),
        "claims less": lambda: packed(bytes(100_000), nbytes),
        "claims more": lambda: packed(bytes(100_000), (1 << 32) - 1),
    }[bomb]()
    for file in folder.glob("*.safetensors"):
        file.write_bytes(save({"embed.weight": np.frombuffer(frame, np.uint8)}))
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_bytes())
    document["weight_map"] = {"embed.weight": "model-00000-of-00002.safetensors"}
    index.write_text(json.dumps(document))
    with bounded(more_bytes=64 << 20), pytest.raises(CorruptData):
        read_all("pull-weights", tmp_path, base)


def test_objects_that_are_no_small_objects_are_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path))
    store.put("run.json", bytes(1001))
    with pytest.raises(StoreError, match="not what was published"):
        store.get("run.json", most=1000)
    assert store.get_range("run.json", 0, 10) == bytes(10)
    assert stores.MOST_SMALL_BYTES == 1 << 30


def test_links_and_pipes_in_a_store_are_never_followed_nor_waited_for(tmp_path: Path) -> None:
    root, secret = tmp_path / "root", tmp_path / "secret"
    store = open_store(str(root))
    store.put("versions/000000000001/x", b"there")
    secret.write_text("mine")
    (root / "run.json").symlink_to(secret)
    os.mkfifo(root / "pipe")
    (root / "elsewhere").symlink_to(tmp_path / "outside")
    (tmp_path / "outside").mkdir()
    with pytest.raises(StoreError, match="symbolic link"):
        store.get("run.json")
    with pytest.raises(StoreError):
        store.get("pipe")
    for write in (store.put, store.create):
        with pytest.raises(StoreError, match="symbolic link"):
            write("elsewhere/file", b"data")
    assert not list((tmp_path / "outside").iterdir())
    assert {info.key for info in store.list("")} == {"versions/000000000001/x"}


def test_keys_that_lead_out_of_a_root_are_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "root"))
    for key in ("../x", "/x", "a/../../x", "a//b", "a/./b", "a\0b", ""):
        with pytest.raises((UsageError, WeighbridgeError)):
            store.put(key, b"x")
    assert not (tmp_path / "x").exists()


def sparse(root: Path, key: str, nbytes: int = 1 << 30) -> None:
    """An object that has its size and takes no room, as anybody makes one in a directory."""
    (root / key).parent.mkdir(parents=True, exist_ok=True)
    with (root / key).open("wb") as file:
        file.truncate(nbytes)


def test_small_documents_are_small_or_not_read(tmp_path: Path) -> None:
    told = record(version=3, ended=4)
    store = open_store(str(tmp_path))
    for key in (RUN_KEY, record_key(told), kept_key("name"), "delta-00000001/manifest.json"):
        sparse(tmp_path, key)
    with bounded(more_bytes=64 << 20):
        with pytest.raises(StoreError, match="at most"):
            _ = Lineage(store).run
        with pytest.raises(CorruptData, match="at most"):
            read_record(store, record_key(told))
        with pytest.raises(CorruptData, match="at most"):
            kept_names(store)
        with pytest.raises(CorruptData, match="at most"):
            read_json(store, "delta-00000001/manifest.json")
        found: list[CorruptData] = []
        assert read_records(store, on_corrupt=found.append) == [] and len(found) == 1
        assert watermarks(store, grace_seconds=60) == {told.host: 0}, "a host that cannot be read holds everything"


def test_many_large_objects_are_not_in_memory_at_once(tmp_path: Path) -> None:
    run = LongRun(open_store(str(tmp_path)), tensors=2, hosts=("a",)).grow(43)
    manifests, records = [manifest_key(v) for v in range(20, 44)], list(record_keys(run.store, "a"))
    for key in (*manifests[8:], *records[30:]):
        sparse(tmp_path, key, 20 << 20)

    ahead: list[int] = []

    class Slow(FaultyStore):
        """So slow that threads read ahead."""

        def get(self, key: str, *, most: int = stores.MOST_SMALL_BYTES) -> bytes:
            time.sleep(0.004)
            if threading.current_thread() is not threading.main_thread():
                ahead.append(most)
            return super().get(key, most=most)

    slow = Slow(run.store)
    with bounded(more_bytes=1 << 30):  # the arenas of eight threads, too
        history = History(slow)
        assert [opened.head.version for opened in history.manifests(20, 43)] == list(range(20, 28))
        assert len(list(history.read_records(records))) == 30
    assert len(history.faults) == 16 + 13
    assert len(ahead) > 20 and max(ahead) <= 16 << 20


@pytest.mark.parametrize("text", [b"[" + b"[]," * 1_000_000 + b"[]]", b"[" + b"0.5," * 1_000_000 + b"0]"])
def test_a_sealed_document_of_many_values_is_not_made_into_objects(text: bytes) -> None:
    with bounded(more_bytes=32 << 20), pytest.raises(ValueError, match="at most"):
        unseal(b'{"a":' + text + b',"digest":"' + b"0" * 64 + b'"}')


def test_a_manifest_with_more_rows_than_a_model_has_parts_is_refused_before_they_are_made_into_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, metadata = opened(MANIFEST)
    rows = batch.take(pa.array([0] * 200_000))
    zeroed = {**metadata, "digest": ZERO_DIGEST, "signature": ZERO_SIGNATURE}
    digest = blake3.blake3(written(rows.replace_schema_metadata(zeroed))).hexdigest()
    sealed = written(rows.replace_schema_metadata({**zeroed, "digest": digest}))
    monkeypatch.setattr(manifests, "MOST_VALUES", 1 << 20)
    with bounded(more_bytes=96 << 20), pytest.raises(ManifestCorrupt, match="more parts than any model"):
        from_bytes(sealed)
