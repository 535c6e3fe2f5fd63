"""The slot's reader on a scripted stream: batches are cut at their limits, and nothing is missing or twice.

A real server decides itself when a message arrives and a session ends. Here a script does, so that every order of
events can be tried. Real servers are in integration/.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import BY_KEY, HEADER, TYPED, described, insert, update

from pg_cdc_source.errors import SchemaChangedError, TransientError
from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.protocol.changes import ChangeDecoder, Described
from pg_cdc_source.protocol.pgoutput import ROWS, RelationMessage
from pg_cdc_source.stream import slot_reader, spill
from pg_cdc_source.stream.slot_reader import Limits, SlotReader, from_ipc
from pg_cdc_source.stream.spill import Spill
from pg_cdc_source.values.wire import Collected

SCHEMA = TYPED.schema([BY_KEY])
RELATION = (
    HEADER
    + b"R"
    + struct.pack(">I", BY_KEY.oid)
    + b"public\0by_key\0d"
    + struct.pack(">H", 3)
    + b"".join(
        struct.pack(">B", key) + name + b"\0" + struct.pack(">Ii", oid, typmod)
        for key, name, (oid, typmod) in zip((1, 0, 0), (b"id", b"a", b"b"), BY_KEY.type_oids, strict=True)
    )
)

pytestmark = pytest.mark.usefixtures("accelerated")
UNLIMITED = Position(Lsn(1 << 40))


def begin(lsn: int, xid: int = 7) -> bytes:
    return HEADER + b"B" + struct.pack(">QqI", lsn, 0, xid)


def commit(lsn: int) -> bytes:
    return HEADER + b"C" + struct.pack(">BQQq", 0, lsn, lsn + 1, 0)


def keepalive(end: int) -> bytes:
    return struct.pack(">cQQ?", b"k", end, 0, False)


@dataclass(frozen=True)
class Transaction:
    """A commit of ``rows`` rows; ``streamed`` before it commits, with rows of a subtransaction that is rolled back."""

    lsn: int
    rows: int
    streamed: bool = False

    def messages(self) -> list[bytes]:
        changes = [self._change(i) for i in range(self.rows)]
        if not self.streamed:
            return [begin(self.lsn), RELATION, *changes, commit(self.lsn)]
        xid, rolled_back = self.lsn, self.lsn + 1
        half = len(changes) // 2
        start, stop = HEADER + b"S" + struct.pack(">IB", xid, 1), HEADER + b"E"
        return [
            start,
            *(self._in_stream(message, xid) for message in (RELATION, *changes[:half])),
            stop,
            keepalive(self.lsn),
            start,
            *(self._in_stream(message, rolled_back) for message in changes),
            *(self._in_stream(message, xid) for message in changes[half:]),
            stop,
            HEADER + b"A" + struct.pack(">II", xid, rolled_back),
            HEADER + b"c" + struct.pack(">IBQQq", xid, 0, self.lsn, self.lsn + 1, 0),
        ]

    def _change(self, i: int) -> bytes:
        values = (str(i), f"row {self.lsn}", "0.50")
        return update(BY_KEY.oid, values) if i % 3 == 2 else insert(BY_KEY.oid, values)

    @staticmethod
    def _in_stream(message: bytes, xid: int) -> bytes:
        at = len(HEADER) + 1
        return message[:at] + struct.pack(">I", xid) + message[at:]

    def expected(self) -> list[tuple[int, int, int]]:
        """(LSN, number, id) of each row: an update takes two numbers."""
        found, seq = [], 0
        for i in range(self.rows):
            seq += 2 if i % 3 == 2 else 1
            found.append((self.lsn, seq, i))
        return found


@dataclass
class Server:
    """Sends transactions from where a session starts; ``losses`` are the numbers of messages after which one ends."""

    transactions: Sequence[Transaction]
    losses: list[int] = field(default_factory=list)
    confirmed: list[int] = field(default_factory=list)
    sessions: int = 0

    def connect(self, received: Position) -> Any:
        self.sessions += 1
        sent = [t for t in self.transactions if t.lsn >= received.next_lsn]
        return Session(self, sent, self.losses.pop() if self.losses else -1)


class Session:
    def __init__(self, server: Server, transactions: Sequence[Transaction], lost_after: int) -> None:
        self.server = server
        self.messages = self._script(transactions)
        self.rest = lost_after

    def _script(self, transactions: Sequence[Transaction]) -> Iterator[bytes | None]:
        for transaction in transactions:
            yield from transaction.messages()
            yield None
        last = max((t.lsn for t in self.server.transactions), default=0)
        while True:
            yield keepalive(last + 10)
            yield None

    def receive(self, rows: Collected | None = None) -> bytes | None:
        while True:
            if self.rest == 0:
                raise TransientError("the session was lost")
            self.rest -= 1
            message = next(self.messages)
            if rows is None or message is None or message[len(HEADER)] not in ROWS:
                return message
            rows.append(message)
            if rows.is_full:
                return None

    def confirm(self, flushed: Lsn, *, ask: bool) -> None:
        self.server.confirmed.append(int(flushed))

    def wait(self, wake: socket.socket, seconds: float) -> None:
        with contextlib.suppress(BlockingIOError):
            wake.recv(100)

    def close(self) -> None:
        pass


def describe(relation: RelationMessage, lsn: Lsn) -> Described | None:
    return described(BY_KEY) if relation.oid == BY_KEY.oid else None


@contextlib.contextmanager
def reading(server: Server, limits: Limits, start: Position, how: Any = describe) -> Iterator[SlotReader]:
    decoder = ChangeDecoder(TYPED, SCHEMA, len(HEADER))
    reader = SlotReader(server.connect, how, decoder, SCHEMA, start, limits)
    try:
        yield reader
    finally:
        reader.close()


def rows_between(reader: SlotReader, start: Position, end: Position) -> list[tuple[int, int, int]]:
    rows = [row for chunk in reader.batch(start, end) for row in from_ipc(chunk.data()).to_pylist()]
    return [(row["_commit_lsn"], row["_seq"], row["id"]) for row in rows]


def drain(
    reader: SlotReader, limits: Limits, start: Position, last: Position
) -> list[tuple[Position, list[tuple[int, int, int]]]]:
    """Cut batches until ``last`` is reached, as Spark would: (end, rows) of each."""
    batches: list[tuple[Position, list[tuple[int, int, int]]]] = []
    deadline = time.monotonic() + 60
    while start < last:
        assert time.monotonic() < deadline, (start, last)
        end = reader.cut(start, limits, last, patience=0.05)
        if end > start:
            batches.append((end, rows_between(reader, start, end)))
            assert batches[-1][1] == rows_between(reader, start, end), "a batch can be handed out again"
            reader.release(start)
            start = end
    return batches


class Files:
    """Counts the files that are open."""

    def __init__(self) -> None:
        self.open = 0

    def new(self) -> Spill:
        files = self

        class Counted(Spill):
            def close(self) -> None:
                files.open -= 1
                super().close()

        self.open += 1
        return Counted()


transactions = st.lists(st.tuples(st.integers(0, 12) | st.integers(0, 60), st.booleans()), min_size=1, max_size=8).map(
    lambda sizes: [Transaction(100 * (i + 1), rows, streamed) for i, (rows, streamed) in enumerate(sizes)]
)


@settings(max_examples=60, deadline=None)
@given(sent=transactions, limit=st.integers(1, 40), chunk=st.integers(1, 30), data=st.data())
def test_batches_hold_every_row_once_and_end_between_commits(
    sent: list[Transaction], limit: int, chunk: int, data: st.DataObject
) -> None:
    losses = data.draw(st.lists(st.integers(1, 60), max_size=3))
    server = Server(sent, losses)
    limits = Limits(limit, 1 << 30)
    start, last = Position.before(100), Position(Lsn(sent[-1].lsn))
    files = Files()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_reader, "MESSAGES_PER_CHUNK", chunk)
        patch.setattr(slot_reader, "MEMORY_BYTES", data.draw(st.sampled_from([0, 5000, 1 << 30])))
        patch.setattr(spill, "FILE_BYTES", 4000)
        # Of a few messages, a block may hold nothing but what was rolled back.
        patch.setattr(spill, "MESSAGES_PER_BLOCK", data.draw(st.integers(1, 8)))
        patch.setattr(slot_reader, "Spill", files.new)
        with reading(server, limits, start) as reader:
            batches = drain(reader, limits, start, last)
    assert files.open == 0
    assert [row for _, rows in batches for row in rows] == [row for t in sent for row in t.expected()]
    sizes = {t.lsn: t.rows for t in sent}
    for end, rows in batches:
        assert len(rows) <= limit
        if end.seq != last.seq:
            assert sizes[end.lsn] > limit, "within a commit only where it is larger than the limit"
    # What was confirmed was released before, and is where a batch ended.
    ends = {start.next_lsn, *(end.next_lsn for end, _ in batches)}
    assert set(server.confirmed) <= ends
    assert server.confirmed == sorted(server.confirmed)


@settings(max_examples=30, deadline=None)
@given(sent=transactions, data=st.data())
def test_a_reader_goes_on_from_any_row(sent: list[Transaction], data: st.DataObject) -> None:
    expected = [row for t in sent for row in t.expected()]
    at = data.draw(st.sampled_from([Position.before(100), *(Position(Lsn(lsn), seq) for lsn, seq, _ in expected)]))
    last = Position(Lsn(sent[-1].lsn))
    limits = Limits(1000, 1 << 30)
    with reading(Server(sent), limits, at) as reader:
        batches = drain(reader, limits, at, last)
    rest = [row for row in expected if Position(Lsn(row[0]), row[1]) > at]
    assert [row for _, rows in batches for row in rows] == rest


def test_without_limits_everything_up_to_a_position_is_read() -> None:
    sent = [Transaction(100 * (i + 1), 500) for i in range(20)]
    start, end = Position.before(100), Position(Lsn(1500))
    with reading(Server(sent), Limits(10, 1 << 30), start) as reader:
        reader.read_through(end, alive=lambda: True)
        assert rows_between(reader, start, end) == [row for t in sent[:15] for row in t.expected()]


def test_a_reader_waits_while_nobody_takes_its_rows() -> None:
    sent = [Transaction(100 * (i + 1), 100) for i in range(1000)]
    limits = Limits(1000, 1 << 30)
    start = Position.before(100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_reader, "MESSAGES_PER_CHUNK", 100)
        server = Server(sent)
        with reading(server, limits, start) as reader:
            end = reader.cut(start, limits, None, patience=60)
            told, deadline = len(server.confirmed), time.monotonic() + 60
            # It goes on telling the server that it is there.
            while len(server.confirmed) < told + 2:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            far = reader.batch(start, UNLIMITED)
    assert len(rows := [row for chunk in far for row in from_ipc(chunk.data()).to_pylist()]) < 5000
    assert rows[0]["_commit_lsn"] == 100
    assert end > start


def test_what_came_before_an_error_is_handed_out_first() -> None:
    """The relation changes in the middle of the third commit."""
    other = RELATION.replace(b"b\0", b"c\0")
    third = Transaction(300, 6).messages()

    class Changed(Transaction):
        def messages(self) -> list[bytes]:
            return [*third[:5], other, *third[5:]]

    def refuse(relation: RelationMessage, lsn: Lsn) -> Described | None:
        if relation.columns[2].name == "c":
            raise SchemaChangedError("column b was renamed")
        return described(BY_KEY)

    sent = [Transaction(100, 2), Transaction(200, 2), Changed(300, 6), Transaction(400, 1)]
    limits, start = Limits(100, 1 << 30), Position.before(100)
    with reading(Server(sent), limits, start, refuse) as reader:
        found, at = [], start
        error = None
        while error is None:
            try:
                end = reader.cut(at, limits, None, patience=1)
            except SchemaChangedError as raised:
                error = raised
            else:
                found += rows_between(reader, at, end)
                at = end
    assert found == [*sent[0].expected(), *sent[1].expected(), *Transaction(300, 3).expected()]
    assert at == Position(Lsn(300), 4)
