"""Build record batches of a stream's rows: typed rows, the envelope's, those of the snapshot, and messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.protocol.decoding_messages import NO_XID, content_as_json
from pg_cdc_source.protocol.envelope import EnvelopeColumn, json_objects
from pg_cdc_source.protocol.layout import (
    BEFORE,
    CHANGE_FIELDS,
    CHANGE_TYPES,
    COMMIT_TS_TYPE,
    ENVELOPE_SCHEMA,
    MESSAGE,
    OF_SCHEMA,
    OF_SNAPSHOT,
    UNCHANGED_TYPE,
    Layout,
    StreamedTable,
)
from pg_cdc_source.protocol.packed import layout_text, packed_rows
from pg_cdc_source.protocol.pgoutput import Message
from pg_cdc_source.values.arrow import from_numpy, from_texts, null, to_numpy
from pg_cdc_source.values.ndarrays import Flags, Ints
from pg_cdc_source.values.registry import Codec


def change_columns(
    kind: Ints, lsn: Ints, seq: Ints, commit_ts: Ints | None, xid: Ints | None, unchanged: pa.Array
) -> list[pa.Array]:
    """Return the change columns in the order of ``CHANGE_FIELDS``.

    ``kind`` are places in ``CHANGE_TYPES``; ``commit_ts`` are microseconds since 1970, None where no row has a commit.
    """
    n = len(kind)
    return [
        from_texts(CHANGE_TYPES).take(from_numpy(kind)),
        from_numpy(lsn),
        from_numpy(seq),
        pa.nulls(n, COMMIT_TS_TYPE) if commit_ts is None else from_numpy(commit_ts).cast(COMMIT_TS_TYPE),
        pa.nulls(n, pa.int64()) if xid is None else from_numpy(xid),
        unchanged,
    ]


def nothing_unchanged(n: int) -> pa.Array:
    """Return ``n`` empty lists for ``_unchanged``."""
    offsets = pa.py_buffer(np.zeros(n + 1, np.int32))
    return pa.Array.from_buffers(UNCHANGED_TYPE, n, [None, offsets], children=[pa.nulls(0, pa.string())])


def lists_of_names(names: Sequence[str], flags: Sequence[Flags]) -> pa.Array:
    """Return for each row the list of those ``names`` whose flag is set there, for ``_unchanged``."""
    by_row = np.stack(flags, axis=1)
    columns = np.nonzero(by_row)[1]
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(by_row.sum(axis=1)))).astype(np.int32)
    children = [from_texts(names).take(from_numpy(columns))]
    return pa.Array.from_buffers(UNCHANGED_TYPE, len(by_row), [None, pa.py_buffer(offsets)], children=children)


def envelope_columns(codecs: Sequence[Codec]) -> list[EnvelopeColumn]:
    """Return what the columns are in JSON."""
    return [EnvelopeColumn(codec.column.name, codec.column.type_oid) for codec in codecs]


def envelope_rows(
    table: StreamedTable,
    changes: Sequence[pa.Array],
    texts: Sequence[pa.Array],
    absent: Sequence[pa.BooleanArray | None],
    *,
    deleted: Flags | None = None,
    before: pa.StringArray | None = None,
) -> pa.RecordBatch:
    """Return rows of ``ENVELOPE_SCHEMA``, at least one.

    ``texts`` and ``absent`` are those of the table's columns, as :func:`json_objects` takes them. Where a row is
    ``deleted``, they only give its key, and it has no ``after``.
    """
    n = len(changes[0])
    columns = envelope_columns(table.codecs)
    after = json_objects(table.name, columns, texts, absent) if columns else from_texts(["{}"] * n)
    if deleted is not None:
        after = pc.if_else(from_numpy(deleted), null(pa.string()), after)
    key = pa.nulls(n, pa.string())
    keyed = [i for i, column in enumerate(columns) if column.name in table.key]
    if keyed:
        key = json_objects(
            table.name, [columns[i] for i in keyed], [texts[i] for i in keyed], [absent[i] for i in keyed]
        )
    names = from_texts([table.name]).take(from_numpy(np.zeros(n, np.int64)))
    if before is None:
        before = pa.nulls(n, pa.string())
    return pa.RecordBatch.from_arrays([names, *changes, key, after, before], schema=ENVELOPE_SCHEMA)


def snapshot_rows(
    columns: Sequence[pa.Array], n: int, lsn: Lsn, layout: Layout, table: StreamedTable, schema: pa.Schema
) -> pa.RecordBatch:
    """Return ``n`` rows of the initial snapshot in the stream's schema; in the envelope ``columns`` are texts.

    Their LSN is that of the snapshot, they have no commit, and their number is 0.
    """
    changes = columns_of_snapshot(n, lsn, table)
    if layout.packed:
        return packed_rows(table, changes, columns)
    if layout.envelope:
        return envelope_rows(table, changes, columns, [None] * len(columns))
    before = [pa.nulls(n, schema.field(BEFORE).type)] if layout.before_image else []
    return pa.RecordBatch.from_arrays([*columns, *changes, *before], schema=schema)


def columns_of_snapshot(n: int, lsn: Lsn, table: StreamedTable) -> list[pa.Array]:
    """Return the change columns of ``n`` rows of a table's snapshot at ``lsn``."""
    lsns, seqs = np.full(n, lsn, np.int64), np.zeros(n, np.int64)
    unchanged = nothing_unchanged(n)
    if table.unsent:
        unchanged = lists_of_names(table.unsent, [np.ones(n, np.bool_) for _ in table.unsent])
    return change_columns(np.full(n, OF_SNAPSHOT), lsns, seqs, None, None, unchanged)


