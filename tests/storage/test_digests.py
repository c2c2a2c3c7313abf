"""Digests: known answers, and kinds that are not known."""

import pytest

from weighbridge.errors import UsageError
from weighbridge.storage.digests import DIGESTS, chain_digest, digest_bytes, new_hasher


@pytest.mark.parametrize(
    ("kind", "data", "expected"),
    [
        ("xxh3-128", b"", "99aa06d3014798d86001c324468d497f"),
        ("blake3", b"", "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"),
    ],
)
def test_a_digest_has_the_published_value(kind: str, data: bytes, expected: str) -> None:
    assert digest_bytes(kind, data).hex() == expected


@pytest.mark.parametrize("kind", sorted(DIGESTS))
def test_pieces_give_the_digest_of_the_whole(kind: str) -> None:
    hasher = new_hasher(kind)
    for piece in (b"weigh", bytearray(b"br"), memoryview(b"idge")):
        hasher.update(piece)
    assert hasher.digest() == digest_bytes(kind, b"weighbridge")


def test_the_chain_digest_is_hex_blake3() -> None:
    assert chain_digest(b"") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"md5.*xxh3-128, blake3"):
        digest_bytes("md5", b"")
