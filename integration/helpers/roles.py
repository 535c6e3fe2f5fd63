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


SETTINGS_OF_ROLES = {
    "DateStyle": "German, DMY",
    "IntervalStyle": "sql_standard",
    "TimeZone": "Asia/Kathmandu",
    "bytea_output": "escape",
    "extra_float_digits": "-10",
    "statement_timeout": "150ms",
    "idle_in_transaction_session_timeout": "50ms",
    "lock_timeout": "1ms",
    "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on",
    "default_transaction_read_only": "off",
    "row_security": "on",
    "quote_all_identifiers": "on",
    "standard_conforming_strings": "off",
    "client_encoding": "LATIN1",
    "enable_seqscan": "off",
    "xmlbinary": "hex",
    "search_path": "decoy",
}


# Text of each of these depends on a setting.
TELLING_COLUMNS = (
    "SELECT i AS id, date '2024-02-03' + i AS d, timestamp '2024-02-03 04:05:06.5' AS ts,"
    " timestamptz '2024-02-03 04:05:06+00' AS tz, interval '1 year -2 days 03:04:05' AS iv, '\\x00ff41'::bytea AS b,"
    " 0.1::float8 + 0.2 AS f8, 1.1::float4 / 3 AS f4, '12.34'::text::money AS m,"
    " tstzrange('2024-02-03 04:05:06+00', NULL) AS r, ARRAY[timestamptz '2024-02-03 04:05:06+00'] AS tza,"
    " daterange('2024-02-03', '2024-03-01') AS dr, timetz '04:05:06+02' AS tmz, 'größe €' AS txt,"
    " 'pg_class'::regclass AS rel"
)
