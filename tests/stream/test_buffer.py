"""The buffer between a slot and Spark: batches are cut at their limits, and nothing is missing or twice.

Messages and questions come in any order here, which threads would only try by chance.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import BY_KEY, TYPED, described
from transactions import OTHER_RELATION, Server, Transaction, match, message, some_transactions
from trials import examples

from pg_cdc_source.errors import DefiniteError, SchemaChangedError, TransientError
from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.protocol.changes import ChangeDecoder, Described
from pg_cdc_source.protocol.ipc import from_ipc
from pg_cdc_source.protocol.streamed import StreamedTransaction
from pg_cdc_source.protocol.transactions import SentRelation, TransactionAssembler
from pg_cdc_source.stream.received import spill
from pg_cdc_source.stream.received.batches import Limits
from pg_cdc_source.stream.received.buffer import BufferLevel, ChangeBuffer
from pg_cdc_source.stream.received.chunks import ChunkStore
from pg_cdc_source.stream.received.spill import Spill

pytestmark = pytest.mark.usefixtures("accelerated")

SCHEMA = TYPED.schema([BY_KEY])
START = Position.before(100)
EPOCH_US = 946_684_800_000_000  # PostgreSQL's, at which the scripted server commits everything
NO_LIMITS = Limits(1000, 1 << 30)
Row = tuple[int, int, int | None]


class Files:
    """Counts the files that are open."""

    def __init__(self) -> None:
        self.open = 0

    def new(self) -> Spill:
        files = self

        class Counted(Spill):
            def close(self) -> None:
                files.open -= not self._file.closed
                super().close()

        self.open += 1
        return Counted()


def buffer_from(
    start: Position = START,
    limits: Limits = NO_LIMITS,
    how: Any = match,
    *,
    files: Files | None = None,
    chunk: int = 1000,
    block: int = 1000,
    memory_bytes: int = 1 << 30,
    prefixes: tuple[str, ...] = ("outbox",),
) -> ChangeBuffer:
    new_file = Spill if files is None else files.new
    return ChangeBuffer(
        TransactionAssembler(
            start, lambda: StreamedTransaction(new_file, block), prefixes=prefixes, messages_per_chunk=chunk
        ),
        ChangeDecoder(TYPED, SCHEMA),
        how,
        ChunkStore(start, new_file, memory_bytes),
        limits,
        "orders",
    )


def rows_between(buffer: ChangeBuffer, start: Position, end: Position) -> list[Row]:
    batches = [from_ipc(chunk.between(start, end).data()) for chunk in buffer.batch(start, end)]
    return [row for batch in batches for row in rows_of(batch)]


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    return list(zip(*(batch.column(name).to_pylist() for name in ("_commit_lsn", "_seq", "id")), strict=True))


class Source:
    """What fills a buffer: sessions of a scripted server, without limits and waiting."""

    def __init__(self, buffer: ChangeBuffer, server: Server) -> None:
        self._buffer = buffer
        self._server = server
        self._session: Any = None

    def receive(self, messages: int) -> None:
        """Receive so many times, as long as the buffer takes it."""
        buffer = self._buffer
        for _ in range(messages):
            if self._session is None:
                self._session = self._server.connect(buffer.received)
                buffer.begin_session()
            if not buffer.can_go_on:
                self._session = None
                return
            if buffer.is_full:
                return
            if buffer.is_replaying:
                buffer.replay()
                continue
            rows = buffer.rows
            try:
                data = self._session.receive(rows)
            except TransientError:
                self._session = None
                continue
            if rows is not None and rows.is_full:
                buffer.make_room()
            if data is not None and buffer.can_go_on:
                buffer.receive(data)


def batches(
    buffer: ChangeBuffer, source: Source, start: Position, last: Position, steps: Iterator[int]
) -> Iterator[tuple[Position, list[Row]]]:
    """Cut batches until ``last`` is reached, as Spark would, after so many messages each: (end, rows) of each."""
    asked = 0
    while start < last:
        asked += 1
        assert asked < 2000, (start, last)
        source.receive(next(steps))
        end = buffer.end_of_batch(start, last)
        if end > start:
            rows = rows_between(buffer, start, end)
            assert rows == rows_between(buffer, start, end), "a batch can be handed out again"
            yield end, rows
            buffer.drop(start)
            start = end


some_steps = st.lists(st.integers(1, 100), min_size=1, max_size=5)


def forever(steps: list[int]) -> Iterator[int]:
    while True:
        yield from steps


@examples(100)
@given(
    sent=some_transactions,
    limit=st.integers(1, 40),
    chunk=st.integers(1, 30),
    # Of a few messages, a block may hold nothing but what was rolled back.
    block=st.integers(1, 8),
    memory_bytes=st.sampled_from([0, 5000, 1 << 30]),
    losses=st.lists(st.integers(1, 60), max_size=3),
    steps=some_steps,
)
def test_batches_hold_every_row_once_and_end_between_commits(
    sent: list[Transaction],
    limit: int,
    chunk: int,
    block: int,
    memory_bytes: int,
    losses: list[int],
    steps: list[int],
) -> None:
    files, last = Files(), Position(Lsn(sent[-1].lsn))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spill, "FILE_BYTES", 4000)
        buffer = buffer_from(
            limits=Limits(limit, 1 << 30), files=files, chunk=chunk, block=block, memory_bytes=memory_bytes
        )
        source = Source(buffer, Server(sent, losses))
        found = list(batches(buffer, source, START, last, forever(steps)))
        buffer.close()
    assert files.open == 0
    assert [row for _, rows in found for row in rows] == [row for t in sent for row in t.expected()]
    sizes = {t.lsn: t.rows + t.emitted for t in sent}
    for end, rows in found:
        assert len(rows) <= limit
        if end.seq != last.seq:
            assert sizes[end.lsn] > limit, "within a commit only where it is larger than the limit"


@examples(60)
@given(sent=some_transactions, steps=some_steps, data=st.data())
def test_a_buffer_goes_on_from_any_row(sent: list[Transaction], steps: list[int], data: st.DataObject) -> None:
    expected = [row for t in sent for row in t.expected()]
    at = data.draw(st.sampled_from([START, *(Position(Lsn(lsn), seq) for lsn, seq, _ in expected)]))
    buffer = buffer_from(at)
    found = list(batches(buffer, Source(buffer, Server(sent)), at, Position(Lsn(sent[-1].lsn)), forever(steps)))
    assert [row for _, rows in found for row in rows] == [row for row in expected if Position(Lsn(row[0]), row[1]) > at]


def test_a_full_buffer_takes_no_more_until_rows_are_dropped() -> None:
    sent = [Transaction(100 * (i + 1), 10) for i in range(10)]
    buffer = buffer_from(limits=Limits(10, 1 << 30), chunk=5)
    source = Source(buffer, Server(sent))
    source.receive(1000)
    assert buffer.is_full
    end = buffer.end_of_batch(START, None)
    assert rows_between(buffer, START, end) == sent[0].expected()
    assert buffer.drop(end)
    assert not buffer.is_full
    assert not buffer.drop(end)


def test_what_waits_is_counted_from_a_position_on() -> None:
    buffer = buffer_from(chunk=5, memory_bytes=0, prefixes=())
    source = Source(buffer, Server([Transaction(100, 12), Transaction(200, 3)]))
    assert buffer.waiting(START) == BufferLevel(0, 0, 0, START, None)
    # The second transaction is here and not yet decoded: 10 rows are in chunks, which are in files.
    source.receive(10)
    all_of_it = buffer.waiting(START)
    assert (all_of_it.rows, all_of_it.through, all_of_it.oldest_us) == (15, START, EPOCH_US)
    assert all_of_it.file_bytes > 1000
    rest = buffer.waiting(Position(Lsn(100)))
    assert (rest.rows, rest.through, rest.oldest_us) == (3 + 2, Position(Lsn(100)), EPOCH_US)
    buffer.decode()
    source.receive(20)
    last = Position(Lsn(200))
    # A keepalive has told that there is nothing up to there.
    done = buffer.waiting(last)
    assert (done.rows, done.bytes, done.through, done.oldest_us) == (0, 0, Position.before(210), None)
    buffer.drop(last)
    assert buffer.waiting(last).file_bytes == 0


def test_what_waits_of_a_transaction_that_goes_on_is_counted_as_well() -> None:
    buffer = buffer_from(block=2)
    Source(buffer, Server([Transaction(100, 12, streamed=True)])).receive(9)
    waiting = buffer.waiting(START)
    assert (waiting.rows, waiting.through) == (0, START)
    assert waiting.file_bytes > 100
    buffer.close()


def test_what_spark_was_done_with_is_not_handed_out_again() -> None:
    buffer = buffer_from()
    Source(buffer, Server([Transaction(100, 3), Transaction(200, 3)])).receive(50)
    buffer.drop(Position(Lsn(100)))
    with pytest.raises(DefiniteError, match="asked for again, when Spark was done with all up to 0/64"):
        buffer.batch(START, Position(Lsn(200)))
    assert rows_between(buffer, Position(Lsn(100)), Position(Lsn(200))) == Transaction(200, 3).expected()


def test_an_end_without_rows_is_one_where_they_are_not_asked_for() -> None:
    buffer = buffer_from()
    source = Source(buffer, Server([Transaction(100, 0)]))
    source.receive(20)
    assert buffer.end_of_batch(START, None, only_rows=True) == START
    assert buffer.end_of_batch(START, None) > Position(Lsn(100))


class Changed(Transaction):
    """A commit whose relation changes after its third row."""

    def messages(self) -> list[bytes]:
        messages = super().messages()
        return [*messages[:5], OTHER_RELATION, *messages[5:]]


def test_what_came_before_an_error_is_handed_out_first() -> None:
    def refuse(of: SentRelation, position: Position) -> Described | None:
        if of.relation.columns[2].name == "c":
            raise SchemaChangedError("column b was renamed")
        return described(BY_KEY)

    sent = [Transaction(100, 2), Transaction(200, 2), Changed(300, 6), Transaction(400, 1)]
    buffer = buffer_from(how=refuse)
    source = Source(buffer, Server(sent))
    found, at = [], START
    for _ in range(20):
        source.receive(7)
        end = buffer.end_of_batch(at, None)
        if end > at:
            found += rows_between(buffer, at, end)
            at = end
    assert isinstance(buffer.error, SchemaChangedError)
    assert found == [*sent[0].expected(), *sent[1].expected(), *Transaction(300, 3).expected()]
    assert at == Position(Lsn(300), Transaction(300, 3).expected()[-1][1])


class Full(Files):
    """Files that have room for so many chunks."""

    def __init__(self, chunks: int) -> None:
        super().__init__()
        self.rest = chunks

    def new(self) -> Spill:
        spill, files = super().new(), self
        append = spill.append

        def limited(data: bytes) -> tuple[int, int]:
            if not files.rest:
                raise MemoryError("no room")
            files.rest -= 1
            return append(data)

        spill.append = limited  # type: ignore[method-assign]
        return spill


@pytest.mark.parametrize("chunks", [0, 1, 2, 3])
def test_what_could_not_be_stored_is_not_passed_over(chunks: int) -> None:
    """A chunk has five rows, and a commit eight: what came before the one that is missing is handed out."""
    files, sent = Full(chunks), [Transaction(100 * (i + 1), 8) for i in range(4)]
    buffer = buffer_from(chunk=5, memory_bytes=0, files=files, prefixes=())
    with pytest.raises(MemoryError, match="no room"):
        Source(buffer, Server(sent)).receive(1000)
    assert isinstance(buffer.error, MemoryError)
    found, at = [], START
    while (end := buffer.end_of_batch(at, None)) > at:
        found += rows_between(buffer, at, end)
        at = end
    assert found == [row for t in sent for row in t.expected()][: 5 * chunks]
    assert at <= Position(Lsn(found[-1][0]), found[-1][1]) if found else at == START
    assert not buffer.has(Position(Lsn(400)))
    buffer.close()
    # Its frames hold the file.
    buffer.error.__traceback__ = None
    gc.collect()
    assert files.open == 0


def test_a_full_disk_ends_the_stream_with_an_error_that_says_where() -> None:
    class OnFullDisk(Spill):
        def __init__(self) -> None:
            super().__init__()
            self._file.close()
            self._file = open("/dev/full", "w+b")  # noqa: SIM115 - closed with its owner

    class FullDisk(Files):
        def new(self) -> Spill:
            return OnFullDisk()

    buffer = buffer_from(chunk=5, memory_bytes=0, files=FullDisk())
    Source(buffer, Server([Transaction(100, 8)])).receive(100)
    assert isinstance(buffer.error, DefiniteError)
    assert tempfile.gettempdir() in buffer.error.what
    assert "No space left on device" in buffer.error.what
    assert buffer.end_of_batch(START, None) == START
    buffer.close()


@pytest.mark.parametrize("step", [1, 2, 3, 5, 100])
def test_what_could_not_be_decoded_for_a_moment_comes_again(step: int) -> None:
    """To find out what a changed column is takes a query, which fails while the server starts again."""
    failures = [TransientError("the server is starting up")] * 3

    def fail(of: SentRelation, position: Position) -> Described | None:
        if of.relation.columns[2].name == "c" and failures:
            raise failures.pop()
        return match(of, position)

    sent = [Transaction(100, 2), Changed(200, 6), Transaction(300, 4)]
    buffer = buffer_from(how=fail)
    found = list(batches(buffer, Source(buffer, Server(sent)), START, Position(Lsn(300)), forever([step])))
    assert not failures
    assert [row for _, rows in found for row in rows] == [row for t in sent for row in t.expected()]


ASK = b'{"snapshot": ["public.orders"], "slot": "orders"}'
ORDERS = ("public.orders",)


class Asking(Transaction):
    """A commit with a request, one that is malformed, and one for another slot's stream."""

    def messages(self) -> list[bytes]:
        first, *rest = super().messages()
        contents = (ASK, b"{}", b'{"snapshot": ["a.other"], "slot": "other"}')
        return [first, *(message(self.lsn - 40, "pgcdc", content) for content in contents), *rest]


