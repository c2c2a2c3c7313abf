"""Batches: every byte once, in order, in groups that are not larger than asked for unless one part is."""

from collections.abc import Iterator

import numpy as np
import pytest
from tests.storage.publishing import some_bytes

from weighbridge.storage import parts
from weighbridge.storage.batching import Batch, batches
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.values import PartKey, TensorSpec


def tensors(*sizes: int) -> list[tuple[TensorSpec, Bytes]]:
    return [(TensorSpec(f"t{n}", "U8", (size,), size), some_bytes(size, n)) for n, size in enumerate(sizes)]


def names(batch: Batch) -> list[PartKey]:
    return [part.part.key for part in batch.parts]


def test_parts_are_grouped_in_the_order_in_which_they_arrive() -> None:
    made = list(batches(tensors(40, 60, 1, 99, 100), shard_bytes=100))
    assert [[key.tensor for key in names(batch)] for batch in made] == [["t0", "t1"], ["t2", "t3"], ["t4"]]
    assert [batch.index for batch in made] == [0, 1, 2]


def test_a_part_larger_than_a_shard_is_a_batch_of_its_own() -> None:
    made = list(batches(tensors(10, 500, 10), shard_bytes=100))
    assert [[key.tensor for key in names(batch)] for batch in made] == [["t0"], ["t1"], ["t2"]]


def test_no_tensors_make_no_batch() -> None:
    assert list(batches([], shard_bytes=100)) == []


def test_empty_tensors_come_along() -> None:
    (made,) = batches(tensors(0, 100, 0), shard_bytes=100)
    assert [key.tensor for key in names(made)] == ["t0", "t1", "t2"]
    assert [part.new.size for part in made.parts] == [0, 100, 0]


def test_a_large_tensor_is_cut_and_comes_whole_with_its_first_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 64)
    given = tensors(64, 150, 10)
    made = list(batches(given, shard_bytes=130))
    assert [names(batch) for batch in made] == [
        [PartKey("t0", 0), PartKey("t1", 0)],
        [PartKey("t1", 64), PartKey("t1", 128), PartKey("t2", 0)],
    ]
    assert [[name for name, _ in batch.whole] for batch in made] == [["t1"], []]
    assert made[0].whole[0][1] is given[1][1]


@pytest.mark.parametrize("shard_bytes", [1, 63, 64, 65, 200, 10_000])
def test_every_byte_comes_once(monkeypatch: pytest.MonkeyPatch, shard_bytes: int) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 64)
    given = tensors(0, 1, 64, 65, 200, 3)
    made = list(batches(given, shard_bytes=shard_bytes))
    for spec, data in given:
        pieces = [p for batch in made for p in batch.parts if p.part.key.tensor == spec.name]
        assert [p.part.key.offset for p in pieces] == list(range(0, max(1, spec.nbytes), 64))
        assert np.array_equal(np.concatenate([p.new for p in pieces]), data)
        assert all(p.part.nbytes == p.new.size for p in pieces)
    for batch in made:
        assert sum(p.new.size for p in batch.parts) <= shard_bytes or sum(p.new.size > 0 for p in batch.parts) == 1
    assert [name for batch in made for name, _ in batch.whole] == ["t3", "t4"]


def test_bytes_are_not_copied() -> None:
    given = tensors(40, 60)
    (made,) = batches(given, shard_bytes=100)
    assert all(np.shares_memory(part.new, data) for part, (_, data) in zip(made.parts, given, strict=True))


def test_no_more_is_asked_for_than_the_batch_in_hand_needs() -> None:
    asked: list[str] = []

    def source() -> Iterator[tuple[TensorSpec, Bytes]]:
        for spec, data in tensors(60, 60, 60, 60):
            asked.append(spec.name)
            yield spec, data

    made = batches(source(), shard_bytes=100)
    assert asked == []
    next(made)
    assert asked == ["t0", "t1"]
    next(made)
    assert asked == ["t0", "t1", "t2"]
