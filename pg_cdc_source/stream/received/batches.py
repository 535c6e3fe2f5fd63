"""Where a batch ends: between commits, unless one commit alone is larger than a batch may be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from pg_cdc_source.offsets import Position
from pg_cdc_source.protocol.ipc import from_ipc
from pg_cdc_source.protocol.stream_rows import rows_through
from pg_cdc_source.stream.received.chunks import Chunk, position_of


@dataclass(frozen=True, slots=True)
class Limits:
    """What one batch may hold."""

    rows: int
    bytes: int


def end_of_batch(
    chunks: Iterable[Chunk],
    start: Position,
    limits: Limits,
    complete: Position,
    ceiling: Position | None,
    *,
    is_stuck: bool,
) -> Position:
    """Where a batch from ``start`` ends, whose rows are in ``chunks``; ``start`` itself where there is nothing for one.

    Nothing beyond ``ceiling`` is taken. Every commit through ``complete`` is there; where the rest of the next one
    ``is_stuck``, it does not come before what is here was taken.
    """
    bound = complete if ceiling is None else min(complete, ceiling)
    rows_left, bytes_left = limits.rows, limits.bytes
    last = start
    opening: Chunk | None = None
    for chunk in chunks:
        if chunk.last <= start:
            continue
        if ceiling is not None and chunk.last > ceiling:
            # Rows come in order, so all that are not beyond it are here, also of a commit that is not yet complete.
            bound = ceiling
        if ceiling is not None and chunk.first > ceiling:
            break
        opening = opening or chunk
        rows = chunk.rows
        if chunk.first <= start:
            batch = from_ipc(chunk.data())
            rows -= rows_through(batch, start, batch.schema)
        room = max(0, min(rows_left, bytes_left * chunk.rows // max(chunk.raw_bytes, 1)))
        if rows > room:
            end = _end_within(opening, chunk, start, room, last)
            return end if ceiling is None else min(end, ceiling)
        rows_left -= rows
        bytes_left -= chunk.raw_bytes * rows // chunk.rows
        last = chunk.last
    if is_stuck and last > bound and (ceiling is None or last <= ceiling):
        return last
    return max(bound, start)


def _end_within(opening: Chunk, chunk: Chunk, start: Position, room: int, last: Position) -> Position:
    """The end of a batch, whose rows begin in ``opening``, that may take ``room`` more, from a chunk with more."""
    batch = from_ipc(chunk.data())
    skipped = rows_through(batch, start, batch.schema)
    first_out = skipped + room
    if first_out >= batch.num_rows:
        return position_of(batch, -1)
    behind = position_of(batch, first_out)
    between_commits = Position.before(behind.lsn)
    if behind.seq == behind.lsn:
        # A message that is a commit of its own. Its record begins further before, and a server that is asked for what
        # comes from there on leaves it out.
        previous = position_of(batch, first_out - 1) if first_out > skipped else last
        between_commits = Position(previous.lsn)
    # Where the commit is the first that has rows, a batch that ends before it would be empty.
    if between_commits > start and _first_after(opening, start) < between_commits:
        return between_commits
    if room == 0 and last > start:
        return last
    # A single row may be larger than the limit.
    end = position_of(batch, skipped + max(room, 1) - 1)
    # A row that says a layout has the position of the one behind it.
    after = rows_through(batch, end, batch.schema)
    if not _are_one_change(batch, after):
        return end
    before = next((p for row in range(after - 2, skipped - 1, -1) if (p := position_of(batch, row)) < end), None)
    return position_of(batch, after) if before is None else before


def _are_one_change(batch: pa.RecordBatch, row: int) -> bool:
    """Whether a row and the one before it may be a change of the key, whose rows are told by standing side by side."""
    if not 0 < row < batch.num_rows:
        return False
    before, then = position_of(batch, row - 1), position_of(batch, row)
    kinds = batch.column("_change_type").slice(row - 1, 2).to_pylist()
    return kinds == ["delete", "insert"] and (before.lsn, before.seq + 1) == (then.lsn, then.seq)


def _first_after(chunk: Chunk, start: Position) -> Position:
    """The first row after ``start``, which is in ``chunk``."""
    if chunk.first > start:
        return chunk.first
    batch = from_ipc(chunk.data())
    return position_of(batch, rows_through(batch, start, batch.schema))
