"""The thread that follows a slot: it receives ahead of Spark, confirms what Spark has committed, and connects again.

Where batches end is in test_buffer.py. Real servers are in integration/.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import BY_KEY, TYPED, described
from transactions import OTHER_RELATION, Server, Session, Transaction, keepalive, match
from trials import examples

from pg_cdc_source.errors import ConnectError, PgCdcError, SchemaChangedError, ServerSetupError, TransientError
from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.replication import DecodingError
from pg_cdc_source.protocol.changes import ChangeDecoder, Described
from pg_cdc_source.protocol.ipc import from_ipc
from pg_cdc_source.protocol.streamed import StreamedTransaction
from pg_cdc_source.protocol.transactions import SentRelation, TransactionAssembler
from pg_cdc_source.stream.received import slot_reader
from pg_cdc_source.stream.received.batches import Limits
from pg_cdc_source.stream.received.buffer import ChangeBuffer
from pg_cdc_source.stream.received.chunks import ChunkStore
from pg_cdc_source.stream.received.slot_reader import SlotReader
from pg_cdc_source.stream.received.spill import Spill

pytestmark = pytest.mark.usefixtures("accelerated")

START = Position.before(100)
UNLIMITED = Position(Lsn(1 << 40))
LIMITS = Limits(100, 1 << 30)


@contextlib.contextmanager
def reading(
    server: Any,
    limits: Limits = LIMITS,
    how: Any = match,
    *,
    chunk: int = 1000,
    safe: Position = START,
    start: Position = START,
) -> Iterator[SlotReader]:
    buffer = ChangeBuffer(
        TransactionAssembler(start, lambda: StreamedTransaction(Spill), messages_per_chunk=chunk),
        ChangeDecoder(TYPED, TYPED.schema([BY_KEY])),
        how,
        ChunkStore(start),
        limits,
        "s",
    )
    reader = SlotReader(server.connect, server, buffer, safe)
    try:
        yield reader
    finally:
        reader.close()


def wait_until_told(server: Server, count: int) -> None:
    """Wait until the server is told where the stream stands, so many times more."""
    told, deadline = len(server.confirmed), time.monotonic() + 60
    while len(server.confirmed) < told + count:
        assert time.monotonic() < deadline, f"told {len(server.confirmed) - told} of {count} times within 60 s"
        time.sleep(0.01)


def rows_between(reader: SlotReader, start: Position, end: Position) -> list[tuple[int, int, int]]:
    rows = [row for chunk in reader.batch(start, end) for row in from_ipc(chunk.data()).to_pylist()]
    return [(row["_commit_lsn"], row["_seq"], row["id"]) for row in rows]


def drain(
    reader: SlotReader, last: Position, *, only_full: bool = False
) -> list[tuple[Position, list[tuple[int, int, int]]]]:
    """Cut batches until ``last`` is reached, as Spark would: (end, rows) of each."""
    batches: list[tuple[Position, list[tuple[int, int, int]]]] = []
    start, deadline = START, time.monotonic() + 60
    while start < last:
        assert time.monotonic() < deadline, (start, last)
        end = reader.cut(start, last, patience=0.05, only_full=only_full)
        if end > start:
            batches.append((end, rows_between(reader, start, end)))
            reader.release(start)
            start = end
    return batches


@examples(10)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 60), st.booleans()), min_size=1, max_size=8),
    limit=st.integers(1, 40),
    losses=st.lists(st.integers(1, 60), max_size=2),
    only_full=st.booleans(),
)
def test_every_row_comes_once_and_only_ends_of_batches_are_confirmed(
    sizes: list[tuple[int, bool]], limit: int, losses: list[int], only_full: bool
) -> None:
    sent = [Transaction(100 * (i + 1), rows, streamed) for i, (rows, streamed) in enumerate(sizes)]
    server = Server(sent, losses)
    with reading(server, Limits(limit, 1 << 30), chunk=20) as reader:
        batches = drain(reader, Position(Lsn(sent[-1].lsn)), only_full=only_full)
    assert [row for _, rows in batches for row in rows] == [row for t in sent for row in t.expected()]
    # What was confirmed was released before, and is where a batch ended.
    ends = {START.next_lsn, *(end.next_lsn for end, _ in batches)}
    assert set(server.confirmed) <= ends
    assert server.confirmed == sorted(server.confirmed)


class Slow(Server):
    """One whose messages come one by one."""

    def connect(self, received: Position) -> Any:
        session = super().connect(received)

        class OneByOne(Session):
            def receive(self, rows: Any = None) -> bytes | None:
                return super().receive(None)

        session.__class__ = OneByOne
        return session


def test_batches_are_full_where_nobody_waits_for_the_first_rows() -> None:
    sent = [Transaction(100 * (i + 1), 10) for i in range(22)]
    with reading(Slow(sent), Limits(50, 1 << 30)) as reader:
        batches = drain(reader, Position(Lsn(sent[-1].lsn)), only_full=True)
    assert [len(rows) for _, rows in batches] == [50, 50, 50, 50, 20]


def test_rows_of_a_commit_that_were_read_before_are_passed_over_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They fill the buffer, and decoding shows that none of them is wanted."""
    monkeypatch.setattr(slot_reader, "CONFIRM_SECONDS", 120.0)
    monkeypatch.setattr(slot_reader, "MESSAGES_PER_BURST", 10)
    sent = Transaction(200, 600)
    lsn, seq, _ = sent.expected()[499]
    start = Position(Lsn(lsn), seq)
    with reading(Slow([sent]), Limits(10, 1 << 30), start=start) as reader:
        end = reader.cut(start, None, patience=30)
        assert rows_between(reader, start, end) == sent.expected()[500:510]


