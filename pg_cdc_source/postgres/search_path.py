"""Whose search_path a statement runs with: PostgreSQL's own names alone, or what the role has set.

PostgreSQL prefers a function or operator whose types fit exactly, wherever in the search_path it is: to its own
``array_agg(anynonarray)`` it prefers an ``array_agg(text)`` that somebody has made in ``public``, and calls that with
the rights of this role. So sessions find nothing but what is PostgreSQL's own. The role's search_path is for what is
the user's: tables that are named without a schema, SQL of the user's, views and functions that may rely on it, and
texts that it changes: names of types, values of ``regclass``. What runs with it names PostgreSQL's schema itself.

A walsender has the role's all the time: it runs no SQL, and prints the stream's values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from psycopg2 import sql
from psycopg2.extensions import TRANSACTION_STATUS_IDLE
from psycopg2.extensions import connection as Session
from psycopg2.extensions import cursor as Cursor

OWN = "pg_catalog"
# What RESET gives back is the setting of the connection string, else of the role in the database.
_TO_ROLES = "SET LOCAL search_path TO DEFAULT"
_TO_OWN = f"SET LOCAL search_path TO {OWN}"


def execute(cursor: Cursor, statement: str | sql.Composable, parameters: Any = None, *, by_role: bool = True) -> None:
    """Execute one statement, whose rows are the cursor's; with the role's search_path where it is ``by_role``."""
    statement = sql.SQL(statement) if isinstance(statement, str) else statement
    if not by_role:
        cursor.execute(statement, parameters)
        return
    cursor.execute(sql.SQL("{}; {}").format(sql.SQL(_TO_ROLES), statement), parameters)
    # Without a transaction it was gone with the statement.
    if cursor.connection.info.transaction_status != TRANSACTION_STATUS_IDLE:
        _set(cursor.connection, _TO_OWN)


def take_roles(session: Session) -> None:
    """Have a session run with the role's search_path from now on."""
    _set(session, "SET search_path TO DEFAULT")


@contextmanager
def of_role(session: Session, *, by_role: bool) -> Iterator[None]:
    """Run a block in a transaction with the role's search_path where it is ``by_role``.

    An error in it has ended the transaction, and that setting with it.
    """
    if by_role:
        _set(session, _TO_ROLES)
    yield
    if by_role:
        _set(session, _TO_OWN)


def _set(session: Session, statement: str) -> None:
    with session.cursor() as cursor:
        cursor.execute(statement)
