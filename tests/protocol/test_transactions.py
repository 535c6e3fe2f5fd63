"""Transactions are assembled from messages: every change once, with its commit and number, whatever ends a session."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import BY_KEY, HEADER, insert, truncate
from transactions import (
    OTHER_RELATION,
    RELATION,
    STREAM_STOP,
    Transaction,
    begin,
    commit,
    in_stream,
    keepalive,
    some_transactions,
    stream_abort,
    stream_commit,
    stream_start,
)
from trials import examples

from pg_cdc_source.errors import WireError
from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.protocol import pgoutput
from pg_cdc_source.protocol.streamed import StreamedTransaction
from pg_cdc_source.protocol.transactions import Changes, TransactionAssembler
from pg_cdc_source.protocol.tuples import tags_and_oids
from pg_cdc_source.protocol.walsender import Keepalive, read_starts

pytestmark = pytest.mark.usefixtures("accelerated")

START = Position.before(100)
ROW = insert(BY_KEY.oid, ("1", "a", "0.50"))


class Blocks:
    """Keeps blocks in memory; counts those that are open."""

    opened = 0

    def __init__(self) -> None:
        self._data: list[bytes] = []
        Blocks.opened += 1

    def append(self, data: bytes) -> tuple[int, int]:
        self._data.append(data)
        return len(self._data) - 1, len(data)

    def read(self, place: tuple[int, int]) -> bytes:
        return self._data[place[0]]

    def close(self) -> None:
        Blocks.opened -= 1


def assembler(
    start: Position = START, chunk: int = 1000, block: int = 1000, prefixes: tuple[str, ...] = ("outbox",)
) -> TransactionAssembler:
    return TransactionAssembler(
        start, lambda: StreamedTransaction(Blocks, block), prefixes=prefixes, messages_per_chunk=chunk
    )


Row = tuple[int, int, int | None]


def rows_of(changes: Changes) -> tuple[list[Row], int]:
    """(LSN, number, id) of the rows that were not handed out before, and the last number; messages have no id."""
    _, tags, _ = tags_and_oids(changes.messages, len(HEADER))
    records = read_starts(changes.messages) - (tags == pgoutput.MESSAGE)
    rows: list[Row] = []
    at = seq = 0
    for run in changes.runs:
        seq = run.after_seq
        for i in sorted(range(at, at + run.messages), key=lambda i: records[i]):
            is_message = tags[i] == pgoutput.MESSAGE
            # Those of one record count on from it.
            seq = max(seq, int(records[i]) - 1) + (2 if tags[i] == pgoutput.UPDATE else 1)
            # Tag, oid, "N", number of columns, "t", length: the id is what comes behind.
            number = changes.messages.octets(i)[len(HEADER) + 13 :].split(b"t")[0]
            if Position(run.commit_lsn, seq) > changes.after:
                rows.append((int(run.commit_lsn), seq, None if is_message else int(number)))
        at += run.messages
    assert at == len(changes.messages)
    return rows, seq


def given_by(what: TransactionAssembler, messages: Iterator[bytes], *, unseen: bool) -> Iterator[Changes]:
    """Feed messages, those of rows ``unseen`` where they may be; yields what becomes due."""
    for message in messages:
        rows = what.rows
        if unseen and rows is not None and message[len(HEADER)] in pgoutput.ROWS:
            rows.append(message)
            event: Changes | Keepalive | None = what.make_room() if rows.is_full else None
        else:
            event = what.receive(message)
        while True:
            if isinstance(event, Changes):
                yield event
            if not what.is_replaying:
                break
            event = what.replay()


@examples(200)
@given(
    sent=some_transactions,
    chunk=st.integers(1, 30),
    block=st.integers(1, 8),
    losses=st.lists(st.integers(1, 60), max_size=3),
    unseen=st.booleans(),
    asked=st.sets(st.integers(0, 60)),
)
def test_every_change_comes_once_with_its_commit_and_number(
    sent: list[Transaction], chunk: int, block: int, losses: list[int], unseen: bool, asked: set[int]
) -> None:
    what = assembler(chunk=chunk, block=block)
    found: list[Row] = []
    opened = Blocks.opened

    def keep(changes: Changes | None) -> None:
        if changes is not None:
            rows, last_seq = rows_of(changes)
            found.extend(rows)
            what.kept(changes, last_seq)

    for lost_after in [*losses, None]:
        keep(what.take())
        what.begin_session()
        script = [m for t in sent for m in t.sent_after(what.received)][:lost_after]
        for i, message in enumerate(script):
            for changes in given_by(what, iter([message]), unseen=unseen):
                keep(changes)
            if i in asked:
                keep(what.take())
                # What is complete was taken, and nothing of what goes on counts as complete.
                assert what.received >= what.complete
                assert [row for row in found if row[0] <= what.complete.lsn] == [
                    row for t in sent for row in t.expected() if row[0] <= what.complete.lsn
                ]
    keep(what.take())
    assert found == [row for t in sent for row in t.expected()]
    assert what.complete == what.received == Position(Lsn(sent[-1].lsn))
    what.close()
    assert Blocks.opened == opened


def test_a_keepalive_completes_what_is_before_it_only_between_transactions() -> None:
    what = assembler()
    assert what.receive(keepalive(150, wants_answer=True)) == Keepalive(Lsn(150), wants_answer=True)
    assert what.complete == what.received == Position.before(150)
    what.receive(begin(200))
    what.receive(keepalive(190))
    assert what.complete == Position.before(150)
    what.receive(commit(200))
    assert what.complete == Position(Lsn(200))
    # An older server's end never takes anything back.
    what.receive(keepalive(160))
    assert what.complete == Position(Lsn(200))


def test_a_position_waits_for_rows_that_were_collected_before_it() -> None:
    what = assembler()
    for message in (begin(200), RELATION, ROW, commit(200)):
        assert what.receive(message) is None
    assert (what.complete, what.received) == (Position(Lsn(200)), START)
    changes = what.take()
    assert changes is not None
    assert what.received == START
    what.kept(changes, 1)
    assert what.received == what.complete
    assert what.take() is None


def test_a_relation_that_changes_ends_what_was_collected_and_leaves_its_rows_their_columns() -> None:
    what = assembler()
    for message in (begin(200), RELATION, ROW, RELATION):
        assert what.receive(message) is None, "the same again is no change"
    changes = what.receive(OTHER_RELATION)
    assert isinstance(changes, Changes)
    what.kept(changes, 1)
    for message in (ROW, commit(200)):
        what.receive(message)
    later = what.take()
    assert later is not None
    assert [c.relation(BY_KEY.oid).relation.columns[2].name for c in (changes, later)] == ["b", "c"]
    assert later.after == Position(Lsn(200), 1)
    assert later.runs[0].after_seq == 1


def test_rows_of_a_relation_that_was_not_described_are_refused() -> None:
    what = assembler()
    for message in (begin(200), ROW, commit(200)):
        what.receive(message)
    changes = what.take()
    assert changes is not None
    with pytest.raises(WireError, match="expected a Relation message for oid 1 before its rows"):
        changes.relation(BY_KEY.oid)


def test_what_was_refused_is_not_complete_and_comes_again() -> None:
    what = assembler()
    for message in Transaction(200, 2).messages():
        what.receive(message)
    first = what.take()
    assert first is not None
    what.kept(first, 2)
    for message in (*Transaction(300, 3).messages(), *Transaction(400, 1).messages()):
        what.receive(message)
    refused = what.take()
    assert refused is not None
    what.refused(refused)
    assert what.complete == Position.before(300)
    assert what.received == Position(Lsn(200))
    what.begin_session()
    for lsn, rows in ((200, 2), (300, 3), (400, 1)):
        for message in Transaction(lsn, rows).messages():
            what.receive(message)
    again = what.take()
    assert again is not None
    assert rows_of(again)[0] == [*Transaction(300, 3).expected(), *Transaction(400, 1).expected()]


def test_a_commit_that_was_kept_in_part_comes_whole_and_only_its_rest_is_new() -> None:
    what = assembler(chunk=2, prefixes=())
    messages = Transaction(200, 4).messages()
    (changes,) = given_by(what, iter(messages[:4]), unseen=False)
    what.kept(changes, rows_of(changes)[1])
    what.begin_session()
    found = []
    for changes in given_by(what, iter(messages), unseen=True):
        rows, last_seq = rows_of(changes)
        found += rows
        what.kept(changes, last_seq)
    assert found == Transaction(200, 4).expected()[2:]


def test_a_streamed_transaction_that_is_rolled_back_leaves_nothing() -> None:
    what = assembler(block=1)
    opened = Blocks.opened
    for message in (stream_start(9), in_stream(RELATION, 9), in_stream(ROW, 9), STREAM_STOP):
        what.receive(message)
    assert Blocks.opened == opened + 1
    what.receive(stream_abort(9, 9))
    assert Blocks.opened == opened
    # Of one of which nothing came, PostgreSQL 18 says it too.
    what.receive(stream_abort(10, 11))
    assert what.take() is None
    assert what.complete == START


def test_a_relation_of_a_subtransaction_that_is_rolled_back_stays() -> None:
    what = assembler()
    block = (stream_start(9), in_stream(RELATION, 10), in_stream(ROW, 10), in_stream(ROW, 9), STREAM_STOP)
    for message in (*block, stream_abort(9, 10), stream_commit(9, 300)):
        what.receive(message)
    assert what.is_replaying
    assert what.replay() is None
    assert not what.is_replaying
    changes = what.take()
    assert changes is not None
    assert len(changes.messages) == 1
    assert changes.relation(BY_KEY.oid).lsn == 300


OLD, NEW = (pgoutput.read(message, len(HEADER)) for message in (RELATION, OTHER_RELATION))


def relations_of_commits(*messages: bytes) -> list[tuple[int, pgoutput.RelationMessage]]:
    """Each commit that has rows, with the relation that these are understood by."""
    what, found = assembler(), []
    for message in messages:
        found.append(what.receive(message))
        while what.is_replaying:
            found.append(what.replay())
    found.append(what.take())
    return [
        (run.commit_lsn, c.relation(BY_KEY.oid).relation) for c in found if isinstance(c, Changes) for run in c.runs
    ]


@pytest.mark.parametrize("has_rows", [True, False])
def test_a_relation_that_was_described_anew_while_a_transaction_waited_stays_so(has_rows: bool) -> None:
    """The server sends it no more: servers of before May 2025, after DDL of the other transaction."""
    waits = [in_stream(ROW, 9)] if has_rows else []
    assert relations_of_commits(
        *(stream_start(9), in_stream(RELATION, 9), *waits, STREAM_STOP),
        *(begin(200), OTHER_RELATION, ROW, commit(200), stream_commit(9, 300)),
        *(begin(400), ROW, commit(400)),
    ) == [(200, NEW), *([(300, OLD)] if has_rows else []), (400, NEW)]


def test_a_relation_that_a_transaction_described_last_holds_behind_its_commit() -> None:
    assert relations_of_commits(
        *(begin(200), RELATION, ROW, commit(200)),
        *(stream_start(9), in_stream(OTHER_RELATION, 9), in_stream(ROW, 9), STREAM_STOP),
        *(begin(250), ROW, commit(250), stream_commit(9, 300)),
        *(begin(400), ROW, commit(400)),
    ) == [(200, OLD), (250, OLD), (300, NEW), (400, NEW)]


def test_a_session_that_ends_before_a_replay_gives_up_its_file() -> None:
    what = assembler(block=1)
    opened = Blocks.opened
    for message in (stream_start(9), in_stream(RELATION, 9), STREAM_STOP, stream_commit(9, 300)):
        what.receive(message)
    assert what.is_replaying
    what.begin_session()
    assert not what.is_replaying
    assert Blocks.opened == opened


COMMIT_9 = stream_commit(9, 300)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([b"x" + HEADER[1:] + b"B"], "expected XLogData or a keepalive"),
        ([HEADER], "expected XLogData or a keepalive"),
        ([keepalive(1)[:-1]], "keepalive: expected 18 bytes, got 17"),
        ([ROW], "expected 'I' within a transaction"),
        ([truncate(1)], "expected 'T' within a transaction"),
        ([RELATION], "expected 'R' within a transaction"),
        ([begin(200), begin(300)], "expected Commit before the next Begin"),
        ([commit(200)], "expected the Commit of the transaction that began"),
        ([begin(200), commit(300)], "expected the Commit of the transaction that began"),
        ([COMMIT_9], "expected a transaction that was streamed, got 9"),
        ([stream_start(9), HEADER + b"I" + struct.pack(">H", 1), STREAM_STOP, COMMIT_9], "'I' in a stream: expected"),
    ],
)
def test_a_message_that_cannot_come_is_refused(messages: list[bytes], said: str) -> None:
    with pytest.raises(WireError, match=said):
        list(given_by(assembler(), iter(messages), unseen=False))
