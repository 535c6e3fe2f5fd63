"""Read a slot ahead of Spark: one thread receives and decodes, the buffer between is bounded, batches are cut from it.

::

    walsender ──► thread: receive, collect ──► chunks (Arrow IPC) ──► cut at limits ──► payloads for Spark's partitions
        ▲                                                                                    │
        └──────────── confirm: only what Spark has committed ◄──────── release ◄─────────────┘

Decoding commit by commit would cost a hundred NumPy calls for each; so raw messages wait until there are enough of them
or somebody asks for a batch. What is decoded is kept as compressed Arrow IPC, beyond some tens of megabytes in a file
that has no name, and handed to Spark as it is.

Invariants:

- Commits arrive in the order of their LSNs, so everything before the commit that is being received is complete.
- A batch ends between commits, unless one alone is larger than the limits.
- Chunks stay until Spark is done with their batch: it can be handed out again. The slot moves when Spark commits.
- After a lost session the slot sends again what was not confirmed; what is here already is left out by position.
- While the buffer is full nothing is received, and PostgreSQL waits; its timeout is kept away by our own messages.
- A transaction that comes before it has committed (protocol 2) waits in a file, and is taken when its commit comes: at
  the place, and with the numbers, that it would have had otherwise.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from pg_cdc_source.errors import DefiniteError, TransientError, WireError
from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.postgres.replication import HEADER_BYTES, KEEPALIVE, XLOG_DATA, ReplicationStream, keepalive_end
from pg_cdc_source.protocol import pgoutput
from pg_cdc_source.protocol.changes import ChangeDecoder, Described, Run
from pg_cdc_source.protocol.pgoutput import (
    Begin,
    Commit,
    RelationMessage,
    StreamAbort,
    StreamCommit,
    StreamStart,
    StreamStop,
)
from pg_cdc_source.protocol.stream_rows import rows_through
from pg_cdc_source.stream.spill import XID_BYTES, Spill, StreamedTransaction
from pg_cdc_source.values.wire import Collected

log = logging.getLogger(__name__)

# As many messages are decoded at a time: they stay in cache, and the cost of a NumPy call is shared.
MESSAGES_PER_CHUNK = 8192
BYTES_PER_CHUNK = 4 << 20
# One burst of receiving holds the lock, for about a millisecond.
MESSAGES_PER_BURST = 1024
# Well within half of the least wal_sender_timeout that anybody sets (PostgreSQL's default is 60 s).
CONFIRM_SECONDS = 1.0
IDLE_ASK_SECONDS = 1.0
# A walsender sends each message by itself. Who waits for each takes longer, and keeps the walsender from its work by
# waking up all the time: a backlog came 1.2 times as fast with a pause. Where there are cores to spare, 10 ms save 11 %
# of the CPU that walsender and reader take together with 2 ms. A message that comes alone is not kept waiting.
PAUSE_SECONDS = 0.01
RECONNECT_SECONDS = 60.0
# A server asks once within half of wal_sender_timeout. One that shuts down asks again with every answer, until all is
# confirmed, which Spark may never get to: it has to wait for us as long as we stay (walsender.c, WalSndDone).
SHUTDOWN_QUESTIONS = 20
SHUTDOWN_PAUSE_SECONDS = 0.1
# The buffer holds this many batches at the limits: the one that Spark works on, and the next.
BATCHES_AHEAD = 2
# Compressed chunks in memory; more of them go to the file.
MEMORY_BYTES = 64 << 20

# By Arrow's threads it takes half as much CPU again: a chunk's buffers are small.
_LZ4 = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
_COUNTED = frozenset((*pgoutput.ROWS, pgoutput.TRUNCATE))


@dataclass(frozen=True, slots=True)
class Limits:
    """What one batch may hold."""

    rows: int
    bytes: int


@dataclass(slots=True)
class Chunk:
    """Decoded rows that follow each other: ``first`` and ``last`` are positions of rows; ``raw_bytes`` uncompressed."""

    rows: int
    raw_bytes: int
    first: Position
    last: Position
    payload: bytes | None
    spill: Spill | None = None
    place: tuple[int, int] = (0, 0)

    def data(self) -> bytes:
        if self.payload is not None:
            return self.payload
        assert self.spill is not None
        return self.spill.read(self.place)


class SlotReader:
    """Reads one slot from ``start`` on, in a thread, until it is closed.

    ``connect`` opens the stream after a position; ``describe`` says what a relation's rows are to become, given the
    relation and the LSN of the commit whose rows it describes: None where they are not wanted; it raises where they
    cannot be.
    """

    def __init__(
        self,
        connect: Callable[[Position], ReplicationStream],
        describe: Callable[[RelationMessage, Lsn], Described | None],
        decoder: ChangeDecoder,
        schema: pa.Schema,
        start: Position,
        limits: Limits,
    ) -> None:
        self._connect = connect
        self._describe = describe
        self._decoder = decoder
        self._schema = schema
        self._limits = limits
        self._changed = threading.Condition()
        # Whoever wants the lock goes through here first: the thread, which takes it again and again, waits here.
        self._turn = threading.Lock()
        self._wake, self._waker = socket.socketpair()
        for end in (self._wake, self._waker):
            end.setblocking(False)
        self._closed = False
        self._error: BaseException | None = None
        self._confirmed = start.next_lsn
        self._received = start  # everything through here is in chunks or was not wanted
        self._complete = start
        self._dropped = start
        self._wanted: Position | None = None  # read this far whatever the limits say
        self._asked_at = 0.0
        self._questions, self._questioned_at = 0, 0.0
        self._relations: dict[int, tuple[RelationMessage, Lsn]] = {}
        self._described: dict[int, Described | None] = {}
        self._transaction: Begin | None = None
        self._streamed: dict[int, StreamedTransaction] = {}
        self._in_stream: StreamedTransaction | None = None
        self._replay: Iterator[None] | None = None  # of a streamed transaction that has committed
        self._leave_out = False  # the transaction is here already
        self._next_seq = 1
        self._collected = Collected(MESSAGES_PER_CHUNK, BYTES_PER_CHUNK)
        self._runs: list[Run] = []
        self._run_start = 0
        self._chunks: deque[Chunk] = deque()
        self._buffered_rows = self._buffered_bytes = self._memory_bytes = 0
        self._spill: Spill | None = None
        self._thread = threading.Thread(target=self._run, name="pgcdc-slot", daemon=True)
        self._thread.start()

    # --- what the source asks for -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._turn:
            self._changed.acquire()
        try:
            yield
        finally:
            self._changed.release()

    def close(self) -> None:
        with self._locked():
            self._closed = True
            self._changed.notify_all()
        self._poke()
        self._thread.join()
        self._wake.close()
        self._waker.close()
        while self._chunks:
            self._give_up(self._chunks.popleft())
        for streamed in self._streamed.values():
            streamed.close()

    def release(self, position: Position) -> None:
        """Forget what is at or before ``position`` and confirm it to the slot: Spark has committed it."""
        with self._locked():
            self._drop(position)
            self._confirmed = max(self._confirmed, position.next_lsn)
            self._changed.notify_all()
        self._poke()

    def cut(
        self, start: Position, limits: Limits, ceiling: Position | None, patience: float, *, only_rows: bool = False
    ) -> Position:
        """Where a batch from ``start`` ends; ``start`` itself when nothing has come within ``patience`` seconds.

        Nothing beyond ``ceiling`` is taken. With ``only_rows``, an end without a row before it is nothing. Raises what
        the thread has met, once all that came before it was handed out. Spark asks for the next batch when it is done
        with the one that ends at ``start``, so chunks up to there make room; confirmed they are only when Spark says
        so.
        """
        deadline = time.monotonic() + patience
        with self._locked():
            self._drop(start)
            while True:
                # Within a commit that goes on, chunks are left to fill.
                if self._collected and (self._complete > start or self._is_full()):
                    self._close_chunk()
                end = self._end_of_batch(start, limits, ceiling)
                if end > start and not (only_rows and self._is_quiet(start, end)):
                    return end
                if self._error is not None:
                    raise self._error
                rest = deadline - time.monotonic()
                if rest <= 0:
                    return start
                self._changed.wait(rest)

    def read_through(self, end: Position, alive: Callable[[], bool]) -> None:
        """Read until ``end`` is here, without limits. Raises what keeps that from happening."""
        with self._locked():
            self._wanted = end
            self._changed.notify_all()
            try:
                while True:
                    if self._collected:
                        self._close_chunk()
                    if max(self._complete, self._received) >= end:
                        return
                    if self._error is not None:
                        raise self._error
                    if not alive():
                        raise TransientError("the driver's JVM is gone")
                    self._poke()
                    self._changed.wait(0.5)
            finally:
                self._wanted = None

    def batch(self, start: Position, end: Position) -> list[Chunk]:
        """The chunks with the rows after ``start`` up to ``end``, cut where they reach over."""
        with self._locked():
            if start < self._dropped:
                raise DefiniteError(
                    f"changes after {start} are asked for again, when Spark was done with all up to {self._dropped}",
                    remedy="read a batch's DataFrame only while its foreachBatch function runs, or persist() it there",
                )
            if self._collected:
                self._close_chunk()
            chunks = [chunk for chunk in self._chunks if chunk.last > start and chunk.first <= end]
        return [self._between(chunk, start, end) for chunk in chunks]

    # --- cutting ----------------------------------------------------------------------------------------------------

    def _is_quiet(self, start: Position, end: Position) -> bool:
        """Whether there is neither a row after ``start`` up to ``end``, nor an error to be told of behind it."""
        return self._error is None and not any(c.last > start and c.first <= end for c in self._chunks)

    def _end_of_batch(self, start: Position, limits: Limits, ceiling: Position | None) -> Position:
        bound = self._complete if ceiling is None else min(self._complete, ceiling)
        rows_left, bytes_left = limits.rows, limits.bytes
        last = start
        opening: Chunk | None = None
        for chunk in self._chunks:
            if chunk.last <= start:
                continue
            if ceiling is not None and chunk.first > ceiling:
                break
            opening = opening or chunk
            rows = chunk.rows
            if chunk.first <= start:
                rows -= rows_through(from_ipc(chunk.data()), start, self._schema)
            room = max(0, min(rows_left, bytes_left * chunk.rows // max(chunk.raw_bytes, 1)))
            if rows > room:
                end = self._cut_within(opening, chunk, start, room, last)
                return end if ceiling is None else min(end, ceiling)
            rows_left -= rows
            bytes_left -= chunk.raw_bytes * rows // chunk.rows
            last = chunk.last
        # Where the rest of a commit does not come, or not before there is room for it.
        stuck = self._error is not None or (bound <= start and self._is_full())
        if stuck and last > bound and (ceiling is None or last <= ceiling):
            return last
        return max(bound, start)

    def _cut_within(self, opening: Chunk, chunk: Chunk, start: Position, room: int, last: Position) -> Position:
        """The end of a batch, whose rows begin in ``opening``, that may take ``room`` more, from a chunk with more."""
        batch = from_ipc(chunk.data())
        lsn = batch.column(self._schema.get_field_index("_commit_lsn"))
        seq = batch.column(self._schema.get_field_index("_seq"))
        skipped = rows_through(batch, start, self._schema)
        first_out = skipped + room
        if first_out >= batch.num_rows:
            return Position(Lsn(lsn[-1].as_py()), seq[-1].as_py())
        between_commits = Position.before(lsn[first_out].as_py())
        # Where the commit is the first that has rows, a batch that ends before it would be empty.
        if between_commits > start and self._first_after(opening, start) < between_commits:
            return between_commits
        if room:
            return Position(Lsn(lsn[first_out - 1].as_py()), seq[first_out - 1].as_py())
        if last > start:
            return last
        # A single row larger than the limit.
        return Position(Lsn(lsn[skipped].as_py()), seq[skipped].as_py())

    def _first_after(self, chunk: Chunk, start: Position) -> Position:
        """The first row after ``start``, which is in ``chunk``."""
        if chunk.first > start:
            return chunk.first
        batch = from_ipc(chunk.data())
        row = rows_through(batch, start, self._schema)
        lsn, seq = (batch.column(self._schema.get_field_index(name))[row].as_py() for name in ("_commit_lsn", "_seq"))
        return Position(Lsn(lsn), seq)

    def _between(self, chunk: Chunk, start: Position, end: Position) -> Chunk:
        if start < chunk.first and chunk.last <= end:
            return chunk
        batch = from_ipc(chunk.data())
        first, after = rows_through(batch, start, self._schema), rows_through(batch, end, self._schema)
        part = batch.slice(first, after - first)
        return Chunk(part.num_rows, part.nbytes, chunk.first, chunk.last, to_ipc(part))

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        lost_at: float | None = None
        pause = 0.1
        while not self._closed:
            try:
                with contextlib.closing(self._connect(self._received)) as stream:
                    pause = 0.1
                    for _ in self._follow(stream):
                        lost_at = None
            except TransientError as error:
                lost_at = time.monotonic() if lost_at is None else lost_at
                if time.monotonic() > lost_at + RECONNECT_SECONDS:
                    self._fail(error)
                    return
                log.warning("%s; connecting again", error.what)
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, pause)
                pause = min(2 * pause, 5.0)
            except BaseException as error:
                self._fail(error)
                return

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _follow(self, stream: ReplicationStream) -> Iterator[None]:
        """Receive until closed; yields after each burst that brought something."""
        with self._changed:
            # What the session before has brought is kept; the rest of its transaction comes with the whole again.
            self._close_chunk()
            self._transaction = self._in_stream = self._replay = None
            for streamed in self._streamed.values():
                streamed.close()
            self._streamed.clear()
            self._relations.clear()
            self._described.clear()
        confirmed, confirm_at = Lsn(0), 0.0
        while not self._closed:
            with self._turn:
                pass
            now = time.monotonic()
            ask = now >= self._asked_at + IDLE_ASK_SECONDS
            if now >= confirm_at or self._confirmed != confirmed or ask:
                confirmed = self._confirmed
                stream.confirm(confirmed, ask=ask)
                confirm_at = now + CONFIRM_SECONDS
                self._asked_at = now if ask else self._asked_at
            if self._is_full():
                with self._changed:
                    if self._is_full():
                        self._changed.wait(CONFIRM_SECONDS / 2)
                continue
            more, something = self._burst(stream)
            if something:
                yield
            if not more and self._asked_at:  # else the server waits for an answer
                if something:
                    select.select([self._wake], [], [], PAUSE_SECONDS)
                stream.wait(self._wake, IDLE_ASK_SECONDS)

    def _burst(self, stream: ReplicationStream) -> tuple[bool, bool]:
        """Receive what is there, bounded: (there is more, there was something)."""
        with self._changed:
            received = 0
            while received < MESSAGES_PER_BURST:
                # Whoever asks for a batch decodes as well, and what was refused there must not be passed over here.
                if self._error is not None:
                    break
                if self._replay is not None:
                    if next(self._replay, self) is self:
                        self._replay = None
                    break
                rows = self._rows()
                count = len(rows or ())
                data = stream.receive(rows)
                came = len(rows or ()) - count + (data is not None)
                received += came
                if rows is not None and rows.is_full and self._in_stream is not None:
                    self._in_stream.make_room()
                elif self._collected.is_full:
                    self._close_chunk()
                    if self._error is not None:
                        break
                elif not came:
                    if received:
                        self._changed.notify_all()
                    return False, received > 0
                if data is not None:
                    self._take(data)
            self._changed.notify_all()
            return True, True

    def _rows(self) -> Collected | None:
        """Where messages of rows go without being looked at."""
        if self._in_stream is not None:
            return self._in_stream.waiting
        return self._collected if self._transaction is not None and not self._leave_out else None

    def _is_full(self) -> bool:
        if self._wanted is not None:
            return False
        return (
            self._buffered_rows + len(self._collected) > BATCHES_AHEAD * self._limits.rows
            or self._buffered_bytes + self._collected.size_bytes > BATCHES_AHEAD * self._limits.bytes
        )

    def _take(self, data: bytes) -> None:
        if data[0] == KEEPALIVE:
            end, wants_answer = keepalive_end(data)
            if wants_answer:
                self._asked_at = 0.0
                self._count_question()
            if self._transaction is None and end:
                self._advance(Position.before(end))
            return
        if data[0] != XLOG_DATA or len(data) <= HEADER_BYTES:
            raise WireError(f"replication: expected XLogData or a keepalive, got {data[:1]!r} with {len(data)} bytes")
        tag = data[HEADER_BYTES]
        if self._in_stream is not None and tag != pgoutput.STREAM_STOP:
            self._in_stream.append(data)
            return
        self._take_message(tag, data)

    def _take_message(self, tag: int, data: bytes) -> None:
        if tag in _COUNTED:
            if self._transaction is None:
                raise WireError(f"pgoutput: expected {chr(tag)!r} within a transaction, got one outside")
            if not self._leave_out:
                self._collected.append(data)
                if self._collected.is_full:
                    self._close_chunk()
            return
        message = pgoutput.read(data, HEADER_BYTES)
        if isinstance(message, Begin):
            self._begin(message)
        elif isinstance(message, Commit):
            self._commit(message.commit_lsn)
        elif isinstance(message, StreamStart):
            self._in_stream = self._streamed.setdefault(message.xid, StreamedTransaction(HEADER_BYTES))
        elif isinstance(message, StreamStop):
            self._in_stream = None
        elif isinstance(message, StreamAbort):
            # PostgreSQL 18 also says it of subtransactions of which it has sent nothing, because it knew already that
            # the transaction was rolled back (reorderbuffer.c: ReorderBufferCheckAndTruncateAbortedTXN).
            rolled_back = self._streamed.get(message.xid)
            if rolled_back is not None and message.subxid != message.xid:
                rolled_back.roll_back(message.subxid)
            elif rolled_back is not None:
                self._streamed.pop(message.xid).close()
        elif isinstance(message, StreamCommit):
            if message.xid not in self._streamed:
                raise WireError(f"pgoutput: Stream Commit: expected a transaction that was streamed, got {message.xid}")
            streamed = self._streamed.pop(message.xid)
            self._replay = self._replayed(streamed, message)
        elif isinstance(message, RelationMessage):
            assert self._transaction is not None
            known = self._relations.get(message.oid)
            if known is None or known[0] != message:
                # Rows before it have the columns that they were sent with.
                if self._collected and known is not None:
                    self._close_chunk()
                self._relations[message.oid] = (message, self._transaction.final_lsn)
                self._described.pop(message.oid, None)

    def _begin(self, begin: Begin) -> None:
        if self._transaction is not None:
            raise WireError("pgoutput: expected Commit before the next Begin")
        self._transaction = begin
        self._leave_out = Position(begin.final_lsn) <= self._received
        self._next_seq = 1
        self._run_start = len(self._collected)

    def _commit(self, commit_lsn: Lsn) -> None:
        if self._transaction is None or commit_lsn != self._transaction.final_lsn:
            raise WireError("pgoutput: expected the Commit of the transaction that began, got another")
        self._end_run()
        self._transaction = None
        self._advance(Position(commit_lsn))

    def _replayed(self, streamed: StreamedTransaction, commit: StreamCommit) -> Iterator[None]:
        """Take a streamed transaction as if it came only now, a chunk at most at a step."""
        with contextlib.closing(streamed):
            self._begin(Begin(commit.commit_lsn, commit.commit_ts, commit.xid))
            for part in streamed.parts():
                tag = part.buffer.data[part.starts[0] + HEADER_BYTES]
                if tag not in pgoutput.ROWS:
                    data = part.octets(0)
                    if tag in pgoutput.IN_STREAM:
                        data = data[: streamed.xid_at] + data[streamed.xid_at + XID_BYTES :]
                    self._take_message(int(tag), data)
                    continue
                while len(part) and not self._leave_out:
                    part = part[self._collected.extend(part, streamed.xid_at, XID_BYTES) :]
                    if self._collected.is_full:
                        self._close_chunk()
                        yield
            self._commit(commit.commit_lsn)

    def _count_question(self) -> None:
        now = time.monotonic()
        self._questions = self._questions + 1 if now < self._questioned_at + SHUTDOWN_PAUSE_SECONDS else 0
        self._questioned_at = now
        if self._questions >= SHUTDOWN_QUESTIONS:
            self._questions = 0
            raise TransientError("reading the slot: the server is shutting down")

    def _advance(self, position: Position) -> None:
        if position > self._complete:
            self._complete = position
        if not self._collected and position > self._received:
            self._received = position

    def _end_run(self) -> None:
        """Close the present transaction's run of messages, if it has any."""
        count = len(self._collected) - self._run_start
        if self._transaction is not None and count:
            transaction = self._transaction
            self._runs.append(Run(transaction.final_lsn, transaction.commit_ts, transaction.xid, self._next_seq, count))
            self._run_start = len(self._collected)
            # Known after decoding; only a transaction that is cut by a chunk's end needs it.
            self._next_seq = 0

    def _close_chunk(self) -> None:
        """Decode what was collected. Called by either thread, under the lock."""
        self._end_run()
        if not self._collected:
            return
        messages, runs = self._collected.take(), self._runs
        self._runs, self._run_start = [], 0
        try:
            batch, last_seq = self._decoder.decode(messages, runs, self._describe_oid, self._received)
        except DefiniteError as error:
            # What came before is handed out first; nothing from here on is taken.
            self._error = error
            self._closed = True
            self._complete = max(self._received, min(self._complete, Position.before(runs[0].commit_lsn)))
            return
        inside = self._transaction is not None and runs[-1].commit_lsn == self._transaction.final_lsn
        if inside:
            self._next_seq = last_seq + 1
            self._received = max(self._received, Position(runs[-1].commit_lsn, last_seq))
        else:
            self._received = max(self._received, self._complete)
        if batch.num_rows:
            self._keep(batch)

    def _keep(self, batch: pa.RecordBatch) -> None:
        lsn = batch.column(self._schema.get_field_index("_commit_lsn"))
        seq = batch.column(self._schema.get_field_index("_seq"))
        first, last = (Position(Lsn(lsn[i].as_py()), seq[i].as_py()) for i in (0, -1))
        self._chunks.append(self._stored(Chunk(batch.num_rows, batch.nbytes, first, last, to_ipc(batch))))

    def _stored(self, chunk: Chunk) -> Chunk:
        """Count a new chunk, and move it to a file where memory has enough."""
        assert chunk.payload is not None
        if self._memory_bytes + len(chunk.payload) > MEMORY_BYTES:
            if self._spill is None or self._spill.is_large:
                self._spill = Spill()
            self._spill.users += 1
            chunk.spill, chunk.place, chunk.payload = self._spill, self._spill.append(chunk.payload), None
        else:
            self._memory_bytes += len(chunk.payload)
        self._buffered_rows += chunk.rows
        self._buffered_bytes += chunk.raw_bytes
        return chunk

    def _give_up(self, chunk: Chunk) -> None:
        self._buffered_rows -= chunk.rows
        self._buffered_bytes -= chunk.raw_bytes
        if chunk.payload is not None:
            self._memory_bytes -= len(chunk.payload)
        elif chunk.spill is not None:
            chunk.spill.users -= 1
            if not chunk.spill.users:
                chunk.spill.close()
                if chunk.spill is self._spill:
                    self._spill = None

    def _drop(self, position: Position) -> None:
        """Forget the chunks up to ``position``."""
        while self._chunks and self._chunks[0].last <= position:
            self._give_up(self._chunks.popleft())
            self._changed.notify_all()
        if self._chunks and self._chunks[0].first <= position:
            self._trim(position)
        self._dropped = max(self._dropped, position)

    def _trim(self, position: Position) -> None:
        """Forget the rows of the first chunk up to ``position``: what they leave free lets a commit come whole."""
        chunk = self._chunks[0]
        batch = from_ipc(chunk.data())
        rest = batch.slice(rows_through(batch, position, self._schema))
        lsn, seq = (rest.column(self._schema.get_field_index(name))[0].as_py() for name in ("_commit_lsn", "_seq"))
        trimmed = Chunk(rest.num_rows, rest.nbytes, Position(Lsn(lsn), seq), chunk.last, to_ipc(rest))
        self._give_up(chunk)
        self._chunks[0] = self._stored(trimmed)
        self._changed.notify_all()

    def _describe_oid(self, oid: int) -> Described | None:
        if oid not in self._described:
            if oid not in self._relations:
                raise WireError(f"pgoutput: expected a Relation message for oid {oid} before its rows, got none")
            self._described[oid] = self._describe(*self._relations[oid])
        return self._described[oid]

    def _poke(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"x")


def to_ipc(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_LZ4) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def from_ipc(payload: bytes) -> pa.RecordBatch:
    with pa.ipc.open_stream(payload) as reader:
        return reader.read_next_batch()
