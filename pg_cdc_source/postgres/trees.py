"""What lies under a table: its partitions and inheritance children, and the heaps that hold the rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from psycopg2.errors import LockNotAvailable
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import TransientError
from pg_cdc_source.postgres.catalog import Relation, Server
from pg_cdc_source.postgres.lock_waits import waiting_for_nobody
from pg_cdc_source.postgres.server_errors import translated

log = logging.getLogger(__name__)

# TID range scans, without which every ctid range would read the whole table, came with PostgreSQL 14.
TID_RANGE_SCAN_VERSION = 140000

# A common table expression for the queries below: each relation under each of the parameter ``roots``, these included.
# A child may be reached over several parents, and is in a tree once.
TREE = """tree (root, oid) AS (
    SELECT oid, oid FROM unnest(%(roots)s::oid[]) AS given (oid)
    UNION
    SELECT tree.root, i.inhrelid FROM tree JOIN pg_catalog.pg_inherits AS i ON i.inhparent = tree.oid
)"""

# Of an entry i of pg_inherits: no DETACH CONCURRENTLY is about to take it away, which writes it anew and then waits for
# others. Before PostgreSQL 14 there is no such column.
IS_STAYING = "to_jsonb(i) ->> 'inhdetachpending' IS DISTINCT FROM 'true'"

# The same as a query reads it, on the servers that can be read in ranges: PostgreSQL leaves out a partition once its
# DETACH CONCURRENTLY is visible to the snapshot, also while that waits for others or was interrupted; and children that
# are temporary tables of other sessions. partdesc.c, RelationGetPartitionDesc; inherit.c, expand_inherited_rtentry.
_TREE_AS_READ = """tree (root, oid) AS (
    SELECT oid, oid FROM unnest(%(roots)s::oid[]) AS given (oid)
    UNION
    SELECT tree.root, i.inhrelid
    FROM tree
    JOIN pg_catalog.pg_inherits AS i ON i.inhparent = tree.oid AND NOT i.inhdetachpending
    JOIN pg_catalog.pg_class AS c ON c.oid = i.inhrelid AND c.relpersistence <> 't'
)"""


# What OrioleDB goes by is not in a snapshot that another session exports (its snapmgr.c: ExportSnapshot).
WITHOUT_EXPORTED_SNAPSHOTS = ("orioledb",)


@dataclass(frozen=True, slots=True)
class Node:
    """A relation of a tree, the root included. ``persistence`` is pg_class.relpersistence: p, u or t.

    ``access_method`` is None for what has no storage of its own. ``is_hypertable``: its rows are in chunks of
    TimescaleDB's, which are published each under its own name.
    """

    relation: Relation
    persistence: str
    publishable: bool
    access_method: str | None
    is_hypertable: bool


# Changes of partitions may come under their root. A table that inherits is a table of its own to a publication. They
# are looked up without locks, for which DDL in progress would let everything wait.
PARTITIONS = """
WITH RECURSIVE tree (root, oid) AS (
    SELECT oid, oid FROM unnest(%(oids)s::oid[]) AS given (oid)
    UNION
    SELECT tree.root, i.inhrelid
    FROM tree
    JOIN pg_catalog.pg_inherits AS i ON i.inhparent = tree.oid
    JOIN pg_catalog.pg_class AS c ON c.oid = i.inhrelid AND c.relispartition
)
"""
_HAS_TIMESCALEDB = "EXISTS (SELECT FROM pg_catalog.pg_extension WHERE extname = 'timescaledb')"
# Once it has a chunk; where these are in the schema that TimescaleDB gives them.
_IS_HYPERTABLE = f"""{_HAS_TIMESCALEDB} AND EXISTS (
    SELECT
    FROM pg_catalog.pg_inherits AS chunk
    JOIN pg_catalog.pg_class AS part ON part.oid = chunk.inhrelid
    JOIN pg_catalog.pg_namespace AS place ON place.oid = part.relnamespace
    WHERE chunk.inhparent = c.oid AND place.nspname = '_timescaledb_internal'
)"""
_READ_TREES = f"""
{PARTITIONS}
SELECT tree.root, c.oid, n.nspname, c.relname, c.relkind, c.relpersistence, pg_relation_is_publishable(c.oid),
    (SELECT amname FROM pg_catalog.pg_am WHERE oid = c.relam AND c.relkind = 'r'),
    {_IS_HYPERTABLE}
