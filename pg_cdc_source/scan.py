"""What one scan reads, how it is cut, and how one range of it becomes Arrow batches.

A range is read in pieces, each a COPY of its own over a few thousand blocks in physical order. A thread receives rows,
because psycopg2 pushes them, and hands chunks of them to the decoder over a queue of one, so that memory is bounded by
bytes, whatever a row weighs.

A lost session is replaced and only its piece is repeated, on the same snapshot: the rows that were decoded before are
skipped by their number. That is exact, because under one snapshot a heap is scanned in the same order each time: ranges
are TID range scans by one backend, the predicate is wrapped so that it cannot choose another plan, and a row's place
cannot change while the snapshot needs it. What has no such order (views, foreign tables, ``query``) is not repeated once
rows were handed on; Spark repeats the task.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace

import psycopg2
import pyarrow as pa
from psycopg2 import sql
from psycopg2.extensions import connection as Session

from pg_cdc_source import catalog, ctid, keeper, snapshot, types
from pg_cdc_source.catalog import Relation, Server
from pg_cdc_source.connection import connect, refuse_breaking_pooler, translate, translated
from pg_cdc_source.copy import CopyDecoder, CopyMessages, RefusedValueError, record_batch, select_order
from pg_cdc_source.ctid import BlockRange
from pg_cdc_source.errors import (
    OptionError,
    PgCdcError,
    SchemaChangedError,
    SnapshotLostError,
    TransientError,
    UnrepresentableError,
)
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.options import SnapshotOptions
from pg_cdc_source.types import Codec, Column

# 16 MB of heap: what a lost session repeats. A new COPY costs about a millisecond.
BLOCKS_PER_PIECE = 2048
# 2,048 rows stay in cache while they are walked by columns; measured best between 512 and 65,536.
ROWS_PER_CHUNK = 2048
BYTES_PER_CHUNK = 1 << 20
ROWS_PER_BATCH = 65_536
RECONNECT_SECONDS = 30.0
ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """What a scan reads. Found out once per load and shipped to every task."""

    options: SnapshotOptions
    relation: Relation | None  # None for a query
    columns: tuple[Column, ...]
    server: Server

    @property
    def codecs(self) -> list[Codec]:
        as_string = self.options.as_string
        return [
            types.plan(column, as_string=column.name in as_string, numeric_as=self.options.numeric_as)
            for column in self.columns
        ]

    @property
    def what(self) -> str:
        return str(self.relation) if self.relation else "the query"

    def arrow_schema(self) -> pa.Schema:
        fields = [pa.field(codec.column.name, codec.arrow_type) for codec in self.codecs]
        if self.options.lsn_column:
            fields.append(pa.field(self.options.lsn_column, pa.int64()))
        return pa.schema(fields)


@dataclass(frozen=True, slots=True)
class Piece:
    """One partition: a range of one heap, or with ``heap`` None all of a relation or query."""

    heap: Relation | None
    attnums: tuple[int, ...]
    blocks: BlockRange


@dataclass(frozen=True, slots=True)
class Source:
    """What tasks need to find their snapshot, and to see in it that planning was right.

    ``keeper`` is its name, None where the user gave a snapshot; ``heaps`` identifies the set of heaps that was planned.
    """

    keeper: str | None
    planned_at: float
    heaps: int | None


def make_plan(options: SnapshotOptions) -> Plan:
    """Look up what is to be read; raises whatever would keep a later read from being complete."""
    with contextlib.closing(connect(options.connection, "pgsnapshot:planning")) as session:
        refuse_breaking_pooler(options.connection, session, "pgsnapshot:planning")
        server = catalog.read_server(session)
        if options.consistent_point == "require" and not options.snapshot:
            snapshot.require_consistent_point(server)
        relation = catalog.find_relation(session, options.dbtable) if options.dbtable else None
        names = None
        if relation is not None:
            names = _chosen_columns(options, relation, catalog.column_names(session, relation))
        columns = catalog.describe(session, _select(options, relation, names), f"reading {relation or 'the query'}")
        if relation is not None:
            not_null = catalog.not_null_attnums(session, relation)
            columns = [replace(column, not_null=column.attnum in not_null) for column in columns]
        _check_names(options, [column.name for column in columns])
    return Plan(options, relation, tuple(columns), server)


def _chosen_columns(options: SnapshotOptions, relation: Relation, existing: list[str]) -> list[str]:
    for option, names in (("columns", options.columns or ()), ("asString", options.as_string)):
        for name in names:
            if name not in existing:
                raise OptionError(
                    f"{relation} has no column {catalog.quoted(name)}, which the option {option} names",
                    remedy=f"its columns are {', '.join(map(catalog.quoted, existing))}",
                )
    return existing if options.columns is None else list(options.columns)


def _check_names(options: SnapshotOptions, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise OptionError(
            f"the query gives several columns of the same name: {', '.join(twice)}", remedy="name them apart with AS"
        )
    for name in options.as_string:
        if name not in names:
            raise OptionError(f"the option asString names a column that is not read: {name}")
    if options.lsn_column and options.lsn_column.lower() in {name.lower() for name in names}:
        raise OptionError(
            f"the option lsnColumn names a column that exists: {options.lsn_column}", remedy="choose another name"
        )


def _select(options: SnapshotOptions, relation: Relation | None, names: list[str] | None) -> sql.Composable:
    """The rows read as a SELECT of plain columns, for looking at its columns."""
    if relation is None or names is None:
        return sql.SQL("SELECT * FROM ({}\n) AS query").format(sql.SQL(options.query or ""))
    return sql.SQL("SELECT {} FROM {}{}").format(
        sql.SQL(", ").join(map(sql.Identifier, names)), relation.identifier, _where(options, None)
    )


def _where(options: SnapshotOptions, blocks: BlockRange | None) -> sql.Composable:
    conditions: list[sql.Composable] = []
    if blocks is not None and blocks.start_block:
        conditions.append(sql.SQL("ctid >= {}::tid").format(sql.Literal(f"({blocks.start_block},0)")))
    if blocks is not None and blocks.end_block_exclusive is not None:
        conditions.append(sql.SQL("ctid < {}::tid").format(sql.Literal(f"({blocks.end_block_exclusive},0)")))
    if options.where is not None:
        # IS TRUE keeps the same rows and keeps the planner from turning the predicate into an index scan or a join,
        # either of which would read in another order.
        conditions.append(sql.SQL("(({}\n) IS TRUE)").format(sql.SQL(options.where)))
    return sql.SQL(" WHERE {}").format(sql.SQL(" AND ").join(conditions)) if conditions else sql.SQL("")


def plan_pieces(plan: Plan) -> tuple[Source, list[Piece]]:
    """Cut the scan into partitions and make sure that its tasks will find a snapshot."""
    options = plan.options
    with contextlib.closing(connect(options.connection, "pgsnapshot:planning")) as session:
        with translated(f"planning {plan.what}"), session.cursor() as cursor:
            # One transaction, so that pieces and identity are those of the same heaps.
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            pieces = _pieces(session, plan)
            heaps = None if plan.relation is None else catalog.identify_heaps(session, plan.relation)
            cursor.execute("SELECT extract(epoch FROM clock_timestamp())::float8")
            planned_at = float(cursor.fetchone()[0])
            cursor.execute("COMMIT")
        name = None
        if options.snapshot is None:
            name = keeper.ensure_keeper(options.connection, session, request_for(plan, "", planned_at))
    return Source(name, planned_at, heaps), pieces


def _pieces(session: Session, plan: Plan) -> list[Piece]:
    whole = [Piece(None, tuple(column.attnum for column in plan.columns), ctid.WHOLE)]
    if plan.relation is None:
        return whole
    heaps = catalog.read_heaps(session, plan.server, plan.relation, [column.name for column in plan.columns])
    if heaps is None:
        return whole
    options = plan.options
    step = ctid.blocks_per_range(
        [heap.blocks for heap in heaps], plan.server.block_size, options.partition_bytes, options.num_partitions
    )
    return [
        Piece(heap.relation, heap.attnums, blocks) for heap in heaps for blocks in ctid.cut(heap.blocks, step)
    ] or whole


# --- reading one piece ----------------------------------------------------------------------------------------------


def read_piece(plan: Plan, source: Source, piece: Piece, execution: str) -> Iterator[pa.RecordBatch]:
    """Read one partition as record batches of ``plan.arrow_schema()``, each of about ``batchBytes``.

    ``execution`` names the SQL execution (or the stage) that all its tasks have in common.
    """
    with contextlib.closing(_Reader(plan, source, piece, execution)) as reader:
        yield from reader.batches()


class _Reader:
    """One partition's reading: the session, which may be replaced, and how far decoding has come."""

    def __init__(self, plan: Plan, source: Source, piece: Piece, execution: str) -> None:
        self._plan = plan
        self._source = source
        self._piece = piece
        self._execution = execution
        self._codecs = plan.codecs
        self._decoder = CopyDecoder(self._codecs, plan.options.unrepresentable)
        self._schema = plan.arrow_schema()
        self._columns = pa.schema(list(self._schema)[: len(self._codecs)])
        self._session: Session | None = None
        self._lsn: Lsn | None = None
        self._doing = f"reading {piece.heap or plan.what}" + (f", {piece.blocks}" if piece.heap else "")

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def batches(self) -> Iterator[pa.RecordBatch]:
        pending: list[list[pa.Array]] = []
        pending_bytes = pending_rows = 0
        for arrays, rows in self._arrays():
            pending.append(arrays)
            pending_bytes += sum(array.nbytes for array in arrays)
            pending_rows += rows
            if pending_bytes >= self._plan.options.batch_bytes or pending_rows >= ROWS_PER_BATCH:
                yield self._batch(pending, pending_rows)
                pending, pending_bytes, pending_rows = [], 0, 0
        if pending_rows:
            yield self._batch(pending, pending_rows)

    def _batch(self, chunks: list[list[pa.Array]], rows: int) -> pa.RecordBatch:
        if self._plan.options.lsn_column:
            lsn = pa.scalar(None if self._lsn is None else int(self._lsn), pa.int64())
            joined = record_batch(chunks, self._columns)
            return pa.RecordBatch.from_arrays([*joined.columns, pa.repeat(lsn, rows)], schema=self._schema)
        return record_batch(chunks, self._columns)

    def _arrays(self) -> Iterator[tuple[list[pa.Array], int]]:
        """Decoded chunks of all pieces in order, with their numbers of rows; lost sessions are replaced."""
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
                    if attempt == ATTEMPTS or (done and self._piece.heap is None):
                        raise
                    attempt += 1

    def _steps(self) -> Iterator[BlockRange]:
        heap = self._piece.heap
        if heap is None:
            return iter([ctid.WHOLE])
        for attempt in range(1, ATTEMPTS + 1):
            try:
                blocks_now = catalog.read_blocks(self._open(), self._plan.server.block_size, heap)
                break
            except TransientError:
                self.close()
                if attempt == ATTEMPTS:
                    raise
        return ctid.steps(self._piece.blocks, blocks_now, BLOCKS_PER_PIECE)

    def _open(self) -> Session:
        """The session in the snapshot's transaction, with the relation locked and found to be what was planned."""
        if self._session is not None:
            return self._session
        plan, name = self._plan, "pgsnapshot:reading"
        if self._source.keeper is not None:
            oid = plan.relation.oid if plan.relation else 0
            name = keeper.reader_name(self._source.keeper, self._execution, oid)
        self._session = connect(plan.options.connection, name, retry_seconds=RECONNECT_SECONDS)
        self._import(self._session)
        self._check(self._session)
        return self._session

    def _import(self, session: Session) -> None:
        if self._source.keeper is None:
            assert self._plan.options.snapshot is not None
            self._lsn = snapshot.announced_lsn(session, self._plan.options.snapshot)
            snapshot.import_snapshot(session, self._plan.options.snapshot)
            return
        request = request_for(self._plan, self._execution, self._source.planned_at)
        for _ in range(ATTEMPTS):
            found = keeper.find_snapshot(session, self._source.keeper, request)
            for snapshot_id in found.ids:
                # A holder may have been lost since; the other one has the same snapshot under another id.
                with contextlib.suppress(SnapshotLostError):
                    snapshot.import_snapshot(session, snapshot_id)
                    self._lsn = found.lsn
                    return
        raise TransientError(f"{self._doing}: no holder of the snapshot of execution {self._execution} lasted")

    def _check(self, session: Session) -> None:
        columns, relation = self._plan.columns, self._plan.relation
        # A whole relation is expanded by PostgreSQL, a piece by planning, which may have been an hour ago.
        if relation and self._piece.heap and catalog.identify_heaps(session, relation) != self._source.heaps:
            raise SchemaChangedError(
                f"{self._doing}: {relation} has other partitions or children than when the DataFrame was planned",
                remedy="load the DataFrame again",
            )
        names = [column.name for column in columns]
        now = catalog.describe(session, self._select_plain(names), self._doing)
        snapshot.check_files(session, self._doing)
        for planned, attnum, found in zip(columns, self._piece.attnums, now, strict=False):
            if (planned.name, attnum, planned.type_oid, planned.typmod) != (
                found.name,
                found.attnum,
                found.type_oid,
                found.typmod,
            ):
                raise SchemaChangedError(
                    f"{self._doing}: column {planned.name} ({planned.type_name}) is not the column it was when the "
                    f"DataFrame was loaded; it is {found.name} ({found.type_name}) now",
                    remedy="load the DataFrame again",
                )
        if len(columns) != len(now):
            raise SchemaChangedError(f"{self._doing}: the number of columns has changed", remedy="load it again")

    def _select_plain(self, names: list[str]) -> sql.Composable:
        return _select_from(self._plan, self._piece, [sql.Identifier(name) for name in names], None)

    def _copy_statement(self, blocks: BlockRange) -> sql.Composable:
        """COPY with the columns in the order that the decoder wants, cast as their codecs say."""
        items: list[sql.Composable] = []
        for i in select_order(self._codecs):
            codec = self._codecs[i]
            cast = sql.SQL(f"::{codec.select_sql_cast}" if codec.select_sql_cast else "")
            items.append(sql.SQL("{}{}").format(sql.Identifier(codec.column.name), cast))
        select = _select_from(self._plan, self._piece, items, blocks if self._piece.heap else None)
        return sql.SQL("COPY ({}) TO STDOUT (FORMAT binary)").format(select)

    def _copy(self, blocks: BlockRange, skip: int) -> Iterator[tuple[list[pa.Array], int]]:
        """Decoded chunks of one COPY and their numbers of rows, without its first ``skip`` rows."""
        position = 0
        messages = CopyMessages()
        session = self._open()
        with contextlib.closing(_receive(session, self._copy_statement(blocks), self._doing)) as chunks:
            for chunk in chunks:
                rows = messages.rows(chunk)
                fresh = rows[max(0, skip - position) :]
                position += len(rows)
                if fresh:
                    try:
                        arrays = self._decoder.decode(fresh)
                    except RefusedValueError as refused:
                        raise self._unrepresentable(refused, blocks, position - len(fresh) + refused.row) from None
                    yield arrays, len(fresh)
        messages.finish()

    def _unrepresentable(self, refused: RefusedValueError, blocks: BlockRange, position: int) -> PgCdcError:
        heap = self._piece.heap
        where = f"row {position + 1}"
        if heap is not None:
            # The same scan again, in a session that is not in the middle of a COPY.
            self.close()
            with self._open().cursor() as cursor:
                cursor.execute(
                    sql.SQL("SELECT ctid::text FROM ({}) AS scan OFFSET {} LIMIT 1").format(
                        _select_from(self._plan, self._piece, [sql.SQL("ctid")], blocks), sql.Literal(position)
                    )
                )
                where = f"ctid {cursor.fetchone()[0]}"
        name = catalog.quoted(refused.column.name)
        return UnrepresentableError(
            f"{heap or self._plan.what}, column {name} ({refused.column.type_name}), {where}: {refused.reason}",
            remedy=f"asString={name} reads the column as text; unrepresentable=null makes such values NULL",
        )


