"""Claiming a root: fresh, ours already, somebody else's, half claimed."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from safetensors.numpy import load
from tests.checkpoints import state_digest_of, tiny_weights, trained, write_checkpoint
from tests.faults.faulty_store import Fault, FaultyStore, Killed
from tests.faults.virtual_clock import VirtualClock
from tests.storage.folders import split, write_sharded

from weighbridge.errors import ForeignRun, LineageError, StoreError, UsageError
from weighbridge.storage import parts
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.claim import claim
from weighbridge.storage.lineage import RUN_KEY, Lineage, RunInfo
from weighbridge.storage.manifest import manifest_key, shard_key
from weighbridge.storage.stores import Store, open_store
from weighbridge.values import PartKey


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "root"))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "base", tiny_weights())


def claimed(
    store: Store,
    base: Path,
    run_id: str | None = "run-1",
    digest_kind: str = "xxh3-128",
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> RunInfo:
    run, found = claim(
        store,
        open_checkpoint(base),
        run_id=run_id,
        digest_kind=digest_kind,
        writer="writer-1",
        aliases=aliases,
        clock=VirtualClock(),
    )
    assert found.state_digest == run.base_digest
    assert found.digest_kind == run.digest_kind
    return run


def listing(store: Store) -> list[tuple[str, int]]:
    return [(info.key, info.nbytes) for info in store.list("")]


# --- a fresh root


@pytest.mark.parametrize("kind", ["xxh3-128", "blake3"])
def test_a_fresh_root_becomes_this_runs_with_the_base_as_version_zero(store: Store, base: Path, kind: str) -> None:
    run = claimed(store, base, digest_kind=kind, aliases={"lm_head.weight": "embed.weight"})
    state = state_digest_of(tiny_weights(), kind=kind)
    assert (run.run_id, run.digest_kind, run.base_digest) == ("run-1", kind, state)
    lineage = Lineage(store)
    assert (lineage.run, lineage.head()) == (run, 0)
    zero = lineage.manifest(0)
    assert (zero.kind, zero.parent, zero.parent_digest, zero.state_digest) == ("base", -1, "", state)
    assert (zero.writer, zero.aliases) == ("writer-1", {"lm_head.weight": "embed.weight"})
    assert {row.key.tensor: (row.shape, row.nbytes) for row in zero.rows} == {
        name: (array.shape, array.nbytes) for name, array in tiny_weights().items()
    }
    assert all((row.codec, row.shard, row.changed, row.before) == ("base", -1, 0, b"") for row in zero.rows)
    assert zero.tensors == len(tiny_weights())
    assert zero.model_bytes == sum(array.nbytes for array in tiny_weights().values())
    assert zero.model_elements == sum(array.size for array in tiny_weights().values())


def test_version_zero_carries_the_small_files_and_no_weights(store: Store, base: Path) -> None:
    (base / "tokenizer").mkdir()
    (base / "tokenizer" / "vocab.txt").write_text("a b c")
    (base / "tokenizer" / "__init__.py").write_bytes(b"")
    claimed(store, base)
    zero = Lineage(store).manifest(0)
    assert zero.files == zero.shards[0].name
    files = {name: data.tobytes() for name, data in load(store.get(shard_key(0, zero.shards[0]))).items()}
    assert files == {
        "config.json": b'{"model_type": "llama"}',
        "generation_config.json": b"{}",
        "tokenizer/vocab.txt": b"a b c",
        "tokenizer/__init__.py": b"",
    }
    assert sorted(key for key, _ in listing(store)) == sorted([RUN_KEY, manifest_key(0), shard_key(0, zero.shards[0])])


def test_a_base_without_small_files_is_claimed_too(store: Store, base: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        (base / name).unlink()
    claimed(store, base)
    zero = Lineage(store).manifest(0)
    assert load(store.get(shard_key(0, zero.shards[0]))) == {}


def test_a_large_tensor_has_a_row_for_each_part(store: Store, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 600)
    run = claimed(store, base)
    assert run.base_digest == state_digest_of(tiny_weights(), part_bytes=600)
    rows = [row for row in Lineage(store).manifest(0).rows if row.key.tensor == "embed.weight"]
    assert [(row.key, row.nbytes) for row in rows] == [
        (PartKey("embed.weight", 0), 600),
        (PartKey("embed.weight", 600), 600),
        (PartKey("embed.weight", 1200), 336),
    ]
    assert len({row.tensor_digest for row in rows}) == 1
    assert rows[0].tensor_digest not in {row.after for row in rows}


def test_a_root_claimed_without_a_name_gets_one_and_keeps_it(store: Store, base: Path) -> None:
    first = claimed(store, base, run_id=None)
    assert first.run_id.startswith("run-")
    assert claimed(store, base, run_id=None) == first
    assert claimed(store, base, run_id=first.run_id) == first


def test_a_name_that_cannot_stand_in_a_key_is_refused_before_anything_is_written(store: Store, base: Path) -> None:
    with pytest.raises(UsageError, match="not a name"):
        claimed(store, base, run_id="../other")
    assert listing(store) == []


# --- a root that is in use


def test_claiming_again_changes_nothing(store: Store, base: Path) -> None:
    first = claimed(store, base)
    before = listing(store)
    assert claimed(store, base) == first
    assert listing(store) == before


def test_a_used_root_keeps_the_digest_kind_that_it_began_with(store: Store, base: Path) -> None:
    claimed(store, base, digest_kind="blake3")
    run = claimed(store, base, digest_kind="xxh3-128")
    assert (run.digest_kind, run.base_digest) == ("blake3", state_digest_of(tiny_weights(), kind="blake3"))


def test_a_second_run_is_refused_with_nothing_changed(store: Store, base: Path) -> None:
    claimed(store, base)
    before = listing(store)
    with pytest.raises(ForeignRun, match=r"run-1, not to run-2.*Nothing was changed"):
        claimed(store, base, run_id="run-2")
    assert listing(store) == before


@pytest.mark.parametrize("run_id", ["run-1", None])
def test_another_base_is_refused_with_nothing_changed(
    store: Store, base: Path, tmp_path: Path, run_id: str | None
) -> None:
    claimed(store, base)
    before = listing(store)
    other = write_checkpoint(tmp_path / "other", trained(tiny_weights(), 1, only=("mask",)))
    with pytest.raises(ForeignRun, match=r"another base.*Nothing was changed"):
        claimed(store, other, run_id=run_id)
    assert listing(store) == before


def test_a_base_of_other_shapes_with_the_same_bytes_is_still_refused_by_its_tensors(
    store: Store, base: Path, tmp_path: Path
) -> None:
    """The state digest is over names and bytes; one tensor more, though empty, is another state."""
    claimed(store, base)
    more = write_checkpoint(tmp_path / "more", {**tiny_weights(), "zz": np.empty((0,), np.float32)})
    with pytest.raises(ForeignRun):
        claimed(store, more)


def test_the_same_base_in_other_files_is_accepted(store: Store, base: Path, tmp_path: Path) -> None:
    run = claimed(store, base)
    before = listing(store)
    sharded = write_sharded(tmp_path / "sharded", split(tiny_weights()))
    assert claimed(store, sharded) == run
    assert listing(store) == before


def test_a_run_that_cannot_be_read_is_left_alone(store: Store, base: Path) -> None:
    store.put(RUN_KEY, b"{}")
    with pytest.raises(LineageError, match="does not describe a run"):
        claimed(store, base)
    assert listing(store) == [(RUN_KEY, 2)]


# --- half claimed


def calls_of_a_claim(tmp_path: Path, base: Path) -> int:
    faulty = FaultyStore(open_store(str(tmp_path / "dry")))
    claimed(faulty, base)
    return len(faulty.calls)


@pytest.mark.parametrize("action", ["kill", "kill before"])
def test_a_claim_that_dies_at_any_call_is_healed_by_the_next(tmp_path: Path, base: Path, action: str) -> None:
    calls = calls_of_a_claim(tmp_path, base)
    assert calls >= 5
    for number in range(calls):
        store = open_store(str(tmp_path / f"root-{number}"))
        with pytest.raises(Killed):
            claimed(FaultyStore(store, Fault("*", action, skip=number)), base)  # type: ignore[arg-type]
        run = claimed(store, base)
        lineage = Lineage(store)
        zero = lineage.manifest(0)
        assert (lineage.head(), zero.state_digest) == (0, run.base_digest)
        assert store.size(shard_key(0, zero.shards[0])) == zero.shards[0].nbytes


@pytest.mark.parametrize("key", [RUN_KEY, "versions/*/manifest.arrow"])
def test_a_lost_reply_to_the_claim_is_recognised_as_our_own(store: Store, base: Path, key: str) -> None:
    run = claimed(FaultyStore(store, Fault("create", "lose", key)), base)
    assert Lineage(store).run == run
    assert Lineage(store).head() == 0


def test_small_files_that_a_store_cut_short_are_not_committed(store: Store, base: Path) -> None:
    with pytest.raises(StoreError, match="start again"):
        claimed(FaultyStore(store, Fault("put", "truncate")), base)
    assert Lineage(store).head() == -1
    claimed(store, base)
    assert Lineage(store).head() == 0


class Overtaken(FaultyStore):
    """Somebody else acts just before the first create of a key."""

    def __init__(self, inner: Store, key: str, act: Callable[[], object]) -> None:
        super().__init__(inner)
        self._key = key
        self._act: Callable[[], object] | None = act

    def create(self, key: str, data: bytes) -> None:
        if key == self._key and self._act is not None:
            act, self._act = self._act, None
            act()
        super().create(key, data)


def test_of_two_runs_that_claim_at_once_one_is_refused(store: Store, base: Path) -> None:
    racing = Overtaken(store, RUN_KEY, lambda: claimed(store, base, run_id="run-2"))
    with pytest.raises(ForeignRun, match="belongs to run run-2"):
        claimed(racing, base, run_id="run-1")
    assert Lineage(store).run.run_id == "run-2"
    assert [json.loads(store.get(RUN_KEY))["run_id"], Lineage(store).head()] == ["run-2", 0]


def test_of_two_writers_that_claim_at_once_with_other_digests_both_go_on_with_the_winners(
    store: Store, base: Path
) -> None:
    racing = Overtaken(store, RUN_KEY, lambda: claimed(store, base, digest_kind="blake3"))
    assert claimed(racing, base, digest_kind="xxh3-128").digest_kind == "blake3"


def test_of_two_writers_of_version_zero_one_stands_and_the_other_leaves_nothing(store: Store, base: Path) -> None:
    racing = Overtaken(store, manifest_key(0), lambda: claimed(store, base))
    run = claimed(racing, base)
    zero = Lineage(store).manifest(0)
    assert zero.state_digest == run.base_digest
    assert sorted(key for key, _ in listing(store)) == sorted([RUN_KEY, manifest_key(0), shard_key(0, zero.shards[0])])
