"""A table's columns as the catalog has them now, with what rows from before a column was added have in it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from psycopg2.extensions import connection as Session
from psycopg2.extensions import cursor as Cursor

from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.postgres.columns import read_types
from pg_cdc_source.postgres.publication.identity import read_identities
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.protocol.table_layout import CatalogColumn, CatalogLayout, TypeFacts
from pg_cdc_source.values import registry
from pg_cdc_source.values.registry import Column
from pg_cdc_source.values.spark_names import spark_name

# Partitions are looked up without locks, for which DDL in progress would let everything wait.
_TREE = """
WITH RECURSIVE tree (oid) AS (
    SELECT %s::oid
    UNION
    SELECT i.inhrelid
    FROM tree AS t
    JOIN pg_catalog.pg_inherits AS i ON i.inhparent = t.oid
    JOIN pg_catalog.pg_class AS c ON c.oid = i.inhrelid AND c.relispartition
)
"""

# A table's rows are in its file; a partitioned table's in those of its partitions, which come and go. A row of
# pg_attribute has another xmin after each ALTER TABLE of its column.
_READ_TABLE = f"""
{_TREE}
SELECT
    (
        SELECT left(md5(string_agg(f.oid || ':' || coalesce(pg_relation_filenode(f.oid), 0), ',' ORDER BY f.oid)), 12)
        FROM tree AS f
    ),
    (
        SELECT left(md5(string_agg(a.attnum || ':' || a.xmin, ',' ORDER BY a.attnum)), 12)
        FROM pg_catalog.pg_attribute AS a
        WHERE a.attrelid = c.oid AND a.attnum > 0
    ),
    c.relnatts
FROM pg_catalog.pg_class AS c
WHERE c.oid = %s
"""

# A partitioned table has no rows. Each of its partitions knows what its own have.
_READ_COLUMNS = f"""
{_TREE}
SELECT a.attnum, a.attname, a.atttypid, a.atttypmod, a.attnotnull, a.attgenerated::text,
    (
        SELECT b.attmissingval::text
        FROM tree AS f
        JOIN pg_catalog.pg_attribute AS b ON b.attrelid = f.oid AND b.attname = a.attname
        WHERE b.atthasmissing
        LIMIT 1
    )
FROM pg_catalog.pg_attribute AS a
WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""

# Columns that not every version has are read from the row as JSON: prattrs came with 15, pubgencols with 18.
_READ_PUBLISHED = """
SELECT coalesce(to_jsonb(p) ->> 'pubgencols' = 's', false),
    (
        SELECT to_jsonb(r) ->> 'prattrs'
        FROM pg_catalog.pg_publication_rel AS r
        WHERE r.prpubid = p.oid AND r.prrelid = %s
    )
FROM pg_catalog.pg_publication AS p
WHERE p.pubname = %s
"""


def read_layout(session: Session, publication: str, oid: int) -> CatalogLayout | None:
    """A table's columns as they are now, and which of them the publication sends; None for a table that is gone."""
    # One snapshot for all questions.
    with translated("reading the layout of a table"), session.cursor() as cursor:
        own = session.info.transaction_status == 0
        if own:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            return _read(session, cursor, publication, oid)
        finally:
            if own and not session.closed:
                cursor.execute("ROLLBACK")


def _read(session: Session, cursor: Cursor, publication: str, oid: int) -> CatalogLayout | None:
    cursor.execute(_READ_TABLE, (oid, oid))
    row = cursor.fetchone()
    if row is None:
        return None
    files, altered, last = row
    cursor.execute(_READ_PUBLISHED, (oid, publication))
    generated_are_sent, attnums = cursor.fetchone() or (False, None)
    chosen = None if attnums is None else set(map(int, re.findall(r"\d+", attnums)))
    cursor.execute(_READ_COLUMNS, (oid, oid))
    columns = tuple(
        CatalogColumn(
            attnum,
            name,
            type_oid,
            typmod,
            not not_null,
            None if missing is None else _only_element(missing),
            attnum in chosen if chosen is not None else not generated or (generated == "s" and generated_are_sent),
        )
        for attnum, name, type_oid, typmod, not_null, generated, missing in cursor
    )
    identity = read_identities(session, [oid])[oid]
    key = identity.primary_key if identity.kind == "f" else identity.columns
    return CatalogLayout(columns, identity.kind, key, last, files, altered)


def _only_element(array: str) -> str:
    """The element of an array of one, out of the array's text (arrayfuncs.c: array_out)."""
    element = array[array.index("{") + 1 : -1]
    return re.sub(r"\\(.)", r"\1", element[1:-1], flags=re.DOTALL) if element.startswith('"') else element


_READ_TYPE_NAMES = """
SELECT format_type(t.oid, t.typmod)
FROM unnest(%s::oid[], %s::int[]) WITH ORDINALITY AS t (oid, typmod, i)
ORDER BY t.i
"""


def read_type_facts(session: Session, types: Sequence[tuple[int, int]]) -> dict[tuple[int, int], TypeFacts]:
    """What types with their modifiers are. One that is gone has only its text, which is a string."""
    doing = "reading the types of a table's columns"
    with translated(doing), session.cursor() as cursor:
        cursor.execute(_READ_TYPE_NAMES, ([oid for oid, _ in types], [typmod for _, typmod in types]))
        names = [name for (name,) in cursor]
    found = {}
    for key, name, known in zip(types, names, read_types(session, types, doing), strict=True):
        codec = registry.plan(Column("", 0, known, name, False), as_string=False, numeric_as=NumericAs("string"))
        found[key] = TypeFacts(name, known, spark_name(codec.arrow_type))
    return found
