"""The replication protocol, and what else psycopg2 keeps to itself, through the libpq that psycopg2 has loaded.

psycopg2's replication cursor confirms positions by itself: while nothing is to be sent, it reports as flushed whatever
the server's keepalives name, and there is no way to turn that off. The slot would then move past Spark's checkpoint,
and a restart could not tell that from a slot that somebody else has emptied. So psycopg2 connects (TLS, SCRAM and all
that) and starts the stream; its messages are received and answered here, by six functions of libpq.
"""

from __future__ import annotations

import ctypes
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psycopg2
import psycopg2.extras
from psycopg2 import sql
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import PgCdcError, TransientError, WireError
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.postgres.connection import classified, connect, translated
from pg_cdc_source.protocol import pgoutput
from pg_cdc_source.values import native
from pg_cdc_source.values.binary import Collected, Messages, WireBuffer

# Looked up in psycopg2's extension module and what it depends on, wherever that libpq lies. PyDLL keeps the
# interpreter's lock: giving it up and taking it again would cost more than these calls, which do not wait.
_QUICK = ctypes.PyDLL(psycopg2._psycopg.__file__)
_WAITING = ctypes.CDLL(psycopg2._psycopg.__file__)

_connection, _result = ctypes.c_void_p, ctypes.c_void_p

_COPY_OUT = 3  # libpq-fe.h: PGRES_COPY_OUT
_COMMAND_OK = 1


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(library, name)
    function.restype, function.argtypes = result, list(arguments)
    return function


_get_copy_data = _function(
    _QUICK, "PQgetCopyData", ctypes.c_int, _connection, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int
)
_free = _function(_QUICK, "PQfreemem", None, ctypes.c_void_p)
_consume_input = _function(_QUICK, "PQconsumeInput", ctypes.c_int, _connection)
_error_message = _function(_QUICK, "PQerrorMessage", ctypes.c_char_p, _connection)
_error_field = _function(_QUICK, "PQresultErrorField", ctypes.c_char_p, _result, ctypes.c_int)
_clear = _function(_QUICK, "PQclear", None, _result)
_put_copy_data = _function(_WAITING, "PQputCopyData", ctypes.c_int, _connection, ctypes.c_char_p, ctypes.c_int)
_flush = _function(_WAITING, "PQflush", ctypes.c_int, _connection)
_get_result = _function(_WAITING, "PQgetResult", _result, _connection)
_exec = _function(_WAITING, "PQexec", _result, _connection, ctypes.c_char_p)
_status = _function(_QUICK, "PQresultStatus", ctypes.c_int, _result)
_fields = _function(_QUICK, "PQnfields", ctypes.c_int, _result)
_modifier = _function(_QUICK, "PQfmod", ctypes.c_int, _result, ctypes.c_int)

# Of the same libpq, as C calls them.
_GET_COPY_DATA, _FREE, _CONSUME_INPUT = (
    ctypes.cast(getattr(_QUICK, name), ctypes.c_void_p) for name in ("PQgetCopyData", "PQfreemem", "PQconsumeInput")
)
# Where a COPY has nothing more to give just now, see pgcdc_drain_all. 2M rows of 13 columns in one process, beside
# waiting at once: 0.74 s of CPU instead of 0.97, and 1.61 of the backend's instead of 1.74. 0.2 and 2 ms gained less.
COPY_PAUSE_NANOSECONDS = 1_000_000

# Manual, "Streaming Replication Protocol": XLogData is its tag, three numbers of 8 bytes, and the plugin's message.
XLOG_DATA, KEEPALIVE = b"wk"
HEADER_BYTES = 25
_ROWS = bytes(tag in pgoutput.ROWS for tag in range(256))
_KEEPALIVE = struct.Struct(">cQQ?")
_STATUS = struct.Struct(">cQQQq?")
_EPOCH_SECONDS = 946_684_800


