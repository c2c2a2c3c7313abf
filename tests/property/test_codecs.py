"""Every codec is exact for every dtype, bit pattern, length, density and alignment."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.property.codec_cases import Change, changes, part, round_trip

from weighbridge.errors import PayloadCorrupt, UsageError
from weighbridge.storage import codecs
from weighbridge.storage.codecs.elements import element
from weighbridge.storage.codecs.kernels.lanes import SPAN, STRETCH
from weighbridge.storage.parts import cut
from weighbridge.values import PartKey, TensorSpec

NAMES = (None, *codecs.CODECS)


@pytest.fixture(scope="module", autouse=True)
def warm_kernels() -> None:
    codecs.warm()


@pytest.mark.parametrize("codec", NAMES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shard=st.lists(changes, min_size=1, max_size=5))
def test_any_shard_comes_back_bit_for_bit(codec: str | None, shard: list[Change]) -> None:
    round_trip([part(f"t{i}", change) for i, change in enumerate(shard)], codec)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "I16"])
@pytest.mark.parametrize("codec", NAMES)
def test_all_16_bit_patterns_change_into_patterns_near_and_far(codec: str | None, dtype: str) -> None:
    old = np.arange(1 << 16, dtype=np.uint16)
    shifts = [1, 2, 3, 127, 128, 129, 255, 256, 257, 0x7FFF, 0x8000, 0x8001, 0xFF00, 0xFFFE, 0xFFFF]
    parts = [
        codecs.PartInput(PartKey(f"+{s}", 0), dtype, old.view(np.uint8), (old + np.uint16(s)).view(np.uint8))
        for s in shifts
    ]
    parts.append(codecs.PartInput(PartKey("sign", 0), dtype, old.view(np.uint8), (old ^ 0x8000).view(np.uint8)))
    round_trip(parts, codec)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_each_bf16_pattern_changes_into_each() -> None:
    old = np.arange(1 << 16, dtype=np.uint16)
    for first in range(0, 1 << 16, 64):
        new = [old + np.uint16(s) for s in range(first, first + 64)]
        shard = [
            codecs.PartInput(PartKey(f"+{i}", 0), "BF16", old.view(np.uint8), n.view(np.uint8))
            for i, n in enumerate(new)
        ]
        round_trip(shard, "gap")


def test_parts_of_several_chunks_keep_their_places() -> None:
    dtypes = ("BF16", "U8", "F32", "I64")
    parts = [part(f"t{i}", Change(d, 300_001, 0.01, "steps", i, i)) for i, d in enumerate(dtypes)]
    parts.append(part("late", Change("BF16", 700_000, 0.0, "ends", 1, 9)))
    for codec in NAMES:
        round_trip(parts, codec)


@pytest.mark.parametrize("dtype", ["BF16", "F8_E5M2", "F32"])
def test_parts_that_change_here_a_little_and_there_a_lot_keep_their_places(dtype: str) -> None:
    width = element(dtype).width
    for elements in (STRETCH - 1, STRETCH, STRETCH + 1, 5 * STRETCH + SPAN + 77):
        rng = np.random.default_rng(elements)
        old = (rng.standard_normal(elements) * 0.02).astype(np.float32).view(np.uint32) >> np.uint32(32 - 8 * width)
        dense = np.arange(elements) // STRETCH % 2 == 1
        hit = rng.random(elements) < np.where(dense, 0.4, 0.002)
        new = old + np.where(hit, rng.choice([1, 2], elements), 0).astype(np.uint32)
        before, after = (words.astype(f"<u{width}").view(np.uint8) for words in (old, new))
        round_trip([codecs.PartInput(PartKey("t", 0), dtype, before, after)], "expgap")


def test_a_gap_may_end_at_any_multiple_of_255() -> None:
    for gap in (253, 254, 255, 256, 509, 510, 511, 765, 766):
        old = np.zeros(2000, np.uint8)
        new = old.copy()
        new[[gap, 2 * gap + 1]] = 7
        round_trip([codecs.PartInput(PartKey("t", 0), "U8", old, new)], "gap")


def test_nothing_changed_gives_no_payload() -> None:
    same = part("t", Change("BF16", 5000, 0.0, "noise", 1, 3))
    shard = codecs.encode_shard([same], digest_kind="xxh3-128")
    assert (shard.payload, shard.parts, shard.unchanged) == (b"", (), (same.key,))


def test_sparse_changes_weigh_little_and_dense_ones_no_more_than_the_bytes() -> None:
    rare = part("t", Change("BF16", 200_000, 0.02, "steps", 0, 1))
    assert len(codecs.encode_shard([rare], digest_kind="xxh3-128").payload) < 200_000 * 0.02 * 1.6 + 700
    noise = part("t", Change("I64", 20_000, 1.0, "noise", 0, 1))
    assert len(codecs.encode_shard([noise], digest_kind="xxh3-128").payload) < noise.new.size * 1.01 + 700


def test_the_same_parts_give_the_same_payload() -> None:
    parts = [part("t", Change("BF16", 9000, 0.02, "steps", 0, 1))]
    assert (
        codecs.encode_shard(parts, digest_kind="xxh3-128").payload
        == codecs.encode_shard(parts, digest_kind="blake3").payload
    )


def test_parts_that_do_not_fit_are_refused_before_anything_is_encoded() -> None:
    ten, eleven = np.zeros(10, np.uint8), np.zeros(11, np.uint8)
    for old, new, dtype in ((ten, eleven, "U8"), (eleven, eleven + 1, "BF16"), (ten, np.zeros((2, 5), np.uint8), "U8")):
        with pytest.raises(UsageError):
            codecs.encode_shard([codecs.PartInput(PartKey("t", 0), dtype, old, new)], digest_kind="xxh3-128")


def test_deltas_folded_equal_deltas_applied_in_turn() -> None:
    rng = np.random.default_rng(5)
    for codec in NAMES:
        versions = [part("t", Change("BF16", 70_001, 0.0, "weights", 1, 1)).old]
        for _ in range(4):
            words = versions[-1].copy().view(np.uint16)
            hit = rng.random(words.size) < 0.01
            words[hit] += rng.integers(1, 4, int(hit.sum())).astype(np.uint16)
            versions.append(words.view(np.uint8))
        steps = []
        for old, new in itertools.pairwise(versions):
            shard = codecs.encode_shard(
                [codecs.PartInput(PartKey("t", 0), "BF16", old, new)], digest_kind="xxh3-128", codec=codec
            )
            decoder = codecs.open_shard(shard.payload, [(shard.parts[0].codec, codecs.PartShape("BF16", new.size))])
            steps.append(lambda data, decoder=decoder: decoder.decode(0, data))
        base = versions[0].tobytes()
        patch = codecs.fold(versions[0], steps)
        assert versions[0].tobytes() == base
        assert codecs.patched_digest(versions[0], patch, digest_kind="xxh3-128") == shard.parts[0].after
        target = versions[0].copy()
        codecs.scatter(target, patch)
        assert target.tobytes() == versions[-1].tobytes()


def test_a_patch_that_does_not_fit_writes_nothing() -> None:
    target = np.zeros(64, np.uint8)
    for positions, values, width in (
        ([0, 32], 4, 2),  # the second lies just beyond
        ([0, 0xFFFFFFFF], 4, 2),
        ([0], 4, 2),  # a value too many
        ([0], 3, 3),  # no such width
        (None, 63, 1),
    ):
        at = None if positions is None else np.array(positions, np.uint32)
        patch = codecs.Patch(width, at, np.full(values, 9, np.uint8))
        with pytest.raises(PayloadCorrupt):
            codecs.scatter(target, patch)
        with pytest.raises(PayloadCorrupt):
            codecs.patched_digest(target, patch, digest_kind="xxh3-128")
        assert not target.any()


def test_a_patch_out_of_order_is_refused_by_the_digest() -> None:
    patch = codecs.Patch(1, np.array([codecs.CHUNK_BYTES, 0], np.uint32), np.ones(2, np.uint8))
    with pytest.raises(PayloadCorrupt, match="ascend"):
        codecs.patched_digest(np.zeros(codecs.CHUNK_BYTES + 1, np.uint8), patch, digest_kind="xxh3-128")


_SAME_BYTES = """
import sys, xxhash
sys.path.insert(0, sys.argv[1])
from tests.property.codec_cases import Change, part, round_trip
from weighbridge.storage.codecs import CODECS, kernels
dtypes = ("BF16", "F8_E4M3", "F32", "F16", "I64", "BOOL", "U16", "F8_E5M2")
kinds = ["weights", "steps"] * 4
parts = [part(f"t{i}", Change(d, (9000 if i == 0 else 700) + i, 0.1, kinds[i], i, i)) for i, d in enumerate(dtypes)]
for codec in (None, *CODECS):
    print(kernels.compiler.JIT, xxhash.xxh3_64_hexdigest(round_trip(parts, codec).payload))
