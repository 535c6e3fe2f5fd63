"""Turn messages of rows into record batches of the stream's schema, a column at a time.

A chunk of messages, a few thousand, is joined into one buffer. Messages of the same relation are walked together
(``pgoutput.walk``), and the values of each column, wherever they lie, are decoded as one Arrow array. Rows of several
relations are put into the stream's order again afterwards.

- Columns are found by name in the relation as the stream last described it, never by position in today's table.
- ``_seq`` counts within a commit over all messages, also those of tables that are not read: so it is the same in
  every replay. An update takes two numbers, because it may become a delete and an insert.
- A value that did not travel is NULL and listed in ``_unchanged``, unless an old image of the row has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.errors import OptionError, SchemaChangedError, UnrepresentableError, WireError
from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.options.names import quoted
from pg_cdc_source.protocol import pgoutput
from pg_cdc_source.protocol.envelope import EnvelopeColumn, json_objects
from pg_cdc_source.protocol.pgoutput import DELETE, INSERT, TRUNCATE, UPDATE, Rows
from pg_cdc_source.values.binary import (
    Decoded,
    Field,
    Flags,
    Ints,
    MalformedError,
    Messages,
    WireBuffer,
    byte_strings,
    from_numpy,
    from_texts,
    null,
    refuse_other_bytes,
    to_numpy,
    utf8_strings,
)
from pg_cdc_source.values.registry import Codec

# Not an array: the first one that is made imports pandas, which planning has no use for.
CHANGE_TYPES = ("snapshot", "insert", "update", "delete", "truncate")
_SNAPSHOT, _INSERT, _UPDATE, _DELETE, _TRUNCATE = range(5)

_UNCHANGED_TYPE = pa.list_(pa.field("element", pa.string(), nullable=True))
CHANGE_FIELDS = (
    pa.field("_change_type", pa.string()),
    pa.field("_commit_lsn", pa.int64()),
    pa.field("_seq", pa.int64()),
    pa.field("_commit_ts", pa.timestamp("us", tz="UTC")),
    pa.field("_xid", pa.int64()),
    pa.field("_unchanged", _UNCHANGED_TYPE),
)
BEFORE = "_before"
ENVELOPE_SCHEMA = pa.schema(
    [
        pa.field("_table", pa.string()),
        *CHANGE_FIELDS,
        *(pa.field(name, pa.string()) for name in ("key", "after", "before")),
    ]
)


@dataclass(frozen=True, slots=True)
class StreamedTable:
    """One table of the stream, as it was planned. ``oid`` is that of the relation under which changes arrive.

    ``key`` are the columns that tell rows apart in every change: those of the replica identity; under FULL, the primary
    key, if there is one.
    """

    oid: int
    name: str
    codecs: tuple[Codec, ...]
    type_oids: tuple[tuple[int, int], ...]  # (type, modifier) of each column as pg_attribute has them
    key: tuple[str, ...]
    identity: str  # pg_class.relreplident


@dataclass(frozen=True, slots=True)
class Layout:
    """What rows of the stream look like: typed rows of one table, or the envelope of several."""

    envelope: bool
    before_image: bool
    unrepresentable: Literal["error", "null"]
    on_truncate: Literal["emit", "fail", "ignore"]

    def schema(self, tables: Sequence[StreamedTable]) -> pa.Schema:
        if self.envelope:
            return ENVELOPE_SCHEMA
        (table,) = tables
        refuse_change_names(table.name, [codec.column.name for codec in table.codecs])
        columns = [pa.field(codec.column.name, codec.arrow_type) for codec in table.codecs]
        before = [pa.field(BEFORE, pa.struct(columns))] if self.before_image else []
        return pa.schema([*columns, *CHANGE_FIELDS, *before])


def refuse_change_names(table: str, names: Sequence[str]) -> None:
    """Raise OptionError where a typed row would have two columns of one name; Spark knows no upper and lower case."""
    taken = {*(field.name for field in CHANGE_FIELDS), BEFORE}
    for name in names:
        if name.lower() in taken:
            raise OptionError(
                f"{table} has a column {quoted(name)}, which is the name of one of the change columns",
                remedy="rename the column in PostgreSQL; or take the envelope (option tables) and its JSON",
            )


@dataclass(frozen=True, slots=True)
class Described:
    """A streamed table together with the columns that the stream says its rows have now.

    ``index`` says for each planned column which of the relation's columns it is, None where it is not there.
    """

    table: StreamedTable
    relation: pgoutput.Relation
    index: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Messages of one commit that follow each other: how many, and the number that the first one takes."""

    commit_lsn: Lsn
    commit_ts: int  # microseconds since 1970
    xid: int
    first_seq: int
    messages: int


