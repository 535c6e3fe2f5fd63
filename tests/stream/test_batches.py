"""Where a batch ends; that no batch loses a row is in test_buffer.py."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest

from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.stream.received.batches import Limits, end_of_batch
from pg_cdc_source.stream.received.chunks import Chunk, position_of

START = Position.before(100)
COMPLETE = Position(Lsn(300))
MANY = 1 << 30


def chunk(*rows: tuple[int, int], kinds: Sequence[str] | None = None) -> Chunk:
    """Rows by LSN and number."""
    lsns, seqs = zip(*rows, strict=True)
    batch = pa.record_batch(
        {
            "_change_type": pa.array(kinds or ["update"] * len(rows)),
            "_commit_lsn": pa.array(lsns, pa.int64()),
            "_seq": pa.array(seqs, pa.int64()),
            "_commit_ts": pa.nulls(len(rows), pa.timestamp("us", "UTC")),
        }
    )
    return Chunk.of(batch, position_of(batch, 0), position_of(batch, -1))


# Two rows of 100, three of 200 over two chunks, one of 300.
CHUNKS = [chunk((100, 1), (100, 2), (200, 1)), chunk((200, 2), (200, 3), (300, 1))]


def at(lsn: int, seq: int | None = None) -> Position:
    return Position(Lsn(lsn)) if seq is None else Position(Lsn(lsn), seq)


@pytest.mark.parametrize(
    ("start", "rows", "end"),
    [
        (START, 6, COMPLETE),
        (START, 5, Position.before(300)),
        (START, 4, Position.before(200)),
        (START, 2, Position.before(200)),
        # One commit alone is larger than the limit.
        (START, 1, at(100, 1)),
        (at(100, 1), 1, Position.before(200)),
        (at(100), 3, Position.before(300)),
        (at(100), 2, at(200, 2)),
        (at(200, 2), 1, Position.before(300)),
        (at(200), 1, COMPLETE),
        (COMPLETE, 1, COMPLETE),
    ],
)
def test_a_batch_ends_between_commits_unless_one_alone_is_too_large(start: Position, rows: int, end: Position) -> None:
    assert end_of_batch(CHUNKS, start, Limits(rows, MANY), COMPLETE, None, is_stuck=False) == end


@pytest.mark.parametrize(
    ("start", "rows", "end"),
    [
        (START, 1, at(100, 1)),
        (START, 2, at(100, 1)),
        (START, 3, at(100, 3)),
        # More than the limit: there is no place before it.
        (at(100, 1), 1, at(100, 3)),
        (at(100, 1), 0, at(100, 3)),
        (at(100, 3), 1, at(100, 4)),
    ],
)
def test_a_change_of_a_key_comes_whole(start: Position, rows: int, end: Position) -> None:
    """Its insert may lack values, which the row has that its delete removes."""
    rows_of_commit = [(100, i) for i in range(1, 6)]
    chunks = [chunk(*rows_of_commit, kinds=["insert", "delete", "insert", "delete", "delete"])]
    assert end_of_batch(chunks, start, Limits(rows, MANY), COMPLETE, None, is_stuck=False) == end


@pytest.mark.parametrize(("rows", "end"), [(1, at(100, 1)), (2, at(100, 1)), (3, at(100, 1)), (4, at(100, 3))])
def test_it_does_where_a_layout_is_said_before_it(rows: int, end: Position) -> None:
    """The row that says it has the position of the delete."""
    rows_of_commit = [(100, 1), (100, 2), (100, 2), (100, 3), (100, 4)]
    chunks = [chunk(*rows_of_commit, kinds=["insert", "schema", "delete", "insert", "insert"])]
    assert end_of_batch(chunks, START, Limits(rows, MANY), COMPLETE, None, is_stuck=False) == end
    behind = end_of_batch(chunks, at(100, 1), Limits(1, MANY), COMPLETE, None, is_stuck=False)
    assert behind == at(100, 3)


@pytest.mark.parametrize(
    ("ceiling", "end"), [(at(100), at(100)), (at(150), at(150)), (Position.before(100), START), (at(900), COMPLETE)]
)
def test_nothing_beyond_the_ceiling_is_taken(ceiling: Position, end: Position) -> None:
    assert end_of_batch(CHUNKS, START, Limits(100, MANY), COMPLETE, ceiling, is_stuck=False) == end


@pytest.mark.parametrize("is_stuck", [True, False])
@pytest.mark.parametrize("ceiling", [at(100), at(150), at(200, 1), at(250)])
def test_rows_beyond_the_ceiling_show_that_all_before_it_is_there(ceiling: Position, is_stuck: bool) -> None:
    """As where a commit that does not fit into memory comes right behind it: nothing more comes before it is taken."""
    assert end_of_batch(CHUNKS, START, Limits(100, MANY), START, ceiling, is_stuck=is_stuck) == ceiling


def test_a_commit_that_goes_on_waits_unless_it_is_stuck() -> None:
    for is_stuck, end in ((False, at(100)), (True, at(300, 1))):
        assert end_of_batch(CHUNKS, START, Limits(100, MANY), at(100), None, is_stuck=is_stuck) == end


def test_a_row_that_is_larger_than_the_limit_comes_alone() -> None:
    assert end_of_batch(CHUNKS, START, Limits(100, 1), COMPLETE, None, is_stuck=False) == at(100, 1)


def test_without_rows_a_batch_ends_where_all_is_complete() -> None:
    assert end_of_batch([], START, Limits(1, 1), COMPLETE, None, is_stuck=False) == COMPLETE
    assert end_of_batch([], COMPLETE, Limits(1, 1), START, None, is_stuck=False) == COMPLETE