def request_for(plan: Plan, execution: str, planned_at: float) -> keeper.Request:
    """What a task of ``plan`` asks its keeper for."""
    options = plan.options
    return keeper.Request(
        execution,
        planned_at,
        options.snapshot_idle_seconds,
        snapshot.SnapshotSpec(options.consistent_point, options.slot, options.slot_timeout_seconds),
    )


def _select_from(plan: Plan, piece: Piece, items: list[sql.Composable], blocks: BlockRange | None) -> sql.Composable:
    if plan.relation is None:
        source: sql.Composable = sql.SQL("({}\n) AS query").format(sql.SQL(plan.options.query or ""))
    elif piece.heap is None:
        source = plan.relation.identifier
    else:
        source = sql.SQL("ONLY {}").format(piece.heap.identifier)
    return sql.SQL("SELECT {} FROM {}{}").format(sql.SQL(", ").join(items), source, _where(plan.options, blocks))


class _Stopped(Exception):
    """The reader wants no more rows."""


def _receive(session: Session, copy: sql.Composable, doing: str) -> Generator[list[bytes], None, None]:
    """Run a COPY in a thread and yield its messages in chunks; psycopg2 pushes rows, and a generator has to pull.

    The receiving thread stops while a chunk waits to be taken. Closing the generator early closes the session, which
    ends the COPY on the server.
    """
    chunks: queue.Queue[list[bytes] | BaseException | None] = queue.Queue(maxsize=1)
    stopped = threading.Event()

    def put(item: list[bytes] | BaseException | None) -> None:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                chunks.put(item, timeout=0.5)
                return
        raise _Stopped

    def rows() -> Generator[None, bytes, None]:
        # A generator's send is a C function that resumes a frame: half the price of a Python method per row.
        while True:
            chunk: list[bytes] = []
            size = 0
            while len(chunk) < ROWS_PER_CHUNK and size < BYTES_PER_CHUNK:
                try:
                    row = yield
                except GeneratorExit:
                    put(chunk)
                    raise
                chunk.append(row)
                size += len(row)
            put(chunk)

    def receive() -> None:
        collector = rows()
        next(collector)
        try:
            with session.cursor() as cursor:
                cursor.copy_expert(copy, SimpleNamespace(write=collector.send), size=0)
            collector.close()
            put(None)
        except _Stopped:
            pass
        except BaseException as error:
            with contextlib.suppress(_Stopped):
                put(error)

    thread = threading.Thread(target=receive, name="pgsnapshot-copy", daemon=True)
    thread.start()
    finished = False
    try:
        while (item := chunks.get()) is not None:
            if isinstance(item, psycopg2.Error):
                finished = True
                raise translate(item, doing)
            if isinstance(item, BaseException):
                finished = True
                raise item
            yield item
        finished = True
    finally:
        stopped.set()
        if not finished:
            # The thread may be waiting for the server: hanging up wakes it, and the server as well.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(session.fileno())) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        thread.join()
        if not finished:
            session.close()
