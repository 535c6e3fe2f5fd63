"""Turn messages of rows into record batches of the stream's schema, a column at a time.

A chunk of messages, a few thousand, is joined into one buffer. Messages of the same relation are walked together
(:mod:`~pg_cdc_source.protocol.tuples`), and the values of each column, wherever they lie, are decoded as one Arrow
array. Rows of several relations are put into the stream's order again afterwards.

- Columns are found by name in the relation as the stream last described it, never by position in today's table.
- ``_seq`` is the LSN of the change's WAL record. To count a commit's changes would not give the same numbers in every
  replay: the server leaves out tables that have left the publication since. Rows of one record count on from its LSN
  (:func:`_last_numbers`). An update takes two numbers, because it may become a delete and an insert.
- A value that did not travel is NULL and listed in ``_unchanged``, unless an old image of the row has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.errors import SchemaChangedError
from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.protocol import pgoutput
from pg_cdc_source.protocol.changelog import require_whole_rows
from pg_cdc_source.protocol.envelope import json_objects
from pg_cdc_source.protocol.images import Image, RowsOfMessages
from pg_cdc_source.protocol.layout import BEFORE, OF_SCHEMA, TRUNCATED, Layout, StreamedTable
from pg_cdc_source.protocol.packed import packed_rows
from pg_cdc_source.protocol.refused import RefusedValueError, accept
from pg_cdc_source.protocol.stream_rows import (
    change_columns,
    envelope_columns,
    envelope_rows,
    lists_of_names,
    message_rows,
    nothing_unchanged,
    rows_through,
    schema_rows,
    truncate_rows,
)
from pg_cdc_source.protocol.tuples import tags_and_oids, walk
from pg_cdc_source.protocol.walsender import HEADER_BYTES, read_starts
from pg_cdc_source.values.arrow import from_numpy, null, one_batch, to_numpy
from pg_cdc_source.values.decoder import Field, refuse_other_bytes
from pg_cdc_source.values.ndarrays import Bytes, Flags, Ints
from pg_cdc_source.values.registry import Codec
from pg_cdc_source.values.strings import Text
from pg_cdc_source.values.wire import Messages


@dataclass(frozen=True, slots=True)
class Described:
    """A streamed table together with the columns that the stream says its rows have now.

    ``index`` says for each planned column which of the relation's columns it is, None where it is not there.
    ``announced``: what a row ``schema`` right before the table's first row says; None for no such row. Commits before
    ``since`` are left out. ``refused`` is why the first row after that cannot be read, if that is so.
    """

    table: StreamedTable
    relation: pgoutput.RelationMessage
    index: tuple[int | None, ...]
    announced: str | None = None
    since: int = 0
    refused: SchemaChangedError | None = None


# What a relation's rows are, given its oid and the position of the first of them; None where they are not read.
Describe = Callable[[int, Position], Described | None]


@dataclass(frozen=True, slots=True)
class Run:
    """Messages of one commit that follow each other, how many they are, and the number before the first one.

    ``after_seq`` is 0 where nothing of the commit came before them. Only the first run of a chunk can go on with one.
    """

    commit_lsn: Lsn
    commit_ts: int  # microseconds since 1970
    xid: int
    after_seq: int
    messages: int


def relations_in(messages: Messages) -> set[int]:
    """The oids of the relations that have rows or a TRUNCATE in a chunk of at least one message."""
    _, tags, oids = tags_and_oids(messages, HEADER_BYTES)
    found = set(np.unique(oids[(tags != pgoutput.TRUNCATE) & (tags != pgoutput.MESSAGE)]).tolist())
    for i in np.flatnonzero(tags == pgoutput.TRUNCATE).tolist():
        found.update(pgoutput.read(messages.octets(i), HEADER_BYTES).oids)
    return found


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Messages: where each lies, its tag, relation and commit, and the last number that it takes in the commit.

    Those of a commit are in the order of their records.
    """

    messages: Messages
    starts: Ints
    ends: Ints
    tags: Bytes
    oids: Ints
    truncates: dict[int, pgoutput.Truncate]
    seq: Ints
    lsn: Ints
    ts: Ints
    xid: Ints

    @classmethod
    def of(cls, messages: Messages, runs: Sequence[Run]) -> _Chunk:
        starts, tags, oids = tags_and_oids(messages, HEADER_BYTES)
        # A logical decoding message says where its record ends, and the next one may begin.
        records = read_starts(messages) - (tags == pgoutput.MESSAGE)
        run_of = np.repeat(np.arange(len(runs)), [run.messages for run in runs])
        if runs[0].after_seq >= records[0]:
            # The first rows of this record were in the chunk before.
            records = np.where(run_of == 0, np.maximum(records, records[0]), records)
        # So the server may send it behind the row that begins there, if it is of a subtransaction and the row is not.
        if ((records[1:] < records[:-1]) & (run_of[1:] == run_of[:-1])).any():
            order = np.lexsort((records, run_of))
            return cls.of(Messages(messages.buffer, messages.starts[order], messages.ends[order]), runs)
        truncates = {
            i: pgoutput.read(messages.octets(i), HEADER_BYTES)
            for i in np.flatnonzero(tags == pgoutput.TRUNCATE).tolist()
        }
        numbers = np.where(tags == pgoutput.UPDATE, 2, 1)
        for i, message in truncates.items():
            numbers[i] = len(message.oids)
        return cls(
            messages=messages,
            starts=starts,
            ends=messages.ends,
            tags=tags,
            oids=oids,
            truncates=truncates,
            seq=_last_numbers(records, numbers, run_of, runs[0].after_seq),
            lsn=np.array([run.commit_lsn for run in runs], np.int64)[run_of],
            ts=np.array([run.commit_ts for run in runs], np.int64)[run_of],
            xid=np.array([run.xid for run in runs], np.int64)[run_of],
        )

    @property
    def is_row(self) -> Flags:
        """Which messages are of one row, and name its relation."""
        flags: Flags = (self.tags != pgoutput.TRUNCATE) & (self.tags != pgoutput.MESSAGE)
        return flags

    def after(self, position: Position) -> Flags:
        """Return which messages have rows after ``position``."""
        if position.lsn < self.lsn[0]:
            return np.ones(len(self.lsn), np.bool_)
        after: Flags = (self.lsn > position.lsn) | ((self.lsn == position.lsn) & (self.seq > position.seq))
        return after

    def first_changes(self, wanted: Flags, *, with_truncates: bool) -> dict[int, tuple[int, int]]:
        """Return for each relation with ``wanted`` changes the first one: its message, and the least number in it."""
        rows = np.flatnonzero(wanted & self.is_row)
        oids, at = np.unique(self.oids[rows], return_index=True)
        message = rows[at]
        numbers = self.seq[message] - (self.tags[message] == pgoutput.UPDATE)
        first = dict(zip(oids.tolist(), zip(message.tolist(), numbers.tolist(), strict=True), strict=True))
        for i, truncate in self.truncates.items():
            if with_truncates and wanted[i]:
                for k, oid in enumerate(truncate.oids):
                    place = (i, int(self.seq[i]) - len(truncate.oids) + 1 + k)
                    first[oid] = min(place, first.get(oid, place))
        return first

    def change_columns(self, message: Ints, seq: Ints, kind: Ints, unchanged: pa.Array) -> list[pa.Array]:
        return change_columns(kind, self.lsn[message], seq, self.ts[message], self.xid[message], unchanged)


