"""Questions that wait for nobody's lock, or not for long, and who it is that they would have waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from psycopg2.extensions import TRANSACTION_STATUS_INERROR
from psycopg2.extensions import connection as Session
from psycopg2.extensions import cursor as Cursor

from pg_cdc_source.postgres.server_errors import translated


@contextmanager
def waiting_for_nobody(cursor: Cursor, *, within: str = "100ms") -> Iterator[None]:
    """Have statements fail that would wait for a lock for long: DDL holds its tables' locks until its transaction ends.

    Tables are locked to ask for their size, or which of them a publication has.
    """
    with _having(cursor, "lock_timeout", within):
        yield


@contextmanager
def taking_at_most(cursor: Cursor, longest: str) -> Iterator[None]:
    """Have statements fail with psycopg2.errors.QueryCanceled that take longer."""
    with _having(cursor, "statement_timeout", longest):
        yield


@contextmanager
def _having(cursor: Cursor, setting: str, value: str) -> Iterator[None]:
    cursor.execute("SELECT current_setting(%(s)s), set_config(%(s)s, %(v)s, false)", {"s": setting, "v": value})
    ((before, _),) = cursor.fetchall()
    try:
        yield
    finally:
        # A transaction that has failed takes it back by itself.
        if cursor.connection.get_transaction_status() != TRANSACTION_STATUS_INERROR:
            cursor.execute("SELECT set_config(%s, %s, false)", (setting, before))


# Also who still waits for such a lock: whoever comes later stands behind them.
_READ_LOCKERS = """
SELECT DISTINCT c.oid::regclass::text || coalesce(' by pid ' || l.pid, ' by a prepared transaction')
FROM pg_catalog.pg_locks AS l
JOIN pg_catalog.pg_class AS c ON c.oid = l.relation AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't'
WHERE l.locktype = 'relation'
    AND l.mode = 'AccessExclusiveLock'
    AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
LIMIT 5
"""


def describe_lockers(session: Session) -> str:
    """Which tables are locked against readers, or about to be, and by whom; empty where none is any more."""
    with translated("looking who has locked tables"), session.cursor() as cursor:
        cursor.execute(_READ_LOCKERS)
        return ", ".join(text for (text,) in cursor)
