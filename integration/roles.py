"""Roles with no more rights than a test gives them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

from psycopg2 import sql
from psycopg2.extensions import connection as Session
from psycopg2.extensions import make_dsn, parse_dsn


@contextlib.contextmanager
def role(pg: Session, db: str, *attributes: str) -> Iterator[dict[str, str]]:
    """Create a role that may log in; yields what to connect with: host, port, dbname, user, password."""
    name, password = f"reader_{secrets.token_hex(4)}", f"Geheim-{secrets.token_hex(6)}"
    identifier = sql.Identifier(name)
    with pg.cursor() as cursor:
        create = sql.SQL("CREATE ROLE {} LOGIN {} PASSWORD {}")
        cursor.execute(create.format(identifier, sql.SQL(" ".join(attributes)), sql.Literal(password)))
        try:
            yield {**parse_dsn(db), "user": name, "password": password}
        finally:
            cursor.execute(sql.SQL("DROP OWNED BY {}; DROP ROLE {}").format(identifier, identifier))


def conninfo(login: dict[str, str], **changed: str) -> str:
    return str(make_dsn(**{**login, **changed}))
