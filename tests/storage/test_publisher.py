"""The publisher's promises: what it commits is what was pushed, whatever fails, whoever else writes."""

import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from tests.checkpoints import Weights, as_tensors, spec_of, state_digest_of, tiny_weights, trained, write_checkpoint
from tests.faults.crash_disk import Crash, CrashDisk, FullDisk, RecordingDisk
from tests.faults.faulty_store import Action, Fault, FaultyStore, Killed, flipped
from tests.storage.folders import split, write_sharded
from tests.storage.publishing import (
    Run,
    assert_sound,
    bare_push,
    bytes_of,
    fill,
    orphans,
    push,
    push_tensors,
    snapshot_of,
    some_bytes,
)

from weighbridge.errors import (
    CommitConflict,
    CommitStateUnknown,
    CorruptData,
    DigestMismatch,
    DiskFull,
    ForeignRun,
    ManifestCorrupt,
    ObjectMissing,
    PayloadCorrupt,
    ShardCorrupt,
    StoreError,
    StoreRefused,
    UsageError,
    WeighbridgeError,
    WriterOvertaken,
)
from weighbridge.storage import attempt as attempt_module
from weighbridge.storage import parts
from weighbridge.storage.batching import batches
from weighbridge.storage.codecs import EncodedShard, PartInput, encode_shard
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.feed import Feed
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.manifest import manifest_key, shard_key, to_bytes
from weighbridge.storage.publication import Publication
from weighbridge.storage.publisher import Publisher
from weighbridge.storage.state import advance, base_digests, state_digest
from weighbridge.values import Manifest, PartKey, TensorSpec

FOREVER = 10**9
V0 = tiny_weights()
V1, V2, V3 = trained(V0, 1), trained(trained(V0, 1), 2), trained(trained(trained(V0, 1), 2), 3)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


# --- what is committed is what was pushed


@pytest.mark.parametrize("kind", ["xxh3-128", "blake3"])
@pytest.mark.parametrize("threads", [1, 3])
def test_after_three_pushes_the_snapshot_is_the_weights(run: Run, kind: str, threads: int) -> None:
    publisher = run.open(digest_kind=kind, threads=threads)
    for version, weights in enumerate((V1, V2, V3), 1):
        manifest = push(publisher, weights, {"step": version})
        assert (manifest.version, manifest.parent, manifest.labels["step"]) == (version, version - 1, version)
        assert manifest.state_digest == state_digest_of(weights, kind=kind)
        assert publisher.version == version
        assert snapshot_of(publisher) == bytes_of(weights)
        assert publisher.lineage.manifest(version) == manifest
    assert snapshot_of(run.open(threads=threads)) == bytes_of(V3)
    assert orphans(run) == []
    assert run.spooled() == []


def test_a_manifest_tells_of_the_model_as_the_base_does(run: Run) -> None:
    publisher = run.open(aliases={"lm_head.weight": "embed.weight"})
    zero, one = publisher.lineage.manifest(0), push(publisher, V1)
    assert (one.model_bytes, one.model_elements, one.tensors) == (zero.model_bytes, zero.model_elements, zero.tensors)
    assert one.aliases == publisher.aliases == {"lm_head.weight": "embed.weight"}
    assert (one.run_id, one.writer) == (publisher.run_id, publisher.writer)
    assert (one.parent_digest, one.files) == (zero.digest, "")
    assert publisher.specs == {name: spec_of(name, V0[name]) for name in sorted(V0)}


def test_every_row_has_the_digests_and_the_count_of_its_part(run: Run) -> None:
    publisher = run.open()
    push(publisher, V1)
    manifest = push(publisher, V2)
    changed = [name for name in V0 if V0[name].size]
    assert sorted(row.key.tensor for row in manifest.rows) == sorted(changed)
    for row in manifest.rows:
        old, new = (np.atleast_1d(w[row.key.tensor]).reshape(-1).view(np.uint8) for w in (V1, V2))
        width = V0[row.key.tensor].dtype.itemsize
        differ = (old.reshape(-1, width) != new.reshape(-1, width)).any(axis=1).sum()
        digests = [np_digest(weights[row.key.tensor]) for weights in (V1, V2)]
        assert (row.changed, [row.before, row.after]) == (differ, digests)
        assert (row.tensor_digest, row.nbytes, row.shape) == (row.after, new.size, V0[row.key.tensor].shape)


def np_digest(array: "np.ndarray[Any, Any]") -> bytes:
    return xxhash.xxh3_128_digest(array.tobytes())


