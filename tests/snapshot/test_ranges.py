"""Ranges cover every block of every heap exactly once, and steps every block of a range."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_cdc_source.postgres.catalog import Relation
from pg_cdc_source.snapshot.ranges import BlockRange, cut, range_count, steps
from pg_cdc_source.snapshot.scan import Piece, reading, steps_of

WHOLE = BlockRange(0, None)


def assert_adjoining(ranges: list[BlockRange]) -> None:
    for left, right in itertools.pairwise(ranges):
        assert left.end_block_exclusive == right.start_block
        assert left.start_block < right.start_block


def length(blocks: BlockRange, of: int) -> int:
    return (of if blocks.end_block_exclusive is None else blocks.end_block_exclusive) - blocks.start_block


# --- ranges -----------------------------------------------------------------------------------------------------------


HEAPS = st.lists(st.integers(0, 3_000), min_size=1, max_size=60)


@given(heaps=HEAPS, wanted=st.integers(1, 5_000))
def test_ranges_cover_every_block_of_every_heap_once_and_are_even(heaps: list[int], wanted: int) -> None:
    count = range_count(heaps, 8192, 0, wanted)
    cuts = cut(heaps, count)
    of_heap: dict[int, list[BlockRange]] = {}
    for heap, blocks in itertools.chain.from_iterable(cuts):
        of_heap.setdefault(heap, []).append(blocks)
    assert list(of_heap) == list(range(len(heaps)))
    for ranges in of_heap.values():
        assert ranges[0].start_block == 0
        assert ranges[-1].end_block_exclusive is None
        assert_adjoining(ranges)
    # An empty heap counts as a block.
    sizes = [sum(length(blocks, max(1, heaps[heap])) for heap, blocks in pieces) for pieces in cuts]
    assert max(sizes) - min(sizes) <= 1
    assert len(cuts) == count == min(wanted, sum(max(1, blocks) for blocks in heaps))


@given(heaps=HEAPS, size=st.integers(1, 2_000))
def test_no_range_is_larger_than_its_size_says(heaps: list[int], size: int) -> None:
    cuts = cut(heaps, range_count(heaps, 8192, size * 8192, None))
    assert max(sum(length(blocks, max(1, heaps[heap])) for heap, blocks in pieces) for pieces in cuts) <= size


@given(blocks=st.integers(0, 3_000), heaps=st.integers(1, 50), size=st.integers(1, 500))
def test_a_size_means_the_same_for_one_heap_and_for_many(blocks: int, heaps: int, size: int) -> None:
    each = max(1, blocks)
    assert range_count([each] * heaps, 1, size, None) == range_count([each * heaps], 1, size, None)


def test_small_heaps_share_ranges_and_a_large_one_among_them_is_cut() -> None:
    assert cut([10, 0, 100, 1, 8], 4) == [
        [(0, WHOLE), (1, WHOLE), (2, BlockRange(0, 19))],
        [(2, BlockRange(19, 49))],
        [(2, BlockRange(49, 79))],
        [(2, BlockRange(79, None)), (3, WHOLE), (4, WHOLE)],
    ]
    # Where a range ends with a heap, the next one begins with the next heap.
    assert cut([10, 10], 2) == [[(0, WHOLE)], [(1, WHOLE)]]


@pytest.mark.parametrize(
    ("heap_blocks", "range_bytes", "ranges", "expected"),
    [
        ([100], 8192, None, 100),
        ([100], 80_000, None, 12),
        ([100], 1, None, 100),
        ([100], 64 << 20, None, 1),
        ([1] * 2000, 8 << 20, None, 2),
        ([100], 0, 33, 33),
        ([100], 0, 64, 64),
        ([100], 0, 99, 99),
        ([100], 0, 101, 100),
        ([50, 0, 49], 0, 99, 99),
        ([0, 0], 0, 4, 2),
        ([1_000_000], 8192, None, 100_000),
    ],
)
def test_as_many_ranges_as_the_options_say(
    heap_blocks: list[int], range_bytes: int, ranges: int | None, expected: int
) -> None:
    assert range_count(heap_blocks, 8192, range_bytes, ranges) == expected


# --- steps ------------------------------------------------------------------------------------------------------------


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


def piece(oid: int, blocks: BlockRange = WHOLE) -> Piece:
    return Piece(Relation(oid, "public", f"t_{oid}", "r"), (1, 2), blocks)


@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=60), most=st.integers(1, 100), heaps=st.integers(1, 9))
def test_steps_cover_the_pieces_in_their_order_and_keep_both_bounds(sizes: list[int], most: int, heaps: int) -> None:
    found = list(steps_of(map(piece, range(len(sizes))), dict(enumerate(sizes)), most, heaps))
    flat = [part for step in found for part in step]
    expected = [(oid, blocks) for oid, size in enumerate(sizes) for blocks in steps(WHOLE, size, most)]
    assert [(part.heap.oid, part.blocks) for part in flat] == expected
    for step in found:
        assert 1 <= len(step) <= heaps
        assert sum(length(part.blocks, sizes[part.heap.oid]) for part in step) <= most
    # None of them could have been joined with the next one.
    for left, right in itertools.pairwise(found):
        joined = sum(length(part.blocks, sizes[part.heap.oid]) for part in (*left, right[0]))
        assert len(left) == heaps or joined > most


def test_a_heap_that_has_grown_or_gone_since_it_was_planned_is_in_the_steps() -> None:
    pieces = [piece(1), piece(2, BlockRange(0, 3)), piece(3)]
    assert [[(p.heap.oid, str(p.blocks)) for p in step] for step in steps_of(pieces, {1: 5}, 4, 64)] == [
        [(1, "blocks [0, 4)")],
        [(1, "blocks [4, end)"), (2, "blocks [0, 3)"), (3, "blocks [0, end)")],
    ]


def test_what_is_read_is_named() -> None:
    plan = cast(Any, type("Plan", (), {"what": "public.t"}))
    assert reading(plan, ()) == "reading public.t"
    assert reading(plan, [piece(1, BlockRange(3, 7))]) == "reading public.t_1, blocks [3, 7)"
    assert reading(plan, [piece(1), piece(2), piece(3)]) == "reading public.t, 3 tables from public.t_1 to public.t_3"
