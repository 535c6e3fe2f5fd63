"""Turn a later snapshot back to the point where the stream begins.

An initial snapshot lives in a session of the driver's. When that is gone, its point t1 cannot be read any more: the
unfinished tables are read at a new point t2. But the slot still has every change between t1 and t2, and under
REPLICA IDENTITY FULL each of them says what the row was before. So the rows of t1 can be had exactly::

    rows at t1  =  rows at t2, without those whose key was changed in (t1, t2]        filtered in every range
                +  for each such key, the first image before a change, if it had one  one more partition

A table without a primary key has no key to tell rows by; there, whole rows are counted: one task reads the table, takes
away as many copies of a row as were added, and adds those that were removed.

A table that only grew needs no old images, so whatever its identity, it is turned back all the same. Where it was
truncated, or rows were changed under less than FULL, old images are missing. Then the rows of t2 are taken as they are.
The stream repeats the changes since t1 on top of them, so an upsert by key still ends where the source is.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.errors import TransientError
from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.postgres.replication import ReplicationStream
from pg_cdc_source.protocol.changes import ChangeDecoder, Described
from pg_cdc_source.protocol.layout import BEFORE, Layout, StreamedTable
from pg_cdc_source.protocol.stream_rows import snapshot_rows
from pg_cdc_source.protocol.streamed import StreamedTransaction
from pg_cdc_source.protocol.transactions import Changes, TransactionAssembler
from pg_cdc_source.protocol.walsender import HEADER_BYTES, Keepalive
from pg_cdc_source.stream.buffer import Match, Matched
from pg_cdc_source.stream.chunks import Chunk, from_ipc, to_ipc
from pg_cdc_source.stream.spill import Spill

log = logging.getLogger(__name__)

_ROW = "row"
ROWS_PER_CHUNK = 65_536


@dataclass(frozen=True, slots=True)
class Rewound:
    """How to turn one table back: leave out the rows with a key of ``keys``, and add ``old_rows``.

    ``whole``: there is no key; then ``keys`` are whole rows as text, each to be left out once for every time it stands
    there. Both are Arrow IPC.
    """

    keys: bytes
    whole: bool
    old_rows: tuple[Chunk, ...]

    def leave_out(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of ``batches`` that were there at the earlier point as they are."""
        keys = from_ipc(self.keys)
        if self.whole:
            yield from _without_copies(batches, Counter(keys.column(0).to_pylist()))
            return
        changed = pa.Table.from_batches([keys])
        for batch in batches:
            rows = pa.table(
                {**{name: batch.column(name) for name in keys.schema.names}, _ROW_COLUMN: np.arange(batch.num_rows)}
            )
            kept = rows.join(changed, keys.schema.names, join_type="left anti", use_threads=False)
            if kept.num_rows:
                yield batch.take(pa.array(np.sort(kept.column(_ROW_COLUMN).to_numpy())))


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
class _Images:
    """Changes of one table with the rows before and after them, in order; none where ``missing`` says what is."""

    batches: list[pa.RecordBatch]
    missing: str | None = None

    def add(self, batch: pa.RecordBatch, identity: str) -> None:
        kinds = pc.unique(batch.column("_change_type")).to_pylist()
        if "truncate" in kinds:
            self.missing = "it was truncated in between"
        elif identity != "f" and ("update" in kinds or "delete" in kinds):
            self.missing = "changes in between did not say what rows were before: its replica identity was not FULL"
        if self.missing is None:
            self.batches.append(batch)
        else:
            self.batches.clear()


