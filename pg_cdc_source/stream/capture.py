"""One stream in the driver's source process: its slot, its initial snapshot, and what each batch consists of.

Spark asks for the newest offset, then for the partitions between two offsets, and says later which one it has
committed. It may ask for partitions of a batch that an earlier process has planned, and it may never say anything
again. So every offset says by itself what a batch ends with, and this class only keeps what makes answering fast: the
snapshot's session, and the reader of the slot.

::

    initial ──► origin, table 1 of n read ──► … ──► origin, all n read ──► LSN ──► LSN ──► …
                └──────── at the slot's consistent point ────────┘         └─ changes from the slot ─┘

- The slot stays at its origin until the tables are read and Spark has committed the first changes after them.
- A snapshot that was lost with its process is made again at a later point and turned back (``rewind``).
- Where Spark gives no start (before 4.2), the first offset of a process is the end of the server's WAL: at or after
  whatever an earlier process has given out.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pyarrow as pa
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import (
    DefiniteError,
    SchemaChangedError,
    SlotLostError,
    TransientError,
)
from pg_cdc_source.offsets import Lsn, Position, SlotIdentity, StreamOffset, end_of_timeline
from pg_cdc_source.options.names import quoted
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres import catalog, locks, publication, slot_creation, snapshots
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.connection import connect, refuse_transaction_pooler
from pg_cdc_source.postgres.replication import ReplicationStream
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.slot_checks import check_confirmed, check_slot, in_use_error, missing_error
from pg_cdc_source.postgres.slots import Slot, read_end_of_wal, read_slot
from pg_cdc_source.postgres.snapshots import Held, SnapshotSpec
from pg_cdc_source.protocol.changes import ChangeDecoder, Described
from pg_cdc_source.protocol.layout import StreamedTable
from pg_cdc_source.protocol.pgoutput import RelationMessage
from pg_cdc_source.protocol.streamed import StreamedTransaction
from pg_cdc_source.protocol.transactions import TransactionAssembler
from pg_cdc_source.protocol.walsender import HEADER_BYTES
from pg_cdc_source.snapshot import scan
from pg_cdc_source.snapshot.driver import Process, driver_process
from pg_cdc_source.snapshot.scan import Plan, ScanRange
from pg_cdc_source.snapshot.source import GivenSnapshot
from pg_cdc_source.stream.batches import Limits
from pg_cdc_source.stream.buffer import ChangeBuffer
from pg_cdc_source.stream.chunks import Chunk, ChunkStore
from pg_cdc_source.stream.rewind import Rewound, rewind
from pg_cdc_source.stream.schema_history import StreamPlan, describe, plan_stream, session_name
from pg_cdc_source.stream.slot_reader import SlotReader
from pg_cdc_source.stream.spill import Spill

log = logging.getLogger(__name__)

T = TypeVar("T")

# How long an answer may wait for changes: it spares Spark's loop its polling, and stop() waits no longer than this.
PATIENCE_SECONDS = 0.25
# How often the offset of a quiet stream moves on: each move is an empty batch, and lets the slot forget WAL.
IDLE_SECONDS = 10.0
WATCH_SECONDS = 2.0
IN_USE = Backoff(0.2, attempts=7)  # about 12 s in all


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """One range of a table of the initial snapshot. ``rewound`` says what to leave out, None being nothing."""

    scan: Plan
    table: StreamedTable
    source: GivenSnapshot
    range: ScanRange
    lsn: Lsn
    rewound: Rewound | None


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
        self._session: Session | None = None
        self._in_recovery = False
        self._identity: SlotIdentity | None = None
        self._publication_mark = ""
        self._plan: StreamPlan | None = None
        self._held: Held | None = None
        self._rewound: dict[int, Rewound] = {}
        self._reader: SlotReader | None = None
        self._created: Lsn | None = None  # where the slot began, if this process has made it
        self._given: StreamOffset | None = None  # the newest offset that this process has given out
        self._target: Position | None = None
        self._moved_at = time.monotonic()
        self._watched_at = 0.0

    # --- Spark's questions --------------------------------------------------------------------------------------------

    def newest(self, start: StreamOffset | None, *, limited: bool) -> StreamOffset:
        """The end of the next batch after ``start``, None being the initial offset; ``start`` if there is nothing."""
        end = self._newest(start, limited=limited)
        if self._in_recovery and (start is None or end.position != start.position):
            # A standby may come to another timeline under a session that lasts. One that is asked for only now is at or
            # after that of everything up to the end.
            self._identity = None
        return replace(end, identity=self._identify())

    def _newest(self, start: StreamOffset | None, *, limited: bool) -> StreamOffset:
        if start is None:
            end = self._begin()
            return end if limited else replace(end, done=len(end.tables), position=self._end_of_wal(end.position))
        self._attach(start)
        if start.done < len(start.tables):
            done = start.done + 1 if limited else len(start.tables)
            return replace(start, done=done, position=start.position if limited else self._end_of_wal(start.position))
        self._end_snapshot()
        start = replace(start, tables=(), done=0)
        if not limited:
            return replace(start, position=self._end_of_wal(start.position))
        return self._next(start)

    def newest_without_start(self) -> StreamOffset:
        """As ``newest``, for a Spark that neither says where it starts nor limits a batch."""
        if self._given is not None:
            self._given = self.newest(self._given, limited=True)
            return self._given
        slot = self._look_at_slot()
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
        if start is not None and self._created not in (None, start.origin):
            # Only the batch's start tells that there was a stream before (see newest_without_start).
            self._end_snapshot()
            slot_creation.drop_slot(self._open(), self._options.slot)
            raise missing_error(self._options.slot, begun=True)
        self._given = end
        parts: list[SnapshotPart] = []
        chunks: list[Chunk] = []
        first, last = self._pending(start, end)
        if first < last:
            parts, chunks = self._snapshot_parts(end, first, last)
        position = Position.before(end.origin) if start is None else start.position
        if end.position > position:
            reader = self._read_from(position)
            reader.read_through(end.position, self._driver.runs)
            chunks += reader.batch(position, end.position)
        return Batch(tuple(parts), tuple(chunks))

    def commit(self, end: StreamOffset | None) -> None:
        """Spark has committed everything through ``end``: the slot may move there."""
        if end is not None and self._reader is not None and end.done == len(end.tables):
            self._reader.release(end.position)

    def stop_at_present(self) -> None:
        """Take nothing that is committed from now on."""
        self._target = Position.before(self._flushed())

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._held is not None:
            self._held.close()
            self._held = None
        if self._session is not None:
            self._session.close()
            self._session = None

    @staticmethod
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

    # --- offsets ------------------------------------------------------------------------------------------------------

    def _begin(self) -> StreamOffset:
        """The first end of a stream: where it begins, and its tables, one of them to be read."""
        slot = self._look_at_slot()
        if slot is not None:
            return self._begin_at(slot)
        options = self._options
        if options.start_from == "slot":
            raise missing_error(options.slot, begun=False)
        plan = self._planned(create=True)
        spec = SnapshotSpec("require", options.slot, options.slot_timeout_seconds, options.failover)
        held = snapshots.make_snapshot(
            options.connection, spec, lambda snapshot_id: session_name(options, "snapshot"), holders=1, stream=True
        )
        assert held.lsn is not None
        self._created = origin = Lsn(held.lsn + 1)
        tables: tuple[str, ...] = ()
        if options.start_from == "snapshot":
            try:
                self._check_files(held, plan)
            except BaseException:
                held.close()
                slot_creation.drop_slot(self._open(), options.slot)
                raise
            self._held = held
            tables = tuple(table.name for table in plan.tables)
        else:
            held.close()
        return self._first_end(origin, tables)

    def _begin_at(self, slot: Slot) -> StreamOffset:
        assert slot.confirmed_flush is not None
        # Nothing is created: what was committed before it would be missing, from PostgreSQL 18 on without an error.
        plan = self._planned()
        origin = slot.confirmed_flush
        tables: tuple[str, ...] = ()
        if self._options.start_from == "snapshot":
            tables = tuple(table.name for table in plan.tables)
        elif self._options.start_from == "now":
            origin = max(self._flushed(), origin)
        return self._first_end(origin, tables)

    def _first_end(self, origin: Lsn, tables: tuple[str, ...]) -> StreamOffset:
        done = min(1, len(tables))
        return StreamOffset(self._identify(), origin, tables, done, Position.before(origin), self._publication_mark)

    def _next(self, start: StreamOffset) -> StreamOffset:
        if time.monotonic() >= self._watched_at + WATCH_SECONDS:
            self._watch()
        reader = self._read_from(start.position)
        if self._target is not None and start.position >= self._target:
            return start
        end = self._cut(reader, start.position)
        while end == start.position:
            # To give the start again would say that there is no more, so on the way to a target it waits.
            if self._target is None:
                return start
            if not self._driver.runs():
                raise TransientError("the driver's JVM is gone")
            end = self._cut(reader, start.position)
        self._moved_at = time.monotonic()
        return replace(start, position=end, publication=self._publication_mark)

    def _cut(self, reader: SlotReader, start: Position) -> Position:
        # A batch without rows only moves the slot, which need not happen all the time.
        only_rows = self._target is None and time.monotonic() < self._moved_at + IDLE_SECONDS
        try:
            return reader.cut(start, self._target, PATIENCE_SECONDS, only_rows=only_rows)
        except SchemaChangedError:
            # A column that the publication leaves out looks like one that was dropped.
            self._watch()
            raise

    def _end_of_wal(self, at_least: Position) -> Position:
        return max(at_least, self._target or Position.before(self._flushed()))

    # --- PostgreSQL ---------------------------------------------------------------------------------------------------

    def _open(self) -> Session:
        if self._session is None or self._session.closed:
            self._session = connect(self._options.connection, session_name(self._options, "source"), retry_seconds=30)
            refuse_transaction_pooler(self._options.connection, self._session, session_name(self._options, "source"))
            server = catalog.read_server(self._session)
            self._in_recovery = server.in_recovery
            slot_creation.require_consistent_point(server, stream=True, failover=self._options.failover)
        return self._session

    def _asking(self, ask: Callable[[Session], T]) -> T:
        """Run ``ask`` in the source's own session, and again in a new one where that is lost."""

        def attempt() -> T:
            try:
                return ask(self._open())
            except TransientError:
                self._forget_session()
                raise

        return Backoff(0.5, attempts=3).retrying(attempt)

    def _flushed(self) -> Lsn:
        """How far the WAL is safe on disk: what may be decoded."""
        return self._asking(read_end_of_wal)

    def _forget_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _identify(self) -> SlotIdentity:
        if self._identity is None:
            system, timeline, _, database = self._replication_command("IDENTIFY_SYSTEM")
            self._identity = SlotIdentity(str(system), int(timeline), str(database), self._options.slot)
        return self._identity

    def _replication_command(self, command: str) -> tuple[Any, ...]:
        name = session_name(self._options, "source")
        with (
            contextlib.closing(connect(self._options.connection, name, replication=True)) as session,
            translated("identifying the server"),
            session.cursor() as cursor,
        ):
            cursor.execute(command)
            row: tuple[Any, ...] = cursor.fetchone()
            return row

    def _require_same_history(self, theirs: SlotIdentity, position: Position) -> None:
        """Raise SlotLostError unless what a stream has read through ``position`` there is the server's past, too.

        A server that was promoted or restored has left its timeline at some LSN; what lies before that is common.
        """
        ours = self._identify()
        if theirs == ours:
            return
        if replace(theirs, timeline=ours.timeline) != ours or theirs.timeline > ours.timeline:
            raise _other(theirs, ours)
        _, history = self._replication_command(f"TIMELINE_HISTORY {ours.timeline}")
        # Bytes from older servers.
        text = history if isinstance(history, str) else bytes(history).decode()
        end = end_of_timeline(text, theirs.timeline)
        if end is None:
            raise _other(theirs, ours)
        if position.lsn >= end:
            raise SlotLostError(
                f"the server was promoted or restored and left timeline {theirs.timeline} at {end}; the stream has "
                f"read that one up to {position.lsn}, and may have changes that are not in this server's history",
                remedy="start over with a new checkpoint location and a new slot. So that standbys never lag behind a "
                "stream: synchronized_standby_slots (PostgreSQL 17)",
            )
        log.warning("the server went from timeline %d to %d; the stream goes on", theirs.timeline, ours.timeline)

    def _look_at_slot(self) -> Slot | None:
        found = self._asking(lambda session: read_slot(session, self._options.slot))
        if found is not None:
            check_slot(found, self._identify().database, failover=self._options.failover)
        return found

    def _planned(self, *, create: bool = False) -> StreamPlan:
        if self._plan is not None:
            return self._plan
        plan = self._asking(lambda session: self._plan_in(session, create))
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
            published = publication.require_publication(session, options.publication)
        lsn = self._flushed()
        plan = plan_stream(session, options, published, lsn)
        self._publication_mark = publication.mark_of(published, plan.names)
        return plan

    def _attach(self, *offsets: StreamOffset | None) -> None:
        """Make sure that offsets and slot belong together."""
        for offset in offsets:
            if offset is not None:
                self._require_same_history(offset.identity, offset.position)
        names = self._planned().names
        marks = [offset.publication for offset in offsets if offset is not None and offset.publication]
        for mark in marks:
            if changed := publication.find_change(mark, self._publication_mark, names):
                raise self._unpublished(changed)

    def _watch(self) -> None:
        """Find out whether the publication still sends what is read: newer servers pass over one that is gone."""
        self._watched_at = time.monotonic()
        try:
            names = self._planned().names
            lost = publication.find_lost(self._open(), self._options.publication, self._publication_mark, names)
        except TransientError:
            self._forget_session()
            return
        if lost:
            raise self._unpublished(lost)

    def _unpublished(self, why: str) -> SchemaChangedError:
        return SchemaChangedError(
            f"publication {quoted(self._options.publication)} {why}, so changes may be missing",
            remedy="start over with a new checkpoint location and a new slot",
        )

    def _read_from(self, position: Position) -> SlotReader:
        if self._reader is None:
            plan = self._planned()
            self._check_slot_has(position)
            buffer = ChangeBuffer(
                TransactionAssembler(position, lambda: StreamedTransaction(Spill)),
                ChangeDecoder(plan.layout, plan.schema, HEADER_BYTES),
                self._describe,
                ChunkStore(position),
                self._limits,
            )
            sessions = itertools.count()

            def connect_stream(received: Position) -> ReplicationStream:
                # After a lost session large transactions are sent whole: should the server have lost it over one that
                # is in progress, it gets past that one so.
                return self._connect_stream(received, streaming=next(sessions) == 0)

            self._reader = SlotReader(connect_stream, buffer)
        return self._reader

    def _slot_with(self, session: Session, start: Lsn) -> Slot:
        """The slot, which has all from ``start`` on."""
        slot = read_slot(session, self._options.slot)
        if slot is None:
            raise missing_error(self._options.slot, begun=True)
        check_slot(slot, self._identify().database, failover=self._options.failover)
        check_confirmed(slot, start)
        return slot

    def _check_slot_has(self, position: Position) -> None:
        def check() -> None:
            session = self._open()
            slot = self._slot_with(session, position.next_lsn)
            if slot.active_pid is not None:
                raise in_use_error(session, slot)

        IN_USE.retrying(check)

    def _connect_stream(self, received: Position, *, streaming: bool) -> ReplicationStream:
        options, start = self._options, received.next_lsn
        name = session_name(options, "changes")
        # Each time: while a session is lost, the slot may be lost too, or be made anew.
        with contextlib.closing(connect(options.connection, session_name(options, "source"))) as session:
            self._slot_with(session, start)
        stream = ReplicationStream(
            options.connection, name, options.slot, options.publication, start, streaming=streaming
        )
        # The same address may lead to another server by now, to one that was promoted or restored.
        before = self._identify()
        self._identity = replace(before, system=stream.system, timeline=stream.timeline)
        try:
            self._require_same_history(before, received)
        except BaseException:
            stream.close()
            raise
        return stream

    # --- the initial snapshot -----------------------------------------------------------------------------------------

    def _check_files(self, held: Held, plan: StreamPlan) -> None:
        """Make sure that no table was rewritten between its plan and the snapshot, under locks that do not stay.

        A holder that kept them would make DDL wait until the last table is read, and the tasks behind the DDL, and
        everybody else. A task finds out under its own lock whether its table still has what the snapshot should see.
        """
        held.lock([table.oid for table in plan.tables], timeout="60s")
        for session, _ in held.holders:
            locks.check_files(session, "starting the snapshot")
        held.unlock()

    def _snapshot_parts(self, end: StreamOffset, first: int, last: int) -> tuple[list[SnapshotPart], list[Chunk]]:
        plan = self._planned()
        if tuple(table.name for table in plan.tables) != end.tables:
            raise SchemaChangedError(
                "the stream's tables are not those that its initial snapshot began with",
                remedy="start over with a new checkpoint location and a new slot",
            )
        if self._held is None:
            self._rewind(plan, end.origin, first)
        assert self._held is not None
        parts: list[SnapshotPart] = []
        olds: list[Chunk] = []
        session = self._held.holders[0][0]
        lsn = Lsn(end.origin - 1)
        source = GivenSnapshot(self._held.holders[0][1])
        for i in range(first, last):
            table, scanned = plan.tables[i], plan.scans[i]
            rewound = self._rewound.get(table.oid)
            with translated(f"planning {table.name}"):
                ranges = scan.ranges_in(session, scanned)
            if rewound is not None and rewound.whole:
                ranges = [scan.whole(scanned)]
            if rewound is not None:
                olds += rewound.old_rows
                # They come once; every part would carry them.
                rewound = replace(rewound, old_rows=())
            parts += [SnapshotPart(scanned, table, source, scan_range, lsn, rewound) for scan_range in ranges]
        return parts, olds

    def _rewind(self, plan: StreamPlan, origin: Lsn, first: int) -> None:
        options = self._options
        self._check_slot_has(Position.before(origin))
        spec = SnapshotSpec("require", None, options.slot_timeout_seconds)
        held = snapshots.make_snapshot(
            options.connection, spec, lambda snapshot_id: session_name(options, "snapshot"), holders=1, stream=True
        )
        try:
            self._check_files(held, plan)
            assert held.lsn is not None
            self._rewound = rewind(
                functools.partial(self._connect_stream, streaming=False),
                plan.layout,
                plan.schema,
                plan.tables[first:],
                self._describe,
                origin,
                held.lsn,
                self._driver.runs,
            )
        except BaseException:
            held.close()
            raise
        self._held = held

    def _end_snapshot(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None
            self._rewound = {}

    def _describe(self, relation: RelationMessage, lsn: Lsn) -> Described | None:
        return describe(self._planned(), relation, lsn)


def _other(of_checkpoint: SlotIdentity, found: SlotIdentity) -> SlotLostError:
    differences = [
        f"{what} {theirs!r} instead of {ours!r}"
        for what, theirs, ours in (
            ("system identifier", found.system, of_checkpoint.system),
            ("timeline", found.timeline, of_checkpoint.timeline),
            ("database", found.database, of_checkpoint.database),
            ("slot", found.slot, of_checkpoint.slot),
        )
        if theirs != ours
    ]
    return SlotLostError(
        f"the checkpoint belongs to another place in another history: the connection leads to {', '.join(differences)}",
        remedy="connect to the server that the checkpoint was made with, or start over with a new checkpoint location "
        "and a new slot",
    )
