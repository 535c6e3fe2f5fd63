"""Logical decoding messages: what their rows hold, what a request says, and which cannot come."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import BY_KEY, ENVELOPE, HEADER, NOTHING, described, insert, recorded, run
from mutated import mutated
from transactions import (
    RELATION,
    STREAM_STOP,
    begin,
    commit,
    in_stream,
    keepalive,
    message,
    stream_abort,
    stream_commit,
    stream_start,
)
from trials import examples

from pg_cdc_source.errors import TransientError, WireError
from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.protocol.changes import ChangeDecoder, Run
from pg_cdc_source.protocol.decoding_messages import Asked, content_as_json, read_request, write_request
from pg_cdc_source.protocol.streamed import StreamedTransaction
from pg_cdc_source.protocol.transactions import Changes, TransactionAssembler
from pg_cdc_source.stream.received.spill import Spill
from pg_cdc_source.values.wire import Messages

pytestmark = pytest.mark.usefixtures("accelerated")

START = Position.before(100)
ROW = insert(BY_KEY.oid, ("1", "a", "0.50"))
ASK = b'{"snapshot": ["public.orders"]}'


def fed(*messages: bytes, what: TransactionAssembler | None = None) -> TransactionAssembler:
    if what is None:
        what = TransactionAssembler(START, lambda: StreamedTransaction(Spill), prefixes=("outbox",))
    for one in messages:
        what.receive(one)
        while what.is_replaying:
            what.replay()
    return what


def taken(what: TransactionAssembler) -> list[tuple[int, int]]:
    """(LSN, messages) of what was collected."""
    changes = what.take()
    assert isinstance(changes, Changes)
    return [(int(one.commit_lsn), one.messages) for one in changes.runs]


# --- rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", ""),
        (b'{"a": "b\\n"}', '{"a": "b\\n"}'),
        ("ü \U0001f418 \x00 \x1f".encode(), "ü \U0001f418 \x00 \x1f"),
        (b"\xfc", "\\xfc"),
        (b"\x00\xff", "\\x00ff"),
        (b"\xed\xa0\x80", "\\xeda080"),
    ],
)
def test_a_content_is_a_json_string(content: bytes, text: str) -> None:
    assert json.loads(content_as_json(content)) == text


def test_a_message_of_a_subtransaction_stands_before_the_row_that_its_record_precedes() -> None:
    """The server takes the record's end for its place, and may send the row that begins there first."""
    decoder = ChangeDecoder(ENVELOPE, ENVELOPE.schema([BY_KEY]))
    rows = [recorded(at, ROW) for at in (100, 300, 300, 500)]
    sent = [*rows[:3], message(300, "outbox", b"sub"), rows[3], message(300, "outbox", b"next"), rows[0]]
    runs = [run(5, 600), run(2, 700)]
    batch, last = decoder.decode(Messages.joined(sent), runs, lambda oid, position: described(BY_KEY), NOTHING)
    found = list(
        zip(*(batch.column(name).to_pylist() for name in ("_change_type", "_commit_lsn", "_seq")), strict=True)
    )
    assert found == [
        ("insert", 600, 100), ("message", 600, 299), ("insert", 600, 300), ("insert", 600, 301), ("insert", 600, 500),
        ("insert", 700, 100), ("message", 700, 299),
    ]  # fmt: skip
    assert last == 299


def test_a_message_takes_no_rows_place_where_a_chunk_ends_within_their_record() -> None:
    """The first rows of the record are out by then, so the message stays behind the rest."""
    decoder = ChangeDecoder(ENVELOPE, ENVELOPE.schema([BY_KEY]))
    rows = [recorded(300, ROW) for _ in range(5)]
    sent = [*rows, message(300, "outbox", b"sub"), recorded(500, ROW)]
    found: list[tuple[str, int]] = []
    last, after = 0, NOTHING
    for part in (sent[:2], sent[2:]):
        runs = [Run(Lsn(600), 0, 1, last, len(part))]
        batch, last = decoder.decode(Messages.joined(part), runs, lambda oid, position: described(BY_KEY), after)
        after = Position(Lsn(600), last)
        found += zip(batch.column("_change_type").to_pylist(), batch.column("_seq").to_pylist(), strict=True)
    assert found == [*(("insert", 300 + i) for i in range(5)), ("message", 305), ("insert", 500)]


