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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.protocol.layout import BEFORE, Layout, StreamedTable
from pg_cdc_source.protocol.stream_rows import snapshot_rows
from pg_cdc_source.stream.chunks import Chunk, from_ipc, to_ipc

_ROW = "row"
ROWS_PER_CHUNK = 65_536


@dataclass(frozen=True, slots=True)
class Rewound:
    """How to turn one table back: leave out the rows with a key of ``keys``, and add ``old_rows``.

    ``whole``: no key tells rows apart; then ``keys`` are whole rows as text, each to be left out once for every time it
    stands there. Both are Arrow IPC. Rows that are not ``is_exact`` may be as of any point up to that of the snapshot.
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
            rows = pa.table({**columns, _ROW_COLUMN: np.arange(some.num_rows)})
            kept = rows.join(changed, keys.schema.names, join_type="left anti", use_threads=False)
            found = some.take(pa.array(np.sort(kept.column(_ROW_COLUMN).to_numpy())))
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


# A name that no column of PostgreSQL can have: it is longer than 63 bytes.
_ROW_COLUMN = "row" * 22


def _without_copies(batches: Iterable[pa.RecordBatch], surplus: Counter[str]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        kept = []
        for i, text in enumerate(_as_texts(batch)):
            if surplus[text]:
                surplus[text] -= 1
            else:
                kept.append(i)
        if kept:
            yield batch.take(pa.array(kept))


def _as_texts(batch: pa.RecordBatch) -> list[str]:
    return [repr(tuple(row.values())) for row in batch.to_pylist()]


@dataclass(slots=True)
class Images:
    """Changes of one table with the rows before and after them, in order; none where ``missing`` says what is."""

    batches: list[pa.RecordBatch]
    missing: str | None = None

    def add(self, batch: pa.RecordBatch, identity: str) -> None:
        kinds = pc.unique(batch.column("_change_type")).to_pylist()
        if "truncate" in kinds:
            self.end("it was truncated in between")
        elif identity != "f" and ("update" in kinds or "delete" in kinds):
            self.end("changes in between did not say what rows were before: its replica identity was not FULL")
        elif _lacks_old_rows(batch):
            # They are labelled by the root.
            self.end("changes in between did not say what rows were before: a partition was not FULL, as its root is")
        elif self.missing is None:
            self.batches.append(batch)

    def end(self, missing: str) -> None:
        """Give up: the table is taken as it is."""
        self.missing = missing
        self.batches.clear()


def _lacks_old_rows(batch: pa.RecordBatch) -> bool:
    is_update = pc.equal(batch.column("_change_type"), "update")
    return bool(pc.any(pc.and_(is_update, batch.column(BEFORE).is_null())).as_py())


def turn_back(
    table: StreamedTable, images: Images, layout: Layout, schema: pa.Schema, lsn: Lsn, keys: Sequence[str]
) -> Rewound:
    """How to turn a table back by its ``images``; ``keys`` are columns that have told its rows apart all the time."""
    columns = [codec.column.name for codec in table.codecs]
    plain = pa.schema([pa.field(codec.column.name, codec.arrow_type) for codec in table.codecs])
    befores, afters = _before_and_after(images, columns, plain)
    if _tell_rows(keys, befores) and _tell_rows(keys, afters):
        events = pa.concat_tables([rows.select([*keys, _ROW_COLUMN]) for rows in (befores, afters)])
        firsts = events.group_by(keys, use_threads=False).aggregate([(_ROW_COLUMN, "min")])
        first_rows = firsts.column(f"{_ROW_COLUMN}_min")
        olds = befores.filter(pc.is_in(befores.column(_ROW_COLUMN), first_rows.combine_chunks())).select(columns)
        changed = _one_batch(firsts.select(keys))
        return Rewound(to_ipc(changed), False, _chunks(olds, table, layout, schema, lsn))
    added, removed = Counter(_table_texts(afters, columns)), Counter(_table_texts(befores, columns))
    surplus, missing = added - removed, removed - added
    chosen = []
    for i, text in enumerate(_table_texts(befores, columns)):
        if missing[text]:
            missing[text] -= 1
            chosen.append(i)
    texts = pa.RecordBatch.from_arrays([pa.array(list(surplus.elements()), pa.string())], names=[_ROW])
    return Rewound(
        to_ipc(texts),
        True,
        _chunks(befores.select(columns).take(pa.array(chosen, pa.int64())), table, layout, schema, lsn),
    )


def _before_and_after(images: Images, columns: list[str], plain: pa.Schema) -> tuple[pa.Table, pa.Table]:
    """Old and new images with the order of their events: an update's old one comes right before its new one."""
    befores, afters = [], []
    number = 0
    for batch in images.batches:
        order = np.arange(number, number + 2 * batch.num_rows, 2)
        number += 2 * batch.num_rows
        kind = batch.column("_change_type")
        has_old = pc.is_valid(batch.column(BEFORE))
        old = batch.column(BEFORE)
        old_arrays = [pc.struct_field(old, [i]) for i in range(len(columns))]
        befores.append(pa.table([*old_arrays, pa.array(order)], names=[*columns, _ROW_COLUMN]).filter(has_old))
        is_new = pc.is_in(kind, pa.array(["insert", "update"]))
        arrays = [batch.column(i) for i in range(len(columns))]
        afters.append(pa.table([*arrays, pa.array(order + 1)], names=[*columns, _ROW_COLUMN]).filter(is_new))
    empty = pa.schema([*plain, pa.field(_ROW_COLUMN, pa.int64())]).empty_table()
    return pa.concat_tables([empty, *befores]), pa.concat_tables([empty, *afters])


def _tell_rows(keys: Sequence[str], rows: pa.Table) -> bool:
    """Whether each of ``rows`` is found by the keys.

    Arrow joins by no list, a key that is not sent tells nothing, NULL stands for each value that its type cannot hold
    (unrepresentable=null), and a floating one for several: of numeric (numericAs=double), or of the bits of NaN.
    """

    def tells(key: str) -> bool:
        kind = rows.field(key).type
        return not (pa.types.is_nested(kind) or pa.types.is_floating(kind) or rows.column(key).null_count)

    return bool(keys) and all(key in rows.column_names and tells(key) for key in keys)


def _table_texts(table: pa.Table, columns: list[str]) -> list[str]:
    return [text for batch in table.select(columns).to_batches() for text in _as_texts(batch)]


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    arrays = [column.combine_chunks() for column in table.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=table.schema)


def _chunks(rows: pa.Table, table: StreamedTable, layout: Layout, schema: pa.Schema, lsn: Lsn) -> tuple[Chunk, ...]:
    chunks = []
    for start in range(0, rows.num_rows, ROWS_PER_CHUNK):
        batch = _one_batch(rows.slice(start, ROWS_PER_CHUNK))
        arrays = [array.cast(codec.arrow_type) for array, codec in zip(batch.columns, table.codecs, strict=True)]
        out = snapshot_rows(arrays, batch.num_rows, lsn, layout, table, schema)
        chunks.append(Chunk.of(out, Position(lsn, 0), Position(lsn, 0)))
    return tuple(chunks)
