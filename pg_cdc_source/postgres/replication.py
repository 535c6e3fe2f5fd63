"""A logical replication stream, whose positions only this package confirms.

psycopg2's replication cursor confirms positions by itself: while nothing is to be sent, it reports as flushed whatever
the server's keepalives name, and there is no way to turn that off. The slot would then move past Spark's checkpoint,
and a restart could not tell that from a slot that somebody else has emptied. So psycopg2 connects and starts the
stream; messages are received and answered here, by libpq's own functions.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection

import psycopg2.extras
from psycopg2 import sql
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import DefiniteError, PgCdcError, QueryError, TransientError
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.postgres import libpq, search_path
from pg_cdc_source.postgres.answers import answered_within
from pg_cdc_source.postgres.connection import connect
from pg_cdc_source.postgres.decoding_messages import MESSAGES_VERSION
from pg_cdc_source.postgres.server_errors import READ_ALL_AGAIN, RESNAPSHOT, translated
from pg_cdc_source.protocol import pgoutput
from pg_cdc_source.protocol.walsender import HEADER_BYTES
from pg_cdc_source.values import native
from pg_cdc_source.values.wire import Collected

_ROWS = bytes(tag in pgoutput.ROWS for tag in range(256))
_STATUS = struct.Struct(">cQQQq?")
_READ_SENDER_TIMEOUT = "SELECT setting::float8 / 1000 FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout'"
_EPOCH_SECONDS = 946_684_800  # 2000-01-01, where PostgreSQL's clock begins


class DecodingError(TransientError):
    """The server has ended the stream because of an internal error: it could not decode what came next."""


class ReplicationStream:
    """One walsender's stream of one slot, for one thread.

    ``system`` and ``timeline`` are those of its server, ``end_of_wal`` is how far that one's WAL went before the start.
    ``sender_timeout_seconds``: within half of this, the walsender answers also while it decodes; with 0 it does not.
    """

    def __init__(
        self,
        options: ConnectionOptions,
        name: str,
        slot: str,
        publications: Sequence[str],
        start: Lsn,
        *,
        streaming: bool,
    ) -> None:
        """Start at ``start``. With ``streaming``, large transactions come before they commit, from PostgreSQL 14 on.

        Logical decoding messages come from that version on as well, of all prefixes.
        """
        self._doing = f"reading slot {slot}"
        self._session = connect(options, name, replication=True)
        try:
            with translated(self._doing), answered_within(self._session):
                with self._session.cursor() as cursor:
                    cursor.execute("IDENTIFY_SYSTEM")
                    system, timeline, end_of_wal, *_ = cursor.fetchone()
                    cursor.execute(_READ_SENDER_TIMEOUT)
                    (self.sender_timeout_seconds,) = cursor.fetchone()
                    search_path.take_roles(self._session)
                self.system, self.timeline, self.end_of_wal = str(system), int(timeline), Lsn.parse(end_of_wal)
                with self._session.cursor(cursor_factory=psycopg2.extras.ReplicationCursor) as cursor:
                    command = _start_command(self._session, slot, publications, start, streaming=streaming)
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
        length = libpq.get_copy_data(self._pgconn, self._reference, 1)
        if length == 0:
            if not libpq.consume_input(self._pgconn):
                raise self._ended()
            length = libpq.get_copy_data(self._pgconn, self._reference, 1)
            if length == 0:
                return None
        if length < 0:
            raise self._ended()
        data = ctypes.string_at(self._copied.value, length)  # type: ignore[arg-type]
        libpq.free_memory(self._copied)
        return data

    def _receive_rows(self, rows: Collected, drain: Callable[..., None]) -> bytes | None:
        for attempt in range(2):
            drained = rows.drain(
                lambda *into: drain(self._pgconn, libpq.GET_COPY_DATA, libpq.FREE_MEMORY, 1, _ROWS, HEADER_BYTES, *into)
            )
            if drained.waiting:
                data = ctypes.string_at(drained.waiting, drained.result)
                libpq.free_memory(drained.waiting)
                drained.waiting = None
                return data
            if drained.result < 0:
                raise self._ended()
            if drained.result > 0 or attempt:
                break
            if not libpq.consume_input(self._pgconn):
                raise self._ended()
        return None

    def confirm(self, flushed: Lsn, *, ask: bool) -> None:
        """Confirm everything before ``flushed``, so that the slot may move there; ``ask`` for a keepalive in answer."""
        now = int((time.time() - _EPOCH_SECONDS) * 1e6)
        # Only the flushed position counts for the slot. Received and applied positions are for display.
        status = _STATUS.pack(b"r", flushed, flushed, flushed, now, ask)
        if libpq.put_copy_data(self._pgconn, status, len(status)) != 1 or libpq.flush(self._pgconn) != 0:
            raise self._ended()

    def wait(self, wake: socket.socket, seconds: float) -> bool:
        """Wait until something arrives, here or on ``wake``; whether it is here: maybe a part of a message."""
        # Not select(), which does not take more than 1,024 files.
        arrived = connection.wait([self.fileno(), wake], seconds)
        if wake in arrived:
            wake.recv(4096)
        return self.fileno() in arrived

    def _ended(self) -> PgCdcError:
        with libpq.cleared(libpq.get_result(self._pgconn)) as result:
            code = libpq.sqlstate(result)
            if code == "XX000":
                # Decoding the same WAL again, in another session, may well succeed.
                return DecodingError(f"{self._doing}: {libpq.message(result)} (SQLSTATE {code})")
            error = libpq.error_of(self._pgconn, result, self._doing, "the server ended the stream")
            if isinstance(error, QueryError):
                # No SQL of the user's: pgoutput computes nothing but row filters.
                return DefiniteError(
                    f"{error.what}: a row filter of the publication cannot be computed for a changed row",
                    remedy="correct the filter by ALTER PUBLICATION. Changes of before are decoded with the filter of "
                    f"their time, so drop the slot, and {RESNAPSHOT}; or {READ_ALL_AGAIN}",
                )
            return error


def _start_command(
    session: Session, slot: str, publications: Sequence[str], start: Lsn, *, streaming: bool
) -> sql.Composed:
    # The option is a list of identifiers inside a string literal. Replication commands know only the plainest form of
    # a literal, and psycopg2 would write E'…' where the role has standard_conforming_strings off.
    identifiers = ",".join(str(sql.Identifier(name).as_string(session)) for name in publications)
    names = "'" + identifiers.replace("'", "''") + "'"
    protocol = "'1'"
    # pgoutput refuses what it does not know yet. Streaming came with the same version as messages.
    if session.server_version >= MESSAGES_VERSION:
        protocol = "'2', streaming 'on', messages 'true'" if streaming else "'1', messages 'true'"
    return sql.SQL("START_REPLICATION SLOT {} LOGICAL {} (proto_version {}, publication_names {})").format(
        sql.Identifier(slot), sql.SQL(str(start)), sql.SQL(protocol), sql.SQL(names)
    )
