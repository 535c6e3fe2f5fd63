"""Open PostgreSQL sessions that behave the same everywhere, and turn the server's errors into ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg2
import psycopg2.extras
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import (
    AccessError,
    ConnectError,
    DefiniteError,
    PgCdcError,
    QueryError,
    ServerSetupError,
    SlotLostError,
    TransientError,
)
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.options.libpq_keywords import SECRET_KEYWORDS
from pg_cdc_source.postgres.backoff import Backoff

# Where servers up to 15, from 16 and from 18 on refuse a slot that was invalidated; the SQLSTATE has other meanings.
_INVALIDATED_IN = ("StartLogicalReplication", "CreateDecodingContext", "ReplicationSlotAcquire")

# A dead peer is noticed after about 30 + 3 * 10 seconds by either side. Users' own keywords win.
_DEFAULT_KEYWORDS = {
    "connect_timeout": "10",
    "keepalives": "1",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
}

# Everything that changes how long a session lives, what it may do, or how it prints values, is set for the session, so
# that settings of the role or the database cannot change a result.
_SETTINGS = {
    "default_transaction_read_only": "on",
    "row_security": "off",  # a policy that would hide rows becomes an error
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "transaction_timeout": "0",
    "lock_timeout": "60s",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "client_connection_check_interval": "5s",  # a COPY whose reader is gone ends within seconds
    "standard_conforming_strings": "on",
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "iso_8601",
    "TimeZone": "UTC",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "lc_monetary": "C",
    "xmloption": "content",
    # Ranges are read in physical order, each by one backend: no parallel workers on the source, no start in the
    # middle of the table, and the same order again when a lost session is repeated.
    "max_parallel_workers_per_gather": "0",
    "synchronize_seqscans": "off",
    "enable_tidscan": "on",
    "jit": "off",
    "synchronous_commit": "off",  # a notification is all that these sessions commit
}

# The versions that some of them came with. To ask pg_settings which there are takes more than twice as long.
_SETTINGS_SINCE = {
    "idle_session_timeout": 140000,
    "client_connection_check_interval": 140000,
    "transaction_timeout": 170000,
}

# Sessions lost, connections or locks not to be had, serialization, a slot in use: none of them has to stay so.
_TRANSIENT = ("08", "57P01", "57P02", "57P03", "57P05", "53300", "40001", "40P01", "55P03", "55006")


def connect(
    options: ConnectionOptions, application_name: str, *, replication: bool = False, retry_seconds: float = 0
) -> Session:
    """Open a read-only session in autocommit mode with this package's settings.

    ``retry_seconds`` bounds how long a server that does not answer is tried again; a refused login is not. Raises
    ConnectError, or TransientError when the time is over.
    """
    backoff = Backoff(0.1, longest_seconds=2.0, within_seconds=retry_seconds)
    return backoff.retrying(lambda: _connect_once(options, application_name, replication=replication))


def _connect_once(options: ConnectionOptions, application_name: str, *, replication: bool) -> Session:
    given = options.settings()
    keywords: dict[str, Any] = {k: v for k, v in _DEFAULT_KEYWORDS.items() if k not in given}
    keywords |= dict(options.keywords)
    keywords |= {"application_name": application_name, "client_encoding": "UTF8"}
    if replication:
        keywords["connection_factory"] = psycopg2.extras.LogicalReplicationConnection
    try:
        session = psycopg2.connect(options.conninfo, **keywords)
    except psycopg2.Error as error:
        raise _connect_error(options, given, error) from None
    try:
        if not replication:  # which is in autocommit mode, and says so by refusing to be told
            session.autocommit = True
        with session.cursor() as cursor:
            # First and alone, because a short timeout of the role's would end the next statement.
            cursor.execute("SET statement_timeout = 0")
            names = [name for name in _SETTINGS if session.server_version >= _SETTINGS_SINCE.get(name, 0)]
            cursor.execute(
                "SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS v (name, value)",
                (names, [_SETTINGS[name] for name in names]),
            )
            if session.info.parameter_status("server_encoding") == "SQL_ASCII":
                # Such a server knows no encoding. Asked for UTF-8 it refuses other bytes without saying where they are;
                # so it shall send what it has. psycopg2 does not notice and goes on in UTF-8.
                cursor.execute("SET client_encoding = 'SQL_ASCII'")
    except psycopg2.Error as error:
        session.close()
        raise translate(error, "preparing a session") from None
    return session


def _connect_error(options: ConnectionOptions, given: dict[str, str], error: psycopg2.Error) -> PgCdcError:
    text = " ".join(str(error).split())
    for keyword in SECRET_KEYWORDS:
        if given.get(keyword):
            text = text.replace(given[keyword], "***")
    where = f"cannot connect to PostgreSQL at {options.display()}: {text}"
    # libpq gives no SQLSTATE for a failed connection, so its English texts decide; an unknown one counts as transient
    # and is tried again within the caller's bound.
    if "authentication failed" in text or "no password supplied" in text or "no pg_hba.conf entry" in text:
        return ConnectError(where, remedy="check user, password and the server's pg_hba.conf")
    if "does not exist" in text or "is not permitted to log in" in text:
        return ConnectError(where, remedy="check the database and role names in the connection options")
    if "could not translate host name" in text:
        return ConnectError(where, remedy="check the host name and the DNS of driver and executors")
    if any(word in text for word in ("certificate", "SSL", "channel binding")):
        return ConnectError(where, remedy="check certificates and connection options (sslmode, sslrootcert, …)")
    # What libpq finds wrong with its settings before it connects.
    in_settings = ("of service", "service file", "invalid ")
    if isinstance(error, psycopg2.ProgrammingError) or any(word in text for word in in_settings):
        return ConnectError(where, remedy="check the connection options")
    if "unsupported startup parameter: replication" in text:
        return ServerSetupError(
            where,
            remedy="a pooler passes no replication on: connect to PostgreSQL itself (only pgsnapshot can do without, "
            "with consistentPoint=off)",
        )
    if "max_wal_senders" in text:
        return ServerSetupError(
            where, remedy="raise max_wal_senders, or end walsenders that nobody needs (pg_stat_replication)"
        )
    # Of 16 and later, and of those before.
    if "to start WAL sender" in text or "to start walsender" in text:
        return ServerSetupError(
            where,
            remedy="ALTER ROLE … REPLICATION (only pgsnapshot can do without, with consistentPoint=off)",
        )
    if any(words in text for words in ("too many connections", "too many clients", "remaining connection slots")):
        remedy = "let fewer tasks read at a time, or raise max_connections or the role's or database's CONNECTION LIMIT"
        return TransientError(where, remedy=remedy)
    return TransientError(where, remedy="check that the server runs and that this host may reach it")


def translate(error: psycopg2.Error, doing: str) -> PgCdcError:
    """The error of this package that an error of the server or of libpq amounts to.

    ``doing`` says what was tried, with the names of table, range or slot.
    """
    code: str | None = error.pgcode
    primary: str | None = error.diag.message_primary if code else None
    text = primary or " ".join(str(error).split())
    if code is None:
        return TransientError(f"{doing}: {text}")
    return classified(code, text, doing, error.diag.source_function)


def classified(code: str, text: str, doing: str, source_function: str | None = None) -> PgCdcError:
    """The error that an SQLSTATE of the server amounts to."""
    where = f"{doing}: {text} (SQLSTATE {code})"
    if code.startswith(_TRANSIENT):
        return TransientError(where)
    if code == "42501":
        if source_function == "check_enable_rls":
            return AccessError(
                where,
                remedy="rows would be missing without a sign; read as a role with BYPASSRLS, or as the table's owner "
                "without FORCE ROW LEVEL SECURITY",
            )
        return AccessError(where, remedy="GRANT SELECT on it (and USAGE on its schema) to this role")
    if code in ("42P01", "3F000"):
        return AccessError(where, remedy="check the name; quote names that are not all lower case")
    if code in ("42703", "42883", "42601", "42804", "42702") or code.startswith("22"):
        return QueryError(where, remedy="check the options columns, where and query")
    if code == "25006":
        return QueryError(where, remedy="sessions of this format only read: leave out what writes")
    if code == "42704" and text.startswith("publication "):
        # pgoutput's, before 18; it looks the publication up as of each change's own time.
        return ServerSetupError(
            where,
            remedy="changes made without the publication cannot be decoded: start over with a new checkpoint location "
            "and a new slot, and leave the publication there",
        )
    if code == "55000" and source_function in _INVALIDATED_IN:
        # Between our look at the slot and the server's own.
        return SlotLostError(
            f"{where}: it was given up by the server, and the changes since the checkpoint are gone",
            remedy="pg_replication_slots says why; drop it, and start over with a new checkpoint location, which reads "
            "the tables again (startFrom=snapshot)",
        )
    if code == "0A000" and "while in recovery" in text:
        # Before 16. A stream looks at this before it begins; later it means a server that is about to be promoted.
        return TransientError(where)
    if code in ("53400", "0A000"):
        return ServerSetupError(where)
    return DefiniteError(where)


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Run a block whose psycopg2 errors become errors of this package."""
    try:
        yield
    except psycopg2.Error as error:
        raise translate(error, doing) from None
    except UnicodeDecodeError as error:
        raise DefiniteError(
            f"{doing}: {error.object!r} is not UTF-8, and the database's encoding, SQL_ASCII, does not say what it is",
            remedy="rename what has this name: columns, tables and schemas need names in UTF-8",
        ) from None


