"""Open sessions in a test's database, and end what others left there."""

from __future__ import annotations

import contextlib
import time

import psycopg2
from psycopg2.extensions import connection as Session
from psycopg2.extensions import cursor as Cursor


def connect(url: str) -> contextlib.closing[Session]:
    """A session in autocommit mode, in which no statement waits for ever."""
    session = psycopg2.connect(url)
    session.autocommit = True
    with session.cursor() as cursor:
        cursor.execute("SET statement_timeout = '5min'")
    return contextlib.closing(session)


def end_sessions(cursor: Cursor, database: str) -> None:
    """End what is still connected to a database: the keeper stays for a while after the last reader."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        cursor.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (database,))
        if cursor.rowcount == 0:
            return
        time.sleep(0.05)
