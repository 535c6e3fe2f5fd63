"""Read one range of a scan: COPY in, Arrow batches out, each row exactly once.

A range is read in steps, each a COPY of its own over a few thousand blocks in physical order, in chunks that are
bounded by bytes, whatever a row weighs. With the accelerator they are pulled, and the socket's buffers let the server
go on. By itself psycopg2 pushes rows: there a thread receives and decodes them, and hands chunks over in a queue of
one. Either way one thread does both; two that take turns with the interpreter's lock took 7 % more CPU, and no less
time.

A task that has read its range leaves its session to the worker's next one (see ``handover``). A lost session is
replaced and only its step is repeated, on the same snapshot: the rows that were decoded before are
skipped by their number. That is exact, because under one snapshot a heap is scanned in the same order each time: ranges
are TID range scans by one backend, the predicate is wrapped so that it cannot choose another plan, and a row's place
cannot change while the snapshot needs it. What has no such order (views, foreign tables, ``query``) is not repeated
once rows were handed on; Spark repeats the task.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from types import SimpleNamespace

import psycopg2
import pyarrow as pa
from psycopg2 import sql
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import (
    PgCdcError,
    QueryError,
    SchemaChangedError,
    TransientError,
)
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.postgres import locks, trees
from pg_cdc_source.postgres.columns import describe_columns
from pg_cdc_source.postgres.connection import connect
from pg_cdc_source.postgres.copy_out import copy_out
from pg_cdc_source.postgres.server_errors import translate, translated
from pg_cdc_source.protocol.binary_copy import CopyDecoder, CopyMessages, record_batch, select_order
from pg_cdc_source.protocol.refused import RefusedValueError
from pg_cdc_source.snapshot import ranges
from pg_cdc_source.snapshot.handover import HANDOVER, Purpose, Reading
from pg_cdc_source.snapshot.ranges import BlockRange
from pg_cdc_source.snapshot.scan import Plan, ScanRange, expect_same, select_from
from pg_cdc_source.snapshot.source import Source
from pg_cdc_source.values import native
from pg_cdc_source.values.wire import Messages

# 16 MB of heap: what a lost session repeats. A new COPY costs about a millisecond.
BLOCKS_PER_STEP = 2048
# Few enough to stay in cache while they are walked by columns, enough to share what Python takes for each chunk.
# Measured best: for NumPy alone between 1,024 and 16,384 rows; with the accelerator, which walks once, between 8,192
# and 32,768.
ROWS_PER_CHUNK = 16_384 if native.LIBRARY is not None else 8192
BYTES_PER_CHUNK = 2 << 20 if native.LIBRARY is not None else 1 << 20
ROWS_PER_BATCH = 65_536
RECONNECT_SECONDS = 30.0
ATTEMPTS = 5

Decoded = tuple[list[pa.Array], int]  # of a chunk: its columns, its rows


def read_range(plan: Plan, source: Source, scan_range: ScanRange, execution: str) -> Iterator[pa.RecordBatch]:
    """Read one range as record batches of ``plan.arrow_schema()``, each of about ``batchBytes``.

    ``execution`` names the SQL execution (or the stage) that all its tasks have in common.
    """
    with contextlib.closing(_Reader(plan, source, scan_range, execution)) as reader:
        yield from reader.batches()


class _Reader:
    """One range's reading: the session, which may be replaced, and how far decoding has come."""

    def __init__(self, plan: Plan, source: Source, scan_range: ScanRange, execution: str) -> None:
        self._plan = plan
        self._source = source
        self._range = scan_range
        self._execution = execution
        self._codecs = plan.codecs
        self._decoder = CopyDecoder(self._codecs, plan.spec.unrepresentable)
        self._schema = plan.arrow_schema()
        self._columns = pa.schema(list(self._schema)[: len(self._codecs)])
        self._purpose = Purpose(plan, source, scan_range.heaps, execution)
        self._session: Session | None = None
        self._lsn: Lsn | None = None
        self._doing = f"reading {scan_range.heap or plan.what}" + (f", {scan_range.blocks}" if scan_range.heap else "")

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows; after the last one the session is left to the next task."""
        pending: list[list[pa.Array]] = []
        pending_bytes = pending_rows = 0
        for arrays, rows in self._arrays():
            pending.append(arrays)
            pending_bytes += sum(array.nbytes for array in arrays)
            pending_rows += rows
            if pending_bytes >= self._plan.spec.batch_bytes or pending_rows >= ROWS_PER_BATCH:
                yield self._batch(pending, pending_rows)
                pending, pending_bytes, pending_rows = [], 0, 0
        if pending_rows:
            yield self._batch(pending, pending_rows)
        if self._session is not None:
            HANDOVER.leave(self._purpose, Reading(self._session, self._lsn, self._range.heap))
            self._session = None

    def _batch(self, chunks: list[list[pa.Array]], rows: int) -> pa.RecordBatch:
        if self._plan.spec.lsn_column:
            lsn = pa.scalar(None if self._lsn is None else int(self._lsn), pa.int64())
            joined = record_batch(chunks, self._columns)
            return pa.RecordBatch.from_arrays([*joined.columns, pa.repeat(lsn, rows)], schema=self._schema)
        return record_batch(chunks, self._columns)

    def _arrays(self) -> Iterator[Decoded]:
        """Decoded chunks of all steps in order, with their numbers of rows; lost sessions are replaced."""
        for blocks in self._steps():
            done = 0
            attempt = 1
            while True:
                try:
                    for arrays, rows in self._copy(blocks, done):
                        done += rows
                        attempt = 1
                        yield arrays, rows
                    break
                except TransientError:
                    self.close()
                    if attempt == ATTEMPTS or (done and self._range.heap is None):
                        raise
                    attempt += 1

    def _steps(self) -> Iterator[BlockRange]:
        heap, blocks = self._range.heap, self._range.blocks
        if heap is None:
            return iter([ranges.WHOLE])
        if blocks.end_block_exclusive is not None:
            return ranges.steps(blocks, 0, BLOCKS_PER_STEP)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                blocks_now = trees.read_blocks(self._open(), self._plan.server.block_size, heap)
                break
            except TransientError:
                self.close()
                if attempt == ATTEMPTS:
                    raise
        return ranges.steps(blocks, blocks_now, BLOCKS_PER_STEP)

    def _open(self) -> Session:
        """The session in the snapshot's transaction, with the relation locked and found to be what was planned."""
        if self._session is not None:
            return self._session
        if (reading := HANDOVER.take(self._purpose)) is not None:
            self._session, self._lsn = reading.session, reading.lsn
            if reading.heap != self._range.heap:
                # One table is locked at a time: DDL that locks several must not meet a session that does as well.
                locks.release_locks(self._session)
                self._check(self._session)
            return self._session
        plan = self._plan
        name = self._source.session_name(self._execution, plan.relation.oid if plan.relation else 0)
        self._session = connect(plan.spec.connection, name, retry_seconds=RECONNECT_SECONDS)
        self._lsn = self._source.import_into(self._session, self._execution, self._doing)
        locks.begin_locking(self._session)
        self._check(self._session)
        return self._session

    def _check(self, session: Session) -> None:
        columns, relation = self._plan.columns, self._plan.relation
        # PostgreSQL expands a whole relation itself. Ranges were cut by planning, which may have been an hour ago.
        if relation and self._range.heap and trees.identify_heaps(session, relation) != self._range.heaps:
            raise SchemaChangedError(
                f"{self._doing}: {relation} has other partitions or children than when the DataFrame was planned",
                remedy="load the DataFrame again; where open_snapshot() or a stream's query holds the snapshot, open "
                "or start that again",
            )
        names = [column.name for column in columns]
        self._expect_planned_names(session)
        try:
            now = describe_columns(session, self._select_plain(names), self._doing, known=columns)
        except QueryError as error:
            if relation is None:
                raise
            raise SchemaChangedError(
                f"{error.what}; it did when the DataFrame was loaded", remedy="load the DataFrame again"
            ) from None
        # Once more, since only now the lock keeps the name with its heap.
        self._expect_planned_names(session)
        locks.check_files(session, self._doing)
        if self._range.heap is None:
            self._check_expansion(session)
        # A modifier that says nothing about decoding, as varchar's, may have changed.
        found_codecs = replace(self._plan, columns=tuple(now)).codecs
        for codec, attnum, found_codec in zip(self._codecs, self._range.attnums, found_codecs, strict=False):
            planned, found = codec.column, found_codec.column
            if (planned.name, attnum, planned.type_oid, codec.decoder, codec.select_sql) != (
                found.name,
                found.attnum,
                found.type_oid,
                found_codec.decoder,
                found_codec.select_sql,
            ):
                raise SchemaChangedError(
                    f"{self._doing}: column {planned.name} ({planned.type_name}) is not the column it was when the "
                    f"DataFrame was loaded; it is {found.name} ({found.type_name}) now",
                    remedy="load the DataFrame again",
                )
        if len(columns) != len(now):
            raise SchemaChangedError(f"{self._doing}: the number of columns has changed", remedy="load it again")

    def _check_expansion(self, session: Session) -> None:
        options = self._plan.spec.connection
        with contextlib.closing(connect(options, "pgsnapshot:checking", retry_seconds=RECONNECT_SECONDS)) as present:
            locks.check_expansion(session, present, self._doing)

    def _expect_planned_names(self, session: Session) -> None:
        heap, relation = self._range.heap, self._plan.relation
        if heap is not None and relation is not None:
            for planned in dict.fromkeys((relation, heap)):
                expect_same(session, planned, self._doing)

    def _select_plain(self, names: list[str]) -> sql.Composable:
        return select_from(self._plan, self._range, [sql.Identifier(name) for name in names], None)

    def _copy_statement(self, blocks: BlockRange) -> sql.Composable:
        """COPY with the columns in the order that the decoder wants, each as its codec says."""
        items: list[sql.Composable] = []
        for i in select_order(self._codecs):
            codec = self._codecs[i]
            items.append(sql.SQL(codec.select_sql).format(sql.Identifier(codec.column.name)))
        select = select_from(self._plan, self._range, items, blocks if self._range.heap else None)
        return sql.SQL("COPY ({}) TO STDOUT (FORMAT binary)").format(select)

    def _copy(self, blocks: BlockRange, skip: int) -> Iterator[Decoded]:
        """Decoded chunks of one COPY and their numbers of rows, without its first ``skip`` rows."""
        position = 0
        messages = CopyMessages()
        fresh = Messages.joined([], 0)
        session = self._open()
        receive = _pull if native.LIBRARY is not None else _take_pushed

        def decode(chunk: Messages) -> Decoded:
            nonlocal position, fresh
            rows = messages.rows(chunk)
            fresh = rows[max(0, skip - position) :]
            position += len(rows)
            return self._decoder.decode(fresh), len(fresh)

        chunks = receive(session, self._copy_statement(blocks), self._doing, self._decoder.padding, decode)
        try:
            with contextlib.closing(chunks):
                yield from (chunk for chunk in chunks if chunk[1])
        except RefusedValueError as refused:
            # Only here has the COPY ended.
            raise self._unrepresentable(refused, blocks, position - len(fresh) + refused.row) from None
        messages.finish()
        if self._range.heap is None:
            # A lock that COPY takes may come too late: ATTACH does not wait for that of the root, and what a function
            # reads is locked only when it runs.
            locks.check_files(session, self._doing)
            self._check_expansion(session)

    def _unrepresentable(self, refused: RefusedValueError, blocks: BlockRange, position: int) -> PgCdcError:
        heap = self._range.heap
        where = f"row {position + 1}"
        if heap is not None:
            # The same scan again, in a session that is not in the middle of a COPY.
            self.close()
            with translated(f"{self._doing}: looking for a row"), self._open().cursor() as cursor:
                cursor.execute(
                    sql.SQL("SELECT ctid::text FROM ({}) AS scan OFFSET {} LIMIT 1").format(
                        select_from(self._plan, self._range, [sql.SQL("ctid")], blocks), sql.Literal(position)
                    )
                )
                where = f"ctid {cursor.fetchone()[0]}"
        return refused.at(str(heap or self._plan.what), where)