def test_an_unchanged_push_is_an_empty_version(run: Run) -> None:
    publisher = run.open()
    push(publisher, V1)
    manifest = push(publisher, V1)
    assert (manifest.version, manifest.rows, manifest.shards, manifest.wire_bytes) == (2, (), (), 0)
    assert manifest.state_digest == state_digest_of(V1)
    assert_sound(run, {0: V0, 1: V1, 2: V1})


def test_a_push_of_nothing_at_all_is_an_empty_version(run: Run) -> None:
    """What `unchanged` covers need not come: what does not come stays as it was."""
    publisher = run.open()
    manifest = push_tensors(publisher, iter(()))
    assert (manifest.version, manifest.state_digest) == (1, state_digest_of(V0))


def test_only_the_tensors_that_came_change(run: Run) -> None:
    publisher = run.open()
    push(publisher, {"mask": V1["mask"]})
    assert_sound(run, {0: V0, 1: {**V0, "mask": V1["mask"]}})


def test_the_order_in_which_tensors_arrive_plays_no_role_for_the_state(run: Run) -> None:
    publisher = run.open()
    push(publisher, dict(reversed(V1.items())))
    push(publisher, dict(sorted(V2.items(), key=lambda item: item[1].nbytes)))
    assert_sound(run, {0: V0, 1: V1, 2: V2})


def test_batches_may_be_encoded_and_uploaded_in_any_order(run: Run) -> None:
    publisher = run.open()
    attempt = publisher.begin()
    made = list(batches(as_tensors(V1), shard_bytes=400))
    for batch in reversed(made):
        attempt.encode(batch)
    for batch in made[1:] + made[:1]:
        attempt.upload(batch.index)
    publisher.commit(attempt, {})
    assert_sound(run, {0: V0, 1: V1})


def test_every_bit_pattern_comes_through(run: Run) -> None:
    """NaN payloads, both zeros, subnormals and infinities, both as what was and as what becomes."""
    rng = np.random.default_rng(5)
    first = {name: rng.permutation(np.arange(array.nbytes) % 256).astype(np.uint8) for name, array in V0.items()}
    weights = {
        name: (first[name] % 2 if array.dtype == bool else first[name]).view(array.dtype).reshape(array.shape)
        for name, array in V0.items()
    }
    publisher = run.open()
    push(publisher, weights)
    push(publisher, V0)
    push(publisher, weights)
    assert_sound(run, {0: V0, 1: weights, 2: V0, 3: weights})


def test_the_diff_is_against_the_last_published_version_and_not_against_the_last_step(run: Run) -> None:
    publisher = run.open()
    attempt = fill(publisher, as_tensors(V1))  # a step that was encoded and never committed
    publisher.discard(attempt)
    manifest = push(publisher, V2)
    assert manifest.version == 1
    assert all(row.before == np_digest(V0[row.key.tensor]) for row in manifest.rows)
    assert_sound(run, {0: V0, 1: V2})


def test_a_tensor_in_several_parts_has_rows_for_those_that_changed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 512)
    publisher = run.open()
    weights = {name: array.copy() for name, array in V0.items()}
    weights["embed.weight"].reshape(-1).view(np.uint16)[[0, 700]] ^= 3  # in the first and the third part
    manifest = push(publisher, weights)
    assert [row.key for row in manifest.rows] == [PartKey("embed.weight", 0), PartKey("embed.weight", 1024)]
    assert {row.tensor_digest for row in manifest.rows} == {np_digest(weights["embed.weight"])}
    assert manifest.state_digest == state_digest_of(weights, part_bytes=512)
    assert snapshot_of(publisher) == snapshot_of(run.open()) == bytes_of(weights)


def test_the_base_may_be_cut_into_other_files_when_a_run_goes_on(run: Run, tmp_path: Path) -> None:
    push(run.open(), V1)
    again = run.open(base=write_sharded(tmp_path / "sharded", split(V0)))
    assert (again.version, snapshot_of(again)) == (1, bytes_of(V1))
    push(again, V2)
    assert_sound(run, {0: V0, 1: V1, 2: V2})


def test_another_run_or_base_is_refused_before_anything_is_changed(run: Run, tmp_path: Path) -> None:
    push(run.open(), V1)
    before = run.objects()
    other = write_checkpoint(tmp_path / "other", V1)
    for options in ({"run_id": "run-2"}, {"base": other}):
        with pytest.raises(ForeignRun):
            run.open(**options)
    assert run.objects() == before


# --- memory


