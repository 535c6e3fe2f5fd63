"""Read one range of a scan: COPY in, Arrow batches out, each row exactly once.

A range is read in steps, each a COPY of its own over a few thousand blocks in physical order: of one heap, or of many
small ones. A session that is lost is replaced and only its step is repeated, on the same snapshot: the rows that were
decoded before are skipped by their number. That is exact, because under one snapshot a heap is scanned in the same
order each time: ranges are TID range scans by one backend, those of several heaps are appended in the order of the
statement, and a row's place cannot change while the snapshot needs it.

A predicate may choose other rows when it is asked again: ``now()`` belongs to the transaction, ``random()`` to nobody.
So with ``where``, the rows of a step are kept back until its COPY has ended, and a lost step is repeated as a whole.
What has no order (views, foreign tables, ``query``), and a step that is too large to keep back, is not repeated once
rows were handed on; Spark repeats the task.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence

import pyarrow as pa
from psycopg2 import sql
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import PgCdcError, ServerFullError, TransientError, WireError
from pg_cdc_source.logs import fields
from pg_cdc_source.postgres import search_path, trees
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.catalog import Relation
from pg_cdc_source.postgres.columns import MOST_COLUMNS
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.protocol.binary_copy import CopyDecoder, CopyMessages, record_batch, select_order
from pg_cdc_source.protocol.refused import RefusedValueError
from pg_cdc_source.snapshot.board import NoAnswerError
from pg_cdc_source.snapshot.checks import check_contents, check_predicate
from pg_cdc_source.snapshot.reading_session import ReadingSession
from pg_cdc_source.snapshot.receiving import Decoded, receive
from pg_cdc_source.snapshot.scan import Piece, Plan, ScanRange, reading, select_from, steps_of
from pg_cdc_source.snapshot.source import Source
from pg_cdc_source.values.wire import Messages

log = logging.getLogger(__name__)

# 16 MB of heap: what a lost session repeats. A new COPY costs about a millisecond.
BLOCKS_PER_STEP = 2048
# As many are locked at a time. A heap of 100 rows took 85 µs of CPU in a COPY of 64 of them (PostgreSQL 15 and 18, the
# server), 95 µs in one of 512, and 155 µs in one of its own.
HEAPS_PER_STEP = 64
ROWS_PER_BATCH = 65_536
# As decoded. A step's heap has 16 MB; what is stored beside it (TOAST) may be any number of times that.
KEPT_BACK_BYTES = 64 << 20
# To connect again waits by itself for a server that is away.
ATTEMPTS = 5
_AGAIN = Backoff(0.0, attempts=ATTEMPTS)
# Who could not have a connection, or a snapshot, has waited for it long enough.
_WAITED_FOR = (ServerFullError, NoAnswerError)


def read_range(plan: Plan, source: Source, scan_range: ScanRange, execution: str) -> Iterator[pa.RecordBatch]:
    """Read one range as record batches of ``plan.arrow_schema()``, each of about ``batchBytes``.

    ``execution`` names the SQL execution (or the stage) that all its tasks have in common.
    """
    began, rows, size_bytes = time.monotonic(), 0, 0
    with contextlib.closing(ReadingSession(plan, source, scan_range, execution)) as session:
        for batch in _Reader(plan, scan_range.pieces, session).batches():
            rows += batch.num_rows
            size_bytes += batch.nbytes
            yield batch
        session.leave()
    log.info(
        "read %s",
        fields(
            **_read(plan, scan_range.pieces),
            execution=execution,
            rows=rows,
            bytes=size_bytes,
            lsn=session.lsn,
            seconds=time.monotonic() - began,
        ),
    )


def _read(plan: Plan, pieces: Sequence[Piece]) -> dict[str, object]:
    if len(pieces) != 1:
        return {"table": plan.what, "heaps": len(pieces) or None}
    end = pieces[0].blocks.end_block_exclusive
    return {"table": pieces[0].heap, "blocks": f"{pieces[0].blocks.start_block}-{'end' if end is None else end}"}


class _Reader:
    """How far the reading of one range has come."""

    def __init__(self, plan: Plan, pieces: Sequence[Piece], session: ReadingSession) -> None:
        self._plan = plan
        self._pieces = pieces
        self._session = session
        self._codecs = plan.codecs
        self._items: list[sql.Composable] = []
        self._decoder = CopyDecoder(self._codecs, plan.spec.unrepresentable)
        self._schema = plan.arrow_schema()
        self._columns = pa.schema(list(self._schema)[: len(self._codecs)])

    def batches(self) -> Iterator[pa.RecordBatch]:
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

    def _batch(self, chunks: list[list[pa.Array]], rows: int) -> pa.RecordBatch:
        if self._plan.spec.lsn_column:
            lsn = pa.scalar(None if self._session.lsn is None else int(self._session.lsn), pa.int64())
            joined = record_batch(chunks, self._columns)
            return pa.RecordBatch.from_arrays([*joined.columns, pa.repeat(lsn, rows)], schema=self._schema)
        return record_batch(chunks, self._columns)

    def _arrays(self) -> Iterator[Decoded]:
        """Decoded chunks of all steps in order, with their numbers of rows; lost sessions are replaced."""
        for step in self._steps():
            may_skip = bool(step) and self._plan.spec.where is None
            done = 0
            attempt = 1
            while True:
                try:
                    chunks = self._copy(step, done)
                    for arrays, rows in chunks if self._plan.spec.where is None else _kept_back(chunks):
                        done += rows
                        attempt = 1
                        yield arrays, rows
                    break
                except TransientError as error:
                    self._session.close()
                    if attempt == ATTEMPTS or (done and not may_skip) or isinstance(error, _WAITED_FOR):
                        raise
                    log.warning("%s; connecting again", error.what)
                    attempt += 1

    def _steps(self) -> Iterator[tuple[Piece, ...]]:
        """What is read by a COPY each; of a scan that is not cut that is all of it."""
        if not self._pieces:
            return iter([()])
        open_heaps = [piece.heap.oid for piece in self._pieces if piece.blocks.end_block_exclusive is None]

        def blocks_now() -> dict[int, int]:
            try:
                session = self._session.open_unlocked()
                return trees.read_blocks(
                    session, self._plan.server.block_size, open_heaps, reading(self._plan, self._pieces)
                )
            except TransientError:
                self._session.close()
                raise

        sizes = _AGAIN.retrying(blocks_now, but=_WAITED_FOR) if open_heaps else {}
        at_once = min(HEAPS_PER_STEP, MOST_COLUMNS // max(1, len(self._codecs)))
        return steps_of(self._pieces, sizes, BLOCKS_PER_STEP, at_once)

    def _copy_statement(self, session: Session, step: Sequence[Piece]) -> sql.Composable:
        """COPY with the columns in the order that the decoder wants, each as its codec says."""
        return _copy_of(select_from(self._plan, step, self._select_items(session)))

    def _select_items(self, session: Session) -> list[sql.Composable]:
        if not self._items:
            ordered = [self._codecs[i] for i in select_order(self._codecs)]
            items = [sql.SQL(codec.select_sql).format(sql.Identifier(codec.column.name)) for codec in ordered]
            # Written once, because it stands in the statement for each heap.
            self._items = [sql.SQL(sql.SQL(", ").join(items).as_string(session))]
        return self._items

    def _copy(self, step: Sequence[Piece], skip: int) -> Iterator[Decoded]:
        """Decoded chunks of one COPY and their numbers of rows, without its first ``skip`` rows."""
        position = 0
        messages = CopyMessages()
        fresh = Messages.joined([], 0)
        session = self._session.open(step)
        doing = reading(self._plan, step)

        def decode(chunk: Messages) -> Decoded:
            nonlocal position, fresh
            rows = messages.rows(chunk)
            fresh = rows[max(0, skip - position) :]
            position += len(rows)
            return self._decoder.decode(fresh), len(fresh)

        chunks = receive(session, self._copy_statement(session, step), doing, self._decoder.padding, decode)
        try:
            with contextlib.closing(chunks):
                yield from (chunk for chunk in chunks if chunk[1])
        except RefusedValueError as refused:
            # Only here has the COPY ended.
            raise self._unrepresentable(refused, step, position - len(fresh) + refused.row) from None
        except WireError as error:
            raise WireError(f"{doing}: {error.what}", remedy=error.remedy) from None
        messages.finish()
        if step and self._plan.spec.where is None and not self._session.on_standby:
            return
        with search_path.own(session):
            self._session.check_snapshot(doing)
            # A lock that COPY takes may come too late: ATTACH does not wait for that of the root, and what a function
            # reads is locked only when it runs.
            if not step:
                check_contents(session, self._session.present, self._plan, doing)
            elif self._plan.spec.where is not None:
                check_predicate(session, self._session.present, self._plan, [piece.heap for piece in step], doing)

    def _unrepresentable(self, refused: RefusedValueError, step: Sequence[Piece], position: int) -> PgCdcError:
        if not step:
            return refused.at(self._plan.what, f"row {position + 1}")
        # The same scan again, in a session that is not in the middle of a COPY.
        self._session.close()
        doing = f"{reading(self._plan, step)}: looking for a row"
        places = select_from(self._plan, step, [sql.SQL("tableoid AS heap"), sql.SQL("ctid AS place")])
        session = self._session.open(step)
        with translated(doing), session.cursor() as cursor:
            cursor.execute(
                sql.SQL(
                    "SELECT heap::pg_catalog.int8, place::pg_catalog.text FROM ({}) AS scan OFFSET {} LIMIT 1"
                ).format(places, sql.Literal(position))
            )
            found = cursor.fetchone()
        for heap in {piece.heap for piece in step if found is not None and piece.heap.oid == found[0]}:
            # A predicate may have chosen other rows this time.
            if self._plan.spec.where is None or self._is_refused(session, heap, found[1], refused, doing):
                return refused.at(str(heap), f"ctid {found[1]}")
        if len(step) == 1:
            return refused.at(str(step[0].heap), str(step[0].blocks))
        return refused.at(self._plan.what, f"one of {len(step)} tables from {step[0].heap} to {step[-1].heap}")

    def _is_refused(self, session: Session, heap: Relation, place: str, refused: RefusedValueError, doing: str) -> bool:
        """Whether the row at ``place`` has a value that is refused as the given one is."""
        row = sql.SQL("SELECT {} FROM ONLY {} WHERE ctid OPERATOR(pg_catalog.=) {}::pg_catalog.tid").format(
            sql.SQL(", ").join(self._select_items(session)), heap.identifier, sql.Literal(place)
        )
        messages = CopyMessages()

        def decode(chunk: Messages) -> Decoded:
            rows = messages.rows(chunk)
            return self._decoder.decode(rows), len(rows)

        try:
            list(receive(session, _copy_of(row), doing, self._decoder.padding, decode))
        except RefusedValueError as again:
            return (again.column, again.reason) == (refused.column, refused.reason)
        return False


def _copy_of(select: sql.Composable) -> sql.Composable:
    return sql.SQL("COPY ({}) TO STDOUT (FORMAT binary)").format(select)


def _kept_back(chunks: Iterator[Decoded]) -> Iterator[Decoded]:
    """The chunks once all of them are there; as they come behind the first KEPT_BACK_BYTES."""
    kept: list[Decoded] = []
    kept_bytes = 0
    for chunk in chunks:
        kept.append(chunk)
        kept_bytes += sum(array.nbytes for array in chunk[0])
        if kept_bytes > KEPT_BACK_BYTES:
            break
    kept.reverse()
    while kept:
        # None is held for longer than it has to be.
        yield kept.pop()
    yield from chunks
