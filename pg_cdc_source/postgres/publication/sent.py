"""What the server sends of each table that a stream reads: columns, keys and old values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import ServerSetupError, TransientError
from pg_cdc_source.options.names import listed_names
from pg_cdc_source.options.stream_options import Publications
from pg_cdc_source.postgres.catalog import Relation
from pg_cdc_source.postgres.publication.identity import ReplicaIdentity, identity_sql, read_identities
from pg_cdc_source.postgres.publication.listing import few, listed
from pg_cdc_source.postgres.publication.read import GENERATED_VERSION, Publication, read_publication
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.trees import read_trees


@dataclass(frozen=True, slots=True)
class SentTable:
    """What changes of a table have. ``unpublished`` are columns that they do not have: generated ones, or not listed.

    ``generated`` are those of them that no list leaves out: the server does not send them, or was not told to.
    ``kind`` is that of ReplicaIdentity. ``identity_columns`` and ``primary_key`` are empty where not all of their
    columns are sent: a part of a key does not tell rows apart.
    """

    relation: Relation
    kind: str
    identity_columns: tuple[str, ...]
    primary_key: tuple[str, ...]
    unpublished: tuple[str, ...]
    row_filter: str | None
    generated: tuple[str, ...] = ()


def read_sent_tables(
    session: Session, publication: Publication, relations: Sequence[Relation], *, whole: bool = False
) -> tuple[SentTable, ...]:
    """What the server sends of each table.

    Raises ServerSetupError where old values of a partition would be taken for those of its root's identity, and with
    ``whole`` where an update or delete would not have the whole old row; TransientError where a table has gone since
    ``publication`` was read.
    """
    trees = read_trees(session, relations)
    identities = read_identities(session, [node.relation.oid for tree in trees.values() for node in tree])
    unpublished = _unpublished_columns(session, publication, relations)
    published = {table.relation.oid: table for table in publication.tables}
    dropped = [
        relation
        for relation in relations
        if not {relation.oid, *(n.relation.oid for n in trees.get(relation.oid, ()) if n.relation.kind == "r")}
        <= identities.keys()
    ]
    if dropped:
        raise TransientError(f"{dropped[0]} was dropped while the publication's tables were looked up")
    tables = []
    for relation in relations:
        if (publication.updates or publication.deletes) and not published[relation.oid].inserts_only:
            lesser = _lesser_identities(session, [node.relation for node in trees[relation.oid]], identities)
            if lesser is not None:
                raise lesser
            if whole:
                _require_whole(session, relation, identities[relation.oid])
        identity, missing = identities[relation.oid], unpublished[relation.oid].columns
        columns = tuple(column for column in identity.columns if column not in missing)
        if identity.kind != "f" and columns != identity.columns:
            columns = ()
        key = () if set(identity.primary_key) & set(missing) else identity.primary_key
        row_filter, generated = published[relation.oid].row_filter, unpublished[relation.oid].generated
        tables.append(SentTable(relation, identity.kind, columns, key, missing, row_filter, generated))
    return tuple(tables)


def find_lesser_identities(
    session: Session, publication: Publication, relations: Sequence[Relation]
) -> dict[int, ServerSetupError]:
    """Those of the tables, by oid, of which old values of a partition would be taken for those of the root's identity.

    Each with the error that :func:`read_sent_tables` raises for it.
    """
    inserts_only = {table.relation.oid for table in publication.tables if table.inserts_only}
    partitioned = [relation for relation in relations if relation.kind == "p" and relation.oid not in inserts_only]
    if not partitioned or not (publication.updates or publication.deletes):
        return {}
    trees = {
        root: [node.relation for node in tree if node.relation.kind in "rp"]
        for root, tree in read_trees(session, partitioned).items()
    }
    identities = read_identities(session, [relation.oid for tree in trees.values() for relation in tree])
    # One that was dropped in between has none.
    there = {root: [r for r in tree if r.oid in identities] for root, tree in trees.items() if root in identities}
    found = ((root, _lesser_identities(session, tree, identities)) for root, tree in there.items())
    return {root: lesser for root, lesser in found if lesser is not None}


def _lesser_identities(
    session: Session, tree: Sequence[Relation], identities: dict[int, ReplicaIdentity]
) -> ServerSetupError | None:
    """The error for a tree, the root first, with partitions whose identity has less than the root's; None for none."""
    root, *below = tree
    of_root = identities[root.oid]
    lesser = [leaf for leaf in below if leaf.kind == "r" and _is_less(identities[leaf.oid], of_root)]
    if not lesser:
        return None
    of_leaf = identities[lesser[0].oid]
    return ServerSetupError(
        f"partitions have another replica identity than their root {root}, by which PostgreSQL labels old values: "
        f"{listed(lesser)}; of {lesser[0]} WAL has {_named(of_leaf)}, and it would be taken for {_named(of_root)}",
        remedy="; ".join(identity_sql(session, leaf, "FULL") for leaf in few(lesser))
        + "; such a statement on the root does not reach its partitions",
    )


