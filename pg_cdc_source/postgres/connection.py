"""Open PostgreSQL sessions that behave the same everywhere."""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Mapping
from typing import Any

import psycopg2
import psycopg2.extras
from psycopg2.extensions import TRANSACTION_STATUS_IDLE
from psycopg2.extensions import connection as Session
from psycopg2.extensions import cursor as Cursor

from pg_cdc_source.errors import ConnectError, ServerFullError, ServerSetupError, TransientError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.options.session_settings import SESSION_SETTINGS
from pg_cdc_source.postgres import search_path
from pg_cdc_source.postgres.answers import answered_within
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.connect_errors import NO_REPLICATION, connect_error, is_refused_login
from pg_cdc_source.postgres.passwords import ask_password
from pg_cdc_source.postgres.server_errors import translate, translated

log = logging.getLogger(__name__)

# Either side notices a dead peer of an idle session after about 30 + 3 * 10 seconds. While something was sent and not
# acknowledged, which a stream's session always has, there are no keepalives, and TCP would try for 15 minutes. So this
# side gives up sooner. The server's side must not: Linux counts the time in which a reader takes nothing as well, and
# a stream's reader, or a task's, may pause for long. Users' own keywords win.
_DEFAULT_KEYWORDS = {
    "connect_timeout": "10",
    "keepalives": "1",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}

_SETTINGS = {**SESSION_SETTINGS, "search_path": search_path.OWN}

# The versions that some of them came with. Asking pg_settings which ones exist takes more than twice as long.
_SETTINGS_SINCE = {
    "idle_session_timeout": 140000,
    "client_connection_check_interval": 140000,
    "transaction_timeout": 170000,
}

# How often a session is asked for its server's process, and how many others look for the same one, to tell a pooler in
# transaction mode.
_QUESTIONS, _OTHERS = 3, 3

# A server refuses it where its platform cannot tell that a socket was closed: Windows, and macOS before 15.
_NOT_EVERYWHERE = "client_connection_check_interval"


# A password that is replaced on the server may be given out a moment before, or a moment after. Not many more attempts:
# servers lock roles out.
_REPLACED = Backoff(0.5, attempts=3)


# How long planning, and making a snapshot, wait for a connection of a server that has none left. Others want one too.
FULL_SECONDS = 60.0


def connect(
    options: ConnectionOptions,
    application_name: str,
    *,
    replication: bool = False,
    retry_seconds: float = 0,
    full_seconds: float = 0,
    was_there: bool = False,
    known_to_last: bool = False,
) -> Session:
    """Open a read-only session in autocommit mode with this package's settings.

    A server that does not answer is tried again for ``retry_seconds``, one that has no connection left for
    ``full_seconds`` where that is longer; a refused login is not, but with a password that is asked for again. Nor is a
    host whose name has no address, unless it ``was_there`` before, as before a failover. Raises ConnectError, or
    TransientError when the time is over.

    A pooler in transaction mode is refused, a ServerSetupError, before anything is set that its other clients would
    find. ``known_to_last``: another session has found that there is none, and this one does not look again.
    """
    began = time.monotonic()
    away = Backoff(0.1, longest_seconds=2.0, within_seconds=retry_seconds).pauses()
    # A thousand tasks may wait for minutes, and each attempt is a process of the server's.
    full = Backoff(0.1, growth=1.3, longest_seconds=5.0, within_seconds=max(full_seconds, retry_seconds)).pauses()
    said = False
    while True:
        try:
            return _connect_once(options, application_name, replication=replication, known_to_last=known_to_last)
        except ServerFullError as error:
            pause_seconds = next(full, None)
            if pause_seconds is None:
                raise _still_full(error, time.monotonic() - began) from None
            if not said:
                log.warning("%s; waiting for a connection, at most %g s", error.what, max(full_seconds, retry_seconds))
                said = True
            # Those who wait, on many hosts, are not to come all at once.
            time.sleep(pause_seconds * random.uniform(0.5, 1.0))  # noqa: S311 - nobody has to guess it
            continue
        except TransientError as error:
            away_error = error
        except ConnectError as error:
            if not (was_there and error.has_no_address):
                raise
            away_error = TransientError(error.what, remedy=error.remedy)
        pause_seconds = next(away, None)
        if pause_seconds is None:
            raise away_error
        time.sleep(pause_seconds)