FROM tree
JOIN pg_catalog.pg_class AS c ON c.oid = tree.oid
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
ORDER BY tree.root, tree.oid <> tree.root, n.nspname COLLATE "C", c.relname COLLATE "C"
"""


def read_trees(session: Session, relations: Sequence[Relation]) -> dict[int, list[Node]]:
    """Each relation with all partitions below it, itself first, by its oid."""
    with translated("reading partitions"), session.cursor() as cursor:
        cursor.execute(_READ_TREES, {"oids": [relation.oid for relation in relations]})
        trees: dict[int, list[Node]] = {}
        for root, oid, schema, name, kind, *rest in cursor:
            trees.setdefault(root, []).append(Node(Relation(oid, schema, name, kind), *rest))
        return trees


def read_tree(session: Session, relation: Relation) -> list[Node]:
    """The relation with all partitions below it, itself first. Raises TransientError where it was just dropped."""
    tree = read_trees(session, [relation]).get(relation.oid)
    if tree is None:
        raise TransientError(f"{relation} was dropped while its partitions were looked up")
    return tree


_READ_PARENTS = """
SELECT DISTINCT i.inhparent::bigint
FROM pg_catalog.pg_inherits AS i
JOIN pg_catalog.pg_class AS c ON c.oid = i.inhparent AND c.relkind = 'r'
WHERE i.inhparent = ANY (%s::oid[])
"""


def read_parents(session: Session, oids: Sequence[int]) -> set[int]:
    """Those tables that others inherit from."""
    with translated("looking for tables that inherit"), session.cursor() as cursor:
        cursor.execute(_READ_PARENTS, (list(oids),))
        return {oid for (oid,) in cursor}


_READ_ANCESTORS = """
SELECT t.oid, c.oid, n.nspname, c.relname, c.relkind
FROM unnest(%s::oid[]) AS t (oid)
CROSS JOIN pg_partition_ancestors(t.oid) WITH ORDINALITY AS a (oid, i)
JOIN pg_catalog.pg_class AS c ON c.oid = a.oid
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE a.oid <> t.oid
ORDER BY t.oid, a.i
"""


def read_ancestors(session: Session, oids: Sequence[int]) -> dict[int, list[Relation]]:
    """The partitioned tables above each partition, the nearest first; a table that is none has no entry."""
    with translated("reading partitions"), session.cursor() as cursor:
        cursor.execute(_READ_ANCESTORS, (list(oids),))
        above: dict[int, list[Relation]] = {}
        for oid, *ancestor in cursor:
            above.setdefault(oid, []).append(Relation(*ancestor))
        return above


@dataclass(frozen=True, slots=True)
class Heap:
    """A part of a table that is stored by itself: the table, a leaf partition, or an inheritance child.

    ``attnums`` are the numbers of the columns read, in their order.
    """

    relation: Relation
    blocks: int
    attnums: tuple[int, ...]


# A number for all that is in the tree.
IDENTITY = "hashtextextended(string_agg(oid::text, ',' ORDER BY oid), 0) FROM tree"

_COLUMN_NAMES = """(
    SELECT array_agg(attname ORDER BY attnum)
    FROM pg_catalog.pg_attribute
    WHERE attrelid = {} AND attnum > 0 AND NOT attisdropped
)"""

# Whether a query of the root gives other values for the rows of tree.oid than one of tree.oid itself does: a child's
# virtual generated column (PostgreSQL 18) may have an expression of its own, and the root's is the one that counts.
# Where a predicate may have the ``whole_row``, that is of the root's columns in the root's order.
_READS_OTHERWISE = f"""(%(virtual)s AND EXISTS (
    SELECT
    FROM pg_catalog.pg_attribute AS above
    JOIN pg_catalog.pg_attrdef AS expected ON expected.adrelid = above.attrelid AND expected.adnum = above.attnum
    JOIN pg_catalog.pg_attribute AS a ON a.attrelid = tree.oid AND a.attname = above.attname
    JOIN pg_catalog.pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    WHERE tree.oid <> tree.root
        AND above.attrelid = tree.root
        AND above.attgenerated = 'v'
        AND pg_get_expr(expected.adbin, expected.adrelid) <> pg_get_expr(d.adbin, d.adrelid)
) OR %(whole_row)s AND {_COLUMN_NAMES.format("tree.oid")} IS DISTINCT FROM {_COLUMN_NAMES.format("tree.root")})"""

# Citus has such a trigger on every table whose rows are on other nodes, which know nothing of the snapshot.
_IS_DISTRIBUTED = """EXISTS (
    SELECT
    FROM pg_catalog.pg_trigger AS t JOIN pg_catalog.pg_proc AS p ON p.oid = t.tgfoid
    WHERE t.tgrelid = c.oid AND p.proname = 'citus_truncate_trigger'
)"""

_READ_HEAPS = f"""
WITH RECURSIVE {_TREE_AS_READ}
SELECT c.oid, n.nspname, c.relname, c.relkind,
    am.amname = 'heap'
        -- Else the catalog does not say which file it has, so that a rewrite would not be noticed.
        AND c.relfilenode <> 0
        -- A compressed chunk has all rows only where it is not asked for with ONLY.
        AND NOT (
            (c.relhassubclass OR EXISTS (SELECT FROM pg_catalog.pg_inherits WHERE inhrelid = c.oid))
            AND {_HAS_TIMESCALEDB}
        )
        AND NOT {_IS_DISTRIBUTED},
    has_table_privilege(c.oid, 'SELECT')
        AND has_schema_privilege(n.oid, 'USAGE')
        AND (c.oid = tree.root OR NOT row_security_active(c.oid))
        AND NOT {_READS_OTHERWISE},
    CASE WHEN c.relkind IN ('r', 'm') THEN pg_relation_size(c.oid) END,
    (
        SELECT array_agg(a.attnum ORDER BY w.i)
        FROM unnest(%(columns)s::pg_catalog.text[]) WITH ORDINALITY AS w (name, i)
        JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attname = w.name AND NOT a.attisdropped
    ),
    {_IS_DISTRIBUTED},
    am.amname,
    (SELECT {IDENTITY})
