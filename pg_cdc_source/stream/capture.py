"""One stream in the driver's source process: what Spark asks of it, and the offsets that it answers with.

Spark asks for the newest offset, then for the partitions between two offsets, and says later which one it has
committed. It may ask for partitions of a batch that an earlier process has planned, and it may never say anything
again. So every offset says by itself what a batch ends with. What is kept in this process only makes answering fast:
the snapshot's session, and the reader of the slot.

::

    initial ──► origin, table 1 of n read ──► … ──► origin, all n read ──► LSN ──► LSN ──► …
                └──────── at the slot's consistent point ────────┘         └─ changes from the slot ─┘

- The slot stays at its origin until the tables are read and Spark has committed the first changes after them.
- Where Spark gives no start (before 4.2), the first offset of a process is the end of the server's WAL: at or after
  whatever an earlier process has given out.
- An offset that a batch ends with is never found out again: the same (start, end) gives the same rows.
"""

from __future__ import annotations

import functools
import itertools
import time
from dataclasses import dataclass, replace

import pyarrow as pa
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import DefiniteError, SchemaChangedError, TransientError
from pg_cdc_source.offsets import Lsn, Position, StreamOffset
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres import publication
from pg_cdc_source.postgres.replication import ReplicationStream
from pg_cdc_source.postgres.slot_checks import missing_error
from pg_cdc_source.postgres.slots import Slot
from pg_cdc_source.protocol.changes import ChangeDecoder, Described
from pg_cdc_source.protocol.pgoutput import RelationMessage
from pg_cdc_source.protocol.streamed import StreamedTransaction
from pg_cdc_source.protocol.transactions import TransactionAssembler
from pg_cdc_source.protocol.walsender import HEADER_BYTES
from pg_cdc_source.snapshot.driver import Process, driver_process
from pg_cdc_source.stream.batches import Limits
from pg_cdc_source.stream.buffer import ChangeBuffer
from pg_cdc_source.stream.chunks import Chunk, ChunkStore
from pg_cdc_source.stream.initial_snapshot import InitialSnapshot, SnapshotPart
from pg_cdc_source.stream.lag import LagMeter, Standing
from pg_cdc_source.stream.publication_watch import PublicationWatch
from pg_cdc_source.stream.schema_history import match_relation
from pg_cdc_source.stream.slot_history import SlotHistory
from pg_cdc_source.stream.slot_reader import SlotReader
from pg_cdc_source.stream.source_session import SourceSession
from pg_cdc_source.stream.spill import Spill
from pg_cdc_source.stream.stream_plan import StreamPlan, plan_stream

# How long an answer may wait for changes: it spares Spark's loop its polling, and stop() waits no longer than this.
PATIENCE_SECONDS = 0.25
# How often the offset of a quiet stream moves on: each move is an empty batch, and lets the slot forget WAL.
IDLE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Batch:
    """What the rows between two offsets are made of."""

    parts: tuple[SnapshotPart, ...]
    chunks: tuple[Chunk, ...]