@dataclass(frozen=True, slots=True)
class _Images:
    """Where each row of the output takes a column's value from."""

    start: Ints
    length: Ints
    valid: Flags | None
    unchanged: Flags | None


class ChangeDecoder:
    """Decodes chunks of a stream's messages into batches of its schema."""

    def __init__(self, layout: Layout, schema: pa.Schema, header_bytes: int) -> None:
        self._layout = layout
        self._schema = schema
        self._header_bytes = header_bytes

    def decode(
        self,
        messages: Messages,
        runs: Sequence[Run],
        describe: Callable[[int], Described | None],
        skip: Position,
    ) -> tuple[pa.RecordBatch, int]:
        """Decode a chunk, not an empty one: its rows after ``skip``, in order, and the last number that it has used.

        ``describe`` is asked by oid for the relations that have rows after ``skip``; messages of those that it gives
        None for only count. Raises WireError, and UnrepresentableError unless such values are to become NULL.
        """
        starts, tags, oids = pgoutput.tags_and_oids(messages, self._header_bytes)
        truncates = np.flatnonzero(tags == TRUNCATE)
        truncated = {i: pgoutput.read(messages.octets(i), self._header_bytes) for i in truncates.tolist()}
        numbers = np.where(tags == UPDATE, 2, 1)
        for i, message in truncated.items():
            numbers[i] = len(message.oids)
        run_of = np.repeat(np.arange(len(runs)), [run.messages for run in runs])
        total = np.cumsum(numbers)
        first_of_run = np.cumsum([0, *(run.messages for run in runs[:-1])])
        base = np.array([run.first_seq - 1 for run in runs]) - (total[first_of_run] - numbers[first_of_run])
        last_seq = total + base[run_of]
        chunk = _Chunk(
            buffer=messages.buffer,
            starts=starts,
            ends=messages.ends,
            seq=last_seq,
            lsn=np.array([run.commit_lsn for run in runs], np.int64)[run_of],
            ts=np.array([run.commit_ts for run in runs], np.int64)[run_of],
            xid=np.array([run.xid for run in runs], np.int64)[run_of],
        )
        wanted = np.ones(len(messages), np.bool_)
        if skip.lsn >= chunk.lsn[0]:
            wanted = (chunk.lsn > skip.lsn) | ((chunk.lsn == skip.lsn) & (chunk.seq > skip.seq))
        is_row = wanted & (tags != TRUNCATE)
        parts: list[tuple[pa.RecordBatch, Ints]] = []
        for oid in np.unique(oids[is_row]).tolist():
            described = describe(oid)
            if described is not None:
                parts.append(self._rows(chunk, np.flatnonzero(is_row & (oids == oid)), described))
        for i, message in truncated.items():
            if wanted[i] and self._layout.on_truncate != "ignore":
                found = [(k, describe(oid)) for k, oid in enumerate(message.oids)]
                named = [(k, described.table) for k, described in found if described is not None]
                if named:
                    parts.append(self._truncate(chunk, i, len(message.oids), named))
        batch = self._in_order(parts)
        # A skip may end within a message: between a delete and its insert, or among the tables of a TRUNCATE.
        return batch.slice(rows_through(batch, skip, self._schema)), int(last_seq[-1])

    def _in_order(self, parts: list[tuple[pa.RecordBatch, Ints]]) -> pa.RecordBatch:
        if not parts:
            return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in self._schema], schema=self._schema)
        if len(parts) == 1:
            return parts[0][0]
        batch = pa.concat_batches([part for part, _ in parts])
        # By message, and by place within it: a stable sort keeps the halves of an update in order.
        order = np.argsort(np.concatenate([message for _, message in parts]), kind="stable")
        return batch.take(from_numpy(order))

    def _rows(self, chunk: _Chunk, which: Ints, described: Described) -> tuple[pa.RecordBatch, Ints]:
        """Rows of one relation, and the message of each."""
        relation = described.relation
        rows = pgoutput.walk(chunk.buffer, chunk.starts[which], chunk.ends[which], len(relation.columns))
        split = self._splits(chunk, rows, described)
        source = np.repeat(np.arange(len(which)), 1 + split) if split.any() else np.arange(len(which))
        use_old = rows.kind[source] == DELETE
        first_half = np.zeros(len(source), np.bool_)
        if split.any():
            first_half[np.cumsum(1 + split)[split] - 2] = True
            use_old |= first_half
        kind = np.where(use_old, _DELETE, np.where(rows.kind[source] == INSERT, _INSERT, _UPDATE))
        kind[split[source] & ~use_old] = _INSERT
        message = which[source]
        seq = chunk.seq[message] - first_half
        images = [self._images(rows, source, use_old, index) for index in described.index]
        meta = self._meta(chunk, message, seq, kind, _unchanged(described, images, use_old))
        # Where the old image belongs to another row than the new one, only the delete has it.
        has_old = rows.has_old[source] & ~(split[source] & ~use_old)
        olds = None
        if self._layout.envelope or self._layout.before_image:
            olds = [self._olds(rows, source, has_old, index) for index in described.index]
        if self._layout.envelope:
            batch = self._envelope(chunk, described, images, olds or [], use_old, has_old, meta)
        else:
            batch = self._typed(chunk, described, images, olds, has_old, meta, chunk.lsn[message], seq)
        return batch, message

    def _splits(self, chunk: _Chunk, rows: Rows, described: Described) -> Flags:
        """Which updates changed the row's key: that of the replica identity, or under FULL the primary key.

        That an old key was sent does not tell: it also comes where a value of the key is TOASTed (heapam.c:
        HeapDetermineColumnsInfo), and with every update of a partition that is FULL under a root that is not.
        """
        split = np.zeros(len(rows.kind), np.bool_)
        if rows.old is None or rows.new is None:
            return split
        columns = described.relation.columns
        of_identity = [i for i, column in enumerate(columns) if column.is_key]
        primary = [i for i, column in enumerate(columns) if column.name in described.table.key]
        for full, keyed in ((False, of_identity or range(len(columns))), (True, primary)):
            which = np.flatnonzero((rows.kind == UPDATE) & rows.has_old & (rows.old_is_full == full))
            in_old, in_new = _ranks(rows.has_old)[which], _ranks(rows.has_new)[which]
            for i in keyed if len(which) else ():
                old, new = _octets(_gather(rows.old.fields[i], in_old)), _octets(_gather(rows.new.fields[i], in_new))
                differs = pc.not_equal(old, new)
                # What did not travel is NULL here, and has not changed.
                split[which] |= to_numpy(pc.if_else(pc.is_valid(differs), differs, pc.is_valid(differs)))
        return split

    def _images(self, rows: Rows, source: Ints, use_old: Flags, index: int | None) -> _Images | None:
        """Where each row's value of one column lies; None where the relation lacks the column."""
        if index is None:
            return None
        new = None if rows.new is None else rows.new.fields[index]
        toast = None if rows.new is None else rows.new.unchanged[index]
        if rows.old is None and new is not None:
            # Inserts, and updates that left the key alone.
            return _Images(new.start, new.length, new.valid, toast)
        n = len(source)
        start, length = np.zeros(n, np.int64), np.zeros(n, np.int64)
        valid, unchanged = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        if new is not None:
            to = np.flatnonzero(~use_old)
            take = _ranks(rows.has_new)[source[to]]
            start[to], length[to] = new.start[take], new.length[take]
            valid[to] = True if new.valid is None else new.valid[take]
            if toast is not None:
                unchanged[to] = toast[take]
        if rows.old is not None:
            # Deletes, and values that did not travel but stand in the old row; its NULLs may be what was not sent.
            old, old_toast = rows.old.fields[index], rows.old.unchanged[index]
            in_old = np.where(rows.has_old, _ranks(rows.has_old), 0)[source]
            sent = rows.has_old[source] if old.valid is None else rows.has_old[source] & old.valid[in_old]
            to = np.flatnonzero(use_old | (unchanged & sent))
            take = in_old[to]
            start[to], length[to] = old.start[take], old.length[take]
            valid[to] = True if old.valid is None else old.valid[take]
            unchanged[to] = False if old_toast is None else old_toast[take]
        # A reader of a column wants ascending positions; NULLs may lie anywhere.
        return _Images(start, length, valid, unchanged if unchanged.any() else None)

    def _olds(self, rows: Rows, source: Ints, has_old: Flags, index: int | None) -> _Images | None:
        if index is None or rows.old is None:
            return None
        n = len(source)
        start, length, valid = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.bool_)
        to = np.flatnonzero(has_old)
        take = _ranks(rows.has_old)[source[to]]
        old = rows.old.fields[index]
        start[to], length[to] = old.start[take], old.length[take]
        valid[to] = True if old.valid is None else old.valid[take]
        return _Images(start, length, valid, None)

    def _meta(self, chunk: _Chunk, message: Ints, seq: Ints, kind: Ints, unchanged: pa.Array) -> list[pa.Array]:
        return [
            from_texts(CHANGE_TYPES).take(from_numpy(kind)),
            from_numpy(chunk.lsn[message]),
            from_numpy(seq),
            from_numpy(chunk.ts[message]).cast(pa.timestamp("us", tz="UTC")),
            from_numpy(chunk.xid[message]),
            unchanged,
        ]

    def _typed(
        self,
        chunk: _Chunk,
        described: Described,
        images: Sequence[_Images | None],
        olds: Sequence[_Images | None] | None,
        has_old: Flags,
        meta: list[pa.Array],
        lsn: Ints,
        seq: Ints,
    ) -> pa.RecordBatch:
        def decode(codec: Codec, image: _Images | None) -> pa.Array:
            if image is None:
                return pa.nulls(len(seq), codec.arrow_type)
            try:
                field = Field(chunk.buffer, image.start, image.length, image.valid)
                decoded = refuse_other_bytes(codec.decode_text, field)
            except MalformedError as malformed:
                raise WireError(f"pgoutput: {_column(described.table, codec)}: {malformed}") from None
            return self._accept(decoded, described.table, codec, lsn, seq)

        codecs = described.table.codecs
        columns = [decode(codec, image) for codec, image in zip(codecs, images, strict=True)]
        if olds is not None:
            fields = [decode(codec, image) for codec, image in zip(codecs, olds, strict=True)]
            struct_type = self._schema.field(BEFORE).type
            before = pa.StructArray.from_arrays(fields, fields=list(struct_type), mask=from_numpy(~has_old))
            return pa.RecordBatch.from_arrays([*columns, *meta, before], schema=self._schema)
        return pa.RecordBatch.from_arrays([*columns, *meta], schema=self._schema)

    def _accept(self, decoded: Decoded, table: StreamedTable, codec: Codec, lsn: Ints, seq: Ints) -> pa.Array:
        if decoded.refused and self._layout.unrepresentable == "error":
            first = min(decoded.refused, key=lambda refused: int(refused.rows[0]))
            row = int(first.rows[0])
            name = quoted(codec.column.name)
            raise UnrepresentableError(
                f"{_column(table, codec)}, change {int(seq[row])} of the commit at {Lsn(lsn[row])}: {first.reason}",
                remedy=f"asString={name} reads the column as text; unrepresentable=null makes such values NULL",
            )
        return decoded.array

    def _envelope(
        self,
        chunk: _Chunk,
        described: Described,
        images: Sequence[_Images | None],
        olds: Sequence[_Images | None],
        use_old: Flags,
        has_old: Flags,
        meta: list[pa.Array],
    ) -> pa.RecordBatch:
        n = len(use_old)
        table = described.table
        columns = [EnvelopeColumn(codec.column.name, codec.column.type_oid) for codec in table.codecs]

        def texts(codec: Codec, image: _Images | None) -> pa.Array:
            if image is None:
                return pa.nulls(n, pa.string())
            try:
                field = Field(chunk.buffer, image.start, image.length, image.valid)
                return utf8_strings(field, field.start, field.length)
            except MalformedError as malformed:
                raise WireError(f"pgoutput: {_column(table, codec)}: {malformed}") from None

        after_texts = [texts(codec, image) for codec, image in zip(table.codecs, images, strict=True)]
        absent = [
            from_numpy(np.ones(n, np.bool_))
            if image is None
            else (None if image.unchanged is None else from_numpy(image.unchanged))
            for image in images
        ]
        nothing = null(pa.string())
        after = pc.if_else(from_numpy(use_old), nothing, json_objects(columns, after_texts, absent))
        key = pa.nulls(n, pa.string())
        keyed = [i for i, column in enumerate(columns) if column.name in described.table.key]
        if keyed:
            key = json_objects([columns[i] for i in keyed], [after_texts[i] for i in keyed], [absent[i] for i in keyed])
        before = pa.nulls(n, pa.string())
        if has_old.any():
            # Of an old key, only the key's columns were sent; their NULLs are no values.
            sent = [
                from_numpy(np.ones(n, np.bool_)) if image is None else self._not_sent(described, i, n)
                for i, image in zip(described.index, olds, strict=True)
            ]
            old_texts = [texts(codec, image) for codec, image in zip(table.codecs, olds, strict=True)]
            objects = json_objects(columns, old_texts, sent)
            before = pc.if_else(from_numpy(has_old), objects, nothing)
        names = from_texts([table.name]).take(from_numpy(np.zeros(n, np.int64)))
        return pa.RecordBatch.from_arrays([names, *meta, key, after, before], schema=ENVELOPE_SCHEMA)

    def _not_sent(self, described: Described, index: int | None, n: int) -> pa.Array | None:
        if index is None or described.relation.identity == "f" or described.relation.columns[index].is_key:
            return None
        return from_numpy(np.ones(n, np.bool_))

    def _truncate(
        self, chunk: _Chunk, i: int, relations: int, named: list[tuple[int, StreamedTable]]
    ) -> tuple[pa.RecordBatch, Ints]:
        n = len(named)
        if self._layout.on_truncate == "fail":
            raise SchemaChangedError(
                f"{', '.join(table.name for _, table in named)} was truncated by the commit at {Lsn(chunk.lsn[i])}",
                remedy="onTruncate=emit makes it a row for the sink to act on; onTruncate=ignore leaves it out",
            )
        message = np.full(n, i)
        seq = chunk.seq[message] - relations + 1 + np.array([k for k, _ in named])
        meta = self._meta(chunk, message, seq, np.full(n, _TRUNCATE), _no_lists(n))
        if self._layout.envelope:
            names = from_texts([table.name for _, table in named])
            nulls = [pa.nulls(n, pa.string())] * 3
            return pa.RecordBatch.from_arrays([names, *meta, *nulls], schema=ENVELOPE_SCHEMA), message
        first, last = len(self._schema) - len(meta) - self._layout.before_image, len(self._schema)
        columns = [pa.nulls(n, field.type) for field in list(self._schema)[:first]]
        before = [pa.nulls(n, field.type) for field in list(self._schema)[first + len(meta) : last]]
        return pa.RecordBatch.from_arrays([*columns, *meta, *before], schema=self._schema), message


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Messages joined, and of each its commit and the last number that it takes within it."""

    buffer: WireBuffer
    starts: Ints
    ends: Ints
    seq: Ints
    lsn: Ints
    ts: Ints
    xid: Ints


def _column(table: StreamedTable, codec: Codec) -> str:
    return f"{table.name}, column {quoted(codec.column.name)} ({codec.column.type_name})"


def _ranks(flags: Flags) -> Ints:
    """For each message the place of its image among those that have one."""
    ranks: Ints = np.cumsum(flags) - 1
    return ranks


def _gather(field: Field, rows: Ints) -> Field:
    valid = None if field.valid is None else field.valid[rows]
    return Field(field.buffer, field.start[rows], field.length[rows], valid)


def _octets(field: Field) -> pa.Array:
    return byte_strings(field, field.start, field.length)


def _no_lists(n: int) -> pa.Array:
    offsets = pa.py_buffer(np.zeros(n + 1, np.int32))
    return pa.Array.from_buffers(_UNCHANGED_TYPE, n, [None, offsets], children=[pa.nulls(0, pa.string())])


def _unchanged(described: Described, images: Sequence[_Images | None], use_old: Flags) -> pa.Array:
    """List for each row the columns whose value did not travel. A delete says nothing about values."""
    n = len(use_old)
    if all(image is not None and image.unchanged is None for image in images):
        return _no_lists(n)
    flags = np.stack(
        [
            ~use_old
            if image is None
            else (np.zeros(n, np.bool_) if image.unchanged is None else image.unchanged & ~use_old)
            for image in images
        ],
        axis=1,
    )
    names = from_texts([codec.column.name for codec in described.table.codecs])
    columns = np.nonzero(flags)[1]
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(flags.sum(axis=1)))).astype(np.int32)
    children = [names.take(from_numpy(columns))]
    return pa.Array.from_buffers(_UNCHANGED_TYPE, n, [None, pa.py_buffer(offsets)], children=children)


def snapshot_rows(
    columns: Sequence[pa.Array], n: int, lsn: Lsn, layout: Layout, table: StreamedTable, schema: pa.Schema
) -> pa.RecordBatch:
    """``n`` rows of the initial snapshot in the stream's schema; in the envelope ``columns`` are texts.

    They have the snapshot's LSN, no commit, and the number 0.
    """
    meta = [
        from_texts(CHANGE_TYPES).take(from_numpy(np.full(n, _SNAPSHOT))),
        from_numpy(np.full(n, lsn, np.int64)),
        from_numpy(np.zeros(n, np.int64)),
        pa.nulls(n, pa.timestamp("us", tz="UTC")),
        pa.nulls(n, pa.int64()),
        _no_lists(n),
    ]
    if layout.envelope:
        described = [EnvelopeColumn(codec.column.name, codec.column.type_oid) for codec in table.codecs]
        keyed = [i for i, column in enumerate(described) if column.name in table.key]
        key = pa.nulls(n, pa.string())
        if keyed:
            key = json_objects([described[i] for i in keyed], [columns[i] for i in keyed], [None] * len(keyed))
        names = from_texts([table.name]).take(from_numpy(np.zeros(n, np.int64)))
        after = json_objects(described, columns, [None] * len(columns)) if described else from_texts(["{}"] * n)
        return pa.RecordBatch.from_arrays([names, *meta, key, after, pa.nulls(n, pa.string())], schema=schema)
    before = [pa.nulls(n, schema.field(BEFORE).type)] if layout.before_image else []
    return pa.RecordBatch.from_arrays([*columns, *meta, *before], schema=schema)


def rows_through(batch: pa.RecordBatch, end: Position, schema: pa.Schema) -> int:
    """How many leading rows of a batch are at or before ``end``."""
    lsn = to_numpy(batch.column(schema.get_field_index("_commit_lsn")))
    seq = to_numpy(batch.column(schema.get_field_index("_seq")))
    first, last = np.searchsorted(lsn, [end.lsn, end.lsn + 1])
    return int(first + np.searchsorted(seq[first:last], end.seq, side="right"))
