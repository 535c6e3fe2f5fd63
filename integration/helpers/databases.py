"""Databases of tests, sessions in them, and the end of what others left there."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from typing import NamedTuple

import psycopg2
from psycopg2 import sql
from psycopg2.extensions import connection as Session
from psycopg2.extensions import cursor as Cursor
from psycopg2.extensions import make_dsn, parse_dsn
from watch import wait_until


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


# What most tests make. IF EXISTS, because one goes with another.
_DROP = """
SET client_min_messages = error;
DO $do$
DECLARE
    made text;
BEGIN
    FOR made IN
        SELECT format('DROP PUBLICATION %I', pubname) FROM pg_publication
        UNION ALL
        SELECT format('DROP EXTENSION IF EXISTS %I CASCADE', extname) FROM pg_extension WHERE oid >= 16384
        UNION ALL
        SELECT format('DROP SCHEMA IF EXISTS %I CASCADE', nspname)
        FROM pg_namespace
        WHERE oid >= 16384 AND nspname !~ '^pg_'
        UNION ALL
        SELECT format(
            'DROP %s IF EXISTS public.%I CASCADE',
            CASE relkind
                WHEN 'v' THEN 'VIEW'
                WHEN 'm' THEN 'MATERIALIZED VIEW'
                WHEN 'S' THEN 'SEQUENCE'
                WHEN 'f' THEN 'FOREIGN TABLE'
                WHEN 'c' THEN 'TYPE'
                ELSE 'TABLE'
            END,
            relname
        )
        FROM pg_class
        WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'v', 'm', 'S', 'f', 'c')
        UNION ALL
        SELECT format('DROP ROUTINE IF EXISTS %s CASCADE', oid::regprocedure)
        FROM pg_proc
        WHERE oid >= 16384 AND pronamespace = 'public'::regnamespace
        UNION ALL
        SELECT format('DROP TYPE IF EXISTS public.%I CASCADE', typname)
        FROM pg_type
        WHERE oid >= 16384 AND typnamespace = 'public'::regnamespace AND typtype IN ('e', 'd', 'r')
    LOOP
        EXECUTE made;
    END LOOP;
END
$do$
"""

# Statistics come and go by themselves.
_CATALOGS = """
SELECT relname::text
FROM pg_class
WHERE relnamespace = 'pg_catalog'::regnamespace AND relkind = 'r' AND NOT relisshared
    AND relname NOT IN ('pg_statistic', 'pg_largeobject')
"""
_IS_AS_MADE = """
SELECT d.datacl IS NULL AND d.datconnlimit = -1 AND d.datallowconn AND NOT d.datistemplate AND d.datdba = 10
    AND NOT EXISTS (SELECT FROM pg_db_role_setting AS s WHERE s.setdatabase = d.oid)
    AND NOT EXISTS (SELECT FROM pg_subscription AS s WHERE s.subdbid = d.oid)
    AND NOT EXISTS (SELECT FROM pg_shdescription AS s WHERE s.objoid = d.oid AND s.classoid = 'pg_database'::regclass)
    -- To drop the database is an error then.
    AND NOT EXISTS (SELECT FROM pg_prepared_xacts AS p WHERE p.database = d.datname)
FROM pg_database AS d
WHERE d.datname = %s
"""


class _Made(NamedTuple):
    """A new database: the transaction since which its catalog changes, and the numbers of its rows and of new ones."""

    since: int
    rows: tuple[int, int]


def _rows(cursor: Cursor, since: int) -> tuple[int, int]:
    """How many rows the catalog of the cursor's database has, and how many of them are of ``since`` or later."""
    cursor.execute(_CATALOGS)
    looks = [
        sql.SQL("SELECT count(*), count(*) FILTER (WHERE xmin::text::bigint >= {}) FROM pg_catalog.{}").format(
            sql.Literal(since), sql.Identifier(catalog)
        )
        for (catalog,) in cursor
    ]
    cursor.execute(
        sql.SQL("SELECT sum(rows)::bigint, sum(new)::bigint FROM ({}) AS catalog (rows, new)").format(
            sql.SQL(" UNION ALL ").join(looks)
        )
    )
    rows, new = cursor.fetchone()
    return rows, new


class Databases:
    """Databases of one server, for one test after another.

    One that a test leaves as it was made is the next one's, under another name. To make one writes 7 MB of WAL, and
    takes ten times as long as to look at what is there.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._free: tuple[str, _Made] | None = None

    @contextlib.contextmanager
    def one(self) -> Iterator[str]:
        """Conninfo of the superuser in a database of the test's own. A slot that the test leaves there is an error."""
        name = f"pg_cdc_test_{secrets.token_hex(4)}"
        with connect(self._server) as session, session.cursor() as cursor:
            made = self._begin(cursor, name)
            try:
                yield self._conninfo(name)
            finally:
                end_sessions(cursor, name)
                cursor.execute("SELECT slot_name FROM pg_replication_slots WHERE database = %s", (name,))
                slots = [slot for (slot,) in cursor]
                cursor.execute("SELECT pg_drop_replication_slot(slot) FROM unnest(%s::name[]) AS slot", (slots,))
                if self._is_as_made(cursor, name, made):
                    self._free = (name, made)
                else:
                    cursor.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
            assert slots == []

    def _begin(self, cursor: Cursor, name: str) -> _Made:
        if self._free is not None:
            (free, made), self._free = self._free, None
            rename = sql.SQL("ALTER DATABASE {} RENAME TO {}").format(sql.Identifier(free), sql.Identifier(name))

            def renamed() -> bool:
                end_sessions(cursor, free)
                try:
                    cursor.execute(rename)
                except psycopg2.errors.ObjectInUse:
                    # One that was about to log in.
                    return False
                return True

            wait_until(renamed)
            return made
        cursor.execute("SELECT txid_current()")
        since = int(cursor.fetchone()[0])
        cursor.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(sql.Identifier(name)))
        with connect(self._conninfo(name)) as session, session.cursor() as inside:
            return _Made(since, _rows(inside, since))

    def _is_as_made(self, cursor: Cursor, name: str, made: _Made) -> bool:
        """Drop what tests make in a database; whether nothing else is new, gone, or another than it was."""
        cursor.execute(_IS_AS_MADE, (name,))
        if cursor.fetchone() != (True,):
            return False
        try:
            with connect(self._conninfo(name)) as session, session.cursor() as inside:
                inside.execute(_DROP)
                return _rows(inside, made.since) == made.rows
        except psycopg2.Error:
            return False

    def _conninfo(self, name: str) -> str:
        return str(make_dsn(**{**parse_dsn(self._server), "dbname": name}))
