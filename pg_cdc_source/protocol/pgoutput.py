"""Read messages of the plugin ``pgoutput`` one by one into dataclasses: Begin, Commit, Relation, Truncate and so on.

Inserts, Updates and Deletes are many. :mod:`~pg_cdc_source.protocol.tuples` reads thousands of them together.

The formats are in the manual under "Logical Replication Message Formats" (protocol-logicalrep-message-formats) and in
src/backend/replication/logical/proto.c. Between Stream Start and Stream Stop (protocol 2 and later), messages have the
xid of their subtransaction behind their tag. Whoever keeps the messages of a streamed transaction takes it out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pg_cdc_source.errors import WireError
from pg_cdc_source.offsets import Lsn

INSERT, UPDATE, DELETE, TRUNCATE = b"IUDT"
BEGIN, COMMIT, ORIGIN, RELATION, TYPE, MESSAGE = b"BCORYM"
STREAM_START, STREAM_STOP, STREAM_COMMIT, STREAM_ABORT = b"SEcA"
ROWS = frozenset((INSERT, UPDATE, DELETE))

NAMES = {
    BEGIN: "Begin",
    COMMIT: "Commit",
    ORIGIN: "Origin",
    RELATION: "Relation",
    TYPE: "Type",
    INSERT: "Insert",
    UPDATE: "Update",
    DELETE: "Delete",
    TRUNCATE: "Truncate",
    MESSAGE: "Message",
    STREAM_START: "Stream Start",
    STREAM_STOP: "Stream Stop",
    STREAM_COMMIT: "Stream Commit",
    STREAM_ABORT: "Stream Abort",
}

# Timestamps count microseconds from 2000-01-01. Unix time is ahead by so many.
_EPOCH_MICROSECONDS = 946_684_800_000_000
# Names that nobody needs: in a database in SQL_ASCII they have any bytes, and all databases share those of origins.
_ANY_BYTES = "surrogateescape"


@dataclass(frozen=True, slots=True)
class Begin:
    """The first message of a transaction that has committed."""

    final_lsn: Lsn  # of the commit record
    commit_ts: int  # microseconds since 1970
    xid: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The last message of a transaction."""

    flags: int  # none are defined: 0
    commit_lsn: Lsn  # of the commit record
    end_lsn: Lsn  # behind the commit record
    commit_ts: int  # microseconds since 1970


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a transaction was replicated from."""

    commit_lsn: Lsn  # on the server of the origin
    name: str


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """One column of a relation, as rows that follow have it."""

    is_key: bool  # part of the replica identity; under FULL, every column is
    name: str
    type_oid: int
    typmod: int


@dataclass(frozen=True, slots=True)
class RelationMessage:
    """What the columns of a relation are from this message on. ``identity`` is pg_class.relreplident: d, n, f or i."""

    oid: int
    schema: str
    name: str
    identity: str
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, slots=True)
class Type:
    """The name of a type that is not built in."""

    oid: int
    schema: str
    name: str


@dataclass(frozen=True, slots=True)
class Truncate:
    """Relations that were truncated together."""

    cascade: bool
    restart_identity: bool
    oids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """What ``pg_logical_emit_message()`` wrote; ``lsn`` is the position of the message itself."""

    transactional: bool
    lsn: Lsn
    prefix: str
    content: bytes


@dataclass(frozen=True, slots=True)
class StreamStart:
    """The first message of a block of a transaction that is still running."""

    xid: int
    is_first: bool  # of the transaction's blocks


@dataclass(frozen=True, slots=True)
class StreamStop:
    """The last message of a block."""


@dataclass(frozen=True, slots=True)
class StreamCommit:
    """A streamed transaction has committed. The other fields are those of Commit."""

    xid: int
    flags: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_ts: int


@dataclass(frozen=True, slots=True)
class StreamAbort:
    """A streamed transaction, or a subtransaction of it, was rolled back."""

    xid: int
    subxid: int  # equals xid if the whole transaction was rolled back


class _Octets:
    """A message's bytes behind its tag, taken from the front. Raises WireError where there are too few or too many."""

    def __init__(self, tag: int, data: bytes, at: int) -> None:
        self._tag = tag
        self._data = data
        self.at = at

    def fail(self, what: str) -> WireError:
        return WireError(f"pgoutput: {NAMES[self._tag]}: {what}")

    def take(self, format: str) -> tuple[Any, ...]:
        """Take the fields of a struct."""
        size = struct.calcsize(format)
        if self.at + size > len(self._data):
            raise self.fail(f"expected {self.at + size} bytes or more, got {len(self._data)}")
        values = struct.unpack_from(format, self._data, self.at)
        self.at += size
        return values

    def text(self, errors: str = "strict") -> str:
        """Take a text that ends with a zero byte; ``errors`` as bytes.decode() takes it."""
        end = self._data.find(b"\0", self.at)
        if end < 0:
            raise self.fail("expected text that ends with a zero byte, got none")
        octets, self.at = self._data[self.at : end], end + 1
        try:
            return octets.decode(errors=errors)
        except UnicodeDecodeError:
            raise self.fail("expected UTF-8, got other bytes (a database in SQL_ASCII?)") from None

    def rest(self, length: int) -> bytes:
        """Take ``length`` bytes."""
        (octets,) = self.take(f">{length}s")
        return bytes(octets)

    def expect_flags(self, flags: int, most: int) -> None:
        if flags > most:
            raise self.fail(f"expected flags of at most {most}, got {flags}")

    def finish(self) -> None:
        """Check that every byte was taken."""
        if self.at != len(self._data):
            raise self.fail(f"expected {self.at} bytes, got {len(self._data)}")


