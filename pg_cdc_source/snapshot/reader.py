"""Read one range of a scan: COPY in, Arrow batches out, each row exactly once.

A range is read in steps, each a COPY of its own over a few thousand blocks in physical order. A session that is lost is
replaced and only its step is repeated, on the same snapshot: the rows that were decoded before are skipped by their
number. That is exact, because under one snapshot a heap is scanned in the same order each time: ranges are TID range
scans by one backend, the predicate is wrapped so that it cannot choose another plan, and a row's place cannot change
while the snapshot needs it. What has no such order (views, foreign tables, ``query``) is not repeated once rows were
handed on; Spark repeats the task.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

import pyarrow as pa
from psycopg2 import sql

from pg_cdc_source.errors import PgCdcError, TransientError
from pg_cdc_source.logs import fields
from pg_cdc_source.postgres import trees
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.protocol.binary_copy import CopyDecoder, CopyMessages, record_batch, select_order
from pg_cdc_source.protocol.refused import RefusedValueError
from pg_cdc_source.snapshot import ranges
from pg_cdc_source.snapshot.checks import check_contents
from pg_cdc_source.snapshot.ranges import BlockRange
from pg_cdc_source.snapshot.reading_session import ReadingSession
from pg_cdc_source.snapshot.receiving import Decoded, receive
from pg_cdc_source.snapshot.scan import Plan, ScanRange, select_from
from pg_cdc_source.snapshot.source import Source
from pg_cdc_source.values.wire import Messages

log = logging.getLogger(__name__)

# 16 MB of heap: what a lost session repeats. A new COPY costs about a millisecond.
BLOCKS_PER_STEP = 2048
ROWS_PER_BATCH = 65_536
# To connect again waits by itself for a server that is away.
ATTEMPTS = 5
_AGAIN = Backoff(0.0, attempts=ATTEMPTS)


def read_range(plan: Plan, source: Source, scan_range: ScanRange, execution: str) -> Iterator[pa.RecordBatch]:
    """Read one range as record batches of ``plan.arrow_schema()``, each of about ``batchBytes``.

    ``execution`` names the SQL execution (or the stage) that all its tasks have in common.
    """
    doing = f"reading {scan_range.heap or plan.what}" + (f", {scan_range.blocks}" if scan_range.heap else "")
    began, rows, size_bytes = time.monotonic(), 0, 0
    with contextlib.closing(ReadingSession(plan, source, scan_range, execution, doing)) as session:
        for batch in _Reader(plan, scan_range, session, doing).batches():
            rows += batch.num_rows
            size_bytes += batch.nbytes
            yield batch
        session.leave()
    log.info(
        "read %s",
        fields(
            table=scan_range.heap or plan.what,
            blocks=_blocks(scan_range.blocks) if scan_range.heap else None,
            execution=execution,
            rows=rows,
            bytes=size_bytes,
            lsn=session.lsn,
            seconds=time.monotonic() - began,
        ),
    )


def _blocks(blocks: BlockRange) -> str:
    return f"{blocks.start_block}-{'end' if blocks.end_block_exclusive is None else blocks.end_block_exclusive}"


class _Reader:
    """How far the reading of one range has come."""

    def __init__(self, plan: Plan, scan_range: ScanRange, session: ReadingSession, doing: str) -> None:
        self._plan = plan
        self._range = scan_range
        self._session = session
        self._doing = doing
        self._codecs = plan.codecs
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
                except TransientError as error:
                    self._session.close()
                    if attempt == ATTEMPTS or (done and self._range.heap is None):
                        raise
                    log.warning("%s; connecting again", error.what)
                    attempt += 1

    def _steps(self) -> Iterator[BlockRange]:
        heap, blocks = self._range.heap, self._range.blocks
        if heap is None:
            return iter([ranges.WHOLE])
        if blocks.end_block_exclusive is not None:
            return ranges.steps(blocks, 0, BLOCKS_PER_STEP)

        def blocks_now() -> int:
            try:
                return trees.read_blocks(self._session.open(), self._plan.server.block_size, heap)
            except TransientError:
                self._session.close()
                raise

        return ranges.steps(blocks, _AGAIN.retrying(blocks_now), BLOCKS_PER_STEP)

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
        session = self._session.open()

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
            check_contents(session, self._plan, self._range, self._doing)

    def _unrepresentable(self, refused: RefusedValueError, blocks: BlockRange, position: int) -> PgCdcError:
        heap = self._range.heap
        where = f"row {position + 1}"
        if heap is not None:
            # The same scan again, in a session that is not in the middle of a COPY.
            self._session.close()
            with translated(f"{self._doing}: looking for a row"), self._session.open().cursor() as cursor:
                cursor.execute(
                    sql.SQL("SELECT ctid::text FROM ({}) AS scan OFFSET {} LIMIT 1").format(
                        select_from(self._plan, self._range, [sql.SQL("ctid")], blocks), sql.Literal(position)
                    )
                )
                where = f"ctid {cursor.fetchone()[0]}"
        return refused.at(str(heap or self._plan.what), where)