class ReplicationStream:
    """One walsender's stream of one slot, for one thread. ``system`` and ``timeline`` are those of its server."""

    def __init__(
        self, options: ConnectionOptions, name: str, slot: str, publication: str, start: Lsn, *, streaming: bool
    ) -> None:
        """Start at ``start``. With ``streaming``, large transactions come before they commit, from PostgreSQL 14 on."""
        self._what = f"reading slot {slot}"
        self._session = connect(options, name, replication=True)
        try:
            with translated(self._what), self._session.cursor() as cursor:
                cursor.execute("IDENTIFY_SYSTEM")
                system, timeline, *_ = cursor.fetchone()
            self.system, self.timeline = str(system), int(timeline)
            with (
                translated(self._what),
                self._session.cursor(cursor_factory=psycopg2.extras.ReplicationCursor) as cursor,
            ):
                # The option is a list of identifiers inside a string, which replication commands know in its plainest
                # form only: psycopg2 would write E'…' where the role has standard_conforming_strings off.
                names = "'" + sql.Identifier(publication).as_string(self._session).replace("'", "''") + "'"
                protocol = "'2', streaming 'on'" if streaming and self._session.server_version >= 140000 else "'1'"
                command = sql.SQL(
                    "START_REPLICATION SLOT {} LOGICAL {} (proto_version {}, publication_names {})"
                ).format(sql.Identifier(slot), sql.SQL(str(start)), sql.SQL(protocol), sql.SQL(names))
                cursor.start_replication_expert(command, decode=False)
            self._pgconn = self._session.pgconn_ptr
            self._copied = ctypes.c_void_p()
            self._reference = ctypes.byref(self._copied)
        except BaseException:
            self._session.close()
            raise

    def fileno(self) -> int:
        return int(self._session.fileno())

    def close(self) -> None:
        self._session.close()

    def receive(self, rows: Collected | None = None) -> bytes | None:
        """The next message that has arrived, None where none has. Raises what ended the stream.

        Given ``rows``, messages of rows before that one are added there; None then also says that it is full.
        """
        if rows is not None and native.LIBRARY is not None:
            return self._receive_rows(rows, native.LIBRARY.pgcdc_drain)
        length = _get_copy_data(self._pgconn, self._reference, 1)
        if length == 0:
            if not _consume_input(self._pgconn):
                raise self._ended()
            length = _get_copy_data(self._pgconn, self._reference, 1)
            if length == 0:
                return None
        if length < 0:
            raise self._ended()
        data = ctypes.string_at(self._copied.value, length)  # type: ignore[arg-type]
        _free(self._copied)
        return data

    def _receive_rows(self, rows: Collected, drain: Callable[..., None]) -> bytes | None:
        for attempt in range(2):
            drained = rows.drain(
                lambda *into: drain(self._pgconn, _GET_COPY_DATA, _FREE, 1, _ROWS, HEADER_BYTES, *into)
            )
            if drained.waiting:
                data = ctypes.string_at(drained.waiting, drained.result)
                _free(drained.waiting)
                drained.waiting = None
                return data
            if drained.result < 0:
                raise self._ended()
            if drained.result > 0 or attempt:
                break
            if not _consume_input(self._pgconn):
                raise self._ended()
        return None

    def confirm(self, flushed: Lsn, *, ask: bool) -> None:
        """Say that everything before ``flushed`` is safe; ``ask`` for a keepalive in answer."""
        now = int((time.time() - _EPOCH_SECONDS) * 1e6)
        # Only what is safe counts for the slot. Received and applied positions are for display.
        status = _STATUS.pack(b"r", flushed, flushed, flushed, now, ask)
        if _put_copy_data(self._pgconn, status, len(status)) != 1 or _flush(self._pgconn) != 0:
            raise self._ended()

    def wait(self, wake: socket.socket, seconds: float) -> None:
        """Wait until something arrives, here or on ``wake``."""
        readable, _, _ = select.select([self.fileno(), wake.fileno()], [], [], seconds)
        if wake.fileno() in readable:
            wake.recv(4096)

    def _ended(self) -> PgCdcError:
        result = _get_result(self._pgconn)
        try:
            code = _error_field(result, ord("C")) if result else None
            if code == b"XX000":
                # An internal error of the server's. Decoding the same again, in another session, may well succeed.
                text = (_error_field(result, ord("M")) or b"").decode(errors="replace")
                return TransientError(f"{self._what}: {text} (SQLSTATE XX000)")
            return _error(self._pgconn, result, self._what, "the server ended the stream")
        finally:
            _clear(result)


