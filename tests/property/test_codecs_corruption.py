"""Whatever happens to a payload, a decoder ends in a typed error, in bytes that the digest refuses, or in the right
bytes. It never crashes, never touches memory that is not its own, never takes more than the declared sizes allow."""

import ctypes
import mmap
import resource
import struct
from collections.abc import Sequence

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save
from tests.property.codec_cases import Change, part, rows_of

from weighbridge.errors import PayloadCorrupt
from weighbridge.storage import codecs
from weighbridge.storage.codecs.contract import Bytes

NAMES = tuple(codecs.CODECS)


@pytest.fixture(scope="module", autouse=True)
def warm_kernels() -> None:
    codecs.warm()


def small_shard(
    codec: str,
) -> tuple[bytes, Sequence[tuple[str, codecs.PartShape]], Sequence[codecs.PartInput], list[bytes]]:
    parts = [
        part("a", Change("BF16", 300, 0.1, "steps", 0, 1)),
        part("b", Change("BF16", 130, 0.2, "weights", 1, 2)),
        part("c", Change("F32", 65, 0.5, "noise", 2, 3)),
        part("d", Change("F32" if codec == "expgap" else "U8", 700, 0.01, "noise", 3, 4)),
        part("e", Change("F8_E4M3", 128, 0.4, "steps", 3, 4)),
    ]
    shard = codecs.encode_shard(parts, digest_kind="xxh3-128", codec=codec)
    rows, order = rows_of(shard, parts)
    return shard.payload, rows, order, [row.after for row in shard.parts]


def outcome(
    payload: bytes, rows: Sequence[tuple[str, codecs.PartShape]], olds: Sequence[Bytes], afters: Sequence[bytes]
) -> str:
    """What becomes of a payload: "refused", "noticed" by a digest, or "right"."""
    try:
        decoder = codecs.open_shard(payload, rows)
        for index, (old, after) in enumerate(zip(olds, afters, strict=True)):
            patch = decoder.decode(index, old)
            if codecs.patched_digest(old, patch, digest_kind="xxh3-128") != after:
                return "noticed"
    except PayloadCorrupt:
        return "refused"
    return "right"


def guarded(data: Bytes) -> Bytes:
    """A copy that ends where a page without any rights begins: a read or write beyond it kills the process."""
    page = mmap.PAGESIZE
    size = -(-data.size // page) * page
    area = mmap.mmap(-1, size + page)
    whole = np.frombuffer(area, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(whole.ctypes.data + size), ctypes.c_size_t(page), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    out = whole[size - data.size : size]
    out[:] = data
    return out


@pytest.mark.parametrize("codec", NAMES)
def test_any_flipped_byte_is_refused_or_noticed(codec: str) -> None:
    payload, rows, parts, afters = small_shard(codec)
    olds = [guarded(p.old) for p in parts]
    assert outcome(payload, rows, olds, afters) == "right"
    for place in range(len(payload)):
        for flip in (1, 0xFF):
            bad = bytearray(payload)
            bad[place] ^= flip
            outcome(bytes(bad), rows, olds, afters)
    assert all(np.array_equal(old, p.old) for old, p in zip(olds, parts, strict=True))


@pytest.mark.parametrize("codec", NAMES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_change_inside_the_streams_is_refused_or_noticed(codec: str, data: st.DataObject) -> None:
    payload, rows, parts, afters = small_shard(codec)
    streams = load(payload)
    name = data.draw(st.sampled_from(sorted(name for name, raw in streams.items() if raw.size)))
    framed = is_one_frame(streams[name].tobytes())
    whole = zstandard.decompress(streams[name].tobytes()) if framed else streams[name].tobytes()
    content = edited(whole, data)
    bad = zstandard.compress(content) if framed else content
    got = outcome(save({**streams, name: np.frombuffer(bad, np.uint8)}), rows, [guarded(p.old) for p in parts], afters)
    assert got != "right" or content == whole or codec != "gap"


def is_one_frame(data: bytes) -> bool:
    try:
        return len(zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)) >= 0
    except zstandard.ZstdError:
        return False


def edited(whole: bytes, data: st.DataObject) -> bytes:
    content = bytearray(whole)
    edit = data.draw(st.sampled_from(("set", "cut", "grow")))
    if edit == "set" and content:
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    elif edit == "cut":
        del content[data.draw(st.integers(0, len(content))) :]
    else:
        content += data.draw(st.binary(min_size=1, max_size=9))
    return bytes(content)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 1 << 30), share=st.sampled_from((0.001, 0.03, 1.0)))