FROM tree
JOIN pg_catalog.pg_class AS c ON c.oid = tree.oid
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
LEFT JOIN pg_catalog.pg_am AS am ON am.oid = c.relam
ORDER BY c.oid <> tree.root, c.oid
"""


def read_heaps(
    session: Session,
    server: Server,
    relation: Relation,
    columns: Sequence[str],
    *,
    only: bool,
    virtual: bool,
    whole_row: bool,
) -> tuple[list[Heap], int] | None:
    """The heaps under a relation that ctid ranges can be cut from; None where it has to be read as a whole.

    With ``only``, its own heap alone. ``virtual`` says whether the relation has virtual generated columns, and
    ``whole_row`` whether rows as such may be read besides the columns. The number is that of :func:`identify_heaps`.

    As a whole: views, foreign tables, tables of other access methods, catalogs with a mapped file, tables of
    TimescaleDB's and distributed ones of Citus, servers without TID range scans; and trees in which this role may read
    the root but not each leaf, or in which a leaf has policies, expressions of generated columns or a row type that do
    not apply through the root.
    """
    if relation.kind == "f":
        _warn_of_foreign(relation)
    if relation.kind not in "rpm" or server.version_num < TID_RANGE_SCAN_VERSION:
        return None
    with translated(f"planning ranges of {relation}"), session.cursor() as cursor:
        cursor.execute(
            _READ_HEAPS,
            {"roots": [relation.oid], "columns": list(columns), "virtual": virtual, "whole_row": whole_row},
        )
        rows = [row for row in cursor if row[3] != "p" and (not only or row[0] == relation.oid)]
    if foreign := [row for row in rows if row[3] == "f"]:
        _warn_of_foreign(Relation(*foreign[0][:4]))
    if any(is_distributed for *_, is_distributed, _, _ in rows):
        log.warning(
            "%s is a distributed table of Citus: it has the rows of the moment at which each node reads, not the "
            "snapshot's",
            relation,
        )
    if own := [row for row in rows if row[-2] in WITHOUT_EXPORTED_SNAPSHOTS]:
        log.warning(
            "%s has the access method %s: it has the rows of the moment at which each session reads, not the "
            "snapshot's",
            Relation(*own[0][:4]),
            own[0][-2],
        )
    heaps = []
    for oid, schema, name, kind, has_all_rows, readable, size_bytes, attnums, *_ in rows:
        if not has_all_rows or not readable or size_bytes is None:
            return None
        heaps.append(Heap(Relation(oid, schema, name, kind), -(-size_bytes // server.block_size), tuple(attnums or ())))
    return (heaps, rows[0][-1]) if rows else None


def _warn_of_foreign(table: Relation) -> None:
    log.warning("%s is a foreign table: it has the rows of the moment at which it is read, not the snapshot's", table)


_IDENTIFY_HEAPS = f"""
WITH RECURSIVE {_TREE_AS_READ}
SELECT CASE WHEN NOT EXISTS (SELECT FROM tree WHERE {_READS_OTHERWISE}) THEN (SELECT {IDENTITY}) END
"""


def identify_heaps(session: Session, relation: Relation, *, virtual: bool, whole_row: bool) -> int | None:
    """A number for the set of tables under a relation, as the transaction's snapshot sees it.

    None where their columns have become such that it cannot be read by its heaps any more.
    """
    with translated(f"reading the partitions of {relation}"), session.cursor() as cursor:
        cursor.execute(_IDENTIFY_HEAPS, {"roots": [relation.oid], "virtual": virtual, "whole_row": whole_row})
        [identity] = cursor.fetchone()
        return None if identity is None else int(identity)


_READ_TREE_SIZES = f"""
WITH RECURSIVE {TREE}
SELECT tree.root::bigint, coalesce(sum(pg_table_size(c.oid)), 0)::bigint
FROM tree
JOIN pg_catalog.pg_class AS c ON c.oid = tree.oid AND c.relkind IN ('r', 'm')
GROUP BY tree.root
"""


def read_sizes(session: Session, oids: Sequence[int]) -> dict[int, int] | None:
    """Bytes of tables with all that is under them, by their oids; None where somebody has locked one of them.

    Those that are gone have none, or are left out.
    """
    with translated("reading the sizes of tables"), session.cursor() as cursor, waiting_for_nobody(cursor):
        try:
            cursor.execute(_READ_TREE_SIZES, {"roots": list(oids)})
            return dict(cursor)
        except LockNotAvailable:
            return None


_READ_SIZES = """
SELECT oid::bigint, pg_relation_size(oid)
FROM unnest(%s::oid[]) AS heap (oid)
"""


def read_blocks(session: Session, server_block_size: int, oids: Sequence[int], doing: str) -> dict[int, int]:
    """Blocks that heaps have now, by their oids; a heap that is gone has none."""
    with translated(doing), session.cursor() as cursor:
        cursor.execute(_READ_SIZES, (list(oids),))
        return {oid: -(-(size_bytes or 0) // server_block_size) for oid, size_bytes in cursor}