# A session that has just begun: some settings, and some more sessions where a pooler may be.
_PREPARED_WITHIN_SECONDS = 120.0


def _still_full(error: ServerFullError, seconds: float) -> ServerFullError:
    waited = f", after {seconds:.0f} s of waiting for a connection" if seconds >= 1 else ""
    return ServerFullError(f"{error.what}{waited}", remedy=error.remedy)


def _connect_once(
    options: ConnectionOptions, application_name: str, *, replication: bool, known_to_last: bool
) -> Session:
    given = options.settings()
    keywords: dict[str, Any] = {k: v for k, v in _DEFAULT_KEYWORDS.items() if k not in given}
    keywords |= dict(options.keywords)
    keywords |= {"application_name": application_name, "client_encoding": "UTF8"}
    if replication:
        keywords["connection_factory"] = psycopg2.extras.LogicalReplicationConnection
    session = _log_in(options, keywords)
    try:
        # From here on libpq's connect_timeout bounds nothing.
        with answered_within(session, _PREPARED_WITHIN_SECONDS), session.cursor() as cursor:
            if replication:
                _require_walsender(options, cursor)
            else:  # psycopg2 has those in autocommit mode already, and refuses to set it
                session.autocommit = True
            # By SQL as well, because a pooler may give it another name.
            settings = {"application_name": application_name, **_SETTINGS}
            settings = {k: v for k, v in settings.items() if session.server_version >= _SETTINGS_SINCE.get(k, 0)}
            # A walsender is nobody else's.
            known_to_last = known_to_last or replication
            if not _set(cursor, settings, even_if_pooled=known_to_last):
                _refuse_transaction_pooler(options, keywords, session)
                _set(cursor, settings, even_if_pooled=True)
            if session.info.parameter_status("server_encoding") == "SQL_ASCII":
                # Such a server does not know the encoding of its text. Asked for UTF-8, it refuses other bytes without
                # saying where they are, so it is told to send the bytes as they are. psycopg2 does not notice and goes
                # on decoding UTF-8.
                cursor.execute("SET client_encoding = 'SQL_ASCII'")
    except psycopg2.Error as error:
        session.close()
        raise translate(error, "preparing a session") from None
    except BaseException:
        session.close()
        raise
    return session


def _set(cursor: Cursor, settings: Mapping[str, str], *, even_if_pooled: bool) -> bool:
    """Set them for the session, and return whether that was done: not behind a pooler, unless ``even_if_pooled``.

    A pooler gives its clients backend keys of its own, so a key that is not the server's tells that one is there.
    """
    # Statements of their own come first: a short timeout of the role's own would end the last one, and with its own
    # isolation that might wait. They themselves take no snapshot, and end with the transaction that they all are.
    statement = f"""
        SET LOCAL statement_timeout = 0;
        SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
        {search_path.KEEP_ROLES} WHERE %(all)s OR pg_catalog.int4eq(pg_catalog.pg_backend_pid(), %(pid)s);
        SELECT pg_catalog.set_config(name, value, false)
        FROM unnest(%(names)s::pg_catalog.text[], %(values)s::pg_catalog.text[]) AS v (name, value)
        WHERE %(all)s OR pg_catalog.int4eq(pg_catalog.pg_backend_pid(), %(pid)s)
        """
    given = {"all": even_if_pooled, "pid": cursor.connection.info.backend_pid}
    try:
        cursor.execute(statement, given | {"names": [*settings], "values": [*settings.values()]})
    except psycopg2.errors.InvalidParameterValue:
        if _NOT_EVERYWHERE not in settings:
            raise
        fewer = {name: value for name, value in settings.items() if name != _NOT_EVERYWHERE}
        return _set(cursor, fewer, even_if_pooled=even_if_pooled)
    return bool(cursor.rowcount)


