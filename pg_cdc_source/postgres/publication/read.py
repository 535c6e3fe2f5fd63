"""A publication and its tables, as the catalog has them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from psycopg2.extensions import connection as Session
from psycopg2.extensions import cursor as Cursor

from pg_cdc_source.errors import ServerSetupError
from pg_cdc_source.options.names import quoted
from pg_cdc_source.options.stream_options import Publications
from pg_cdc_source.postgres import search_path
from pg_cdc_source.postgres.attached import Attachments, read_attachments
from pg_cdc_source.postgres.catalog import Relation
from pg_cdc_source.postgres.publication.before_15 import is_before_15, read_attached
from pg_cdc_source.postgres.publication.listing import by_name
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.trees import read_ancestors

# From these versions on, a publication can have schemas, row filters and column lists; and send stored generated
# columns.
SCHEMAS_VERSION = 150000
GENERATED_VERSION = 180000


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table under the name that its changes have; ``columns`` None means all, ``row_filter`` is SQL.

    ``entries`` are the catalog's rows that list it, its schema or its root, each by its oid; none where all tables are
    published. What lists another relation lists the table as long as it is in that schema, or attached to that root:
    behind ``/`` stand the transactions that made it so. ``attached`` is the transaction that last attached a partition
    which the server may not have noticed, 0 if there is none; None where the server notices every one (see
    ``before_15``). ``partitions`` are those that were tables of their own before; None where changes of partitions do
    not come under this table. With ``inserts_only``, the publication for inserts has it, and ``altered`` is the
    transaction that last set something of that one (from 15 on).
    """

    relation: Relation
    columns: tuple[str, ...] | None
    row_filter: str | None
    entries: tuple[str, ...]
    attached: int | None
    partitions: Attachments | None = None
    inserts_only: bool = False
    altered: int = 0


@dataclass(frozen=True, slots=True)
class Publication:
    """What a publication sends. ``generated``: also stored generated columns (PostgreSQL 18).

    ``altered`` is the transaction that last set something of it; adding and dropping tables does not count.

    Of a stream with two publications, it is the first one with the tables of both.
    """

    oid: int
    name: str
    all_tables: bool
    via_root: bool
    inserts: bool
    updates: bool
    deletes: bool
    truncates: bool
    generated: bool
    tables: tuple[PublishedTable, ...]
    altered: int = 0

    @property
    def unsent(self) -> tuple[str, ...]:
        """The kinds of changes that it leaves out, in the plural."""
        kinds = {"inserts": self.inserts, "updates": self.updates, "deletes": self.deletes, "truncates": self.truncates}
        return tuple(kind for kind, is_sent in kinds.items() if not is_sent)


# Columns that not every version has are read from the row as JSON: attnames, rowfilter and prattrs came with 15,
# pubgencols with 18, prexcept with 19.
_READ_PUBLICATION = """
SELECT p.oid, p.puballtables, p.pubviaroot, p.pubinsert, p.pubupdate, p.pubdelete, p.pubtruncate,
    coalesce(to_jsonb(p) ->> 'pubgencols' = 's', false), p.xmin::text::bigint
FROM pg_catalog.pg_publication AS p
WHERE p.pubname = %s
"""

_SCHEMA_ENTRIES = """
UNION ALL
SELECT s.oid FROM pg_catalog.pg_publication_namespace AS s WHERE s.pnnspid = p.object AND s.pnpubid = %(oid)s
"""