def with_unsent(batch: pa.RecordBatch, table: StreamedTable, types: Sequence[pa.DataType]) -> pa.RecordBatch:
    """Return rows of a table's scan with the columns that it lacks as well, all of them NULL, of these ``types``."""
    names = [codec.column.name for codec in table.codecs]
    # Under their present names, in the order of the table's.
    sent = iter(batch.columns)
    columns = [
        pa.nulls(batch.num_rows, type) if name in table.unsent else next(sent)
        for name, type in zip(names, types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, names=names)


def truncate_rows(
    tables: Sequence[StreamedTable],
    changes: Sequence[pa.Array],
    layout: Layout,
    schema: pa.Schema,
    had: Sequence[str | None] = (),
) -> pa.RecordBatch:
    """Return a row for each of ``tables`` that has neither a key nor values.

    ``had``: what the rows of packed layouts say in ``after``, if anything.
    """
    given = dict(zip((field.name for field in CHANGE_FIELDS), changes, strict=True))
    if layout.envelope:
        given["_table"] = from_texts([table.name for table in tables])
    if layout.packed:
        given["layout"] = from_texts([layout_text(table) for table in tables]).dictionary_encode()
        if had:
            given["after"] = pa.array(had, pa.string())
    return _rows_of(given, len(tables), schema)


def schema_rows(
    tables: Sequence[StreamedTable], objects: Sequence[str], changes: Sequence[pa.Array], schema: pa.Schema
) -> pa.RecordBatch:
    """Return a row of the envelope for each layout: of which table it is, and what its object says."""
    given = dict(zip((field.name for field in CHANGE_FIELDS), changes, strict=True))
    given |= {"_table": from_texts([table.name for table in tables]), "after": from_texts(objects)}
    if "layout" in schema.names:
        given["layout"] = from_texts([layout_text(table) for table in tables]).dictionary_encode()
    return _rows_of(given, len(tables), schema)


def position_row(at: Position, schema: pa.Schema) -> pa.RecordBatch:
    """Return the row that says how far a batch has come that has no other row."""
    given = {"_change_type": from_texts(["position"])}
    given |= {name: from_numpy(np.array([n], np.int64)) for name, n in (("_commit_lsn", at.lsn), ("_seq", at.seq))}
    return _rows_of(given, 1, schema)


def schema_row_at(table: StreamedTable, after: str, at: Position, schema: pa.Schema) -> pa.RecordBatch:
    """Return the row that says what the columns of a table are where there is no commit, as in the snapshot."""
    kind, lsn, seq = (np.array([value], np.int64) for value in (OF_SCHEMA, at.lsn, at.seq))
    changes = change_columns(kind, lsn, seq, None, None, nothing_unchanged(1))
    return schema_rows([table], [after], changes, schema)


def message_rows(
    messages: Sequence[Message], lsn: Ints, seq: Ints, commit_ts: Ints, xid: Ints, schema: pa.Schema
) -> pa.RecordBatch:
    """Return a row of the envelope for each message: its prefix as the key, its content as ``after``."""
    n = len(messages)
    changes = change_columns(np.full(n, MESSAGE), lsn, seq, commit_ts, xid, nothing_unchanged(n))
    given = dict(zip((field.name for field in CHANGE_FIELDS), changes, strict=True))
    of_commit = from_numpy(xid != NO_XID)
    for name in ("_commit_ts", "_xid"):
        given[name] = pc.if_else(of_commit, given[name], null(given[name].type))
    given["key"] = from_texts([message.prefix for message in messages])
    given["after"] = from_texts([content_as_json(message.content) for message in messages])
    return _rows_of(given, n, schema)


def _rows_of(given: Mapping[str, pa.Array], n: int, schema: pa.Schema) -> pa.RecordBatch:
    """Return ``n`` rows with these columns; the others are NULL."""
    columns = [given[field.name] if field.name in given else pa.nulls(n, field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def rows_through(batch: pa.RecordBatch, end: Position, schema: pa.Schema) -> int:
    """Return how many leading rows of a batch are at or before ``end``."""
    lsn = to_numpy(batch.column(schema.get_field_index("_commit_lsn")))
    seq = to_numpy(batch.column(schema.get_field_index("_seq")))
    first, last = np.searchsorted(lsn, [end.lsn, end.lsn + 1])
    return int(first + np.searchsorted(seq[first:last], end.seq, side="right"))