def _last_numbers(records: Ints, numbers: Ints, run_of: Ints, after_seq: int) -> Ints:
    """Return the last number of each message; ``records`` are LSNs, and ``numbers`` say how many each message takes.

    No record has less bytes than it takes numbers, so the next one's are greater: a record of several rows (COPY) has
    seven bytes and more for each, a TRUNCATE four for each relation, and what precedes them is as long as two rows.
    """
    total = np.cumsum(numbers)
    begins = np.ones(len(records), np.bool_)
    begins[1:] = (records[1:] != records[:-1]) | (run_of[1:] != run_of[:-1])
    first = np.maximum.accumulate(np.where(begins, np.arange(len(records)), 0))
    last: Ints = records + total - (total - numbers)[first] - 1
    if after_seq >= records[0]:
        # The record's first rows were in the chunk before.
        last[first == 0] += after_seq + 1 - records[0]
    return last


# The envelope has every value as PostgreSQL prints it.
_TEXT = Text()

# Rows in the stream's schema, and of each the message that it is of.
_Part = tuple[pa.RecordBatch, Ints]


class ChangeDecoder:
    """Decodes chunks of a stream's messages into batches of its schema.

    Every message is a whole XLogData. Nothing is kept from one chunk to the next. Logical decoding messages in commits
    before ``messages_since`` are left out.
    """

    def __init__(self, layout: Layout, schema: pa.Schema, messages_since: int = 0) -> None:
        self._layout = layout
        self._schema = schema
        self._messages_since = messages_since

    def decode(
        self, messages: Messages, runs: Sequence[Run], describe: Describe, skip: Position
    ) -> tuple[pa.RecordBatch, int]:
        """Decode a chunk of at least one message; return its rows after ``skip``, in order, and its last number.

        ``runs`` say which commits the messages are of. ``describe`` is called once for each relation that has rows
        after ``skip``, in the order of their first ones; where it returns None, messages give no rows. Raises
        WireError, SchemaChangedError for a TRUNCATE if ``on_truncate`` is ``fail``, and UnrepresentableError unless
        such values become NULL.
        """
        chunk = _Chunk.of(messages, runs)
        wanted = chunk.after(skip)
        first = chunk.first_changes(wanted, with_truncates=self._layout.on_truncate != "ignore")
        in_order = sorted(first.items(), key=lambda item: item[1])
        found = {oid: describe(oid, Position(Lsn(chunk.lsn[i]), number)) for oid, (i, number) in in_order}
        is_row = wanted & chunk.is_row
        parts: list[_Part] = []
        announced: list[tuple[int, int, Described]] = []
        for oid, described in found.items():
            if described is None:
                continue
            i, number = first[oid]
            which = np.flatnonzero(is_row & (chunk.oids == oid) & (chunk.lsn >= described.since))
            if chunk.lsn[i] < described.since:
                if not len(which):
                    continue
                i = int(which[0])
            if len(which):
                if described.refused is not None:
                    raise described.refused
                parts.append(self._rows(chunk, which, described))
                if which[0] == i:
                    # Whether an update takes one of its numbers or both is known only now.
                    number = parts[-1][0].column("_seq")[0].as_py()
            if described.announced is not None:
                announced.append((i, number, described))
        parts += self._truncates(chunk, wanted, found)
        parts += self._messages(chunk, wanted)
        batch = self._in_order(parts, _announcements(chunk, announced, self._schema))
        # A skip may end within a message: between a delete and its insert, or among the tables of a TRUNCATE.
        return batch.slice(rows_through(batch, skip, self._schema)), int(chunk.seq[-1])

    def _in_order(self, parts: list[_Part], announcements: _Part | None) -> pa.RecordBatch:
        if not parts:
            return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in self._schema], schema=self._schema)
        if announcements is None and len(parts) == 1:
            return parts[0][0]
        first = 0 if announcements is None else len(announcements[1])
        if announcements is not None:
            parts = [announcements, *parts]
        batch = one_batch([part for part, _ in parts])
        message = np.concatenate([message for _, message in parts])
        if first:
            # Each stands right before the row that has its number.
            is_row = np.arange(len(message)) >= first
            order = np.lexsort((is_row, to_numpy(batch.column("_seq")), message))
        else:
            # By message, and by place within it: a stable sort keeps the halves of an update in order.
            order = np.argsort(message, kind="stable")
        return batch.take(from_numpy(order))

    def _rows(self, chunk: _Chunk, which: Ints, described: Described) -> _Part:
        """Return the rows of the messages ``which``, all of one relation."""
        relation = described.relation
        rows = walk(chunk.messages.buffer, chunk.starts[which], chunk.ends[which], len(relation.columns))
        changed = RowsOfMessages.of(rows, relation, described.table.key)
        message = which[changed.source]
        seq = chunk.seq[message] - changed.is_first_half
        images = [None if i is None else changed.image(i) for i in described.index]
        if self._layout.changelog:
            require_whole_rows(described.table.name, changed, images, chunk.lsn[message])
        unchanged = _unchanged(described.table, images, changed.is_delete)
        changes = chunk.change_columns(message, seq, changed.kind, unchanged)
        try:
            if self._layout.envelope:
                return self._envelope(described, changed, images, changes), message
            return self._typed(described, changed, images, changes), message
        except RefusedValueError as refused:
            place = f"the change at {Lsn(seq[refused.row])} in the commit at {Lsn(chunk.lsn[message[refused.row]])}"
            raise refused.at(described.table.name, place) from None

    def _typed(
        self, described: Described, changed: RowsOfMessages, images: Sequence[Image | None], changes: Sequence[pa.Array]
    ) -> pa.RecordBatch:
        taken = partial(accept, _before_column(described.table), self._layout.unrepresentable)

        def decode(codec: Codec, values: Field | None) -> pa.Array:
            if values is None:
                return pa.nulls(len(changed), codec.arrow_type)
            return taken(codec.column, refuse_other_bytes, codec.decode_text, values)

        codecs = described.table.codecs
        columns = [
            decode(codec, None if image is None else image.values) for codec, image in zip(codecs, images, strict=True)
        ]
        if not self._layout.before_image:
            return pa.RecordBatch.from_arrays([*columns, *changes], schema=self._schema)
        olds = [None if i is None else changed.old_image(i) for i in described.index]
        fields = [decode(codec, old) for codec, old in zip(codecs, olds, strict=True)]
        struct_type = self._schema.field(BEFORE).type
        before = pa.StructArray.from_arrays(fields, fields=list(struct_type), mask=from_numpy(~changed.has_old))
        return pa.RecordBatch.from_arrays([*columns, *changes, before], schema=self._schema)

    def _envelope(
        self, described: Described, changed: RowsOfMessages, images: Sequence[Image | None], changes: Sequence[pa.Array]
    ) -> pa.RecordBatch:
        n, table = len(changed), described.table
        taken = partial(accept, _before_column(table), "error")

        def texts_of(codec: Codec, values: Field | None) -> pa.Array:
            if values is None:
                return pa.nulls(n, pa.string())
            return taken(codec.column, refuse_other_bytes, _TEXT.read, values)

        texts = [
            texts_of(codec, None if image is None else image.values)
            for codec, image in zip(table.codecs, images, strict=True)
        ]
        olds: list[pa.Array] | None = None
        if changed.has_old.any():
            indexes = [None if i is None else changed.old_image(i) for i in described.index]
            olds = [texts_of(codec, old) for codec, old in zip(table.codecs, indexes, strict=True)]
        if self._layout.packed:
            return packed_rows(table, changes, texts, olds, changed.has_old)
        all_rows = from_numpy(np.ones(n, np.bool_))
        absent = [
            all_rows if image is None else (None if image.unchanged is None else from_numpy(image.unchanged))
            for image in images
        ]
        before = None
        if olds is not None:
            # Of an old key, only the key's columns were sent, and all others are NULL. But a partition that is FULL
            # under a root that is not sends whole rows as keys (see images); of these, NULLs cannot be told from those.
            columns = described.relation.columns
            has_all = described.relation.identity == "f"
            not_sent = [
                all_rows if i is None else None if has_all or columns[i].is_key else old.is_null()
                for i, old in zip(described.index, olds, strict=True)
            ]
            objects = json_objects(table.name, envelope_columns(table.codecs), olds, not_sent)
            before = pc.if_else(from_numpy(changed.has_old), objects, null(pa.string()))
        return envelope_rows(table, changes, texts, absent, deleted=changed.is_delete, before=before)

    def _messages(self, chunk: _Chunk, wanted: Flags) -> Iterator[_Part]:
        is_message = wanted & (chunk.tags == pgoutput.MESSAGE) & (chunk.lsn >= self._messages_since)
        if (which := np.flatnonzero(is_message)).size:
            found = [pgoutput.read(chunk.messages.octets(i), HEADER_BYTES) for i in which.tolist()]
            lsn, seq, ts, xid = (column[which] for column in (chunk.lsn, chunk.seq, chunk.ts, chunk.xid))
            yield message_rows(found, lsn, seq, ts, xid, self._schema), which

    def _truncates(self, chunk: _Chunk, wanted: Flags, found: Mapping[int, Described | None]) -> Iterator[_Part]:
        for i, message in chunk.truncates.items():
            if wanted[i] and self._layout.on_truncate != "ignore":
                tables = [(k, found[oid]) for k, oid in enumerate(message.oids)]
                named = [(k, d.table) for k, d in tables if d is not None and chunk.lsn[i] >= d.since]
                if named:
                    yield self._truncated(chunk, i, len(message.oids), named)

    def _truncated(self, chunk: _Chunk, i: int, relations: int, named: list[tuple[int, StreamedTable]]) -> _Part:
        """Return a row for each of the tables that message ``i`` truncates, by their places among its relations."""
        tables = [table for _, table in named]
        if self._layout.on_truncate == "fail":
            emit = "" if self._layout.changelog else "onTruncate=emit makes it a row for the sink to act on; "
            raise SchemaChangedError(
                f"{', '.join(table.name for table in tables)} was truncated by the commit at {Lsn(chunk.lsn[i])}",
                remedy=f"{emit}onTruncate=ignore leaves it out, and the rows before it stay in the sink",
            )
        n = len(named)
        message = np.full(n, i)
        seq = chunk.seq[message] - relations + 1 + np.array([k for k, _ in named])
        changes = chunk.change_columns(message, seq, np.full(n, TRUNCATED), nothing_unchanged(n))
        return truncate_rows(tables, changes, self._layout, self._schema), message