"""


def test_kernels_give_the_same_bytes_compiled_and_as_plain_python_with_bounds_checked() -> None:
    def run(**environment: str) -> list[list[str]]:
        out = subprocess.run(
            [sys.executable, "-W", "error::RuntimeWarning", "-c", _SAME_BYTES, str(Path(__file__).parents[2])],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return [line.split() for line in out.stdout.splitlines()]

    compiled, plain = run(), run(NUMBA_DISABLE_JIT="1")
    assert {line[0] for line in compiled} == {"True"}
    assert {line[0] for line in plain} == {"False"}
    assert [line[1] for line in compiled] == [line[1] for line in plain]


def test_importing_the_codecs_loads_neither_prefect_nor_torch() -> None:
    probe = "import sys, weighbridge.storage.codecs; print([m for m in ('prefect', 'torch') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.fixture
def sparse_pair(tmp_path: Path) -> Iterator[tuple[np.memmap, np.memmap]]:  # type: ignore[type-arg]
    size = (1 << 31) + 1
    maps = []
    for name in ("old", "new"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2 * size)
        maps.append(np.memmap(tmp_path / name, np.uint8, "r+"))
    yield maps[0], maps[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_tensor_of_more_than_2_to_the_31_elements(sparse_pair: tuple[np.memmap, np.memmap]) -> None:  # type: ignore[type-arg]
    old, new = sparse_pair
    new[[5, 1 << 31, (1 << 32) - 1, 1 << 32, old.size - 1]] = 3
    spec = TensorSpec("t", "BF16", (old.size // 2,), old.size)
    changed = 0
    for piece in cut(spec):
        at = slice(piece.key.offset, piece.key.offset + piece.nbytes)
        shard = codecs.encode_shard([codecs.PartInput(piece.key, "BF16", old[at], new[at])], digest_kind="xxh3-128")
        for row in shard.parts:
            changed += row.changed
            decoder = codecs.open_shard(shard.payload, [(row.codec, codecs.PartShape("BF16", piece.nbytes))])
            codecs.scatter(old[at], decoder.decode(0, old[at]))
            assert np.array_equal(old[at], new[at])
    assert changed == 4