class Capture:
    """The stream, from its first offset to its last."""

    def __init__(self, options: StreamOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema
        self._driver: Process = driver_process()
        self._limits = Limits(options.max_rows_per_batch, options.max_bytes_per_batch)
        self._source = SourceSession(options)
        self._history = SlotHistory(options, self._source)
        self._watch = PublicationWatch(options, self._source)
        self._snapshot = InitialSnapshot(options, self._source, self._history, self._is_driver_there)
        self._plan: StreamPlan | None = None
        self._reader: SlotReader | None = None
        self._given: StreamOffset | None = None  # the newest offset that this process has given out
        self._target: Position | None = None
        self._moved_at = time.monotonic()
        self._lag = LagMeter(self._source)

    # --- Spark's questions --------------------------------------------------------------------------------------------

    def newest(self, start: StreamOffset | None, *, limited: bool) -> StreamOffset:
        """The end of the next batch after ``start``, None being the initial offset; ``start`` if there is nothing."""
        end = self._newest(start, limited=limited)
        if self._source.in_recovery and (start is None or end.position != start.position):
            # A timeline that is asked for only now is at or after that of everything up to the end.
            self._history.forget_identity()
        return replace(end, identity=self._history.identify())

    def newest_without_start(self) -> StreamOffset:
        """As ``newest``, for a Spark that neither says where it starts nor limits a batch."""
        if self._given is not None:
            self._given = self.newest(self._given, limited=True)
            return self._given
        slot = self._history.find_slot()
        if slot is None:
            end = self._begin()
            self._given = replace(end, done=len(end.tables))
        else:
            # It may go on from a checkpoint, which only the batch's start will tell.
            end = self._begin_at(slot)
            self._given = replace(end, done=len(end.tables), position=self._end_of_wal(end.position))
        return self._given

    def batch(self, start: StreamOffset | None, end: StreamOffset) -> Batch:
        """The rows after ``start`` (None: the initial offset) up to ``end``."""
        self._attach(start, end)
        if start is not None and self._snapshot.created not in (None, start.origin):
            # Only the batch's start tells that there was a stream before (see newest_without_start).
            self._snapshot.drop_slot()
            raise missing_error(self._options.slot, begun=True)
        self._given = end
        parts: list[SnapshotPart] = []
        chunks: list[Chunk] = []
        first, last = _pending(start, end)
        if first < last:
            parts, chunks = self._snapshot.parts(self._planned(), self._match, end, first, last)
        position = Position.before(end.origin) if start is None else start.position
        if end.position > position:
            reader = self._read_from(position)
            reader.read_through(end.position, self._is_driver_there)
            chunks += reader.batch(position, end.position)
        return Batch(tuple(parts), tuple(chunks))

    def commit(self, end: StreamOffset | None) -> None:
        """Spark has committed everything through ``end``: the slot may move there."""
        if end is not None and self._reader is not None and end.done == len(end.tables):
            self._reader.release(end.position)

    def standing(self, end: StreamOffset) -> Standing | None:
        """How far behind its server a stream is whose last batch ends at ``end``; None where that is not known."""
        return self._lag.measure(self._reader, end.position)

    def stop_at_present(self) -> None:
        """Take nothing that is committed from now on."""
        self._target = Position.before(self._source.read_end_of_wal())

    def close(self) -> None:
        """End the reader, the snapshot and the session."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._snapshot.end()
        self._source.close()

    # --- offsets ------------------------------------------------------------------------------------------------------

    def _newest(self, start: StreamOffset | None, *, limited: bool) -> StreamOffset:
        if start is None:
            end = self._begin()
            return end if limited else replace(end, done=len(end.tables), position=self._end_of_wal(end.position))
        self._attach(start)
        if start.done < len(start.tables):
            done = start.done + 1 if limited else len(start.tables)
            return replace(start, done=done, position=start.position if limited else self._end_of_wal(start.position))
        self._snapshot.end()
        start = replace(start, tables=(), done=0)
        if not limited:
            return replace(start, position=self._end_of_wal(start.position))
        return self._next(start)

    def _begin(self) -> StreamOffset:
        """The first end of a stream: where it begins, and its tables, one of them to be read."""
        slot = self._history.find_slot()
        if slot is not None:
            return self._begin_at(slot)
        if self._options.start_from == "slot":
            raise missing_error(self._options.slot, begun=False)
        plan = self._planned(create=True)
        return self._first_end(plan, self._snapshot.create_slot(plan))

    def _begin_at(self, slot: Slot) -> StreamOffset:
        assert slot.confirmed_flush is not None
        # Nothing is created: what was committed before it would be missing, from PostgreSQL 18 on without an error.
        plan = self._planned()
        origin = slot.confirmed_flush
        if self._options.start_from == "now":
            origin = max(self._source.read_end_of_wal(), origin)
        return self._first_end(plan, origin)

    def _first_end(self, plan: StreamPlan, origin: Lsn) -> StreamOffset:
        tables = tuple(table.name for table in plan.tables) if self._options.start_from == "snapshot" else ()
        done = min(1, len(tables))
        return StreamOffset(self._history.identify(), origin, tables, done, Position.before(origin), self._watch.mark)

    def _next(self, start: StreamOffset) -> StreamOffset:
        self._watch.look_sometimes(self._planned().names)
        reader = self._read_from(start.position)
        if self._target is not None and start.position >= self._target:
            return start
        end = self._cut(reader, start.position)
        while end == start.position:
            # To give the start again would say that there is no more, so on the way to a target it waits.
            if self._target is None:
                return start
            if not self._is_driver_there():
                raise TransientError("the driver's JVM is gone")
            end = self._cut(reader, start.position)
        self._moved_at = time.monotonic()
        return replace(start, position=end, publication=self._watch.mark)

    def _cut(self, reader: SlotReader, start: Position) -> Position:
        # A batch without rows only moves the slot, which need not happen all the time.
        only_rows = self._target is None and time.monotonic() < self._moved_at + IDLE_SECONDS
        try:
            return reader.cut(start, self._target, PATIENCE_SECONDS, only_rows=only_rows)
        except SchemaChangedError:
            # A column that the publication leaves out looks like one that was dropped.
            self._watch.look(self._planned().names)
            raise

    def _end_of_wal(self, at_least: Position) -> Position:
        return max(at_least, self._target or Position.before(self._source.read_end_of_wal()))

    def _attach(self, *offsets: StreamOffset | None) -> None:
        """Make sure that offsets, slot and publication belong together."""
        for offset in offsets:
            if offset is not None:
                self._history.require_common(offset.identity, offset.position)
        names = self._planned().names
        for offset in offsets:
            if offset is not None:
                self._watch.require_unchanged(offset.publication, names)

    # --- what is read -------------------------------------------------------------------------------------------------

    def _is_driver_there(self) -> bool:
        return self._driver.runs()

    def _planned(self, *, create: bool = False) -> StreamPlan:
        if self._plan is not None:
            return self._plan
        plan = self._source.ask(lambda session: self._plan_in(session, create))
        if plan.schema != self._schema:
            raise SchemaChangedError(
                f"{plan.tables[0].name} has other columns than when the DataFrame was loaded",
                remedy="load the DataFrame again",
            )
        self._plan = plan
        return self._plan

    def _plan_in(self, session: Session, create: bool) -> StreamPlan:
        options = self._options
        if create:
            published = publication.ensure_publication(session, options)
        else:
            published = publication.require_publication(session, options.publications)
        plan = plan_stream(session, options, published, self._source.read_end_of_wal())
        self._watch.begin(published, plan.names)
        return plan

    def _match(self, relation: RelationMessage, lsn: Lsn, _: Position) -> Described | None:
        return match_relation(self._planned(), relation, lsn)

    def _read_from(self, position: Position) -> SlotReader:
        if self._reader is None:
            plan = self._planned()
            self._history.require_free(position)
            buffer = ChangeBuffer(
                TransactionAssembler(
                    position, functools.partial(StreamedTransaction, Spill), prefixes=self._options.message_prefixes
                ),
                ChangeDecoder(plan.layout, plan.schema, HEADER_BYTES),
                self._match,
                ChunkStore(position),
                self._limits,
                self._options.slot,
            )
            sessions = itertools.count()

            def connect(received: Position) -> ReplicationStream:
                # After a lost session large transactions are sent whole: should the server have lost it over one that
                # is in progress, it gets past that one so.
                return self._history.connect_stream(received, streaming=next(sessions) == 0)

            self._reader = SlotReader(connect, buffer)
        return self._reader


def _pending(start: StreamOffset | None, end: StreamOffset) -> tuple[int, int]:
    """Which of ``end``'s tables a batch reads, [first, last): those that were not done at its start."""
    if start is None:
        return 0, end.done
    if start.done == len(start.tables):
        # Its snapshot is over. A Spark that gives no start gets an end that names the tables all the same.
        return end.done, end.done
    if start.tables != end.tables:
        raise DefiniteError(
            "the checkpoint's offsets name other tables of the initial snapshot than before",
            remedy="start over with a new checkpoint location and a new slot",
        )
    return start.done, end.done
