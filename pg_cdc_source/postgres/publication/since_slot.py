"""What a publication has got since a slot was made: what was written to a table before it was published is not sent."""

from __future__ import annotations

from psycopg2.extensions import connection as Session

from pg_cdc_source.options.names import listed, quoted
from pg_cdc_source.options.stream_options import Publications
from pg_cdc_source.postgres.publication.read import SCHEMAS_VERSION
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.xids import age_of

# Of transactions before its catalog_xmin, a slot sees what they did to the catalog, wherever it stands.
_READ_SINCE_SLOT = f"""
WITH publication AS (
    SELECT p.oid, p.pubname, p.xmin FROM pg_catalog.pg_publication AS p WHERE p.pubname = ANY (%(names)s::text[])
),
entry (what, since) AS (
    SELECT 'publication ' || quote_ident(p.pubname), p.xmin FROM publication AS p
    UNION ALL
    SELECT format('%%I.%%I', n.nspname, c.relname), r.xmin
    FROM pg_catalog.pg_publication_rel AS r
    JOIN publication AS p ON p.oid = r.prpubid
    JOIN pg_catalog.pg_class AS c ON c.oid = r.prrelid
    JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
    {{schema_entries}}
)
SELECT e.what
FROM entry AS e
JOIN pg_catalog.pg_replication_slots AS s ON s.slot_name = %(slot)s AND {age_of("e.since")} <= age(s.catalog_xmin)
ORDER BY e.what
"""

_SCHEMA_ENTRIES = """
UNION ALL
SELECT 'schema ' || n.pnnspid::pg_catalog.regnamespace::text, n.xmin
FROM pg_catalog.pg_publication_namespace AS n
JOIN publication AS p ON p.oid = n.pnpubid
"""


def describe_since_slot(session: Session, names: Publications, slot: str) -> str:
    """Name what may have come to a stream's publications, or been altered, behind a slot's position; empty if nothing.

    It may also have come before, as long as the slot waits for transactions that are as old.
    """
    schema_entries = _SCHEMA_ENTRIES if session.server_version >= SCHEMAS_VERSION else ""
    wanted = [name for name in (names.name, names.inserts) if name is not None]
    with translated(f"comparing publication {quoted(names.name)} with slot {slot}"), session.cursor() as cursor:
        cursor.execute(_READ_SINCE_SLOT.format(schema_entries=schema_entries), {"names": wanted, "slot": slot})
        found = [what for (what,) in cursor]
    if not found:
        return ""
    return (
        f"{listed(found)} may be younger than slot {slot}, or altered since: the stream lacks "
        "what was written before it was published"
    )
