"""Chunks are kept, in memory or a file, until they are dropped, and handed out cut to what is asked for."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_cdc_source.errors import DefiniteError
from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.protocol.ipc import from_ipc
from pg_cdc_source.stream.received import spill
from pg_cdc_source.stream.received.chunks import ChunkStore
from pg_cdc_source.stream.received.spill import Spill

START = Position.before(100)
END = Position(Lsn(1 << 40))


def batch(first: int, rows: int) -> pa.RecordBatch:
    lsns = pa.array([100 + i // 3 for i in range(first, first + rows)], pa.int64())
    seqs = pa.array([1 + i % 3 for i in range(first, first + rows)], pa.int64())
    times = pa.nulls(rows, pa.timestamp("us", "UTC"))
    return pa.record_batch(
        {"_commit_lsn": lsns, "_seq": seqs, "_commit_ts": times, "text": pa.array(["x" * 50] * rows)}
    )


def row_at(i: int) -> Position:
    return Position(Lsn(100 + i // 3), 1 + i % 3)


def numbers(store: ChunkStore, start: Position, end: Position) -> list[int]:
    batches = [from_ipc(chunk.between(start, end).data()) for chunk in store.between(start, end)]
    return [
        3 * (lsn - 100) + seq - 1
        for batch in batches
        for lsn, seq in zip(batch.column("_commit_lsn").to_pylist(), batch.column("_seq").to_pylist(), strict=True)
    ]


class Counted(Spill):
    """Knows how many files are open."""

    open = 0

    def __init__(self) -> None:
        super().__init__()
        Counted.open += 1

    def close(self) -> None:
        Counted.open -= not self._file.closed
        super().close()


def test_a_batch_keeps_what_it_has_when_the_store_is_closed() -> None:
    """Rows of a snapshot that is not held any more close the reader, before Spark takes the batch."""
    store = ChunkStore(START, Counted, 0)
    store.append(batch(0, 3))
    [chunk] = store.between(START, END)
    store.close()
    assert from_ipc(chunk.data()).num_rows == 3
    assert Counted.open == 1
    del chunk
    assert Counted.open == 0


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    memory_bytes=st.sampled_from([0, 600, 1 << 30]),
    cuts=st.lists(st.integers(0, 80), max_size=6),
)
def test_what_is_dropped_is_gone_and_the_rest_stays(sizes: list[int], memory_bytes: int, cuts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spill, "FILE_BYTES", 800)
        store = ChunkStore(START, Counted, memory_bytes)
        for i, rows in enumerate(sizes):
            store.append(batch(sum(sizes[:i]), rows))
        dropped = 0
        for cut in sorted(cuts):
            had = store.drop(row_at(cut))
            now = min(cut + 1, sum(sizes))
            assert had == (now > dropped)
            dropped = max(dropped, now)
            assert store.rows == sum(sizes) - dropped
            assert numbers(store, store.dropped, END) == list(range(dropped, sum(sizes)))
        store.close()
    assert (store.rows, store.raw_bytes, Counted.open) == (0, 0, 0)


@given(first=st.integers(0, 12), rows=st.integers(0, 12))
def test_chunks_are_cut_to_what_lies_between(first: int, rows: int) -> None:
    last = min(first + rows, 14)
    store = ChunkStore(START)
    for at in (0, 5, 10):
        store.append(batch(at, 5))
    assert numbers(store, row_at(first), row_at(last)) == list(range(first + 1, last + 1))


def test_a_chunk_that_is_wanted_whole_is_handed_out_as_it_is() -> None:
    store = ChunkStore(START)
    store.append(batch(0, 5))
    (chunk,) = store
    assert chunk.between(START, END) is chunk


def test_what_was_dropped_is_refused() -> None:
    store = ChunkStore(START)
    store.append(batch(0, 5))
    store.drop(row_at(1))
    with pytest.raises(DefiniteError, match="asked for again") as caught:
        store.between(row_at(0), END)
    assert "foreachBatch" in caught.value.remedy