def test_a_message_is_a_row_of_the_envelope() -> None:
    decoder = ChangeDecoder(ENVELOPE, ENVELOPE.schema([BY_KEY]))
    alone = message(300, "audit", b"\xff", transactional=False)
    sent = [ROW, message(150, "outbox", b'{"id": 1}'), message(160, "outbox", b""), alone]
    runs = [run(3, 200), Run(Lsn(299), 0, 0, 0, 1)]
    batch, last = decoder.decode(Messages.joined(sent), runs, lambda _oid, _position: described(BY_KEY), NOTHING)
    batch.validate(full=True)
    of_row, *rows = batch.to_pylist()
    assert of_row["_table"] == BY_KEY.name
    found = [(r["_change_type"], r["_commit_lsn"], r["_seq"], r["_xid"], r["key"], r["after"]) for r in rows]
    assert found == [
        ("message", 200, 149, of_row["_xid"], "outbox", '"{\\"id\\": 1}"'),
        ("message", 200, 159, of_row["_xid"], "outbox", '""'),
        ("message", 299, 299, None, "audit", '"\\\\xff"'),
    ]
    assert last == 299
    assert [r["_commit_ts"] for r in rows] == [of_row["_commit_ts"], of_row["_commit_ts"], None]
    assert {(r["_table"], tuple(r["_unchanged"]), r["before"]) for r in rows} == {(None, (), None)}
    after_first, _ = decoder.decode(Messages.joined(sent), runs, lambda _oid, _position: None, Position(Lsn(200), 149))
    assert after_first.column("_seq").to_pylist() == [159, 299]


def test_messages_before_a_commit_are_left_out_where_they_had_come() -> None:
    decoder = ChangeDecoder(ENVELOPE, ENVELOPE.schema([BY_KEY]), messages_since=300)
    sent = [ROW, message(150, "outbox", b""), ROW, message(250, "outbox", b"")]
    batch, _ = decoder.decode(
        Messages.joined(sent), [run(2, 200), run(2, 300)], lambda oid, position: described(BY_KEY), NOTHING
    )
    assert batch.column("_change_type").to_pylist() == ["insert", "insert", "message"]


# --- their place --------------------------------------------------------------------------------------------------


def test_messages_stand_between_the_rows_of_their_commit_and_change_no_numbers() -> None:
    rows = [
        recorded(100, ROW),
        message(110),
        recorded(110, ROW),
        recorded(110, ROW),
        message(140),
        message(150, "other"),
    ]
    what = fed(begin(200), RELATION, *rows, recorded(150, ROW), commit(200))
    changes = what.take()
    assert changes is not None
    decoder = ChangeDecoder(ENVELOPE, ENVELOPE.schema([BY_KEY]))
    batch, last = decoder.decode(changes.messages, changes.runs, lambda _oid, _position: described(BY_KEY), NOTHING)
    kinds = ["insert", "message", "insert", "insert", "message", "insert"]
    assert batch.column("_change_type").to_pylist() == kinds
    assert batch.column("_seq").to_pylist() == [100, 109, 110, 111, 139, 150]
    assert last == 150


def test_a_message_that_is_not_transactional_stands_right_before_where_its_record_ends() -> None:
    what = fed(message(200, transactional=False), begin(200), RELATION, ROW, commit(200))
    assert what.complete == Position(Lsn(200))
    assert taken(what) == [(199, 1), (200, 1)]


def test_a_message_that_nobody_wants_moves_the_stream_on() -> None:
    what = fed(message(300, "other", transactional=False))
    assert (what.complete, len(what)) == (Position(Lsn(299)), 0)
    fed(stream_start(9), in_stream(message(310, "other"), 9), STREAM_STOP, stream_commit(9, 400), what=what)
    assert what.received == Position(Lsn(400))


def test_messages_of_a_transaction_that_was_rolled_back_leave_nothing() -> None:
    block = (stream_start(9), in_stream(message(110), 9), in_stream(message(120, "pgcdc", ASK), 9), STREAM_STOP)
    what = fed(*block, stream_abort(9, 9))
    assert (len(what), what.requests) == (0, [])


@pytest.mark.parametrize("prefix", ["outbox", "pgcdc"])
def test_a_part_that_was_rolled_back_beside_a_message_has_the_transaction_sent_again(prefix: str) -> None:
    block = (stream_start(9), in_stream(message(110, prefix), 9), STREAM_STOP)
    what = fed(*block, stream_abort(9, 10))
    with pytest.raises(TransientError, match="does not say which of its logical decoding messages"):
        what.receive(stream_commit(9, 400))
    what.begin_session()
    fed(keepalive(300), begin(400), message(110), what=what)
    # Should this session be lost as well, the next one has to be sent it whole again.
    assert what.needs_whole
    fed(commit(400), what=what)
    assert taken(what) == [(400, 1)]
    assert not what.needs_whole


