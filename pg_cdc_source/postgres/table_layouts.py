"""The columns of tables as the catalog has them now, with what rows from before a column was added have in it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from psycopg2.extensions import connection as Session
from psycopg2.extensions import cursor as Cursor

from pg_cdc_source.errors import UnrepresentableError
from pg_cdc_source.options.names import quoted
from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.options.stream_options import Publications
from pg_cdc_source.postgres import search_path
from pg_cdc_source.postgres.columns import HAS_NO_NULL, read_type_names, read_types
from pg_cdc_source.postgres.publication.identity import read_identities
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.trees import PARTITIONS
from pg_cdc_source.protocol.table_layout import CatalogColumn, CatalogLayout, TypeFacts
from pg_cdc_source.values import registry
from pg_cdc_source.values.registry import Column
from pg_cdc_source.values.spark_names import spark_name

# A table's rows are in its file; a partitioned table's in those of its partitions, which come and go. A table's first
# file has its oid for a number (heap.c, heap_create), so those that count are later ones; and the columns in which
# old rows may have several values: a partition that was attached may have a DEFAULT of its own, which is none that
# older ones had. Not by pg_relation_filenode(), which tells of the present file in a transaction that sees older
# columns, too. A row of pg_attribute has another xmin after each ALTER TABLE of its column, but also after the VACUUM
# FULL that writes a missing value into the rows (RelationClearMissing). Where there is a DEFAULT or an expression,
# ALTER TYPE and SET EXPRESSION make its row of pg_attrdef anew, and VACUUM FULL does not. A partition may be given
# another expression for a stored generated column alone.
_READ_TABLES = f"""
{PARTITIONS}
SELECT c.oid::bigint, left(md5(concat_ws(' ', f.later, several.attnums)), 12),
    left(md5(concat(
        (
            SELECT string_agg(a.attnum || ':' || coalesce('d' || d.oid, a.xmin::text), ',' ORDER BY a.attnum)
            FROM pg_catalog.pg_attribute AS a
            LEFT JOIN pg_catalog.pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
            WHERE a.attrelid = c.oid AND a.attnum > 0
        ),
        expressions.said
    )), 12),
    c.relnatts,
    (SELECT p.oid::bigint FROM pg_catalog.pg_constraint AS p WHERE p.conrelid = c.oid AND p.contype = 'p')