def _server_error(error: BaseException) -> BaseException:
    """The error of the server behind what psycopg2 raises for a COPY that is cut off.

    It goes on working with the error set, and Python then reports a SystemError with the real one as its cause.
    """
    return error.__cause__ if isinstance(error, SystemError) and error.__cause__ is not None else error


class _StoppedError(Exception):
    """The reader wants no more rows."""


def _pull(
    session: Session, copy: sql.Composable, doing: str, padding: int, decode: Callable[[Messages], Decoded]
) -> Generator[Decoded, None, None]:
    """Run a COPY and yield its chunks, decoded. Ending early closes the session, which ends the COPY on the server."""
    finished = False
    try:
        yield from map(decode, copy_out(session, copy, doing, ROWS_PER_CHUNK, BYTES_PER_CHUNK, padding))
        finished = True
    finally:
        if not finished:
            session.close()


def _take_pushed(
    session: Session, copy: sql.Composable, doing: str, padding: int, decode: Callable[[Messages], Decoded]
) -> Generator[Decoded, None, None]:
    """Do the same by psycopg2, in a thread that is one chunk ahead, and stops while that waits to be taken."""
    chunks: queue.Queue[Decoded | BaseException | None] = queue.Queue(maxsize=1)
    stopped = threading.Event()

    def put(item: Decoded | BaseException | None) -> None:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                chunks.put(item, timeout=0.5)
                return
        raise _StoppedError

    def receive() -> None:
        with contextlib.suppress(_StoppedError):
            try:
                _receive_by_rows(session, copy, padding, lambda chunk: put(decode(chunk)))
                put(None)
            except _StoppedError:
                raise
            except BaseException as error:
                put(_server_error(error))

    thread = threading.Thread(target=receive, name="pgsnapshot-copy", daemon=True)
    thread.start()
    finished = False
    try:
        while (item := chunks.get()) is not None:
            if isinstance(item, psycopg2.Error):
                raise translate(item, doing)
            if isinstance(item, BaseException):
                raise item
            yield item
        finished = True
    finally:
        stopped.set()
        if not finished:
            # The thread may be waiting for the server: hanging up wakes it, and the server as well.
            with contextlib.suppress(OSError, psycopg2.Error), socket.socket(fileno=os.dup(session.fileno())) as wire:
                wire.shutdown(socket.SHUT_RDWR)
        thread.join()
        if not finished:
            session.close()


def _receive_by_rows(session: Session, copy: sql.Composable, padding: int, put: Callable[[Messages], None]) -> None:
    """Receive a COPY by psycopg2, which calls for each row."""
    chunk: list[bytes] = []

    def rows() -> Generator[None, bytes, None]:
        # A generator's send is a C function that resumes a frame: half the price of a Python method per row.
        nonlocal chunk
        while True:
            size = 0
            while len(chunk) < ROWS_PER_CHUNK and size < BYTES_PER_CHUNK:
                row = yield
                chunk.append(row)
                size += len(row)
            full, chunk = chunk, []
            put(Messages.joined(full, padding))

    collector = rows()
    next(collector)
    with session.cursor() as cursor:
        cursor.copy_expert(copy, SimpleNamespace(write=collector.send), size=0)
    put(Messages.joined(chunk, padding))