def test_without_limits_everything_up_to_a_position_is_read() -> None:
    sent = [Transaction(100 * (i + 1), 500) for i in range(20)]
    end = Position(Lsn(1500))
    with reading(Server(sent), Limits(10, 1 << 30)) as reader:
        reader.read_through(end, lambda: None)
        assert rows_between(reader, START, end) == [row for t in sent[:15] for row in t.expected()]


def test_a_reader_whose_driver_is_gone_does_not_wait() -> None:
    def require_driver() -> None:
        raise TransientError("the driver's JVM is gone")

    with (
        reading(Server([Transaction(100, 1)])) as reader,
        pytest.raises(TransientError, match="the driver's JVM is gone"),
    ):
        reader.read_through(Position(Lsn(1 << 30)), require_driver)


def test_a_reader_waits_while_nobody_takes_its_rows() -> None:
    sent = [Transaction(100 * (i + 1), 100) for i in range(1000)]
    server = Server(sent)
    with reading(server, Limits(1000, 1 << 30), chunk=100) as reader:
        end = reader.cut(START, None, patience=60)
        # It goes on telling the server that it is there.
        wait_until_told(server, 2)
        far = reader.batch(START, UNLIMITED)
    assert len(rows := [row for chunk in far for row in from_ipc(chunk.data()).to_pylist()]) < 5000
    assert rows[0]["_commit_lsn"] == 100
    assert end > START


class Changed(Transaction):
    """A commit whose relation changes after its third row."""

    def messages(self) -> list[bytes]:
        messages = super().messages()
        return [*messages[:5], OTHER_RELATION, *messages[5:]]


def test_what_came_before_an_error_is_handed_out_first() -> None:
    """The relation changes in the middle of the third commit."""

    def refuse(of: SentRelation, position: Position) -> Described | None:
        if of.relation.columns[2].name == "c":
            raise SchemaChangedError("column b was renamed")
        return described(BY_KEY)

    sent = [Transaction(100, 2), Transaction(200, 2), Changed(300, 6), Transaction(400, 1)]
    with reading(Server(sent), how=refuse) as reader:
        found, at = [], START
        error = None
        while error is None:
            try:
                end = reader.cut(at, None, patience=1)
            except SchemaChangedError as raised:
                error = raised
            else:
                found += rows_between(reader, at, end)
                at = end
    assert found == [*sent[0].expected(), *sent[1].expected(), *Transaction(300, 3).expected()]
    assert at == Position(Lsn(300), Transaction(300, 3).expected()[-1][1])