def test_memory_holds_one_copy_of_the_model_and_a_few_shards(tmp_path: Path) -> None:
    count, nbytes = 40, 2 << 20
    names = [f"layers.{n}.w" for n in range(count)]
    base = {name: some_bytes(nbytes, n).view(np.float16) for n, name in enumerate(names)}
    run = Run(tmp_path, base_weights=base)
    del base

    def stepped() -> Iterator[tuple[TensorSpec, Bytes]]:
        for n, name in enumerate(names):
            data = some_bytes(nbytes, n)
            data[n::128] ^= 1
            yield TensorSpec(name, "F16", (nbytes // 2,), nbytes), data

    tracemalloc.start()
    try:
        publisher = run.open(threads=2)
        publication = Publication(publisher, publisher.begin(), Feed(in_flight=2), {}, threads=2)
        encoding = threading.Thread(target=_encode_all, args=(publication,))
        encoding.start()
        for batch in batches(stepped(), shard_bytes=nbytes):
            publication.feed.put(batch)
        del batch
        publication.feed.close()
        publication.feed.drain()
        encoding.join(150)
        manifest = publication.commit()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (manifest.version, len(manifest.shards), manifest.tensors) == (1, count, count)
    # The codecs' own buffers and a handful of shards: 33 MB measured, however many tensors there are. A second copy of
    # the model would be 80.
    assert count * nbytes < most < count * nbytes + (48 << 20)


def _encode_all(publication: Publication) -> None:
    def work(batch: Any) -> None:
        try:
            publication.attempt.encode(batch)
        finally:
            publication.feed.done()
        publication.attempt.upload(batch.index)

    with ThreadPoolExecutor(2) as pool:
        for batch in publication.feed:
            pool.submit(work, batch)


# --- a process that dies


def calls_of_a_push(folder: Path, weights: Weights) -> list[tuple[str, str]]:
    faulty = FaultyStore(Run(folder).store)
    run = Run(folder)
    run.store = faulty
    publisher = run.open()
    faulty.calls.clear()
    bare_push(publisher, weights)
    return list(faulty.calls)


@pytest.mark.parametrize("action", ["kill", "kill before"])
def test_a_publisher_that_dies_at_any_store_call_of_a_push_is_followed_by_the_next(
    tmp_path: Path, action: Action
) -> None:
    calls = calls_of_a_push(tmp_path / "dry", V1)
    assert [verb for verb, _ in calls].count("put_file") >= 3
    for number, (verb, _) in enumerate(calls):
        run = Run(tmp_path / f"run-{number}")
        faulty = FaultyStore(run.store)
        dying = run.open(faulty)
        faulty.faults.append(Fault("*", action, skip=number))
        with pytest.raises(Killed):
            bare_push(dying, V1)
        landed = verb == "create" and action == "kill"
        states: dict[int, Weights] = {0: V0, 1: V1} if landed else {0: V0}
        assert_sound(run, states)
        heir = run.open()
        assert heir.version == max(states)
        assert push(heir, V2).version == heir.version == max(states) + 1
        assert_sound(run, {**states, max(states) + 1: V2})
        assert all(key.startswith("versions/000000000001/") and key.endswith(".safetensors") for key in orphans(run))


@pytest.mark.parametrize("action", ["kill", "kill before"])
def test_a_publisher_that_dies_at_any_store_call_of_its_start_is_followed_by_the_next(
    tmp_path: Path, action: Action
) -> None:
    run = Run(tmp_path)
    first = run.open()
    push(first, V1)
    push(first, V2)
    faulty = FaultyStore(run.store)
    run.open(faulty)
    states: dict[int, Weights] = {0: V0, 1: V1, 2: V2}
    for number in range(len(faulty.calls)):
        with pytest.raises(Killed):
            run.open(FaultyStore(run.store, Fault("*", action, skip=number)))
    assert_sound(run, states)
    assert all(key.startswith("probe/") for key in orphans(run))
    assert push(run.open(), V3).version == 3


@pytest.mark.parametrize("how", ["before", "torn", "after"])
def test_a_publisher_that_dies_at_any_write_to_its_disk_is_followed_by_the_next(tmp_path: Path, how: str) -> None:
    recorded = RecordingDisk("process")
    push(Run(tmp_path / "dry").open(disk=recorded), V1)
    verbs = [verb for verb, _ in recorded.log]
    assert verbs.count("write_atomic") >= 3
    for number in range(len(verbs)):
        run = Run(tmp_path / f"run-{number}")
        spool = run.folder / "the spool"
        with pytest.raises(Crash):
            bare_push(run.open(disk=CrashDisk(number, how, "process"), spool=spool), V1)
        head = Lineage(run.store).head()
        assert (head == 1) == (verbs[number] == "unlink")  # shards are let go only once the commit stands
        heir = run.open(spool=spool)  # what the dead one left in it does not matter
        states: dict[int, Weights] = {0: V0, 1: V1} if head == 1 else {0: V0}
        assert push(heir, V2).version == max(states) + 1
        assert_sound(run, {**states, max(states) + 1: V2})
        assert all(key.endswith(".safetensors") for key in orphans(run))


@pytest.mark.parametrize("action", ["kill", "kill before"])
def test_a_push_that_is_interrupted_at_any_store_call_is_settled_by_the_next_of_the_same_publisher(
    tmp_path: Path, action: Action
) -> None:
    """An interrupt, a timeout or a cancelled run ends a push anywhere, and the process goes on."""
    for number, (verb, _) in enumerate(calls_of_a_push(tmp_path / "dry", V1)):
        run = Run(tmp_path / f"run-{number}")
        faulty = FaultyStore(run.store)
        publisher = run.open(faulty)
        faulty.faults.append(Fault("*", action, skip=number))
        with pytest.raises(Killed):
            push(publisher, V1)
        sent = verb == "create"
        assert push(publisher, V2).version == (2 if sent else 1)
        assert_sound(run, {0: V0, 1: V1, 2: V2} if sent else {0: V0, 1: V2})
        assert run.spooled() == []
        # A request that is cut off may still be carried out after everything was taken back.
        assert orphans(run) == [] or (verb, action) == ("put_file", "kill")


def test_an_interrupt_while_the_snapshot_advances_is_made_good_by_the_next_push(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = run.open()
    image = publisher._snapshot.image
    scatter, left = image.scatter, [0]

    def interrupted(*args: Any) -> None:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        scatter(*args)

    monkeypatch.setattr(image, "scatter", interrupted)
    weights, version = V0, 0
    for parts_done in range(5):
        left[0] = parts_done
        weights, version = trained(weights, version + 100), version + 1
        with pytest.raises(KeyboardInterrupt):
            push(publisher, weights)
        assert publisher.version == version - 1
        left[0] = 100
        weights, version = trained(weights, version + 100), version + 1
        assert push(publisher, weights).version == publisher.version == version
        assert snapshot_of(publisher) == bytes_of(weights)
    assert snapshot_of(run.open()) == bytes_of(weights)
    assert run.spooled() == []
    assert orphans(run) == []


# --- a store that fails while the process goes on


@pytest.mark.parametrize("action", ["before", "lose", "full", "denied", "truncate", "flip"])
def test_one_fault_at_any_store_call_of_a_push_costs_at_most_that_push(tmp_path: Path, action: Action) -> None:
    for number, (verb, _) in enumerate(calls_of_a_push(tmp_path / "dry", V1)):
        if action in ("truncate", "flip") and verb == "create":
            continue  # a manifest damaged under way stands for good; see below
        run = Run(tmp_path / f"run-{number}")
        faulty = FaultyStore(run.store)
        publisher = run.open(faulty)
        faulty.faults.append(Fault("*", action, skip=number))
        states: dict[int, Weights] = {0: V0}
        before = run.objects()
        try:
            states[push(publisher, V1).version] = V1
        except WeighbridgeError:
            assert run.objects() == before
        assert snapshot_of(publisher) == bytes_of(states[max(states)])
        states[push(publisher, V2).version] = V2
        if (verb, action) != ("put_file", "flip"):  # that shard is damaged in the store: hosts repair or see an anchor
            assert_sound(run, states)
        assert run.spooled() == []
        assert orphans(run) == []


def test_a_lost_acknowledgement_of_the_manifest_is_our_own_commit(run: Run) -> None:
    publisher = run.open(FaultyStore(run.store, Fault("create", "lose", manifest_key(1))))
    assert push(publisher, V1).version == 1
    assert push(publisher, V2).version == 2
    assert_sound(run, {0: V0, 1: V1, 2: V2})


def test_a_commit_of_unknown_outcome_that_landed_is_settled_by_the_next_push(run: Run) -> None:
    faulty = FaultyStore(run.store)
    publisher = run.open(faulty)
    faulty.faults += [Fault("create", "lose", manifest_key(1)), Fault("get", "before", manifest_key(1), times=FOREVER)]
    with pytest.raises(CommitStateUnknown):
        push(publisher, V1)
    assert (publisher.version, snapshot_of(publisher)) == (0, bytes_of(V0))
    assert Lineage(run.store).head() == 1
    with pytest.raises(CommitStateUnknown):
        push(publisher, V2)  # still cannot be read
    faulty.faults.clear()
    assert push(publisher, V2).version == 2
    assert_sound(run, {0: V0, 1: V1, 2: V2})
    assert (orphans(run), run.spooled()) == ([], [])


def test_a_commit_of_unknown_outcome_that_did_not_land_is_settled_by_the_next_push(run: Run) -> None:
    """It is sent again: only so is it certain that it does not land later, below or instead of the next."""
    faulty = FaultyStore(run.store)
    publisher = run.open(faulty)
    faulty.faults.append(Fault("create", "before", manifest_key(1), times=FOREVER))
    with pytest.raises(CommitStateUnknown):
        push(publisher, V1)
    assert (publisher.version, snapshot_of(publisher)) == (0, bytes_of(V0))
    assert Lineage(run.store).head() == 0
    assert len(run.spooled()) == len(orphans(run)) > 0  # kept: it may still land
    faulty.faults.clear()
    assert push(publisher, V2).version == 2
    assert_sound(run, {0: V0, 1: V1, 2: V2})
    assert (orphans(run), run.spooled()) == ([], [])


def test_a_commit_of_unknown_outcome_is_not_given_up_when_the_store_then_refuses(run: Run) -> None:
    faulty = FaultyStore(run.store)
    publisher = run.open(faulty)
    faulty.faults.append(Fault("create", "before", manifest_key(1), times=FOREVER))
    with pytest.raises(CommitStateUnknown):
        push(publisher, V1)
    faulty.faults[:] = [Fault("create", "full")]
    with pytest.raises(StoreRefused):
        push(publisher, V2)
    assert push(publisher, V3).version == 2
    assert_sound(run, {0: V0, 1: V1, 2: V3})


def test_a_commit_of_unknown_outcome_that_another_writer_beat_is_let_go_by_the_next_push(run: Run) -> None:
    faulty = FaultyStore(run.store)
    publisher = run.open(faulty)
    faulty.faults.append(Fault("create", "before", manifest_key(1), times=FOREVER))
    with pytest.raises(CommitStateUnknown):
        push(publisher, V1)
    faulty.faults.clear()
    push(run.open(), V2)
    assert push(publisher, V3).version == 2
    assert_sound(run, {0: V0, 1: V2, 2: V3})
    assert (orphans(run), run.spooled()) == ([], [])


@pytest.mark.parametrize("verb", ["put_file", "create"])
def test_a_store_that_has_no_room_leaves_snapshot_store_and_spool_as_they_were(run: Run, verb: Any) -> None:
    faulty = FaultyStore(run.store)
    publisher = run.open(faulty)
    push(publisher, V1)
    before = run.objects()
    faulty.faults.append(Fault(verb, "full", skip=1 if verb == "put_file" else 0))
    with pytest.raises(StoreRefused):
        push(publisher, V2)
    assert (publisher.version, snapshot_of(publisher)) == (1, bytes_of(V1))
    assert (run.objects(), run.spooled()) == (before, [])
    manifest = push(publisher, V2)  # encoding the same tensors again gives a right delta
    assert (manifest.version, manifest.state_digest) == (2, state_digest_of(V2))
    assert_sound(run, {0: V0, 1: V1, 2: V2})


def test_a_local_disk_without_room_costs_the_push_and_nothing_else(tmp_path: Path) -> None:
    recorded = RecordingDisk()
    push(Run(tmp_path / "dry").open(disk=recorded), V1)
    for number, (verb, _) in enumerate(recorded.log):
        if verb != "write_atomic":
            continue
        run = Run(tmp_path / f"run-{number}")
        disk = FullDisk(number)
        publisher = run.open(disk=disk)
        before = run.objects()
        with pytest.raises(DiskFull):
            push(publisher, V1)
        assert (run.objects(), run.spooled(), snapshot_of(publisher)) == (before, [], bytes_of(V0))
        disk._at = FOREVER
        push(publisher, V2)
        assert_sound(run, {0: V0, 1: V2})


def test_an_orphan_that_cannot_be_deleted_does_not_hide_why_the_push_failed(run: Run) -> None:
    faulty = FaultyStore(run.store)
    publisher = run.open(faulty)
    faulty.faults += [Fault("create", "full", manifest_key(1)), Fault("delete", "before", times=FOREVER)]
    with pytest.raises(StoreRefused, match="no room"):
        push(publisher, V1)
    assert len(orphans(run)) == 3
    push(publisher, V2)
    assert_sound(run, {0: V0, 1: V2})


def test_a_gather_that_fails_half_way_leaves_the_store_as_it_was(run: Run) -> None:
    publisher = run.open()
    push(publisher, V1)
    before = [(info.key, info.nbytes, info.modified_ns) for info in run.store.list("")]

    def failing() -> Iterator[tuple[TensorSpec, Bytes]]:
        for number, pair in enumerate(as_tensors(V2)):
            if number == 5:
                assert len(run.objects()) > len(before)  # shards are under way already
                raise ValueError("a tensor is missing")
            yield pair

    with pytest.raises(ValueError, match="missing"):
        push_tensors(publisher, failing())
    assert [(info.key, info.nbytes, info.modified_ns) for info in run.store.list("")] == before
    assert run.spooled() == []
    assert push(publisher, V2).version == 2


def test_labels_that_a_manifest_cannot_carry_cost_the_push_and_nothing_else(run: Run) -> None:
    publisher = run.open()
    before = run.objects()
    with pytest.raises(UsageError, match="label"):
        push(publisher, V1, {"loss": float("nan")})
    assert (run.objects(), run.spooled()) == (before, [])
    assert push(publisher, V1, {"loss": 0.5}).labels["loss"] == 0.5


def test_a_version_whose_shards_were_not_all_uploaded_is_never_committed(run: Run) -> None:
    publisher = run.open()
    attempt = publisher.begin()
    for batch in batches(as_tensors(V1), shard_bytes=1600):
        attempt.encode(batch)
        if batch.index != 1:
            attempt.upload(batch.index)
    with pytest.raises(RuntimeError, match=r"shards \[1\] are not uploaded"):
        publisher.commit(attempt, {})
    assert Lineage(run.store).head() == 0
    attempt.upload(1)
    assert publisher.commit(attempt, {}).version == 1
    assert_sound(run, {0: V0, 1: V1})


def test_giving_up_an_attempt_that_stands_takes_nothing_back(run: Run) -> None:
    """An interrupt may come between the commit and the word of it."""
    publisher = run.open()
    attempt = fill(publisher, as_tensors(V1))
    publisher.commit(attempt, {})
    publisher.discard(attempt)
    assert_sound(run, {0: V0, 1: V1})


# --- an encoder that errs


Spoil = Callable[[list[PartInput], EncodedShard], EncodedShard]


def _other_element(inputs: list[PartInput], encoded: EncodedShard) -> EncodedShard:
    """A payload that leads to a byte that was not pushed, with the digests of what was pushed."""
    wrong = [replace(p, new=p.new.copy()) for p in inputs]
    for part in wrong:
        if part.new.size and not np.array_equal(part.old, part.new):
            part.new[np.flatnonzero(part.old != part.new)[0]] ^= 0x55
    return replace(encode_shard(wrong, digest_kind="xxh3-128"), parts=encoded.parts)


def _forgotten_part(inputs: list[PartInput], encoded: EncodedShard) -> EncodedShard:
    return replace(encoded, parts=encoded.parts[:-1])


def _swapped_parts(inputs: list[PartInput], encoded: EncodedShard) -> EncodedShard:
    return replace(encoded, parts=encoded.parts[::-1])


def _flipped_payload(inputs: list[PartInput], encoded: EncodedShard) -> EncodedShard:
    return replace(encoded, payload=flipped(encoded.payload))


def _cut_payload(inputs: list[PartInput], encoded: EncodedShard) -> EncodedShard:
    return replace(encoded, payload=encoded.payload[:-1])


def _wrong_digest(inputs: list[PartInput], encoded: EncodedShard) -> EncodedShard:
    return replace(encoded, parts=tuple(replace(part, after=b"\0" * 16) for part in encoded.parts))


@pytest.mark.parametrize(
    "spoil", [_other_element, _forgotten_part, _swapped_parts, _flipped_payload, _cut_payload, _wrong_digest]
)
def test_a_wrong_delta_is_never_committed(run: Run, monkeypatch: pytest.MonkeyPatch, spoil: Spoil) -> None:
    publisher = run.open()
    push(publisher, V1)
    before = run.objects()

    def wrong(inputs: list[PartInput], **options: Any) -> EncodedShard:
        return spoil(inputs, encode_shard(inputs, **options))

    with monkeypatch.context() as patched:
        patched.setattr(attempt_module, "encode_shard", wrong)
        patched.setattr("tests.storage.publishing.SHARD_BYTES", 1 << 20)
        with pytest.raises((DigestMismatch, PayloadCorrupt)):
            push(publisher, V2)
    assert (run.objects(), run.spooled(), snapshot_of(publisher)) == (before, [], bytes_of(V1))
    assert push(publisher, V2).version == 2
    assert_sound(run, {0: V0, 1: V1, 2: V2})


# --- other writers


def test_another_writers_version_is_followed_by_a_writer_that_never_committed(run: Run) -> None:
    ours, theirs = run.open(), run.open()
    push(theirs, V1)
    assert push(ours, V2).version == 2
    assert_sound(run, {0: V0, 1: V1, 2: V2})


def test_a_writer_that_never_committed_meets_a_conflict_and_its_next_push_follows(run: Run) -> None:
    ours, theirs = run.open(), run.open()
    attempt = fill(ours, as_tensors(V2))
    push(theirs, V1)
    with pytest.raises(CommitConflict, match=rf"writer {theirs.writer} first.*push again") as conflict:
        ours.commit(attempt, {})
    assert not isinstance(conflict.value, WriterOvertaken)
    assert (ours.version, snapshot_of(ours), orphans(run)) == (0, bytes_of(V0), [])
    assert push(ours, V2).version == 2
    assert_sound(run, {0: V0, 1: V1, 2: V2})


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_writer_that_committed_and_is_overtaken_stops_for_good(run: Run, when: str) -> None:
    ours = run.open()
    push(ours, V1)
    theirs = run.open()
    attempt = fill(ours, as_tensors(V3)) if when == "meanwhile" else None
    push(theirs, V2)
    said = rf"writer {theirs.writer} took run run-1 over with version 2.*{ours.writer}.*stops for good at version 1"
    with pytest.raises(WriterOvertaken, match=said):
        ours.commit(attempt, {}) if attempt else push(ours, V3)
    before = run.objects()
    for action in (ours.begin, ours.take_over, lambda: push(ours, V3)):
        with pytest.raises(WriterOvertaken, match=said):
            action()
    assert (run.objects(), run.spooled(), orphans(run)) == (before, [], [])
    assert (ours.version, snapshot_of(ours)) == (1, bytes_of(V1))
    assert push(theirs, V3).version == 3
    assert_sound(run, {0: V0, 1: V1, 2: V2, 3: V3})


def test_a_writer_that_was_overtaken_stays_so_when_its_own_commit_was_in_doubt(run: Run) -> None:
    faulty = FaultyStore(run.store)
    ours = run.open(faulty)
    push(ours, V1)
    faulty.faults.append(Fault("create", "before", manifest_key(2), times=FOREVER))
    with pytest.raises(CommitStateUnknown):
        push(ours, V2)
    faulty.faults.clear()
    push(run.open(), V3)
    for _ in range(2):
        with pytest.raises(WriterOvertaken):
            push(ours, V2)
    assert_sound(run, {0: V0, 1: V1, 2: V3})
    assert (orphans(run), run.spooled()) == ([], [])


def test_a_trainer_that_resumes_takes_the_run_over_with_an_empty_version(run: Run) -> None:
    before = run.open()
    push(before, V1)
    resumed = run.open()
    manifest = resumed.take_over()
    assert manifest is not None
    assert (manifest.version, manifest.rows, manifest.labels) == (2, (), {"took_over": True})
    assert manifest.writer == resumed.writer
    with pytest.raises(WriterOvertaken, match=resumed.writer):
        push(before, V2)
    assert push(resumed, V2).version == 3
    assert_sound(run, {0: V0, 1: V1, 2: V1, 3: V2})


def test_there_is_nothing_to_take_over_above_the_base_or_above_ones_own_version(run: Run) -> None:
    publisher = run.open()
    assert publisher.take_over() is None
    push(publisher, V1)
    assert publisher.take_over() is None
    assert Lineage(run.store).head() == 1


class Interloper(FaultyStore):
    """Another writer commits just before each of the first `times` commits that go through here."""

    def __init__(self, run: Run, times: int) -> None:
        super().__init__(run.store)
        self._run, self._times = run, times
        self._other = run.open()

    def create(self, key: str, data: bytes) -> None:
        if key.endswith("manifest.arrow") and self._times:
            self._times -= 1
            push(self._other, trained(V1, 50 + self._times))
        super().create(key, data)


def test_taking_over_tries_again_above_a_version_that_came_in_between(run: Run) -> None:
    push(run.open(), V1)
    interloper = Interloper(run, times=3)
    resumed = run.open(interloper)
    manifest = resumed.take_over()
    assert manifest is not None
    assert (manifest.version, manifest.writer) == (5, resumed.writer)
    assert_sound(run, {0: V0, 1: V1, 4: trained(V1, 50), 5: trained(V1, 50)})


def test_taking_over_gives_up_when_the_other_writer_never_stops(run: Run) -> None:
    push(run.open(), V1)
    resumed = run.open(Interloper(run, times=FOREVER))
    with pytest.raises(CommitConflict, match="stop the other trainer"):
        resumed.take_over()


def test_two_publishers_in_two_processes_race_for_every_version_and_one_wins_each(run: Run) -> None:
    rounds = 20
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    racers = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.storage.racing_publisher",
                run.store.url,
                str(run.base),
                str(run.folder / f"racer-{seed}"),
                str(seed),
                str(rounds),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        for seed in (1000, 2000)
    ]
    states: dict[int, str] = {}
    wins = [0, 0]
    try:
        for version in range(1, rounds + 1):
            assert [hear(racer) for racer in racers] == [["ready", str(version)]] * 2
            for racer in racers[:: 1 if version % 2 else -1]:
                assert racer.stdin is not None
                racer.stdin.write("go\n")
                racer.stdin.flush()
            said = [hear(racer) for racer in racers]
            assert sorted(words[0] for words in said) == ["lost", "won"], said
            winner = 0 if said[0][0] == "won" else 1
            wins[winner] += 1
            assert {words[1] for words in said} == {str(version)}
            states[version] = said[winner][2]
        assert [racer.wait(120) for racer in racers] == [0, 0]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
    lineage = Lineage(run.store)
    assert lineage.head() == rounds
    assert {m.version: m.state_digest for m in lineage.walk(0, rounds)} == states
    assert orphans(run) == []
    assert run.open().version == rounds
    assert sum(wins) == rounds


def hear(racer: "subprocess.Popen[str]") -> list[str]:
    assert racer.stdout is not None
    return racer.stdout.readline().split()


# --- what another writer must not make us believe


Forge = Callable[[Manifest], Manifest]


def with_row(**changes: Any) -> Forge:
    return lambda m: replace(m, rows=(replace(m.rows[0], **changes), *m.rows[1:]))


@pytest.mark.parametrize(
    ("forge", "error"),
    [
        (with_row(key=PartKey("not.in.the.base", 0)), ManifestCorrupt),
        (with_row(key=PartKey("embed.weight", 512)), ManifestCorrupt),
        (with_row(nbytes=8), ManifestCorrupt),
        (with_row(dtype="BF16"), ManifestCorrupt),
        (with_row(before=b"\0" * 16), ManifestCorrupt),
        (with_row(after=b"\0" * 16), DigestMismatch),
        (with_row(codec="full"), PayloadCorrupt),
        (with_row(codec="never heard of"), CorruptData),
        (lambda m: replace(m, rows=m.rows[1:]), DigestMismatch),
        (lambda m: replace(m, state_digest="00" * 32), DigestMismatch),
        (lambda m: replace(m, parent_digest="00" * 32), ManifestCorrupt),
        (lambda m: replace(m, shards=(replace(m.shards[0], digest=b"\0" * 16), *m.shards[1:])), ShardCorrupt),
        (lambda m: replace(m, shards=(replace(m.shards[0], name=f"{'ab' * 16}-0.safetensors"),)), ManifestCorrupt),
    ],
)
def test_a_version_that_does_not_prove_what_it_claims_is_not_followed(
    run: Run, forge: Forge, error: type[Exception]
) -> None:
    ours, theirs = run.open(), run.open()
    honest = push(theirs, V1)
    data, _ = to_bytes(replace(forge(honest), commit_id=honest.commit_id))
    run.store.put(manifest_key(1), data)
    for _ in range(2):
        with pytest.raises(error):
            push(ours, V2)
        assert ours.version == 0
    with pytest.raises(error):
        run.open()
    assert Lineage(run.store).head() == 1


def test_a_version_that_claims_the_state_its_lies_lead_to_is_not_followed(run: Run) -> None:
    """The forger gives `after` digests and the state digest that go together; the shards do not lead there."""
    ours, theirs = run.open(), run.open()
    honest = push(theirs, V1)
    rows = (*honest.rows[:-1], replace(honest.rows[-1], after=b"\7" * 16))
    state = state_digest(advance(base_digests(ours.lineage.manifest(0)), rows))
    run.store.put(manifest_key(1), to_bytes(replace(honest, rows=rows, state_digest=state))[0])
    for _ in range(2):
        with pytest.raises(DigestMismatch, match="do not lead"):
            push(ours, V2)
    assert ours.version == 0
    with pytest.raises(DigestMismatch):
        run.open()


def test_a_missing_shard_stops_a_follower_and_says_which(run: Run) -> None:
    honest = push(run.open(), V1)
    key = shard_key(1, honest.shards[1])
    kept = run.store.get(key)
    run.store.delete(key)
    with pytest.raises(ObjectMissing, match=key):
        run.open()
    run.store.put(key, kept)
    assert snapshot_of(run.open()) == bytes_of(V1)


def test_a_follower_reads_past_a_flipped_bit_in_flight(run: Run) -> None:
    push(run.open(), V1)
    publisher = run.open(FaultyStore(run.store, Fault("get_range", "flip")))
    assert snapshot_of(publisher) == bytes_of(V1)


def test_a_store_that_fails_while_following_leaves_a_publisher_that_can_try_again(run: Run) -> None:
    faulty = FaultyStore(run.store)
    ours: Publisher = run.open(faulty)
    push(run.open(), V1)
    faulty.faults.append(Fault("get_range", "denied", skip=1))
    with pytest.raises(StoreError):
        push(ours, V2)
    assert push(ours, V2).version == 2
    assert_sound(run, {0: V0, 1: V1, 2: V2})
    assert run.spooled() == []