def _begin(octets: _Octets) -> Begin:
    final_lsn, commit_ts, xid = octets.take(">QqI")
    return Begin(Lsn(final_lsn), commit_ts + _EPOCH_MICROSECONDS, xid)


def _commit(octets: _Octets) -> Commit:
    flags, commit_lsn, end_lsn, commit_ts = octets.take(">BQQq")
    octets.expect_flags(flags, 0)
    return Commit(flags, Lsn(commit_lsn), Lsn(end_lsn), commit_ts + _EPOCH_MICROSECONDS)


def _origin(octets: _Octets) -> Origin:
    (commit_lsn,) = octets.take(">Q")
    return Origin(Lsn(commit_lsn), octets.text(_ANY_BYTES))


def _relation(octets: _Octets) -> RelationMessage:
    (oid,) = octets.take(">I")
    # The schema pg_catalog is sent as an empty name.
    schema, name = octets.text() or "pg_catalog", octets.text()
    identity, count = octets.take(">cH")
    columns = []
    for _ in range(count):
        (flags,) = octets.take(">B")
        octets.expect_flags(flags, 1)
        column_name = octets.text()
        type_oid, typmod = octets.take(">Ii")
        columns.append(RelationColumn(bool(flags), column_name, type_oid, typmod))
    if identity not in (b"d", b"n", b"f", b"i"):
        raise octets.fail("expected a replica identity d, n, f or i, got another")
    return RelationMessage(oid, schema, name, identity.decode(), tuple(columns))


def _type(octets: _Octets) -> Type:
    (oid,) = octets.take(">I")
    return Type(oid, octets.text(_ANY_BYTES) or "pg_catalog", octets.text(_ANY_BYTES))


def _truncate(octets: _Octets) -> Truncate:
    count, flags = octets.take(">IB")
    octets.expect_flags(flags, 3)
    return Truncate(bool(flags & 1), bool(flags & 2), octets.take(f">{count}I"))


def _message(octets: _Octets) -> Message:
    transactional, lsn = octets.take(">BQ")
    octets.expect_flags(transactional, 1)
    # Anybody may write any, and those of others are sent as well. No text that is wanted equals one that is no UTF-8.
    prefix = octets.text(_ANY_BYTES)
    (length,) = octets.take(">I")
    return Message(bool(transactional), Lsn(lsn), prefix, octets.rest(length))


def _stream_start(octets: _Octets) -> StreamStart:
    xid, first = octets.take(">IB")
    octets.expect_flags(first, 1)
    return StreamStart(xid, bool(first))


def _stream_stop(octets: _Octets) -> StreamStop:
    return StreamStop()


def _stream_commit(octets: _Octets) -> StreamCommit:
    xid, flags, commit_lsn, end_lsn, commit_ts = octets.take(">IBQQq")
    octets.expect_flags(flags, 0)
    return StreamCommit(xid, flags, Lsn(commit_lsn), Lsn(end_lsn), commit_ts + _EPOCH_MICROSECONDS)


def _stream_abort(octets: _Octets) -> StreamAbort:
    return StreamAbort(*octets.take(">II"))


_READERS: dict[int, Callable[[_Octets], Any]] = {
    BEGIN: _begin,
    COMMIT: _commit,
    ORIGIN: _origin,
    RELATION: _relation,
    TYPE: _type,
    TRUNCATE: _truncate,
    MESSAGE: _message,
    STREAM_START: _stream_start,
    STREAM_STOP: _stream_stop,
    STREAM_COMMIT: _stream_commit,
    STREAM_ABORT: _stream_abort,
}
# In a block of a streamed transaction, these have the xid of their subtransaction behind their tag, in 4 bytes.
IN_STREAM = frozenset((*ROWS, TRUNCATE, RELATION, TYPE, MESSAGE))


def read(data: bytes, at: int = 0) -> Any:
    """Read the one message that ``data`` holds from ``at`` on, other than an Insert, Update or Delete.

    A message of a streamed transaction is read without its xid. Raises WireError for short, long or unknown bytes.
    """
    tag = data[at] if at < len(data) else None
    if tag not in _READERS:
        raise WireError(f"pgoutput: expected a message's tag, got {'nothing' if tag is None else repr(bytes([tag]))}")
    octets = _Octets(tag, data, at + 1)
    message = _READERS[tag](octets)
    octets.finish()
    return message