def test_a_part_that_was_rolled_back_before_any_message_does_no_harm() -> None:
    block = (stream_start(9), in_stream(RELATION, 9), in_stream(ROW, 10), STREAM_STOP, stream_abort(9, 10))
    what = fed(*block, stream_start(9), in_stream(message(110), 9), STREAM_STOP, stream_commit(9, 400))
    assert taken(what) == [(400, 1)]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([message(110)], "expected 'M' within a transaction"),
        ([begin(200), message(110, transactional=False)], "expected Commit before the next Begin"),
        ([message(0, transactional=False)], "expected the LSN of its end, got 0/0"),
        # A BIGINT holds half of all positions, which PostgreSQL does not reach either.
        ([message(1 << 63, transactional=False)], "expected the LSN of its end, got 80000000/0"),
        ([begin(200), message(110)[:-1]], "Message: expected"),
        ([stream_start(9), in_stream(message(110), 9)[:-1]], "Message: expected"),
        ([stream_start(9), HEADER + b"M\0"], "Message: expected"),
        ([begin(200), message(110), commit(300)], "expected the Commit of the transaction that began"),
    ],
)
def test_a_message_that_cannot_come_is_refused(messages: list[bytes], said: str) -> None:
    with pytest.raises(WireError, match=said):
        fed(*messages)


KNOWN = [
    message(110),
    message(110, "pgcdc", ASK),
    message(110, transactional=False),
    message(110, "other", b"\xff" * 9),
]
LONGEST = len(HEADER) + 1


@examples(300)
@given(data=mutated(KNOWN, keep=LONGEST), streamed=st.booleans(), within=st.booleans())
def test_other_bytes_are_a_wire_error_and_nothing_else(data: bytes, streamed: bool, within: bool) -> None:
    messages = [begin(200), data, commit(200)] if within else [data]
    if streamed:
        messages = [stream_start(9), in_stream(data, 9), STREAM_STOP, stream_commit(9, 200)]
    with contextlib.suppress(WireError):
        changes = fed(*messages).take()
        if changes is not None:
            decoder = ChangeDecoder(ENVELOPE, ENVELOPE.schema([BY_KEY]))
            batch, _ = decoder.decode(changes.messages, changes.runs, lambda _oid, _position: None, changes.after)
            batch.validate(full=True)
            assert batch.column("_change_type").to_pylist() == ["message"]


# --- requests -----------------------------------------------------------------------------------------------------


def test_requests_come_with_their_commit_and_are_no_rows() -> None:
    what = fed(begin(200), message(110, "pgcdc", ASK), message(120, "pgcdc", b"?"))
    assert what.requests == []
    fed(commit(200), message(300, "pgcdc", ASK, transactional=False), what=what)
    assert what.requests == [(Position(Lsn(200)), ASK), (Position(Lsn(200)), b"?"), (Position(Lsn(299)), ASK)]
    assert len(what) == 0


@pytest.mark.parametrize(
    ("content", "tables"),
    [
        (ASK, ("public.orders",)),
        (b'{"snapshot": ["*"]}', ("*",)),
        ('{"snapshot": ["Public.Orders", "public.orders", "s.\\"Ü b\\""]}'.encode(), ("public.orders", 's."Ü b"')),
    ],
)
def test_a_request_names_tables(content: bytes, tables: tuple[str, ...]) -> None:
    assert read_request(content) == (tables, None)
    for asked in (Asked(tables), Asked(tables, "slot_1")):
        assert read_request(write_request(asked).encode("ascii")) == asked


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'["snapshot"]', "not an object"),
        (b"{}", "not an object"),
        (b'{"snapshot": ["a.b"], "other": 1}', "not an object"),
        (b'{"snapshot": ["a.b"], "slot": 1}', '"slot" is not a name'),
        (b'{"slot": "a"}', "not an object"),
        (b'{"snapshot": []}', "not a list of names"),
        (b'{"snapshot": "a.b"}', "not a list of names"),
        (b'{"snapshot": [1]}', "not a list of names"),
        (b'{"snapshot": ["orders"]}', "not of the form schema.table"),
        (b'{"snapshot": ["a.b.c"]}', "not of the form schema.table"),
        (b'{"snapshot": ["*", "a.b"]}', "a name that is none"),
        (b'{"snapshot": ["public.*"]}', "a name that is none"),
        (b'{"snapshot": ["SELECT 1"]}', "a name that is none"),
        (b'{"snapshot": ["\\ud800.a"]}', "a name that is none"),
    ],
)
def test_a_malformed_request_is_told_what_it_lacks(content: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_request(content)


@examples(300)
@given(st.binary(max_size=40) | mutated([ASK, b'{"snapshot": ["*"]}', b'{"snapshot": ["a.b", "c.\\"d\\""]}'], keep=0))
def test_any_content_is_a_request_or_a_value_error(content: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert all(isinstance(name, str) for name in read_request(content).tables)
