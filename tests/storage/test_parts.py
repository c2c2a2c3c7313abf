"""Parts cover a tensor once, in order, and are never larger than allowed."""

from hypothesis import given
from hypothesis import strategies as st

from weighbridge.storage.parts import PART_BYTES, cut
from weighbridge.values import Part, PartKey, TensorSpec


def test_a_small_tensor_is_one_part() -> None:
    assert cut(TensorSpec("w", "F32", (2, 3), 24)) == (Part(PartKey("w", 0), "F32", 24),)


def test_scalars_and_empty_tensors_are_one_part() -> None:
    assert cut(TensorSpec("s", "I64", (), 8)) == (Part(PartKey("s", 0), "I64", 8),)
    assert cut(TensorSpec("e", "BF16", (0, 7), 0)) == (Part(PartKey("e", 0), "BF16", 0),)


@given(st.integers(0, 9 * PART_BYTES))
def test_parts_cover_every_byte_once_and_none_is_too_large(nbytes: int) -> None:
    reached = 0
    for part in cut(TensorSpec("w", "U8", (nbytes,), nbytes)):
        assert part.key.offset == reached
        assert part.nbytes <= PART_BYTES
        reached += part.nbytes
    assert reached == nbytes


def test_more_than_four_gigabytes_and_two_to_the_31_elements_are_ordinary() -> None:
    nbytes = 3 * ((1 << 31) + 5)
    parts = cut(TensorSpec("experts", "BF16", (3, (1 << 31) + 5), nbytes * 2))
    assert sum(part.nbytes for part in parts) == nbytes * 2
    assert max(part.nbytes for part in parts) // 2 < 1 << 32