FROM pg_catalog.pg_class AS c
JOIN (
    SELECT t.root,
        string_agg(l.oid || ':' || l.relfilenode, ',' ORDER BY l.oid)
            FILTER (WHERE l.relkind <> 'p' AND l.relfilenode <> l.oid) AS later
    FROM tree AS t
    JOIN pg_catalog.pg_class AS l ON l.oid = t.oid
    GROUP BY t.root
) AS f ON f.root = c.oid
LEFT JOIN (
    SELECT m.root, string_agg(m.attnum::text, ',' ORDER BY m.attnum) AS attnums
    FROM (
        SELECT t.root, r.attnum
        FROM tree AS t
        JOIN pg_catalog.pg_class AS l ON l.oid = t.oid AND l.relkind <> 'p'
        JOIN pg_catalog.pg_attribute AS a ON a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped
        JOIN pg_catalog.pg_attribute AS made ON made.attrelid = t.oid AND made.attname = 'tableoid'
        JOIN pg_catalog.pg_attribute AS r ON r.attrelid = t.root AND r.attname = a.attname
        WHERE t.oid <> t.root
            -- No rows are older than a column that a partition was created with. ATTACH would have written it anew.
            AND (a.atthasmissing OR a.xmin <> made.xmin)
        GROUP BY t.root, r.attnum
        HAVING count(DISTINCT coalesce(a.attmissingval::text, '')) > 1
    ) AS m
    GROUP BY m.root
) AS several ON several.root = c.oid
-- Of all at once: for each table by itself, all trees would be read.
LEFT JOIN (
    SELECT t.root, string_agg(DISTINCT e.said, ',' ORDER BY e.said) AS said
    FROM tree AS t
    JOIN pg_catalog.pg_attribute AS a ON a.attrelid = t.oid AND a.attgenerated = 's'
    JOIN pg_catalog.pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    CROSS JOIN LATERAL (SELECT a.attname || '=' || pg_get_expr(d.adbin, d.adrelid)) AS e (said)
    WHERE t.oid <> t.root
    GROUP BY t.root
) AS expressions ON expressions.root = c.oid
"""

# A partitioned table has no rows. Each of its partitions knows what its own have.
_READ_COLUMNS = f"""
{PARTITIONS}
SELECT a.attrelid::bigint, a.attnum, a.attname, a.atttypid, a.atttypmod, {HAS_NO_NULL}, a.attgenerated::text, m.missing
FROM pg_catalog.pg_attribute AS a
LEFT JOIN (
    SELECT f.root, b.attname, array_agg(b.attrelid::bigint ORDER BY b.attrelid) AS missing
    FROM tree AS f
    JOIN pg_catalog.pg_attribute AS b ON b.attrelid = f.oid AND b.atthasmissing
    GROUP BY f.root, b.attname
) AS m ON m.root = a.attrelid AND m.attname = a.attname
WHERE a.attrelid = ANY (%(oids)s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attrelid, a.attnum
"""

# As the stream's walsender would print them: a search_path changes what regclass and its like look like.
_READ_MISSING = """
SELECT a.attrelid::pg_catalog.int8, a.attname, pg_catalog.textsend(a.attmissingval::pg_catalog.text)
FROM pg_catalog.pg_attribute AS a
WHERE a.attrelid OPERATOR(pg_catalog.=) ANY (%s::pg_catalog.oid[]) AND a.atthasmissing
"""

# Columns that not every version has are read from the row as JSON: prattrs came with 15, pubgencols with 18.
_READ_PUBLISHED = """
SELECT coalesce(to_jsonb(p) ->> 'pubgencols' = 's', false), r.prrelid::bigint, to_jsonb(r) ->> 'prattrs'
FROM pg_catalog.pg_publication AS p
LEFT JOIN pg_catalog.pg_publication_rel AS r ON r.prpubid = p.oid AND r.prrelid = ANY (%(oids)s::oid[])
WHERE p.pubname = ANY (%(publications)s)
"""


# Enums and composite types that columns are of, also within arrays, domains, ranges and each other. Those of PostgreSQL
# itself, below 16384, stay as they are. Multiranges came with 14.
_PARTS_OF_TYPE = """
    SELECT t.typelem
    UNION ALL
    SELECT t.typbasetype
    UNION ALL
    SELECT r.rngsubtype
    FROM pg_catalog.pg_range AS r
    WHERE t.typtype IN ('r', 'm') AND t.oid::text IN (r.rngtypid::text, to_jsonb(r) ->> 'rngmultitypid')
    UNION ALL
    SELECT a.atttypid
    FROM pg_catalog.pg_attribute AS a
    WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
"""

# Labels are in the order in which they came. One that was renamed, and perhaps back, has another xmin.
_INSIDE_OF_TYPE = """
    SELECT CASE
        WHEN t.typtype = 'e' THEN (
            SELECT 'x' || string_agg(left(md5(e.enumlabel), 6) || left(md5(e.xmin::text), 6), '' ORDER BY e.oid)
            FROM pg_catalog.pg_enum AS e
            WHERE e.enumtypid = t.oid
        )
        ELSE (
            SELECT string_agg(a.attnum::text, ',' ORDER BY a.attnum)
            FROM pg_catalog.pg_attribute AS a
            WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
        )
    END
"""

_READ_INSIDES = f"""
WITH RECURSIVE used (root, type) AS (
    SELECT a.attrelid, a.atttypid
    FROM pg_catalog.pg_attribute AS a
    WHERE a.attrelid = ANY (%(oids)s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped AND a.atttypid >= 16384
    UNION
    SELECT u.root, part.type
    FROM used AS u
    JOIN pg_catalog.pg_type AS t ON t.oid = u.type
    CROSS JOIN LATERAL ({_PARTS_OF_TYPE}) AS part (type)
    WHERE part.type >= 16384
)
SELECT u.root::bigint, string_agg(t.oid || t.typtype::text || inside.said, ' ' ORDER BY t.oid)
FROM used AS u
JOIN pg_catalog.pg_type AS t ON t.oid = u.type AND t.typtype IN ('c', 'e')
CROSS JOIN LATERAL ({_INSIDE_OF_TYPE}) AS inside (said)
GROUP BY u.root
"""


def read_layouts(session: Session, publications: Publications, oids: Sequence[int]) -> dict[int, CatalogLayout]:
    """The columns of tables as they are now, and which of them are published, without tables that are gone."""
    # One snapshot for all questions.
    with translated("reading the layouts of tables"), session.cursor() as cursor:
        own = session.info.transaction_status == 0
        if own:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            return _read(session, cursor, publications, oids)
        finally:
            if own and not session.closed:
                cursor.execute("ROLLBACK")


def _read(
    session: Session, cursor: Cursor, publications: Publications, oids: Sequence[int]
) -> dict[int, CatalogLayout]:
    given = {"oids": list(oids), "publications": [publications.name, publications.inserts]}
    cursor.execute(_READ_TABLES, given)
    tables = {oid: rest for oid, *rest in cursor}
    cursor.execute(_READ_PUBLISHED, given)
    published = cursor.fetchall()
    generated_are_sent = any(sent for sent, _, _ in published)
    chosen = {oid: set(map(int, re.findall(r"\d+", attnums))) for _, oid, attnums in published if attnums is not None}
    columns: dict[int, list[CatalogColumn]] = {oid: [] for oid in tables}
    cursor.execute(_READ_COLUMNS, given)
    rows = cursor.fetchall()
    texts: dict[tuple[int, str], str] = {}
    if of := {part for *_, missing in rows for part in missing or ()}:
        search_path.execute_by_role(cursor, _READ_MISSING, (sorted(of),))
        texts = {(part, name): _missing_text(name, bytes(octets)) for part, name, octets in cursor}
    for oid, attnum, name, type_oid, typmod, not_null, generated, missing in rows:
        is_sent = not generated or (generated == "s" and generated_are_sent)
        column = CatalogColumn(
            attnum,
            name,
            type_oid,
            typmod,
            not not_null,
            None if missing is None else _only_element(min(texts[part, name] for part in missing)),
            attnum in chosen[oid] if oid in chosen else is_sent,
        )
        columns[oid].append(column)
    cursor.execute(_READ_INSIDES, given)
    insides: dict[int, str | None] = dict(cursor.fetchall())
    identities = read_identities(session, list(tables))
    found = {}
    for oid, (files, altered, last, primary) in tables.items():
        identity = identities[oid]
        key = identity.primary_key if identity.kind == "f" else identity.columns
        facts = last, files, altered, primary, insides.get(oid) or ""
        found[oid] = CatalogLayout(tuple(columns[oid]), identity.kind, key, *facts)
    return found


def _missing_text(name: str, octets: bytes) -> str:
    try:
        return octets.decode()
    except UnicodeDecodeError:
        # A database in SQL_ASCII has what it was given.
        raise UnrepresentableError(
            f"column {quoted(name)}: the DEFAULT that rows from before it was added have is not UTF-8",
            remedy="VACUUM FULL the table, which writes it into the rows; or leave the table out",
        ) from None


def _only_element(array: str) -> str:
    """The element of an array of one, out of the array's text (arrayfuncs.c: array_out)."""
    element = array[array.index("{") + 1 : -1]
    return re.sub(r"\\(.)", r"\1", element[1:-1], flags=re.DOTALL) if element.startswith('"') else element


# Each ALTER TABLE of a column writes its row of pg_attribute anew. Not pg_class's, which TRUNCATE does as well.
_READ_MARK = f"""
WITH RECURSIVE used (type) AS (
    SELECT a.atttypid
    FROM pg_catalog.pg_attribute AS a
    WHERE a.attrelid = ANY (%(oids)s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped AND a.atttypid >= 16384
    UNION
    SELECT part.type
    FROM used AS u
    JOIN pg_catalog.pg_type AS t ON t.oid = u.type
    CROSS JOIN LATERAL ({_PARTS_OF_TYPE}) AS part (type)
    WHERE part.type >= 16384
)
SELECT concat_ws(
    ' ',
    (
        SELECT sum(hashtextextended(concat_ws(' ', a.attrelid, a.attnum, a.xmin), 0))
        FROM pg_catalog.pg_attribute AS a
        WHERE a.attrelid = ANY (%(oids)s::oid[]) AND a.attnum > 0
    ),
    (
        SELECT sum(hashtextextended(concat_ws(' ', c.oid, c.relnamespace, c.relname, c.relreplident), 0))
        FROM pg_catalog.pg_class AS c
        WHERE c.oid = ANY (%(oids)s::oid[])
    ),
    (
        SELECT sum(hashtextextended(concat_ws(' ', i.indexrelid, i.indisprimary, i.indisreplident), 0))
        FROM pg_catalog.pg_index AS i
        WHERE i.indrelid = ANY (%(oids)s::oid[]) AND (i.indisprimary OR i.indisreplident)
    ),
    (
        SELECT sum(hashtextextended(concat_ws(' ', t.oid, inside.said), 0))
        FROM used AS u
        JOIN pg_catalog.pg_type AS t ON t.oid = u.type AND t.typtype IN ('c', 'e')
        CROSS JOIN LATERAL ({_INSIDE_OF_TYPE}) AS inside (said)
    )
)
"""


def read_mark(session: Session, oids: Sequence[int]) -> str:
    """A text that is another one once these tables' columns, keys, names or types were altered."""
    with translated("looking for tables that were altered"), session.cursor() as cursor:
        cursor.execute(_READ_MARK, {"oids": list(oids)})
        return str(cursor.fetchone()[0])


def read_type_facts(session: Session, types: Sequence[tuple[int, int]]) -> dict[tuple[int, int], TypeFacts]:
    """What types with their modifiers are. One that is gone has only its text, which is a string."""
    doing = "reading the types of a table's columns"
    names = read_type_names(session, types, doing)
    found = {}
    for key, name, known in zip(types, names, read_types(session, types, doing), strict=True):
        codec = registry.plan(Column("", 0, known, name, False), as_string=False, numeric_as=NumericAs("string"))
        found[key] = TypeFacts(name, known, spark_name(codec.arrow_type))
    return found