def test_expgap_decodes_any_gaps_and_symbols_without_touching_what_is_not_its_own(seed: int, share: float) -> None:
    payload, rows, parts, _ = small_shard("expgap")
    streams = {name.partition("/")[2]: memoryview(raw.tobytes()) for name, raw in load(payload).items()}
    decoder = codecs.get_codec("expgap").decoder(streams, [shape for _, shape in rows])
    rng = np.random.default_rng(seed)
    for group in decoder._groups.values():  # type: ignore[attr-defined]
        bad = []
        for stream in group.streams[:4]:
            values = stream.copy()
            hit = rng.random(values.size) < share
            values[hit] = rng.integers(0, 256, int(hit.sum()))
            values.flags.writeable = False
            bad.append(values)
        group.streams = (*bad, *group.streams[4:])
    for index, source in enumerate(parts):
        old = guarded(source.old)
        try:
            part_decoder = decoder.part(index)
            part_decoder.feed(old, guarded(old))
            patch = part_decoder.finish()
        except PayloadCorrupt:
            continue
        codecs.scatter(old, patch)


@pytest.mark.parametrize("codec", NAMES)
def test_a_payload_cut_or_prolonged_anywhere_is_refused(codec: str) -> None:
    payload, rows, parts, afters = small_shard(codec)
    olds = [p.old for p in parts]
    for size in range(len(payload)):
        assert outcome(payload[:size], rows, olds, afters) == "refused"
    assert outcome(payload + b"\0", rows, olds, afters) == "refused"


@pytest.mark.parametrize("codec", NAMES)
def test_rows_that_are_not_the_payloads_own_are_refused_or_noticed(codec: str) -> None:
    payload, rows, parts, afters = small_shard(codec)
    olds = [p.old for p in parts]
    assert outcome(payload, rows[:-1], olds[:-1], afters[:-1]) == "refused"
    assert outcome(payload, [*rows, rows[0]], [*olds, olds[0]], [*afters, afters[0]]) == "refused"
    assert outcome(payload, rows[::-1], olds[::-1], afters[::-1]) != "right"
    assert outcome(payload, [("unheard-of", shape) for _, shape in rows], olds, afters) == "refused"
    wider = [(name, codecs.PartShape(shape.dtype, shape.nbytes + 64)) for name, shape in rows]
    assert outcome(payload, wider, olds, afters) == "refused"
    odd = [(name, codecs.PartShape("I64", shape.nbytes)) for name, shape in rows]
    assert outcome(payload, odd, olds, afters) != "right"


@pytest.mark.parametrize("codec", NAMES)
def test_wrong_old_bytes_are_refused_or_noticed(codec: str) -> None:
    payload, rows, parts, afters = small_shard(codec)
    for index in range(len(parts)):
        for place in range(0, parts[index].old.size, 29):
            olds = [p.old.copy() for p in parts]
            olds[index][place] ^= 0x40
            outcome(payload, rows, [guarded(old) for old in olds], afters)


@pytest.mark.parametrize("codec", NAMES)
def test_a_frame_that_claims_too_much_is_refused_before_memory_is_taken(codec: str) -> None:
    one = [part("a", Change("BF16", 300, 0.1, "steps", 0, 1))]
    payload = codecs.encode_shard(one, digest_kind="xxh3-128", codec=codec).payload
    for name in load(payload):
        bomb = np.frombuffer(struct.pack("<IBQ", 0xFD2FB528, 0xE0, 1 << 40) + b"\1\0\0", np.uint8)
        bad = save({**load(payload), name: bomb})
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(PayloadCorrupt):
            codecs.open_shard(bad, [(codec, codecs.PartShape("BF16", 600))]).decode(0, one[0].old)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
