"""Which segments a reader takes, and which a compactor makes: by their names alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.storage.history.segments import (
    BLOCK,
    GROWTH,
    Gap,
    Segment,
    cover,
    covered_upto,
    due_blocks,
    due_merges,
    parse_key,
    superseded,
)

LENGTHS = [BLOCK * GROWTH**level for level in range(3)]


def segment(first: int, length: int = BLOCK, edition: int = 0) -> Segment:
    return Segment("parts", first, first + length - 1, edition, f"{first:032x}{length:032x}")


some_segments = st.lists(
    st.builds(
        lambda level, place, edition: segment(place * LENGTHS[level], LENGTHS[level], edition),
        st.integers(0, 2),
        st.integers(0, 12),
        st.integers(0, 2),
    ),
    max_size=30,
)


@given(some_segments, st.integers(0, 3000), st.integers(0, 3000))
def test_a_cover_has_every_version_once_and_a_gap_only_where_no_segment_is(
    segments: list[Segment], first: int, last: int
) -> None:
    pieces = list(cover(segments, first, last))
    have = {v for s in segments for v in range(s.first, s.last + 1)}
    seen: list[int] = []
    for piece in pieces:
        span = range(max(piece.first, first), min(piece.last, last) + 1)
        if isinstance(piece, Gap):
            assert not have & set(span)
        seen += span
    assert seen == list(range(first, last + 1))


@given(some_segments)
def test_of_overlapping_segments_the_longest_and_of_equal_ones_the_latest_is_taken(segments: list[Segment]) -> None:
    for piece in cover(segments, 0, 10_000):
        if isinstance(piece, Segment):
            rivals = [s for s in segments if s.first <= piece.first <= s.last]
            assert piece.last - piece.first == max(s.last - s.first for s in rivals)
            assert piece.edition == max(s.edition for s in rivals if s.span == piece.span)


def test_a_longer_segment_is_taken_from_its_middle_too() -> None:
    long, short = segment(0, LENGTHS[1]), segment(BLOCK)
    assert list(cover([long, short], BLOCK + 1, LENGTHS[1] - 1)) == [long]


@given(some_segments)
def test_what_is_superseded_can_go_and_nothing_else_can(segments: list[Segment]) -> None:
    gone = superseded(segments)
    left = [s for s in segments if s not in gone]
    assert list(cover(left, 0, 10_000)) == list(cover(segments, 0, 10_000))
    assert superseded(left) == []


def test_blocks_are_due_where_no_segment_is_and_all_versions_stand() -> None:
    assert due_blocks([], 2 * BLOCK - 2) == [(0, BLOCK - 1)]
    assert due_blocks([segment(0)], 2 * BLOCK - 1) == [(BLOCK, 2 * BLOCK - 1)]
    assert due_blocks([segment(BLOCK)], 2 * BLOCK) == [(0, BLOCK - 1)]
    assert due_blocks([segment(0, LENGTHS[1])], LENGTHS[1]) == []
    assert due_blocks([], -1) == []


def test_as_many_segments_as_make_a_longer_one_are_due_to_be_put_together() -> None:
    row = [segment(n * BLOCK) for n in range(GROWTH)]
    assert list(due_merges(row[:-1])) == []
    assert list(due_merges(row)) == [((0, LENGTHS[1] - 1), row)]
    assert list(due_merges([*row, segment(0, LENGTHS[1])])) == []
    above = [segment(n * LENGTHS[1], LENGTHS[1]) for n in range(GROWTH)]
    assert list(due_merges(above)) == [((0, LENGTHS[2] - 1), above)]


def test_the_row_of_segments_ends_at_the_first_gap() -> None:
    assert covered_upto([]) == -1
    assert covered_upto([segment(BLOCK)]) == -1
    assert covered_upto([segment(0), segment(BLOCK), segment(3 * BLOCK)]) == 2 * BLOCK - 1


def test_a_segments_name_says_all_of_it() -> None:
    made = segment(64, edition=3)
    assert parse_key(made.key) == made


@pytest.mark.parametrize(
    "key", ["history/parts/x.parquet", "history/what/" + segment(0).key[14:], segment(0).key + "x"]
)
def test_other_names_are_no_segments(key: str) -> None:
    assert parse_key(key) is None
