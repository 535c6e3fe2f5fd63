"""Reading the slot to turn tables back: what is between the two points, nothing beyond, and nothing confirmed."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import BY_KEY, TYPED, described, insert, streamed, update
from transactions import RELATION, Server, Transaction, begin, commit
from trials import examples

from pg_cdc_source.errors import SchemaChangedError, TransientError
from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.protocol.changes import ChangeDecoder, Described
from pg_cdc_source.protocol.ipc import from_ipc
from pg_cdc_source.protocol.transactions import SentRelation
from pg_cdc_source.stream.first_rows import rewind as rewind_module
from pg_cdc_source.stream.first_rows.rewind import Stretch, rewind
from pg_cdc_source.stream.first_rows.rewound import Rewound
from pg_cdc_source.stream.received import slot_reader

pytestmark = pytest.mark.usefixtures("accelerated")

ORIGIN = Lsn(100)
FULL = streamed(1, "public.by_key", {"id": "int4", "a": "text", "b": "numeric"}, ["id"], "f")
FULL_RELATION = RELATION.replace(b"by_key\0d", b"by_key\0f")


class Inserts(Transaction):
    """A commit that only adds rows; their ids are its LSN and what follows."""

    def messages(self) -> list[bytes]:
        return [m.replace(RELATION, FULL_RELATION) for m in super().messages()]

    def _change(self, at: int, what: int | str) -> bytes:
        assert isinstance(what, int)
        return super()._change(at, 0).replace(b"t\0\0\0\x010", b"t\0\0\0\x03%d" % self._id(what))

    def _id(self, i: int) -> int:
        return 100 + (self.lsn // 100) * 20 + i

    def ids(self) -> list[int]:
        return [self._id(i) for i in range(self.rows)]


def match(sent: SentRelation, position: Position) -> Described | None:
    return Described(FULL, sent.relation, (0, 1, 2)) if sent.relation.oid == FULL.oid else None


def turned_back(server: Any, through: int, how: Any = match) -> dict[int, Rewound]:
    schema = TYPED.schema([FULL])
    return rewind(
        server.connect,
        TYPED,
        schema,
        [FULL],
        {FULL.oid},
        {},
        how,
        Stretch(ORIGIN, Lsn(through), ORIGIN),
        lambda: None,
    )


@examples(40)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=1, max_size=6),
    data=st.data(),
)
def test_what_was_committed_up_to_the_snapshot_is_left_out_and_nothing_else(
    sizes: list[tuple[int, bool]], data: st.DataObject
) -> None:
    sent = [Inserts(100 * (i + 1), rows, is_streamed) for i, (rows, is_streamed) in enumerate(sizes)]
    # The server's keepalives come to 10 after the last commit.
    through = data.draw(st.integers(0, sent[-1].lsn + 8))
    server = Server(sent)
    rewound = turned_back(server, through)[FULL.oid]
    expected = [i for t in sent if t.lsn <= through for i in t.ids()]
    assert sorted(from_ipc(rewound.keys).column("id").to_pylist()) == expected
    assert rewound.old_rows == ()
    assert server.sessions == 1
    # The slot stays where the stream begins.
    assert set(server.confirmed) <= {ORIGIN}


class Updates(Transaction):
    """An update that does not say what the row was before."""

    def messages(self) -> list[bytes]:
        return [begin(self.lsn), RELATION, update(BY_KEY.oid, ("1", "a", "0.50")), commit(self.lsn)]


def test_a_table_whose_old_rows_did_not_travel_is_taken_as_it_is_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        found = turned_back(Server([Updates(200, 1), Inserts(300, 2)]), 305, lambda sent, position: described(BY_KEY))
    assert found == {}
    assert "its replica identity was not FULL" in caplog.text


class WithoutKey(Inserts):
    """A row whose key is NULL here, as one that its type cannot hold is with unrepresentable=null."""

    def messages(self) -> list[bytes]:
        return [begin(self.lsn), FULL_RELATION, insert(BY_KEY.oid, (None, "a", "0.50")), commit(self.lsn)]


def test_the_slot_is_read_once_more_where_a_key_turns_out_to_tell_no_rows_apart() -> None:
    server = Server([Inserts(200, 1), WithoutKey(300, 1)])
    rewound = turned_back(server, 305)[FULL.oid]
    assert server.sessions == 2
    assert rewound.whole
    assert from_ipc(rewound.keys).num_rows == 2


def test_a_table_that_takes_more_memory_than_there_is_is_taken_as_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewind_module, "_MOST_BYTES", 1000)
    assert FULL.oid in turned_back(Server([Inserts(200, 5)]), 205)
    assert turned_back(Server([Inserts(200, 500)]), 205) == {}
    assert "the rows that were changed in between take 0 MB of the driver's memory" in caplog.text


class Silent(Server):
    """A walsender that hangs, or that a proxy has lost."""

    def connect(self, received: Position) -> Any:
        session = super().connect(received)
        session.messages = iter(lambda: None, 1)
        return session


def test_a_server_that_says_nothing_any_more_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_reader, "SILENT_SECONDS", 0.2)
    with pytest.raises(TransientError, match=r"the server has said nothing for 0\.2 s"):
        turned_back(Silent([]), 205)


def test_a_chunk_is_looked_at_for_the_tables_that_it_has_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of tables may be unread, and a server sends tens of chunks a second."""
    looks = []
    decode = ChangeDecoder.decode

    def counted(self: ChangeDecoder, *args: Any) -> Any:
        looks.append(self)
        return decode(self, *args)

    monkeypatch.setattr(ChangeDecoder, "decode", counted)
    others = [streamed(oid, f"public.t{oid}", {"id": "int4"}, ["id"], "f") for oid in range(1000, 1100)]
    sent = [Inserts(200, 2), Updates(300, 1), Inserts(400, 2)]
    arguments: Any = (match, Stretch(ORIGIN, Lsn(405), ORIGIN), lambda: None)
    found = rewind(Server(sent).connect, TYPED, TYPED.schema([FULL]), [*others, FULL], {FULL.oid}, {}, *arguments)
    # Of BY_KEY, which has the oid of FULL, one row came without what it was before.
    assert found.keys() == {other.oid for other in others}
    assert 0 < len(looks) <= 2 * len(sent)


def test_where_no_table_is_left_to_turn_back_the_slot_is_not_read() -> None:
    server, arguments = Server([Inserts(200, 2)]), (match, Stretch(ORIGIN, Lsn(205), ORIGIN), lambda: None)
    assert rewind(server.connect, TYPED, TYPED.schema([FULL]), [], (), {}, *arguments) == {}
    assert server.sessions == 0


def test_what_cannot_be_understood_ends_it() -> None:
    def refuse(sent: SentRelation, position: Position) -> Described | None:
        raise SchemaChangedError("column b was renamed")

    with pytest.raises(SchemaChangedError, match="column b was renamed"):
        turned_back(Server([Inserts(200, 1)]), 205, refuse)


def test_a_process_whose_driver_is_gone_does_not_wait() -> None:
    def require_driver() -> None:
        raise TransientError("the driver's JVM is gone")

    with pytest.raises(TransientError, match="the driver's JVM is gone"):
        rewind(
            Server([]).connect,
            TYPED,
            TYPED.schema([FULL]),
            [FULL],
            {FULL.oid},
            {},
            match,
            Stretch(ORIGIN, Lsn(1 << 30), ORIGIN),
            require_driver,
        )