# Before 15, pg_publication_tables also has partitions whose root is there, though their changes have the root's name.
# A table is listed by its own name, by a root's, or by the name of a schema of either. FOR ALL TABLES EXCEPT lists what
# it leaves out.
#
# A publication may have thousands of tables, and be new: the server's statistics say that it has one. It would join by
# comparing all with all, so what an index finds is asked for by subqueries. A cast keeps prpubid's own index out of it.
_READ_TABLES = """
WITH published (namespace, nspname, relname, said) AS MATERIALIZED (
    SELECT (SELECT n.oid FROM pg_catalog.pg_namespace AS n WHERE n.nspname = t.schemaname), t.schemaname, t.tablename,
        to_jsonb(t)
    FROM pg_catalog.pg_publication_tables AS t
    WHERE t.pubname = %(name)s
),
relation AS (
    SELECT c.oid, t.nspname, c.relname, c.relkind, c.relispartition, t.said
    FROM published AS t
    JOIN pg_catalog.pg_class AS c ON c.relnamespace = t.namespace AND c.relname = t.relname
),
covered (oid) AS (
    SELECT c.oid
    FROM relation AS c
    CROSS JOIN pg_partition_ancestors(c.oid) AS up (oid)
    JOIN relation AS a ON a.oid = up.oid
    WHERE %(via_root)s AND c.relispartition AND a.oid <> c.oid
),
found AS (
    SELECT c.oid, c.nspname, c.relname, c.relkind,
        CASE
            WHEN (
                SELECT to_jsonb(r) ->> 'prattrs'
                FROM pg_catalog.pg_publication_rel AS r
                WHERE r.prrelid = c.oid AND r.prpubid::bigint = %(oid)s
            ) IS NOT NULL THEN c.said -> 'attnames'
        END AS columns,
        c.said ->> 'rowfilter' AS row_filter
    FROM relation AS c
    WHERE c.oid NOT IN (SELECT oid FROM covered)
),
-- The table and what it is a partition of, from the bottom to the top; and what has made it one.
branch (table_oid, oid, level, link) AS (
    SELECT oid, oid, 1::bigint, NULL::text FROM found
    UNION ALL
    SELECT f.oid, up.oid, up.level,
        -- In an old snapshot, what is a partition now may inherit from several tables.
        (SELECT max(i.xmin::text) FROM pg_catalog.pg_inherits AS i WHERE i.inhrelid = below.oid)
    FROM found AS f
    CROSS JOIN pg_partition_ancestors(f.oid) WITH ORDINALITY AS up (oid, level)
    JOIN pg_partition_ancestors(f.oid) WITH ORDINALITY AS below (oid, level) ON below.level = up.level - 1
),
attached (table_oid, oid, links) AS (
    SELECT table_oid, oid, array_agg(link) OVER (PARTITION BY table_oid ORDER BY level)
    FROM branch
    WHERE level = 1 OR link IS NOT NULL
),
place (table_oid, object, links) AS (
    SELECT table_oid, oid, links FROM attached
    UNION ALL
    SELECT a.table_oid, c.relnamespace, a.links || (
        -- SET SCHEMA replaces it. In WHERE, the schema would have the server read all that depends on it.
        SELECT max(d.xmin::text) FILTER (
            WHERE d.refclassid = 'pg_catalog.pg_namespace'::regclass AND d.refobjid = c.relnamespace
        )
        FROM pg_catalog.pg_depend AS d
        WHERE d.classid = 'pg_catalog.pg_class'::regclass AND d.objid = a.oid AND d.objsubid = 0
    )
    FROM attached AS a
    JOIN pg_catalog.pg_class AS c ON c.oid = a.oid
),
listed (table_oid, entries) AS (
    SELECT p.table_oid, array_agg(DISTINCT concat_ws('/', e.oid, nullif(array_to_string(p.links, '-'), '')))
    FROM place AS p
    CROSS JOIN unnest(ARRAY(
        SELECT r.oid
        FROM pg_catalog.pg_publication_rel AS r
        WHERE r.prrelid = p.object AND r.prpubid::bigint = %(oid)s
            AND NOT coalesce((to_jsonb(r) ->> 'prexcept')::boolean, false)
        {schema_entries}
    )) AS e (oid)
    GROUP BY p.table_oid
)
SELECT f.oid, f.nspname, f.relname, f.relkind, f.columns, f.row_filter, l.entries
FROM found AS f
LEFT JOIN listed AS l ON l.table_oid = f.oid
ORDER BY f.nspname COLLATE "C", f.relname COLLATE "C"
"""


# As PostgreSQL prints them for the role: names that others hide from its search_path have their schema.
_READ_FILTERS = """
SELECT t.schemaname, t.tablename, t.rowfilter
FROM pg_catalog.pg_publication_tables AS t
WHERE t.pubname OPERATOR(pg_catalog.=) %s AND t.rowfilter IS NOT NULL
"""


def _read_filters(cursor: Cursor, name: str) -> dict[tuple[str, str], str]:
    """The row filters of a publication's tables, by schema and name."""
    search_path.execute_by_role(cursor, _READ_FILTERS, (name,))
    return {(schema, table): row_filter for schema, table, row_filter in cursor}


def read_publication(session: Session, names: Publications) -> Publication | None:
    """A stream's publication and its tables, sorted by name; None where there is none.

    Raises ServerSetupError where the one for inserts does not send what the stream takes it for.
    """
    found = read_one(session, names.name)
    inserts = None if found is None or names.inserts is None else read_one(session, names.inserts)
    return found if found is None or inserts is None else _joined(session, found, inserts)


def existing_names(session: Session, names: Publications) -> tuple[str, ...]:
    """The publications to ask the slot for: PostgreSQL refuses one that is missing, or passes over it."""
    if names.inserts is None or read_one(session, names.inserts) is None:
        return (names.name,)
    return (names.name, names.inserts)


