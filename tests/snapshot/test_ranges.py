"""Ranges cover every block exactly once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_cdc_source.snapshot.ranges import BlockRange, blocks_per_range, cut, steps


def assert_adjoining(ranges: list[BlockRange]) -> None:
    for left, right in itertools.pairwise(ranges):
        assert left.end_block_exclusive == right.start_block
        assert left.start_block < right.start_block


@given(blocks=st.integers(0, 200_000), step=st.integers(1, 50_000))
def test_ranges_cover_every_block_once_and_the_last_is_open(blocks: int, step: int) -> None:
    if blocks // step > 5_000:
        step = blocks // 5_000 + 1
    ranges = cut(blocks, step)
    assert ranges[0].start_block == 0
    assert ranges[-1].end_block_exclusive is None
    assert_adjoining(ranges)
    lengths = [(blocks if r.end_block_exclusive is None else r.end_block_exclusive) - r.start_block for r in ranges]
    assert max(lengths) <= step
    assert max(lengths) - min(lengths) <= 1


@given(
    start=st.integers(0, 1000),
    length=st.none() | st.integers(1, 1000),
    now=st.integers(0, 3000),
    step=st.integers(1, 50),
)
def test_steps_cover_their_range_once(start: int, length: int | None, now: int, step: int) -> None:
    whole = BlockRange(start, None if length is None else start + length)
    cut_into = list(steps(whole, now, step))
    assert cut_into[0].start_block == start
    assert cut_into[-1].end_block_exclusive == whole.end_block_exclusive
    assert_adjoining(cut_into)


def test_steps_of_an_open_range_follow_the_table_as_it_is_now() -> None:
    assert list(steps(BlockRange(0, None), 5, 2)) == [BlockRange(0, 2), BlockRange(2, 4), BlockRange(4, None)]


@pytest.mark.parametrize(
    ("heap_blocks", "range_bytes", "ranges", "expected"),
    [
        ([100], 8192, None, 1),
        ([100], 80_000, None, 9),
        ([100], 1, None, 1),
        ([100], 0, 7, 15),
        ([50, 50], 0, 4, 25),
        ([0, 0], 0, 4, 1),
    ],
)
def test_blocks_per_range(heap_blocks: list[int], range_bytes: int, ranges: int | None, expected: int) -> None:
    assert blocks_per_range(heap_blocks, 8192, range_bytes, ranges) == expected


def test_a_wanted_number_of_ranges_is_met() -> None:
    for wanted in range(1, 200):
        assert len(cut(1000, blocks_per_range([1000], 8192, 0, wanted))) <= wanted