def _announcements(chunk: _Chunk, announced: Sequence[tuple[int, int, Described]], schema: pa.Schema) -> _Part | None:
    """Return the rows that say what the columns are from here on: of each the message, and the row's number."""
    if not announced:
        return None
    message = np.array([i for i, _, _ in announced])
    seq = np.array([number for _, number, _ in announced])
    changes = chunk.change_columns(message, seq, np.full(len(seq), OF_SCHEMA), nothing_unchanged(len(seq)))
    tables = [described.table for _, _, described in announced]
    texts = [described.announced or "" for _, _, described in announced]
    return schema_rows(tables, texts, changes, schema), message


def _before_column(table: StreamedTable) -> str:
    """What errors have in front of a column."""
    return f"pgoutput: {table.name}, "


def _unchanged(table: StreamedTable, images: Sequence[Image | None], is_delete: Flags) -> pa.Array:
    """List for each row the columns whose value did not travel. A delete says nothing about values."""
    n = len(is_delete)
    if all(image is not None and image.unchanged is None for image in images):
        return nothing_unchanged(n)
    flags = [
        ~is_delete
        if image is None
        else (np.zeros(n, np.bool_) if image.unchanged is None else image.unchanged & ~is_delete)
        for image in images
    ]
    return lists_of_names([codec.column.name for codec in table.codecs], flags)