def test_what_could_not_be_decoded_for_a_moment_comes_again() -> None:
    failures = [TransientError("the server is starting up")] * 3

    def fail(of: SentRelation, position: Position) -> Described | None:
        if of.relation.columns[2].name == "c" and failures:
            raise failures.pop()
        return match(of, position)

    sent = [Transaction(100, 2), Changed(200, 6), Transaction(300, 4)]
    server = Server(sent)
    with reading(server, how=fail) as reader:
        batches = drain(reader, Position(Lsn(300)))
    assert not failures
    assert server.sessions == 4
    assert [row for _, rows in batches for row in rows] == [row for t in sent for row in t.expected()]


class Refusing(Server):
    """Lets nobody in."""

    attempts = 0

    def connect(self, received: Position) -> Any:
        self.attempts += 1
        raise TransientError("the server is starting up")


def test_a_reader_gives_up_after_its_time_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_reader, "AWAY", Backoff(0.01, longest_seconds=0.02, within_seconds=0.5))
    server = Refusing([])
    with reading(server) as reader, pytest.raises(TransientError, match="the server is starting up"):
        reader.cut(START, None, patience=60)
    assert server.attempts > 3


class FailingOver(Server):
    """Its second session ends without bringing anything, as do those that are let in again while it changes over."""

    def connect(self, received: Position) -> Any:
        self.sessions += 1
        if self.sessions in (2, 3, *range(5, 30)):
            raise TransientError("the server is starting up")
        return Session(self, received, 1 if self.sessions in (1, 4) else -1)


def test_a_server_that_fails_over_is_waited_for_longer_than_one_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_reader, "RECONNECTING", Backoff(0.01, longest_seconds=0.02, within_seconds=0.05))
    monkeypatch.setattr(slot_reader, "AWAY", Backoff(0.01, longest_seconds=0.02, within_seconds=30))
    with reading(server := FailingOver([Transaction(200, 3)])) as reader:
        assert reader.cut(START, None, patience=60, only_rows=True) == Position(Lsn(200))
    assert server.sessions == 30


class Crashing(Server):
    """Its process crashes in each session, and lets nobody in for a moment then."""

    def connect(self, received: Position) -> Any:
        self.sessions += 1
        if self.sessions % 2 == 0:
            raise TransientError("the server is starting up")
        return Session(self, received, 1)


def test_a_server_that_crashes_in_each_session_ends_the_stream_as_one_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slot_reader, "RECONNECTING", Backoff(0.01, longest_seconds=0.02, within_seconds=0.3))
    monkeypatch.setattr(slot_reader, "AWAY", Backoff(0.01, longest_seconds=0.02, within_seconds=30))
    with (
        reading(Crashing([Transaction(200, 3)])) as reader,
        pytest.raises(TransientError, match=r"the session was lost; so all sessions ended .* nothing behind"),
    ):
        reader.cut(START, None, patience=20)


class RefusingForGood(Server):
    """Its first session is lost, and each other one is refused with ``why``."""

    why: PgCdcError = ServerSetupError("number of requested standby connections exceeds max_wal_senders")

    def connect(self, received: Position) -> Any:
        self.sessions += 1
        if self.sessions > 1:
            raise self.why
        return Session(self, received, 1)


def test_a_server_that_refuses_for_good_what_it_let_in_before_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_reader, "RECONNECTING", Backoff(0.01, longest_seconds=0.02, within_seconds=0.3))
    with (
        reading(RefusingForGood([Transaction(200, 3)])) as reader,
        pytest.raises(ServerSetupError, match="exceeds max_wal_senders"),
    ):
        reader.cut(START, None, patience=20)


