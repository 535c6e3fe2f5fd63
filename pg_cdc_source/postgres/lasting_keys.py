"""Which tables have had their keys for as long as a slot stands."""

from __future__ import annotations

from collections.abc import Sequence

from psycopg2.extensions import connection as Session

from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.xids import age_of

# Of transactions before its catalog_xmin, a slot sees what they did to the catalog, wherever it stands. Other commands
# write an index's row anew, too (ALTER TABLE ... CLUSTER ON), so a key may be older than it looks.
_READ_LASTING_KEYS = f"""
SELECT i.indrelid
FROM pg_catalog.pg_index AS i
JOIN pg_catalog.pg_replication_slots AS s ON s.slot_name = %(slot)s
WHERE i.indrelid = ANY (%(oids)s::oid[]) AND (i.indisprimary OR i.indisreplident)
GROUP BY i.indrelid
HAVING bool_and({age_of("i.xmin")} > age(s.catalog_xmin))
"""


def read_lasting_keys(session: Session, slot: str, oids: Sequence[int]) -> frozenset[int]:
    """The oids of tables whose primary keys, and indexes of a replica identity, are older than the slot's position."""
    with translated("reading since when tables have their keys"), session.cursor() as cursor:
        cursor.execute(_READ_LASTING_KEYS, {"slot": slot, "oids": list(oids)})
        return frozenset(oid for (oid,) in cursor)