def _setting_inserts(found: Publication, inserts: Publication) -> str:
    """SQL that has ``inserts`` send inserts and truncates, with the other settings of ``found``."""
    settings = ["publish = 'insert, truncate'", f"publish_via_partition_root = {str(found.via_root).lower()}"]
    if found.generated != inserts.generated:
        settings.append(f"publish_generated_columns = {'stored' if found.generated else 'none'}")
    return f"ALTER PUBLICATION {quoted(inserts.name)} SET ({', '.join(settings)})"


def _joined(session: Session, found: Publication, inserts: Publication) -> Publication:
    """``found`` with the tables of ``inserts`` as well. A table of both has everything that either sends."""
    sends = (inserts.inserts, inserts.truncates, inserts.updates, inserts.deletes, inserts.via_root, inserts.generated)
    if sends != (True, True, False, False, found.via_root, found.generated):
        raise ServerSetupError(
            f"publication {quoted(inserts.name)} is not one of inserts and truncates with the settings of "
            f"{quoted(found.name)}: keyless=insertOnly takes it for that",
            remedy=f"{_setting_inserts(found, inserts)}; or drop it, and give its tables a primary key or REPLICA "
            "IDENTITY FULL",
        )
    filters = {table.relation.oid: table.row_filter for table in inserts.tables}
    columns = {table.relation.oid: table.columns for table in inserts.tables}
    for table in found.tables:
        if columns.get(table.relation.oid, table.columns) != table.columns:
            raise ServerSetupError(
                f"publications {quoted(found.name)} and {quoted(inserts.name)} have {table.relation} with other column "
                "lists, of which PostgreSQL sends neither",
                remedy=f"ALTER PUBLICATION {quoted(inserts.name)} DROP TABLE {table.relation}",
            )
        if table.row_filter is not None and filters.get(table.relation.oid, table.row_filter) != table.row_filter:
            raise ServerSetupError(
                f"publications {quoted(found.name)} and {quoted(inserts.name)} have {table.relation} with other row "
                "filters, so some of its rows come with inserts and not with their deletes",
                remedy=f"ALTER PUBLICATION {quoted(inserts.name)} DROP TABLE {table.relation}",
            )
    altered = 0 if is_before_15(session) else inserts.altered
    tables = {table.relation.oid: replace(table, inserts_only=True, altered=altered) for table in inserts.tables}
    tables |= {table.relation.oid: table for table in found.tables}
    if found.via_root:
        above = read_ancestors(session, list(tables))
        tables = {
            oid: table for oid, table in tables.items() if tables.keys().isdisjoint(a.oid for a in above.get(oid, ()))
        }
    relations = by_name([table.relation for table in tables.values()])
    return replace(found, tables=tuple(tables[relation.oid] for relation in relations))


def read_one(session: Session, name: str) -> Publication | None:
    """The publication of this name and its tables, sorted by name; None where there is none."""
    with translated(f"reading publication {quoted(name)}"), session.cursor() as cursor:
        cursor.execute(_READ_PUBLICATION, (name,))
        row = cursor.fetchone()
        if row is None:
            return None
        oid, all_tables, via_root, inserts, updates, deletes, truncates, generated, altered = row
        schema_entries = _SCHEMA_ENTRIES if session.server_version >= SCHEMAS_VERSION else ""
        cursor.execute(
            _READ_TABLES.format(schema_entries=schema_entries), {"oid": oid, "name": name, "via_root": via_root}
        )
        rows = cursor.fetchall()
        filters = _read_filters(cursor, name) if any(row[5] is not None for row in rows) else {}
        roots = [row[0] for row in rows if row[3] == "p" and via_root]
        partitions = read_attachments(session, roots) if roots else {}
        attached: dict[int, int] = {}
        if is_before_15(session) and via_root:
            attached = read_attached(cursor, oid, roots)
    # By oid, because before 14 the view repeats a partition that is listed beside its root. The view has what is
    # published now, also where the session's snapshot is older: a table without an entry there was not published then.
    tables = {
        relation[0]: PublishedTable(
            Relation(*relation),
            None if columns is None else tuple(columns),
            None if row_filter is None else filters.get((relation[1], relation[2]), row_filter),
            tuple(entries or ()),
            attached.get(relation[0]),
            partitions.get(relation[0]),
        )
        for *relation, columns, row_filter, entries in rows
        if entries or all_tables
    }
    return Publication(
        oid,
        name,
        all_tables,
        via_root,
        inserts,
        updates,
        deletes,
        truncates,
        generated,
        tuple(tables.values()),
        altered,
    )