class Failing(Server):
    """Answers in each session, also brings a commit of another one's, and then fails at the same place."""

    def connect(self, received: Position) -> Any:
        session = super().connect(received)
        session.messages = iter([keepalive(50), *Transaction(200, 2).messages(), None, keepalive(200), None])

        class Poisoned(Session):
            def receive(self, rows: Any = None) -> bytes | None:
                try:
                    return super().receive(rows)
                except StopIteration:
                    raise TransientError("invalid memory alloc request size", remedy="see its log") from None

        session.__class__ = Poisoned
        return session


def test_an_error_that_comes_back_in_each_session_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_reader, "RECONNECTING", Backoff(0.01, longest_seconds=0.02, within_seconds=0.3))
    server = Failing([])
    with reading(server) as reader:
        assert reader.cut(START, None, patience=60) == Position(Lsn(200))
        with pytest.raises(TransientError, match=r"invalid memory alloc .* nothing behind 0/C8 has come") as caught:
            reader.cut(Position(Lsn(200)), None, patience=60)
    assert caught.value.remedy == "see its log"
    assert server.sessions > 3


class Ending(Server):
    """Each session is quiet for longer than a reader tries, and then ends with ``error``, ten of them at most."""

    error = TransientError("")

    def connect(self, received: Position) -> Any:
        session = super().connect(received)
        error, ends = (self.error if self.sessions <= 10 else None), time.monotonic() + 0.15

        class Quiet(Session):
            def receive(self, rows: Any = None) -> bytes | None:
                if error is not None and time.monotonic() > ends:
                    raise error
                return None

        session.__class__ = Quiet
        return session


def test_long_sessions_that_cannot_decode_end_the_stream_and_those_that_a_network_drops_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slot_reader, "RECONNECTING", Backoff(0.01, longest_seconds=0.02, within_seconds=0.1))
    stuck = Ending([])
    stuck.error = DecodingError("could not map filenumber")
    with reading(stuck) as reader, pytest.raises(TransientError, match=r"could not map .* nothing behind"):
        reader.cut(START, None, patience=60)
    assert stuck.sessions == 2
    dropped = Ending([])
    dropped.error = TransientError("connection reset by peer")
    with reading(dropped) as reader:
        until = time.monotonic() + 60
        while dropped.sessions <= 10:
            assert reader.cut(START, None, patience=0.05) == START
            assert time.monotonic() < until


class WithoutRoom(Server):
    """Its first session is lost, and counts as a walsender for a while; or the server has no address for a while."""

    why: PgCdcError = ServerSetupError("number of requested standby connections exceeds max_wal_senders")

    def connect(self, received: Position) -> Any:
        session = super().connect(received)
        if self.sessions in (2, 3):
            raise self.why
        return session


NO_ADDRESS = ConnectError("could not translate host name")
NO_ADDRESS.has_no_address = True


@pytest.mark.parametrize("why", [WithoutRoom.why, NO_ADDRESS])
def test_a_server_has_time_to_find_room_for_a_session_that_was_lost(why: PgCdcError) -> None:
    server = WithoutRoom([Transaction(200, 3)], losses=[2])
    server.why = why
    with reading(server) as reader:
        reader.read_through(Position(Lsn(200)), lambda: None)
    assert server.sessions == 4


def test_a_server_that_does_not_let_in_any_more_is_not_asked_again() -> None:
    server = WithoutRoom([Transaction(200, 3)], losses=[2])
    server.why = ConnectError("password authentication failed")
    with reading(server) as reader, pytest.raises(ConnectError, match="password"):
        reader.read_through(Position(Lsn(200)), lambda: None)
    assert server.sessions == 2


class Silent(Server):
    """Says nothing in its first session."""

    def connect(self, received: Position) -> Any:
        session = super().connect(received)
        if self.sessions == 1:
            session.messages = iter(lambda: None, 1)
        return session


