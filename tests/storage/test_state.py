"""The state digest: its bytes by the format's text, and what it must not depend on."""

import struct
from pathlib import Path

import blake3
import pytest
from tests.checkpoints import state_digest_of, tiny_weights, trained, write_checkpoint
from tests.storage.folders import split, write_sharded
from tests.storage.manifests import some_base, some_row

from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.state import advance, base_digests, state_digest
from weighbridge.values import PartKey

DIGESTS = {PartKey("b", 0): b"\x0b" * 16, PartKey("a", 0): b"\x0a" * 16, PartKey("a", 268_435_456): b"\xaa" * 16}


def test_the_state_digest_is_blake3_over_names_offsets_and_digests() -> None:
    by_hand = (
        b"\x01\x00\x00\x00" + b"a" + b"\x00" * 8 + b"\x10" + b"\x0a" * 16
        + b"\x01\x00\x00\x00" + b"a" + b"\x00\x00\x00\x10\x00\x00\x00\x00" + b"\x10" + b"\xaa" * 16
        + b"\x01\x00\x00\x00" + b"b" + b"\x00" * 8 + b"\x10" + b"\x0b" * 16
    )  # fmt: skip
    assert state_digest(DIGESTS) == blake3.blake3(by_hand).hexdigest()
    assert state_digest(DIGESTS) == "f6d1937c80653de69e346fef2c9635ce6d9d86699197ac3c1e46a9d1de428c52"


def test_no_parts_at_all_have_the_digest_of_nothing() -> None:
    assert state_digest({}) == blake3.blake3(b"").hexdigest()


def test_the_order_of_parts_plays_no_role() -> None:
    assert state_digest(dict(sorted(DIGESTS.items(), reverse=True))) == state_digest(DIGESTS)


def test_names_are_sorted_by_their_utf8_bytes() -> None:
    names = ["z", "ä", "layers.10", "layers.9", "A", "\U0001f600", "\uffff"]
    by_hand = b"".join(
        struct.pack("<I", len(n.encode())) + n.encode() + struct.pack("<QB", 0, 1) + b"d"
        for n in sorted(names, key=str.encode)
    )
    assert state_digest({PartKey(n, 0): b"d" for n in names}) == blake3.blake3(by_hand).hexdigest()


@pytest.mark.parametrize(
    "other",
    [
        {**DIGESTS, PartKey("a", 0): b"\x0c" * 16},
        {**DIGESTS, PartKey("c", 0): b"\x0c" * 16},
        {key: digest for key, digest in DIGESTS.items() if key.tensor != "b"},
        {PartKey(key.tensor + "x", key.offset): digest for key, digest in DIGESTS.items()},
        {PartKey(key.tensor, key.offset + 1): digest for key, digest in DIGESTS.items()},
        {PartKey("b", 0): b"\x0a" * 16, PartKey("a", 0): b"\x0b" * 16, PartKey("a", 268_435_456): b"\xaa" * 16},
    ],
)
def test_any_other_state_has_another_digest(other: dict[PartKey, bytes]) -> None:
    assert state_digest(other) != state_digest(DIGESTS)


def test_advancing_replaces_what_changed_and_keeps_the_rest() -> None:
    before = dict(DIGESTS)
    after = advance(before, [some_row("b", after=b"\x01" * 16)])
    assert after == {**DIGESTS, PartKey("b", 0): b"\x01" * 16}
    assert before == DIGESTS


def test_a_base_manifest_gives_the_digest_of_every_part() -> None:
    assert base_digests(some_base()) == {PartKey("a", 0): b"\x00" * 16, PartKey("b", 0): b"\x01" * 16}


@pytest.mark.parametrize("kind", ["xxh3-128", "blake3"])
def test_how_a_checkpoint_is_cut_into_files_plays_no_role(tmp_path: Path, kind: str) -> None:
    weights = tiny_weights()
    one = open_checkpoint(write_checkpoint(tmp_path / "one", weights))
    two = open_checkpoint(write_sharded(tmp_path / "two", split(weights)))
    expected = state_digest_of(weights, kind=kind)
    assert [state_digest(checkpoint.digests(kind)[0]) for checkpoint in (one, two)] == [expected, expected]
    other = open_checkpoint(write_checkpoint(tmp_path / "other", trained(weights, 1, only=("mask",))))
    assert state_digest(other.digests(kind)[0]) != expected
