"""Transactions as a walsender sends them, and a server that sends them by a script.

A real server decides itself when a message arrives and a session ends. Here a script does, so that every order of
events can be tried.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from messages import BY_KEY, HEADER, described, insert, recorded, update

from pg_cdc_source.errors import TransientError
from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.protocol.changes import Described
from pg_cdc_source.protocol.pgoutput import ROWS
from pg_cdc_source.protocol.transactions import SentRelation
from pg_cdc_source.values.wire import Collected

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
# The record of a message that is not transactional.
ALONE_BYTES = 16
# As if b had been renamed to c.
OTHER_RELATION = RELATION.replace(b"b\0", b"c\0")


def begin(lsn: int, xid: int = 7) -> bytes:
    return HEADER + b"B" + struct.pack(">QqI", lsn, 0, xid)


def commit(lsn: int) -> bytes:
    return HEADER + b"C" + struct.pack(">BQQq", 0, lsn, lsn + 1, 0)


def message(lsn: int, prefix: str = "outbox", content: bytes = b"{}", *, transactional: bool = True) -> bytes:
    """A logical decoding message whose WAL record ends at ``lsn``."""
    head = struct.pack(">BQ", transactional, lsn) + prefix.encode() + b"\0"
    return recorded(lsn, HEADER + b"M" + head + struct.pack(">I", len(content)) + content)


def keepalive(end: int, *, wants_answer: bool = False) -> bytes:
    return struct.pack(">cQQ?", b"k", end, 0, wants_answer)


def stream_start(xid: int) -> bytes:
    return HEADER + b"S" + struct.pack(">IB", xid, 1)


STREAM_STOP = HEADER + b"E"


def stream_abort(xid: int, subxid: int) -> bytes:
    return HEADER + b"A" + struct.pack(">II", xid, subxid)


def stream_commit(xid: int, lsn: int) -> bytes:
    return HEADER + b"c" + struct.pack(">IBQQq", xid, 0, lsn, lsn + 1, 0)


def in_stream(message: bytes, xid: int) -> bytes:
    at = len(HEADER) + 1
    return message[:at] + struct.pack(">I", xid) + message[at:]


@dataclass(frozen=True)
class Transaction:
    """A commit of ``rows`` rows; ``streamed`` before it commits, with rows of a subtransaction that is rolled back.

    Among the rows stand ``emitted`` logical decoding messages of the prefix ``outbox``, and others that nobody wants.
    ``alone``: a message that is not transactional comes first, and its record ends where the commit's begins.
    ``behind``: they are of a subtransaction, their records end where the next row's begins, and they come behind that.
    Each third row is an update; of the two before it the second is of the first one's record, if it follows it.
    """

    lsn: int
    rows: int
    streamed: bool = False
    emitted: int = 0
    alone: bool = False
    behind: bool = False

    def sent_after(self, received: Position) -> list[bytes]:
        """What a session that starts there brings: records that begin there or behind."""
        is_sent = self.alone and self.lsn - ALONE_BYTES >= received.next_lsn
        found = [message(self.lsn, transactional=False)] if is_sent else []
        return found + (self.messages() if self.lsn >= received.next_lsn else [])

    def messages(self) -> list[bytes]:
        in_order = sorted(self._changes(), key=lambda change: (change[0], isinstance(change[1], str)))
        changes = [self._change(at, i) for at, i in in_order]
        if not self.streamed:
            return [begin(self.lsn), RELATION, *changes, commit(self.lsn)]
        xid, rolled_back = self.lsn, self.lsn + 1
        half = len(changes) // 2
        # A message beside what was rolled back might be a part of that.
        gone = [] if self.emitted else changes
        return [
            stream_start(xid),
            *(in_stream(message, xid) for message in (RELATION, *changes[:half])),
            STREAM_STOP,
            keepalive(self.lsn),
            stream_start(xid),
            *(in_stream(message, rolled_back) for message in gone),
            *(in_stream(message, xid) for message in changes[half:]),
            STREAM_STOP,
            *([stream_abort(xid, rolled_back)] if gone else []),
            stream_commit(xid, self.lsn),
        ]

    def _changes(self) -> list[tuple[int, int | str]]:
        """Where the record of each change is, and the row's number or the message's prefix."""
        found: list[int | str] = list(range(self.rows))
        for i in range(self.emitted):
            found[3 * i : 3 * i] = ("other", "outbox") if i % 2 else ("outbox", "other")
        placed: list[tuple[int, int | str]] = []
        for k, one in enumerate(found):
            of_before = isinstance(one, int) and one % 3 == 1 and found[k - 1] == one - 1
            placed.append((self.lsn * 1000 + 16 * (k - of_before), one))
        if self.behind:
            for k in range(len(placed) - 1):
                if isinstance(placed[k][1], str) and isinstance(placed[k + 1][1], int):
                    placed[k] = placed[k + 1][0], placed[k][1]
        return placed

    def _change(self, at: int, what: int | str) -> bytes:
        if isinstance(what, str):
            return message(at, what)
        values = (str(what), f"row {self.lsn}", "0.50")
        return recorded(at, update(BY_KEY.oid, values) if what % 3 == 2 else insert(BY_KEY.oid, values))

    def expected(self) -> list[tuple[int, int, int | None]]:
        """(LSN, number, id) of each row: an update takes two numbers. Messages have no id."""
        found: list[tuple[int, int, int | None]] = [(self.lsn - 1, self.lsn - 1, None)] if self.alone else []
        before = 0
        for at, what in self._changes():
            if isinstance(what, int):
                found.append((self.lsn, at + (at == before or what % 3 == 2), what))
            elif what == "outbox":
                found.append((self.lsn, at - 1, None))
            before = at if isinstance(what, int) else 0
        return found


some_transactions = st.lists(
    st.tuples(
        st.integers(0, 12) | st.integers(0, 60),
        st.booleans(),
        st.just(0) | st.integers(0, 12),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
).map(lambda sizes: [Transaction(100 * (i + 2), *size) for i, size in enumerate(sizes)])


@dataclass
class Server:
    """Sends transactions from where a session starts; ``losses`` are the numbers of messages after which one ends."""

    transactions: Sequence[Transaction]
    losses: list[int] = field(default_factory=list)
    confirmed: list[int] = field(default_factory=list)
    sessions: int = 0

    def connect(self, received: Position) -> Any:
        self.sessions += 1
        return Session(self, received, self.losses.pop() if self.losses else -1)

    def look(self) -> None:
        """As a ServerWatch."""

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass


class Session:
    """What a ReplicationStream is to its caller."""

    sender_timeout_seconds = 0.1

    def __init__(self, server: Server, received: Position, lost_after: int) -> None:
        self.server = server
        self.messages = self._script(received)
        self.rest = lost_after

    def _script(self, received: Position) -> Iterator[bytes | None]:
        for transaction in self.server.transactions:
            if sent := transaction.sent_after(received):
                yield from sent
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

    def wait(self, wake: socket.socket, seconds: float) -> bool:
        if select.select([wake], [], [], 0)[0]:
            wake.recv(100)
        return False

    def close(self) -> None:
        pass


def match(sent: SentRelation, position: Position) -> Described | None:
    """What the buffer asks for: the planned table with the columns that were sent."""
    return described(BY_KEY) if sent.relation.oid == BY_KEY.oid else None