def test_a_server_that_says_nothing_any_more_is_asked_in_another_session(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slot_reader, "SILENT_SECONDS", 0.2)
    with reading(Silent([Transaction(200, 3)])) as reader:
        reader.read_through(Position(Lsn(200)), lambda: None)
    assert "has said nothing for 0.2 s; connecting again" in caplog.text


def test_a_large_message_that_is_still_coming_in_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_reader, "SILENT_SECONDS", 0.2)

    def wait(self: Session, wake: socket.socket, seconds: float) -> bool:
        select.select([wake], [], [], 0.01)
        return True

    monkeypatch.setattr(Session, "wait", wait)
    server = Silent([Transaction(200, 3)])
    with reading(server) as reader:
        assert reader.cut(START, None, patience=1) == START
    assert server.sessions == 1


def test_a_server_whose_timeout_is_long_or_off_may_say_nothing_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_reader, "SILENT_SECONDS", 0.2)
    for timeout in (3600.0, 0.0):
        monkeypatch.setattr(Session, "sender_timeout_seconds", timeout)
        server = Silent([Transaction(200, 3)])
        with reading(server) as reader:
            assert reader.cut(START, None, patience=1) == START
        assert server.sessions == 1


class ShuttingDown(Server):
    """Asks with every answer."""

    def connect(self, received: Position) -> Any:
        session = super().connect(received)

        class Asking(Session):
            def receive(self, rows: Any = None) -> bytes | None:
                return keepalive(50, wants_answer=True)

        session.__class__ = Asking
        return session


def test_a_server_that_shuts_down_is_not_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_reader, "RECONNECTING", Backoff(0.01, longest_seconds=0.02, within_seconds=0.1))
    with reading(ShuttingDown([])) as reader, pytest.raises(TransientError, match="the server is shutting down"):
        reader.cut(START, None, patience=60, only_rows=True)


class Closing(Server):
    """Shuts down once."""

    looks = 0

    def look(self) -> None:
        self.looks += 1
        if self.looks == 1:
            raise TransientError("the server shuts down")


def test_a_full_reader_leaves_a_server_that_shuts_down(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slot_reader, "CONFIRM_SECONDS", 0.05)
    server = Closing([Transaction(lsn, 10) for lsn in range(200, 1200, 100)])
    with reading(server, Limits(10, 1 << 30)) as reader:
        deadline = time.monotonic() + 30
        while server.sessions < 2:
            assert time.monotonic() < deadline, "it stays"
            time.sleep(0.01)
        assert "the server shuts down; connecting again" in caplog.text
        end = Position(Lsn(1100))
        reader.read_through(end, lambda: None)
        assert len(rows_between(reader, START, end)) == 100


def test_a_reader_that_begins_behind_what_is_safe_confirms_no_more_than_that() -> None:
    server = Server([Transaction(200, 3)])
    with reading(server, safe=Position.before(50)) as reader:
        reader.read_through(Position(Lsn(200)), lambda: None)
    assert set(server.confirmed) == {50}


def test_a_position_that_may_lie_within_a_record_is_not_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    # The server is told sooner, so that it is told often.
    monkeypatch.setattr(slot_reader, "CONFIRM_SECONDS", 0.05)
    monkeypatch.setattr(slot_reader, "IDLE_ASK_SECONDS", 0.05)
    server = Server([Transaction(200, 3), Transaction(8192 + 300, 1)])
    with reading(server) as reader:
        reader.read_through(Position(Lsn(8192 + 300)), lambda: None)
        reader.release(Position(Lsn(200)))
        wait_until_told(server, 2)
        assert server.confirmed[-1] == 201
        reader.release(Position.before(8192))
        wait_until_told(server, 2)
        assert server.confirmed[-1] == 201
        reader.release(Position(Lsn(8192 + 300)))
        wait_until_told(server, 2)
        assert server.confirmed[-1] == 8192 + 301
    with reading(server := Server([])) as reader:
        reader.release(Position.before(8192))
        wait_until_told(server, 2)
    assert set(server.confirmed) == {int(START.next_lsn)}