def _require_whole(session: Session, relation: Relation, identity: ReplicaIdentity) -> None:
    if relation.kind == "p":
        raise ServerSetupError(
            f"{relation} is partitioned, so its changes make no changelog: a partition that is created or altered "
            "later has a replica identity of its own, and PostgreSQL sends what it has of old rows as if it were all",
            remedy="leave changeFormat out; or stream the partitions one by one, from a publication "
            "WITH (publish_via_partition_root = false)",
        )
    if identity.kind != "f":
        raise ServerSetupError(
            f"{relation} does not have REPLICA IDENTITY FULL: a changelog has to give the whole old row of every "
            "update and delete, and PostgreSQL would not send it",
            remedy=f"{identity_sql(session, relation, 'FULL')}; or leave changeFormat out",
        )


def _is_less(of_leaf: ReplicaIdentity, of_root: ReplicaIdentity) -> bool:
    # Without a usable identity PostgreSQL refuses UPDATE and DELETE there, so no old values are sent.
    if of_leaf.kind == "f" or not of_leaf.columns:
        return False
    return of_root.kind == "f" or not set(of_root.columns) <= set(of_leaf.columns)


def _named(identity: ReplicaIdentity) -> str:
    return "the whole row" if identity.kind == "f" else listed_names(identity.columns)


@dataclass(frozen=True, slots=True)
class Unpublished:
    """Columns that are not sent, and those of them that are generated and left out by no list."""

    columns: tuple[str, ...] = ()
    generated: tuple[str, ...] = ()


def read_unpublished(session: Session, names: Publications, relation: Relation) -> Unpublished:
    """The columns of a table that a publication does not send; of a missing one, that it would not send."""
    return _unpublished_columns(session, read_publication(session, names), [relation])[relation.oid]


_READ_COLUMNS = """
SELECT attrelid, attname, attgenerated
FROM pg_catalog.pg_attribute
WHERE attrelid = ANY (%s::oid[]) AND attnum > 0 AND NOT attisdropped
ORDER BY attrelid, attnum
"""


def _unpublished_columns(
    session: Session, publication: Publication | None, relations: Sequence[Relation]
) -> dict[int, Unpublished]:
    """As ``read_unpublished``, of several tables by their oids."""
    lists = {} if publication is None else {table.relation.oid: table.columns for table in publication.tables}
    # A missing publication will be created to send them.
    stored_are_sent = session.server_version >= GENERATED_VERSION if publication is None else publication.generated
    unpublished = {relation.oid: Unpublished() for relation in relations}
    with translated("reading the columns that are published"), session.cursor() as cursor:
        cursor.execute(_READ_COLUMNS, (list(unpublished),))
        for oid, name, generated in cursor:
            listed = lists.get(oid)
            # A list may name stored generated columns, whatever the publication says of them otherwise.
            sent = name in listed if listed is not None else not generated or (generated == "s" and stored_are_sent)
            if not sent:
                before = unpublished[oid]
                of_no_list = (name,) if listed is None else ()
                unpublished[oid] = Unpublished((*before.columns, name), before.generated + of_no_list)
    return unpublished
