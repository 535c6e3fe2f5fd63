"""Whose search_path a statement runs with: PostgreSQL's own names alone, or the role's.

PostgreSQL prefers a function or operator whose types fit exactly, wherever in the search_path it is: to its own
``array_agg(anynonarray)`` it prefers an ``array_agg(text)`` that somebody has made in ``public``, and calls that with
the rights of this role. So what asks the catalog finds nothing but what is PostgreSQL's own.

What reads users' tables runs with the role's: the SQL of users may need it, and so may functions of theirs that are
looked into while a table is planned (in indexes, statistics, partition keys, CHECKs). It also changes texts: names of
types, row filters, values of ``regclass``, which a walsender has to print alike. Such statements say of each function,
operator and type that it is PostgreSQL's.

The role's is what a session has when it is opened. A pooler or an event trigger may have set it, so no RESET brings it
back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from psycopg2 import sql
from psycopg2.extensions import TRANSACTION_STATUS_IDLE
from psycopg2.extensions import connection as Session
from psycopg2.extensions import cursor as Cursor

from pg_cdc_source.postgres.server_errors import translated

OWN = "pg_catalog"
# Before the search_path is set.
KEEP_ROLES = "SELECT pg_catalog.set_config('pg_cdc.search_path', pg_catalog.current_setting('search_path'), false)"
_TAKE_ROLES = "SELECT pg_catalog.set_config('search_path', pg_catalog.current_setting('pg_cdc.search_path', true), {})"
_TAKE_ROLES_LOCALLY = _TAKE_ROLES.format("true")
_TAKE_OWN_LOCALLY = f"SET LOCAL search_path TO {OWN}"


def execute_by_role(cursor: Cursor, statement: str | sql.Composable, parameters: Any = None) -> None:
    """Execute one statement with the role's search_path; its rows are the cursor's."""
    statement = sql.SQL(statement) if isinstance(statement, str) else statement
    cursor.execute(sql.SQL("{}; {}").format(sql.SQL(_TAKE_ROLES_LOCALLY), statement), parameters)
    # Without a transaction it was gone with the statement.
    if cursor.connection.info.transaction_status != TRANSACTION_STATUS_IDLE:
        with cursor.connection.cursor() as other:
            other.execute(_TAKE_OWN_LOCALLY)


def take_roles(session: Session, *, locally: bool = False) -> None:
    """Run with the role's search_path from now on; ``locally``, until the transaction goes back to a savepoint."""
    with translated("setting the search_path"), session.cursor() as cursor:
        cursor.execute(_TAKE_ROLES_LOCALLY if locally else _TAKE_ROLES.format("false"))


@contextmanager
def own(session: Session) -> Iterator[None]:
    """Run a block without the role's search_path, which the transaction has taken locally. An error ends both."""
    with translated("setting the search_path"), session.cursor() as cursor:
        cursor.execute(_TAKE_OWN_LOCALLY)
    yield
    take_roles(session, locally=True)
