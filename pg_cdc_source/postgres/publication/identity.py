"""Replica identities: which old values of a row WAL has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psycopg2.extensions import connection as Session

from pg_cdc_source.postgres.catalog import Relation
from pg_cdc_source.postgres.publication.listing import few, listed
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.trees import read_trees


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """Which old values of a row WAL has: ``kind`` is pg_class.relreplident (d, n, f, i), ``columns`` what it means now.

    ``columns`` is empty where the identity is not usable: no primary key, a dropped index, NOTHING, or FULL with
    virtual generated columns. ``primary_key`` is empty where it is DEFERRABLE: within a transaction two rows may have
    the same one, so that it does not tell the changes of one from those of the other.
    """

    kind: str
    columns: tuple[str, ...]
    primary_key: tuple[str, ...]


# Which indexes count: RelationGetIndexList (src/backend/utils/cache/relcache.c). A virtual column is never sent, and
# since there are any (18) PostgreSQL refuses an identity with one.
_READ_IDENTITIES = """
SELECT c.oid, c.relreplident,
    CASE c.relreplident
        WHEN 'f' THEN (
            SELECT array_agg(a.attname::pg_catalog.text ORDER BY a.attnum)
            FROM pg_catalog.pg_attribute AS a
            WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
            HAVING NOT bool_or(a.attgenerated = 'v')
        )
        ELSE i.columns
    END,
    p.columns
FROM pg_catalog.pg_class AS c
LEFT JOIN LATERAL (
    SELECT x.indrelid, array_agg(a.attname::pg_catalog.text ORDER BY k.i) AS columns
    FROM pg_catalog.pg_index AS x
    CROSS JOIN unnest(x.indkey::int2[]) WITH ORDINALITY AS k (attnum, i)
    JOIN pg_catalog.pg_attribute AS a ON a.attrelid = x.indrelid AND a.attnum = k.attnum
    WHERE x.indrelid = c.oid
        AND k.i <= x.indnkeyatts
        AND x.indisvalid
        AND x.indisunique
        AND x.indimmediate
        AND CASE c.relreplident WHEN 'd' THEN x.indisprimary WHEN 'i' THEN x.indisreplident END
    GROUP BY x.indexrelid, x.indrelid
) AS i ON true
LEFT JOIN LATERAL (
    SELECT array_agg(a.attname::pg_catalog.text ORDER BY k.i) AS columns
    FROM pg_catalog.pg_index AS x
    CROSS JOIN unnest(x.indkey::int2[]) WITH ORDINALITY AS k (attnum, i)
    JOIN pg_catalog.pg_attribute AS a ON a.attrelid = x.indrelid AND a.attnum = k.attnum
    WHERE x.indrelid = c.oid AND k.i <= x.indnkeyatts AND x.indisprimary AND x.indisvalid AND x.indimmediate
) AS p ON true
WHERE c.oid = ANY (%s::oid[])
"""


def read_identities(session: Session, oids: Sequence[int]) -> dict[int, ReplicaIdentity]:
    """Replica identity and primary key of tables, by oid; columns in the order of their index."""
    with translated("reading replica identities"), session.cursor() as cursor:
        cursor.execute(_READ_IDENTITIES, (list(oids),))
        return {
            oid: ReplicaIdentity(kind, tuple(columns or ()), tuple(primary_key or ()))
            for oid, kind, columns, primary_key in cursor
        }


def without_identity(session: Session, relations: Sequence[Relation]) -> tuple[str, str]:
    """Name the tables and partitions without a usable identity, and the SQL that gives them one; empty if none."""
    identities, without = _lacking(session, relations)
    steps = (identity_sql(session, r, "DEFAULT" if identities[r.oid].kind == "f" else "FULL") for r in few(without))
    return listed(without), "; ".join(steps)


def keyless_of(session: Session, relations: Sequence[Relation]) -> list[Relation]:
    """Those of ``relations`` that have no usable identity, or of which a partition has none."""
    _, without = _lacking(session, relations)
    lacking = {relation.oid for relation in without}
    trees = read_trees(session, relations)
    return [r for r in relations if not lacking.isdisjoint(node.relation.oid for node in trees[r.oid])]


def _lacking(session: Session, relations: Sequence[Relation]) -> tuple[dict[int, ReplicaIdentity], list[Relation]]:
    """Those tables and partitions that hold rows and have no usable identity; and the identities of all that do."""
    trees = read_trees(session, relations)
    stored = {node.relation.oid: node.relation for tree in trees.values() for node in tree if node.relation.kind == "r"}
    identities = read_identities(session, list(stored))
    return identities, [relation for oid, relation in stored.items() if not identities[oid].columns]


def identity_sql(session: Session, relation: Relation, identity: str) -> str:
    """The statement that gives a table the replica identity DEFAULT or FULL."""
    return f"ALTER TABLE {relation.identifier.as_string(session)} REPLICA IDENTITY {identity}"
