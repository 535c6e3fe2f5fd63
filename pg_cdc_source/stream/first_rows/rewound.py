"""Turn one table back: which of the later rows are left out, and which earlier ones are added.

::

    rows at t1  =  rows at t2, without those whose key was changed in (t1, t2]        filtered in every range
                +  for each such key, the first image before a change, if it had one  one more partition

A table without a primary key has no key to tell rows by, nor has one whose key is younger than t1, or has values that
Spark's type cannot hold. There, whole rows are counted: one task reads the table, takes away as many copies of a row as
were added, and adds those that were removed.

Arrow in, Arrow out: the slot is read in ``rewind``, and ``Rewound`` travels to Spark's tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.protocol.ipc import from_ipc, to_ipc
from pg_cdc_source.protocol.layout import Layout, StreamedTable
from pg_cdc_source.protocol.stream_rows import snapshot_rows
from pg_cdc_source.stream.first_rows.changed_rows import ORDER, ChangedRows, batch_of, digests_of
from pg_cdc_source.stream.received.chunks import Chunk

ROWS_PER_CHUNK = 65_536


@dataclass(frozen=True, slots=True)
class Rewound:
    """How to turn one table back: leave out the rows with a key of ``keys``, and add ``old_rows``.

    ``whole``: no key tells rows apart; then ``keys`` are digests of whole rows, each to be left out once for every time
    it stands there. Both are Arrow IPC. Rows that are not ``is_exact`` may be as of any point up to that of the
    snapshot.
    """

    keys: bytes
    whole: bool
    old_rows: tuple[Chunk, ...]
    is_exact: bool = True

    def leave_out(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of ``batches`` that were there at the earlier point as they are."""
        keys = from_ipc(self.keys)
        if self.whole:
            yield from _without_copies(batches, Counter(keys.column(0).to_pylist()))
            return
        changed = pa.Table.from_batches([keys])
        for some in _in_groups(batches, min(keys.nbytes, _BYTES_PER_JOIN)):
            columns = {name: some.column(name) for name in keys.schema.names}
            rows = pa.table({**columns, ORDER: np.arange(some.num_rows)})
            kept = rows.join(changed, keys.schema.names, join_type="left anti", use_threads=False)
            found = some.take(pa.array(np.sort(kept.column(ORDER).to_numpy())))
            yield from (batch for batch in found.to_batches() if batch.num_rows)


# Arrow builds the table of all keys for each join, which takes a second for a million of them.
_BYTES_PER_JOIN = 64 << 20


def _in_groups(batches: Iterable[pa.RecordBatch], least_bytes: int) -> Iterator[pa.Table]:
    """Yield the rows of several batches at a time, of so many bytes; the last ones may be less."""
    group: list[pa.RecordBatch] = []
    for batch in batches:
        group.append(batch)
        if sum(some.nbytes for some in group) >= least_bytes:
            yield pa.Table.from_batches(group)
            group = []
    if group:
        yield pa.Table.from_batches(group)


def _without_copies(batches: Iterable[pa.RecordBatch], surplus: Counter[bytes]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        kept = []
        for i, digest in enumerate(digests_of(pa.Table.from_batches([batch]))):
            if surplus[digest]:
                surplus[digest] -= 1
            else:
                kept.append(i)
        if kept:
            yield batch.take(pa.array(kept))


def turn_back(table: StreamedTable, changed: ChangedRows, layout: Layout, schema: pa.Schema, lsn: Lsn) -> Rewound:
    """How to turn a table back by what was ``changed``."""
    olds = _chunks(changed.old_rows(), table, layout, schema, lsn)
    return Rewound(to_ipc(changed.left_out()), changed.whole, olds)


def _chunks(rows: pa.Table, table: StreamedTable, layout: Layout, schema: pa.Schema, lsn: Lsn) -> tuple[Chunk, ...]:
    chunks = []
    for start in range(0, rows.num_rows, ROWS_PER_CHUNK):
        batch = batch_of(rows.slice(start, ROWS_PER_CHUNK))
        arrays = [array.cast(codec.arrow_type) for array, codec in zip(batch.columns, table.codecs, strict=True)]
        out = snapshot_rows(arrays, batch.num_rows, lsn, layout, table, schema)
        chunks.append(Chunk.of(out, Position(lsn, 0), Position(lsn, 0)))
    return tuple(chunks)