def refuse_breaking_pooler(options: ConnectionOptions, session: Session, application_name: str) -> None:
    """Raise ServerSetupError when a pooler hands this session's transactions to changing server sessions.

    A pooler invents the backend key it gives to clients, so the key tells whether one is there. One that keeps a server
    session for each client does no harm; one that pools transactions gives the server session of an idle client to
    the next, and with it somebody else's snapshot.
    """
    with translated("looking for a connection pooler"), session.cursor() as cursor:
        cursor.execute("SELECT pg_catalog.pg_backend_pid()")
        server_pid = cursor.fetchone()[0]
        if server_pid == session.info.backend_pid:
            return
        other = connect(options, application_name)
        try:
            with other.cursor() as other_cursor:
                other_cursor.execute("BEGIN; SELECT pg_catalog.pg_backend_pid()")
                other_pid = other_cursor.fetchone()[0]
                cursor.execute("SELECT pg_catalog.pg_backend_pid()")
                now_pid = cursor.fetchone()[0]
        finally:
            other.close()
    if other_pid == server_pid or now_pid != server_pid:
        raise ServerSetupError(
            f"a connection pooler in transaction mode stands before PostgreSQL at {options.display()}: sessions, and "
            "with them snapshots, do not last",
            remedy="connect to PostgreSQL itself, or to a port of the pooler in session mode",
        )