def asked(buffer: ChangeBuffer, after: Position, through: Position) -> list[tuple[int, tuple[str, ...]]]:
    return [(int(request.position.lsn), request.tables) for request in buffer.requests(after, through)]


@examples(60)
@given(losses=st.lists(st.integers(1, 40), max_size=4), step=st.integers(1, 20), chunk=st.integers(1, 10))
def test_a_request_comes_once_with_the_batch_that_has_its_commit(losses: list[int], step: int, chunk: int) -> None:
    sent = [Transaction(200, 5), Asking(300, 4), Transaction(400, 7), Asking(500, 0), Transaction(600, 2)]
    buffer = buffer_from(limits=Limits(3, 1 << 30), chunk=chunk)
    at, found = START, []
    for end, _ in batches(buffer, Source(buffer, Server(sent, losses)), START, Position(Lsn(600)), forever([step])):
        found += asked(buffer, at, end)
        at = end
    assert found == [(300, ORDERS), (500, ORDERS)]


def test_a_request_stays_until_spark_is_done_with_it_and_is_no_quiet_end(caplog: pytest.LogCaptureFixture) -> None:
    buffer, at = buffer_from(), Position(Lsn(300))
    source = Source(buffer, Server([Asking(300, 0)]))
    source.receive(20)
    assert buffer.end_of_batch(START, at, only_rows=True) == at
    for _ in range(2):
        assert asked(buffer, START, at) == [(300, ORDERS)], "a batch may be asked for again"
    assert asked(buffer, at, Position(Lsn(400))) == asked(buffer, START, Position.before(300)) == []
    buffer.drop(at)
    assert asked(buffer, START, at) == []
    (warning,) = caplog.messages
    assert warning.startswith("the pgcdc message in the commit at 0/12C is ignored: it is not an object")


def test_a_request_behind_what_could_not_be_decoded_for_a_moment_comes_once() -> None:
    failures = [TransientError("the server is starting up")] * 2

    def fail(of: SentRelation, position: Position) -> Described | None:
        if failures:
            raise failures.pop()
        return match(of, position)

    buffer = buffer_from(how=fail)
    end = Position(Lsn(300))
    sent = [Transaction(200, 2), Asking(300, 3)]
    found = list(batches(buffer, Source(buffer, Server(sent)), START, end, forever([100])))
    assert not failures
    assert [row for _, rows in found for row in rows] == [row for t in sent for row in t.expected()]
    assert asked(buffer, Position(Lsn(200)), end) == [(300, ORDERS)]
