"""What PostgreSQL before 15 may leave out or confuse in partitions that are published under their root.

A walsender that has decoded a change of a table goes on without that table's changes after it was attached as a
partition, until the publication is altered (rel_sync_cache_relation_cb in pgoutput.c). And a walsender that is told of
DDL at the wrong moment sends a row in the partition's layout as if it were the root's: values of one column under the
name of another. So partitions of another layout are refused under their root. An ATTACH of one, or an ATTACH in a
transaction that does not alter the publication, is a change like a dropped publication.
"""

from __future__ import annotations

from collections.abc import Sequence

from psycopg2.extensions import connection as Session
from psycopg2.extensions import cursor as Cursor

from pg_cdc_source.errors import ServerSetupError
from pg_cdc_source.postgres.catalog import Relation
from pg_cdc_source.postgres.publication.listing import listed
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.trees import IS_STAYING, TREE
from pg_cdc_source.postgres.xids import age_of


def is_before_15(session: Session) -> bool:
    return bool(session.server_version < 150000)


def _layout(oid: str) -> str:
    """SQL for what has to be the same in two tables so that rows of one can be taken for the other's."""
    return f"""(
        SELECT array_agg(ROW(CASE WHEN NOT attisdropped THEN attname END, attlen, attalign)::text ORDER BY attnum)
        FROM pg_catalog.pg_attribute
        WHERE attrelid = {oid} AND attnum > 0
    )"""


# A partition that was created as one has its row type from the same transaction, and no changes of before.
_READ_ATTACHED = f"""
WITH RECURSIVE {TREE}
SELECT DISTINCT ON (tree.root) tree.root::bigint, i.xmin::text::bigint
FROM tree
JOIN pg_catalog.pg_inherits AS i ON i.inhrelid = tree.oid AND tree.oid <> tree.root AND {IS_STAYING}
JOIN pg_catalog.pg_type AS t ON t.typrelid = tree.oid AND t.xmin <> i.xmin
JOIN pg_catalog.pg_publication AS p ON p.oid = %(publication)s
WHERE age(i.xmin) >= 0 AND (
    {age_of("p.xmin")} > age(i.xmin)
    OR {_layout("tree.oid")} IS DISTINCT FROM {_layout("tree.root")}
)
ORDER BY tree.root, age(i.xmin)
"""


def read_attached(cursor: Cursor, publication: int, roots: Sequence[int]) -> dict[int, int]:
    """By root, the transaction that last attached a partition of which changes may be missing or wrong; 0 for none.

    They may be where the publication was not altered with the ATTACH or since, and where the layout is not the root's.
    """
    cursor.execute(_READ_ATTACHED, {"roots": list(roots), "publication": publication})
    return dict.fromkeys(roots, 0) | dict(cursor.fetchall())


_FIND_OTHER_LAYOUTS = f"""
WITH RECURSIVE {TREE}
SELECT c.oid, n.nspname, c.relname, c.relkind
FROM tree
JOIN pg_catalog.pg_class AS r ON r.oid = tree.root AND r.relkind = 'p'
JOIN pg_catalog.pg_class AS c ON c.oid = tree.oid AND c.relkind <> 'p'
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE {_layout("c.oid")} IS DISTINCT FROM {_layout("r.oid")}
"""


def refuse_other_layouts(session: Session, roots: Sequence[int]) -> None:
    """Raise ServerSetupError where a leaf partition has another layout than its root."""
    with translated("reading partitions"), session.cursor() as cursor:
        cursor.execute(_FIND_OTHER_LAYOUTS, {"roots": list(roots)})
        others = [Relation(*row) for row in cursor]
    if others:
        raise ServerSetupError(
            "partitions have another layout than their root (the columns' order, or that of dropped ones): "
            f"{listed(others)}. PostgreSQL before 15 may send values of one column under the name of another",
            remedy="use a publication WITH (publish_via_partition_root = false) and the option tables, or PostgreSQL "
            "15 or later",
        )