def _error(pgconn: int, result: int | None, doing: str, otherwise: str) -> PgCdcError:
    """What a result, or the connection where it has none, says of the error that ended something."""
    code, primary, function = (_error_field(result, ord(field)) if result else None for field in "CMR")
    if code is None:
        text = " ".join((_error_message(pgconn) or b"").decode(errors="replace").split())
        return TransientError(f"{doing}: {text or otherwise}")
    return classified(
        code.decode(), (primary or b"").decode(errors="replace"), doing, (function or b"").decode(errors="replace")
    )


def copy_out(
    session: Session, statement: sql.Composable, doing: str, rows: int, size_bytes: int, padding: int
) -> Iterator[Messages]:
    """Run a COPY … TO STDOUT and yield its messages by up to ``rows`` or ``size_bytes``, received in C.

    Each chunk has ``padding`` zeros behind it. Raises what translate() makes of psycopg2's errors.
    """
    library, pgconn = native.LIBRARY, session.pgconn_ptr
    assert library is not None
    result = _exec(pgconn, statement.as_string(session).encode())
    try:
        if _status(result) != _COPY_OUT:
            raise _error(pgconn, result, doing, "no COPY began")
    finally:
        _clear(result)
    carried = b""
    drained = native.Drained(0, 0, None, 1)
    while drained.result > 0:
        capacity = max(size_bytes, len(carried))
        data, ends = np.empty(capacity + padding, np.uint8), np.empty(rows, np.int64)
        drained = native.Drained(0, 0, None, 1)
        if carried:
            data[: len(carried)] = np.frombuffer(carried, np.uint8)
            ends[0] = drained.bytes = len(carried)
            drained.messages, carried = 1, b""
        library.pgcdc_drain_all(
            *(pgconn, _GET_COPY_DATA, _FREE, _CONSUME_INPUT, session.fileno(), COPY_PAUSE_NANOSECONDS),
            *(data.ctypes.data, capacity, ends.ctypes.data, rows, ctypes.byref(drained)),
        )
        if drained.waiting:
            carried = ctypes.string_at(drained.waiting, drained.result)
            _free(drained.waiting)
        if drained.messages:
            data[drained.bytes : drained.bytes + padding] = 0
            ends = ends[: drained.messages]
            starts = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
            yield Messages(WireBuffer.over(data[: drained.bytes + padding], drained.bytes), starts, ends)
    result = _get_result(pgconn)
    try:
        if drained.result < -1 or _status(result) != _COMMAND_OK:
            raise _error(pgconn, result, doing, "the server ended the COPY")
    finally:
        _clear(result)
    while result := _get_result(pgconn):
        _clear(result)


def column_modifiers(cursor: Any) -> list[int]:
    """The type modifier of each column of the rows that ``cursor`` has; -1 is none. psycopg2 shows numeric's only."""
    result = cursor.pgresult_ptr
    return [_modifier(result, i) for i in range(_fields(result))]


def keepalive_end(data: bytes) -> tuple[Lsn, bool]:
    """How far the server has read the WAL and sent what there was, and whether it wants an answer now."""
    if len(data) != _KEEPALIVE.size:
        raise WireError(f"replication: keepalive: expected {_KEEPALIVE.size} bytes, got {len(data)}")
    _, end, _, wants_answer = _KEEPALIVE.unpack(data)
    return Lsn(end), wants_answer
