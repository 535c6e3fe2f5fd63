"""Logical decoding messages: which servers send them, and how one is written into the WAL."""

from __future__ import annotations

from psycopg2.extensions import connection as Session

from pg_cdc_source.offsets import Lsn
from pg_cdc_source.postgres.server_errors import translated

# From this version on, pgoutput sends them.
MESSAGES_VERSION = 140000

# Sessions are read-only and do not wait for their commits otherwise. A message that was answered for is to be there.
_BEGIN = """
BEGIN READ WRITE;
SET LOCAL synchronous_commit = on
"""

_EMIT = """
SELECT pg_catalog.pg_logical_emit_message(true, %s, %s)::text
"""


def emit_message(session: Session, prefix: str, content: str) -> Lsn:
    """Write a message in a transaction of its own, and return the LSN behind it; its commit follows right there."""
    with translated(f"writing a message with the prefix {prefix}"), session.cursor() as cursor:
        cursor.execute(_BEGIN)
        cursor.execute(_EMIT, (prefix, content))
        lsn = Lsn.parse(cursor.fetchone()[0])
        cursor.execute("COMMIT")
        return lsn