def rewind(
    connect: Callable[[Position], ReplicationStream],
    layout: Layout,
    schema: pa.Schema,
    tables: Sequence[StreamedTable],
    match: Match,
    origin: Lsn,
    snapshot_lsn: Lsn,
    alive: Callable[[], bool],
) -> dict[int, Rewound]:
    """Find out how to turn tables back from a snapshot that contains ``snapshot_lsn`` to the slot's ``origin``.

    Reads the slot and confirms nothing. Tables that are missing in the result are taken as they are, and so logged.
    """
    found = _read(connect, tables, match, layout, origin, snapshot_lsn, alive)
    rewound = {}
    for table in tables:
        images = found[table.oid]
        if not table.codecs:
            images.missing = "it has no columns to tell rows by"
        if images.missing is not None:
            log.warning(
                "the initial snapshot of %s was interrupted and is read again as of %s instead of %s: %s; rows may "
                "come in the state of a later change, %s",
                table.name,
                snapshot_lsn,
                Lsn(origin - 1),
                images.missing,
                "and an upsert by key ends right" if table.key or table.identity in "di" else "some of them twice",
            )
            continue
        log.info("the initial snapshot of %s was interrupted and is turned back to %s exactly", table.name, origin)
        rewound[table.oid] = _turn_back(table, images, layout, schema, Lsn(origin - 1))
    return rewound


def _read(
    connect: Callable[[Position], ReplicationStream],
    tables: Sequence[StreamedTable],
    match: Match,
    layout: Layout,
    origin: Lsn,
    snapshot_lsn: Lsn,
    alive: Callable[[], bool],
) -> dict[int, _Images]:
    """The changes of ``tables`` from ``origin`` up to and including ``snapshot_lsn``."""
    with_images = Layout(envelope=False, before_image=True, unrepresentable=layout.unrepresentable, on_truncate="emit")
    decoders = {t.oid: ChangeDecoder(with_images, with_images.schema([t]), HEADER_BYTES) for t in tables}
    images = {table.oid: _Images([]) for table in tables}
    matched = Matched(match)
    assembler = TransactionAssembler(Position.before(origin), lambda: StreamedTransaction(Spill))

    def keep(changes: Changes) -> None:
        last_seq = 0
        for oid, decoder in decoders.items():

            def of_one(other: int, oid: int = oid) -> Described | None:
                return matched.of(changes, other) if other == oid and images[oid].missing is None else None

            batch, last_seq = decoder.decode(changes.messages, changes.runs, of_one, changes.after)
            if batch.num_rows:
                images[oid].add(batch, changes.relation(oid).relation.identity)
        assembler.kept(changes, last_seq)

    with closing(connect(Position.before(origin))) as stream:
        for changes in _changes(stream, assembler, origin, snapshot_lsn, alive):
            keep(changes)
    return images


def _changes(
    stream: ReplicationStream, assembler: TransactionAssembler, origin: Lsn, through: Lsn, alive: Callable[[], bool]
) -> Iterator[Changes]:
    """Receive until everything up to ``through`` has come, and nothing beyond it."""
    wake, waker = socket.socketpair()
    with closing(wake), closing(waker):
        ask_at = 0.0
        while assembler.complete < Position(through) and (assembler.commit_lsn or 0) <= through:
            if time.monotonic() >= ask_at:
                if not alive():
                    raise TransientError("the driver's JVM is gone")
                stream.confirm(origin, ask=True)
                ask_at = time.monotonic() + 1.0
            rows = assembler.rows
            waiting = len(rows or ())
            data = stream.receive(rows)
            if rows is not None and rows.is_full:
                yield from _given(assembler.make_room())
            elif data is None and len(rows or ()) == waiting:
                stream.wait(wake, 1.0)
            if data is not None:
                yield from _given(assembler.receive(data))
            while assembler.is_replaying:
                yield from _given(assembler.replay())
        yield from _given(assembler.take())


def _given(event: Changes | Keepalive | None) -> Iterator[Changes]:
    if isinstance(event, Changes):
        yield event


def _turn_back(table: StreamedTable, images: _Images, layout: Layout, schema: pa.Schema, lsn: Lsn) -> Rewound:
    columns = [codec.column.name for codec in table.codecs]
    plain = pa.schema([pa.field(codec.column.name, codec.arrow_type) for codec in table.codecs])
    befores, afters = _before_and_after(images, columns, plain)
    keys = list(table.key)
    # Arrow joins by no list, and a key that is not sent tells nothing.
    if keys and all(key in columns and not pa.types.is_nested(plain.field(key).type) for key in keys):
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


def _before_and_after(images: _Images, columns: list[str], plain: pa.Schema) -> tuple[pa.Table, pa.Table]:
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