def _require_walsender(options: ConnectionOptions, cursor: Cursor) -> None:
    """Raise ServerSetupError where a pooler has dropped the parameter ``replication``: the session is a plain one."""
    try:
        cursor.execute("IDENTIFY_SYSTEM")
    except psycopg2.errors.SyntaxError:
        raise ServerSetupError(
            f"what stands before PostgreSQL at {options.display()} opens a plain session where one for replication is "
            "asked for",
            remedy=NO_REPLICATION,
        ) from None


def _refuse_transaction_pooler(options: ConnectionOptions, keywords: Mapping[str, Any], session: Session) -> None:
    """Raise ServerSetupError when a pooler spreads this session's transactions over several server sessions.

    A pooler in session mode does no harm. One in transaction mode gives the server session of an idle client to the
    next client, with its settings, and with it somebody else's snapshot. Nothing is set here in either.
    """
    with session.cursor() as cursor:
        # One that takes servers in turn gives another one each time.
        pids = {_backend(cursor) for _ in range(_QUESTIONS)}
        for _ in range(_OTHERS):
            # Behind one address there may be several poolers, each with servers of its own.
            with contextlib.closing(_log_in(options, keywords)) as other, other.cursor() as other_cursor:
                other.autocommit = True
                other_cursor.execute("BEGIN")
                is_shared = _backend(other_cursor) in pids
                pids.add(_backend(cursor))
                other_cursor.execute("ROLLBACK")
            if is_shared or len(pids) > 1:
                raise ServerSetupError(
                    f"a connection pooler in transaction mode stands before PostgreSQL at {options.display()}: "
                    "sessions, and with them snapshots, do not last",
                    remedy="connect to PostgreSQL itself, or to a port of the pooler in session mode",
                )


def _backend(cursor: Cursor) -> int:
    """The process of the server that answers."""
    cursor.execute("SELECT pg_catalog.pg_backend_pid()")
    return int(cursor.fetchone()[0])


def is_pooled(session: Session) -> bool:
    """Whether a pooler stands before the server."""
    with translated("looking for a connection pooler"), session.cursor() as cursor:
        return bool(_backend(cursor) != session.info.backend_pid)


def _log_in(options: ConnectionOptions, keywords: Mapping[str, Any]) -> Session:
    """Connect, with a password that is asked for now where the options say whom to ask."""
    pauses = _REPLACED.pauses()
    while True:
        password = ask_password(options)
        asked = {} if password is None else {"password": password}
        try:
            return psycopg2.connect(options.conninfo, **keywords, **asked)
        except psycopg2.Error as error:
            pause_seconds = next(pauses, None) if asked and is_refused_login(error) else None
            if pause_seconds is None:
                raise connect_error(options, {**options.settings(), **asked}, error) from None
        time.sleep(pause_seconds)


def rename(session: Session, application_name: str) -> None:
    """Give a session another name."""
    with translated("naming a session"), session.cursor() as cursor:
        cursor.execute("SELECT pg_catalog.set_config('application_name', %s, false)", (application_name,))


def begin_anew(session: Session, application_name: str) -> bool:
    """Make of a session what ``connect`` opens under another name. No SQL but this package's may have run in it.

    Returns False for a session that is lost, which is closed.
    """
    try:
        # The server would log a warning where there is nothing to roll back.
        is_idle = session.info.transaction_status == TRANSACTION_STATUS_IDLE
        with session.cursor() as cursor:
            rollback = "" if is_idle else "ROLLBACK; "
            cursor.execute(f"{rollback}SELECT set_config('application_name', %s, false)", (application_name,))
    except psycopg2.Error:
        session.close()
        return False
    return True
