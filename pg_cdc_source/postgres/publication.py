"""The publication of a stream: make it, check it, and find out which tables a stream reads through it.

A publication decides which changes exist for a stream, so whatever it would leave out of a table without a sign is
found here, before anything is read:

- **Partitions.** ``publish_via_partition_root`` decides whether changes come under the root's name or the leaves'. A
  stream reads tables under the names that they are published by. Partitions that write no WAL for logical decoding
  (foreign, unlogged) are published by PostgreSQL without a word and never send a change: refused.
- **Inheritance.** Changes of children come under the children's names, while a SELECT of the parent has their rows: a
  stream of the parent would disagree with its snapshot, so parents are refused.
- **Replica identity.** From the moment a publication has a table without one, PostgreSQL refuses UPDATE and DELETE
  there. This package never does that to somebody's production: such a publication is not created.
- **Identity of partitions.** WAL has the old values of the leaf's identity, pgoutput labels them by the root's. Where
  the leaf's has less, columns would look NULL that are not: refused.
- **Row filters, column lists.** A stream has the rows and columns that its publication sends, from its snapshot on.
  The server sends what an update brings under a filter as an insert, what it takes away as a delete: so the rows under
  it are a table of their own. Another filter or list leaves a gap, as does a table that was taken out for a while. Each
  of them gives the table a new entry in the catalog, by which ``find_change`` finds out.
- **Partitions before 15** (rel_sync_cache_relation_cb in pgoutput.c). A walsender that has decoded a change of a table
  goes on without that table's changes after it was attached as a partition, until the publication is altered. And one
  that is told of DDL at the wrong moment sends a row in the partition's layout as if it were the root's: values of one
  column under the name of another. So partitions of another layout are refused under their root, and an ATTACH of one,
  or with which nobody has altered the publication, is a change like a dropped publication.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import psycopg2
from psycopg2 import sql
from psycopg2.extensions import connection as Session
from psycopg2.extensions import cursor as Cursor

from pg_cdc_source.errors import AccessError, OptionError, PgCdcError, ServerSetupError, TransientError
from pg_cdc_source.options.names import QualifiedName, TablePattern, quoted
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres import catalog
from pg_cdc_source.postgres.catalog import Relation, Server
from pg_cdc_source.postgres.server_errors import translate, translated

# From these versions on, a publication can have schemas, row filters and column lists; and send stored generated
# columns.
_SCHEMAS_VERSION = 150000
_GENERATED_VERSION = 180000
# From this version on, changes of partitions come under their root whatever DDL there is.
_PARTITIONS_VERSION = 150000

# An error names so many tables and then counts.
_MOST_NAMED = 10


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table under the name that its changes have; ``columns`` None means all, ``row_filter`` is SQL.

    ``entries`` are the oids by which the catalog lists it, its schema or its root; none where all tables are published.
    ``attached`` is the transaction by which it last got a partition that the server may not notice, 0 if there is none;
    None where the server notices every one.
    """

    relation: Relation
    columns: tuple[str, ...] | None
    row_filter: str | None
    entries: tuple[int, ...]
    attached: int | None


@dataclass(frozen=True, slots=True)
class Publication:
    """What a publication sends. ``generated``: also stored generated columns (PostgreSQL 18)."""

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


@dataclass(frozen=True, slots=True)
class Planned:
    """A publication that is not there: what it would send, the tables that it would list, and the SQL that makes it."""

    publication: Publication
    listed: tuple[Relation, ...]
    create: str


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """Which old values of a row WAL has: ``kind`` is pg_class.relreplident (d, n, f, i), ``columns`` what it means now.

    ``columns`` is empty where the identity is not usable: no primary key, a dropped index, NOTHING, or FULL with
    virtual generated columns.
    """

    kind: str
    columns: tuple[str, ...]
    primary_key: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StreamTable:
    """A table of a stream. ``unpublished`` are columns that changes do not have: generated ones, or not listed.

    ``identity_columns`` and ``primary_key`` are empty where they do not travel whole: a part of a key tells no rows
    apart.
    """

    relation: Relation
    kind: str
    identity_columns: tuple[str, ...]
    primary_key: tuple[str, ...]
    unpublished: tuple[str, ...]
    row_filter: str | None


@dataclass(frozen=True, slots=True)
class _Node:
    """A relation of a tree, the root included. ``persistence`` is pg_class.relpersistence: p, u or t."""

    relation: Relation
    persistence: str
    publishable: bool


# --- reading ---------------------------------------------------------------------------------------------------------


def read_publication(session: Session, name: str) -> Publication | None:
    """The publication of this name and its tables, sorted by name; None where there is none."""
    with translated(f"reading publication {quoted(name)}"), session.cursor() as cursor:
        # Rows as JSON, because columns differ by version: attnames, rowfilter and prattrs came with 15, pubgencols
        # with 18.
        cursor.execute(
            "SELECT p.oid, p.puballtables, p.pubviaroot, p.pubinsert, p.pubupdate, p.pubdelete, p.pubtruncate,"
            " coalesce(to_jsonb(p) ->> 'pubgencols' = 's', false) FROM pg_catalog.pg_publication AS p"
            " WHERE p.pubname = %s",
            (name,),
        )
        row = cursor.fetchone()
        if row is None:
            return None
        oid, all_tables, via_root, inserts, updates, deletes, truncates, generated = row
        schemas = ""
        if session.server_version >= _SCHEMAS_VERSION:
            schemas = " UNION ALL SELECT oid, pnnspid FROM pg_catalog.pg_publication_namespace WHERE pnpubid = %(oid)s"
        cursor.execute(
            "WITH entry (oid, object) AS ("
            "SELECT oid, prrelid FROM pg_catalog.pg_publication_rel WHERE prpubid = %(oid)s"
            + schemas
            + "), found AS (SELECT c.oid, n.nspname, c.relname, c.relkind, n.oid AS namespace,"
            " CASE WHEN to_jsonb(r) ->> 'prattrs' IS NOT NULL THEN to_jsonb(t) -> 'attnames' END AS columns,"
            " to_jsonb(t) ->> 'rowfilter' AS row_filter"
            " FROM pg_catalog.pg_publication_tables AS t"
            " JOIN pg_catalog.pg_namespace AS n ON n.nspname = t.schemaname"
            " JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = t.tablename"
            " LEFT JOIN pg_catalog.pg_publication_rel AS r ON r.prrelid = c.oid AND r.prpubid = %(oid)s"
            " WHERE t.pubname = %(name)s"
            # Before 15, the view also has partitions whose root is there, though their changes have the root's name.
            " AND NOT (%(via_root)s AND c.relispartition AND EXISTS (SELECT FROM pg_catalog.pg_publication_tables AS o"
            "  JOIN pg_catalog.pg_namespace AS m ON m.nspname = o.schemaname"
            "  JOIN pg_catalog.pg_class AS a ON a.relnamespace = m.oid AND a.relname = o.tablename"
            "  JOIN pg_partition_ancestors(c.oid) AS up (oid) ON up.oid = a.oid"
            "  WHERE o.pubname = %(name)s AND a.oid <> c.oid))"
            # A table is listed by its own name, a root's, or that of a schema of either.
            "), place (table_oid, object) AS (SELECT oid, unnest(ARRAY[oid, namespace]) FROM found"
            " UNION SELECT f.oid, unnest(ARRAY[a.oid, a.relnamespace]) FROM found AS f"
            "  CROSS JOIN pg_partition_ancestors(f.oid) AS up (oid) JOIN pg_catalog.pg_class AS a ON a.oid = up.oid),"
            " listed (table_oid, entries) AS (SELECT p.table_oid, array_agg(e.oid::bigint ORDER BY e.oid)"
            "  FROM place AS p JOIN entry AS e ON e.object = p.object GROUP BY p.table_oid)"
            " SELECT f.oid, f.nspname, f.relname, f.relkind, f.columns, f.row_filter, l.entries"
            " FROM found AS f LEFT JOIN listed AS l ON l.table_oid = f.oid"
            ' ORDER BY f.nspname COLLATE "C", f.relname COLLATE "C"',
            {"oid": oid, "name": name, "via_root": via_root},
        )
        rows = cursor.fetchall()
        attached: dict[int, int] = {}
        if session.server_version < _PARTITIONS_VERSION and via_root:
            attached = _read_attached(cursor, oid, [row[0] for row in rows if row[3] == "p"])
        # By oid, because before 14 the view repeats a partition that is listed beside its root.
        tables = {
            relation[0]: PublishedTable(
                Relation(*relation),
                None if columns is None else tuple(columns),
                row_filter,
                tuple(entries or ()),
                attached.get(relation[0]),
            )
            for *relation, columns, row_filter, entries in rows
        }
    return Publication(
        oid, name, all_tables, via_root, inserts, updates, deletes, truncates, generated, tuple(tables.values())
    )


def _layout(oid: str) -> str:
    """SQL for what has to be the same in two tables so that rows of one can be taken for the other's."""
    return (
        "(SELECT array_agg(ROW(CASE WHEN NOT attisdropped THEN attname END, attlen, attalign)::text ORDER BY attnum)"
        f" FROM pg_catalog.pg_attribute WHERE attrelid = {oid} AND attnum > 0)"
    )


def _read_attached(cursor: Cursor, publication: int, roots: Sequence[int]) -> dict[int, int]:
    """By root, the transaction that attached a partition last of which changes may be missing or wrong; 0 for none.

    They are where the publication was not altered with it or since, and where the layout is another than the root's. A
    partition that was created as one has its row type from the same transaction, and no changes of before.
    """
    cursor.execute(
        "WITH RECURSIVE tree (root, oid, attached) AS (SELECT oid, oid, NULL::xid FROM unnest(%s::oid[]) AS t (oid)"
        " UNION ALL SELECT tree.root, i.inhrelid, i.xmin FROM tree"
        "  JOIN pg_catalog.pg_inherits AS i ON i.inhparent = tree.oid)"
        " SELECT DISTINCT ON (tree.root) tree.root::bigint, tree.attached::text::bigint FROM tree"
        " JOIN pg_catalog.pg_type AS t ON t.typrelid = tree.oid AND t.xmin <> tree.attached"
        " JOIN pg_catalog.pg_publication AS p ON p.oid = %s"
        f" AND (age(p.xmin) > age(tree.attached) OR {_layout('tree.oid')} IS DISTINCT FROM {_layout('tree.root')})"
        " ORDER BY tree.root, age(tree.attached)",
        (list(roots), publication),
    )
    return dict.fromkeys(roots, 0) | dict(cursor.fetchall())


def read_identities(session: Session, oids: Sequence[int]) -> dict[int, ReplicaIdentity]:
    """Replica identity and primary key of tables, by oid; columns in the order of their index."""
    with translated("reading replica identities"), session.cursor() as cursor:
        # Which indexes count: RelationGetIndexList (src/backend/utils/cache/relcache.c).
        cursor.execute(
            "SELECT c.oid, c.relreplident,"
            " CASE c.relreplident WHEN 'f' THEN"
            # A virtual column is never sent, and since there are any (18) PostgreSQL refuses an identity with one.
            "  (SELECT array_agg(a.attname::text ORDER BY a.attnum) FROM pg_catalog.pg_attribute AS a"
            "   WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped"
            "   HAVING NOT bool_or(a.attgenerated = 'v'))"
            " ELSE i.columns END, p.columns"
            " FROM pg_catalog.pg_class AS c"
            " LEFT JOIN LATERAL (SELECT x.indrelid, array_agg(a.attname::text ORDER BY k.i) AS columns"
            "  FROM pg_catalog.pg_index AS x CROSS JOIN unnest(x.indkey::int2[]) WITH ORDINALITY AS k (attnum, i)"
            "  JOIN pg_catalog.pg_attribute AS a ON a.attrelid = x.indrelid AND a.attnum = k.attnum"
            "  WHERE x.indrelid = c.oid AND k.i <= x.indnkeyatts AND x.indisvalid AND x.indisunique AND x.indimmediate"
            "  AND CASE c.relreplident WHEN 'd' THEN x.indisprimary WHEN 'i' THEN x.indisreplident END"
            "  GROUP BY x.indexrelid, x.indrelid) AS i ON true"
            " LEFT JOIN LATERAL (SELECT array_agg(a.attname::text ORDER BY k.i) AS columns"
            "  FROM pg_catalog.pg_index AS x CROSS JOIN unnest(x.indkey::int2[]) WITH ORDINALITY AS k (attnum, i)"
            "  JOIN pg_catalog.pg_attribute AS a ON a.attrelid = x.indrelid AND a.attnum = k.attnum"
            "  WHERE x.indrelid = c.oid AND k.i <= x.indnkeyatts AND x.indisprimary AND x.indisvalid) AS p ON true"
            " WHERE c.oid = ANY (%s::oid[])",
            (list(oids),),
        )
        return {
            oid: ReplicaIdentity(kind, tuple(columns or ()), tuple(primary_key or ()))
            for oid, kind, columns, primary_key in cursor
        }


def _read_trees(session: Session, relations: Sequence[Relation]) -> dict[int, list[_Node]]:
    """Each relation with all partitions and children below it, itself first, by its oid."""
    with translated("reading partitions"), session.cursor() as cursor:
        cursor.execute(
            "WITH RECURSIVE tree (root, oid) AS (SELECT oid, oid FROM unnest(%s::oid[]) AS t (oid)"
            " UNION SELECT tree.root, i.inhrelid FROM tree JOIN pg_catalog.pg_inherits AS i ON i.inhparent = tree.oid)"
            " SELECT tree.root, c.oid, n.nspname, c.relname, c.relkind, c.relpersistence,"
            " pg_relation_is_publishable(c.oid) FROM tree JOIN pg_catalog.pg_class AS c ON c.oid = tree.oid"
            " JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
            ' ORDER BY tree.root, tree.oid <> tree.root, n.nspname COLLATE "C", c.relname COLLATE "C"',
            ([relation.oid for relation in relations],),
        )
        trees: dict[int, list[_Node]] = {}
        for root, oid, schema, name, kind, persistence, publishable in cursor:
            trees.setdefault(root, []).append(_Node(Relation(oid, schema, name, kind), persistence, publishable))
        return trees


def _read_ancestors(session: Session, oids: Sequence[int]) -> dict[int, list[Relation]]:
    """The partitioned tables above each partition, the nearest first; a table that is none has no entry."""
    with translated("reading partitions"), session.cursor() as cursor:
        cursor.execute(
            "SELECT t.oid, c.oid, n.nspname, c.relname, c.relkind FROM unnest(%s::oid[]) AS t (oid)"
            " CROSS JOIN pg_partition_ancestors(t.oid) WITH ORDINALITY AS a (oid, i)"
            " JOIN pg_catalog.pg_class AS c ON c.oid = a.oid"
            " JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace WHERE a.oid <> t.oid ORDER BY t.oid, a.i",
            (list(oids),),
        )
        above: dict[int, list[Relation]] = {}
        for oid, *ancestor in cursor:
            above.setdefault(oid, []).append(Relation(*ancestor))
        return above


# --- making ----------------------------------------------------------------------------------------------------------


def ensure_publication(session: Session, options: StreamOptions) -> Publication:
    """The stream's publication as it stands, created where it is missing and ``publicationMode`` allows it.

    To be called before the slot is created: decoding looks for the publication as of each change's own time. Nothing
    is created that PostgreSQL or ``stream_tables`` would refuse afterwards.
    """
    found = read_publication(session, options.publication)
    if found is not None:
        return found
    _create(session, options.publication, plan_publication(session, options).create)
    found = read_publication(session, options.publication)
    if found is None:
        raise TransientError(f"publication {quoted(options.publication)} was dropped as soon as it was created")
    return found


def require_publication(session: Session, name: str) -> Publication:
    """The publication of a slot that exists: it has to be older, so that one which is missing is not created."""
    found = read_publication(session, name)
    if found is None:
        raise ServerSetupError(
            f"publication {quoted(name)} does not exist any more: changes made since it was dropped cannot be decoded",
            remedy="start over with a new checkpoint location and a new slot",
        )
    return found


def plan_publication(session: Session, options: StreamOptions) -> Planned:
    """What ``ensure_publication`` creates where there is none; raises whatever keeps it from that, but for rights."""
    server = catalog.read_server(session)
    relations = _wanted(session, options)
    create = _create_sql(session, server, options.publication, relations)
    missing = f"publication {quoted(options.publication)} does not exist"
    if options.publication_mode == "require":
        raise ServerSetupError(
            f"{missing}, and publicationMode=require only checks it", remedy=f"create it: {create}; or name another"
        )
    if server.in_recovery:
        raise ServerSetupError(
            f"{missing}, and a standby cannot create it", remedy=f"on the primary, as the tables' owner: {create}"
        )
    ancestors = _read_ancestors(session, [relation.oid for relation in relations])
    oids = {relation.oid for relation in relations}
    planned = Publication(
        0,
        options.publication,
        all_tables=False,
        via_root=True,
        inserts=True,
        updates=True,
        deletes=True,
        truncates=True,
        generated=server.version_num >= _GENERATED_VERSION,
        tables=tuple(
            PublishedTable(relation, None, None, (), None)
            for relation in relations
            if not any(ancestor.oid in oids for ancestor in ancestors.get(relation.oid, ()))
        ),
    )
    streamed = stream_tables(session, options, planned)
    read_stream_tables(session, planned, streamed)
    _refuse_without_identity(session, server, options, streamed)
    return Planned(planned, tuple(relations), create)


def require_rights(session: Session, planned: Planned) -> None:
    """Raise AccessError where PostgreSQL would not let this role create a publication; it is not tried."""
    with translated("looking for the rights of this role"), session.cursor() as cursor:
        cursor.execute(
            "SELECT CASE WHEN NOT has_database_privilege(current_database(), 'CREATE')"
            " THEN 'permission denied for database ' || current_database() END,"
            " (SELECT 'must be owner of table ' || min(c.oid::regclass::text) FROM pg_catalog.pg_class AS c"
            " WHERE c.oid = ANY (%s::oid[]) AND NOT pg_has_role(c.relowner, 'USAGE'))",
            ([relation.oid for relation in planned.listed],),
        )
        lacks = [text for text in cursor.fetchone() if text is not None]
    if lacks:
        raise _not_allowed(planned.publication.name, "; ".join(lacks), planned.create)


def _not_allowed(name: str, why: str | None, create: str) -> AccessError:
    return AccessError(
        f"publication {quoted(name)} cannot be created: {why}",
        remedy=f"let an administrator run: {create}; it is then taken as it is. Or give this role ownership of the "
        "tables and CREATE on the database",
    )


def _wanted(session: Session, options: StreamOptions) -> list[Relation]:
    """The tables that the options mean where there is no publication yet to choose from, sorted by name."""
    if options.dbtable is not None:
        return [_find_table(session, options.dbtable)]
    found: dict[int, Relation] = {}
    for pattern in options.tables:
        if pattern.qualified is not None:
            matches = [_find_table(session, pattern.qualified)]
        else:
            matches = _publishable_tables(session, pattern)
        found.update((relation.oid, relation) for relation in matches)
    return _sorted(found.values())


def _find_table(session: Session, name: QualifiedName) -> Relation:
    relation = catalog.find_relation(session, name)
    for tree in _read_trees(session, [relation]).values():
        _refuse_unstreamable(tree)
    return relation


def _publishable_tables(session: Session, pattern: TablePattern) -> list[Relation]:
    """What a publication for ``schema.*`` has to list: every table that can be published, partitions by their root."""
    with translated(f"looking for {pattern}"), session.cursor() as cursor:
        cursor.execute(
            "SELECT c.oid, n.nspname, c.relname, c.relkind FROM pg_catalog.pg_class AS c"
            " JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
            " WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND pg_relation_is_publishable(c.oid)"
            " AND coalesce(n.nspname = %s, true)",
            (pattern.schema,),
        )
        relations = [Relation(*row) for row in cursor]
    if not relations:
        raise OptionError(
            f"tables: {pattern} matches no table that can be published",
            remedy="check the schema's name; quote it if it is not all lower case",
        )
    return relations


def _create_sql(
    session: Session, server: Server, name: str, relations: Sequence[Relation], publish: str | None = None
) -> str:
    settings = ["publish_via_partition_root = true"]
    if publish is not None:
        settings.insert(0, f"publish = '{publish}'")
    if server.version_num >= _GENERATED_VERSION:
        # As snapshots have them; and without, PostgreSQL refuses UPDATE and DELETE where an identity has such a column.
        settings.append("publish_generated_columns = stored")
    create = sql.SQL("CREATE PUBLICATION {} FOR TABLE {} WITH ({})").format(
        sql.Identifier(name),
        sql.SQL(", ").join(relation.identifier for relation in relations),
        sql.SQL(", ".join(settings)),
    )
    return str(create.as_string(session))


def _create(session: Session, name: str, create: str) -> None:
    try:
        with session.cursor() as cursor:
            # The slot that comes next is on disk at once, and is worth nothing without its publication.
            cursor.execute("BEGIN READ WRITE; SET LOCAL synchronous_commit = on")
            try:
                cursor.execute(create)
                cursor.execute("COMMIT")
            except psycopg2.Error:
                with contextlib.suppress(psycopg2.Error):
                    cursor.execute("ROLLBACK")
                raise
    except (psycopg2.errors.DuplicateObject, psycopg2.errors.UniqueViolation):
        return  # somebody else created it meanwhile
    except psycopg2.errors.InsufficientPrivilege as error:
        raise _not_allowed(name, error.diag.message_primary, create) from None
    except psycopg2.Error as error:
        raise translate(error, f"creating publication {quoted(name)}") from None


def _refuse_without_identity(
    session: Session, server: Server, options: StreamOptions, relations: Sequence[Relation]
) -> None:
    without, steps = without_identity(session, relations)
    if not without:
        return
    inserts_only = _create_sql(session, server, options.publication, relations, "insert, truncate")
    raise ServerSetupError(
        f"publication {quoted(options.publication)} is not created, because from then on PostgreSQL would "
        f"refuse every UPDATE and DELETE on {without}: no primary key or other usable replica identity",
        remedy=f"add a primary key; or {steps}; or, for inserts alone, create it yourself: {inserts_only}",
    )


def without_identity(session: Session, relations: Sequence[Relation]) -> tuple[str, str]:
    """In words the tables and partitions without a usable identity, and the SQL that gives them one; empty if none."""
    trees = _read_trees(session, relations)
    stored = [node.relation for tree in trees.values() for node in tree if node.relation.kind == "r"]
    identities = read_identities(session, [relation.oid for relation in stored])
    without = [relation for relation in stored if not identities[relation.oid].columns]
    steps = (_identity_sql(session, r, "DEFAULT" if identities[r.oid].kind == "f" else "FULL") for r in _few(without))
    return _listed(without), "; ".join(steps)


def _identity_sql(session: Session, relation: Relation, identity: str) -> str:
    return f"ALTER TABLE {relation.identifier.as_string(session)} REPLICA IDENTITY {identity}"


# --- what a stream reads ---------------------------------------------------------------------------------------------


def stream_tables(session: Session, options: StreamOptions, publication: Publication) -> tuple[Relation, ...]:
    """The tables that the stream reads, under the names that they are published by, sorted by (schema, name).

    Raises OptionError for what cannot be streamed and patterns that match nothing, ServerSetupError with the SQL to run
    where the publication lacks what was named.
    """
    published = {table.relation.oid: table for table in publication.tables}
    found: dict[int, Relation] = {}
    if options.dbtable is not None:
        relation = _find_table(session, options.dbtable)
        if relation.oid not in published:
            raise _not_published(session, publication, relation, whole=True)
        found[relation.oid] = relation
    for pattern in options.tables:
        if pattern.qualified is None:
            matches = _matches(session, publication, pattern)
        else:
            matches = _published_as(session, publication, _find_table(session, pattern.qualified))
        found.update((relation.oid, relation) for relation in matches)
    for tree in _read_trees(session, list(found.values())).values():
        _refuse_unstreamable(tree)
    if session.server_version < _PARTITIONS_VERSION and publication.via_root:
        _refuse_other_layouts(session, list(found))
    return tuple(_sorted(found.values()))


def _matches(session: Session, publication: Publication, pattern: TablePattern) -> list[Relation]:
    """The published tables of a schema, and partitions that are published by themselves of the tables there."""
    relations = [table.relation for table in publication.tables]
    above = _read_ancestors(session, [relation.oid for relation in relations]) if pattern.schema is not None else {}
    matches = [
        relation
        for relation in relations
        if pattern.schema in (None, relation.schema, *(ancestor.schema for ancestor in above.get(relation.oid, ())))
    ]
    if not matches:
        what = f"its tables are {_listed(relations)}" if relations else "it has no tables"
        raise OptionError(
            f"tables: publication {quoted(publication.name)} has no table that matches {pattern}; {what}",
            remedy="name what it has, or add to it with ALTER PUBLICATION ... ADD TABLE",
        )
    return matches


def _published_as(session: Session, publication: Publication, relation: Relation) -> list[Relation]:
    """The relation itself, or the partitions that it is published by."""
    published = {table.relation.oid for table in publication.tables}
    if relation.oid in published:
        return [relation]
    parts = [node.relation for node in _read_trees(session, [relation])[relation.oid] if node.relation.oid in published]
    if not parts or _lacking(session, published, relation):
        raise _not_published(session, publication, relation, whole=False)
    return parts


def _lacking(session: Session, published: set[int], relation: Relation) -> list[Relation]:
    """The tables with rows of a relation, itself or leaf partitions, that are published under no name."""
    stored = [node.relation for node in _read_trees(session, [relation])[relation.oid] if node.relation.kind == "r"]
    above = _read_ancestors(session, [leaf.oid for leaf in stored])
    return [
        leaf
        for leaf in stored
        if published.isdisjoint((leaf.oid, *(ancestor.oid for ancestor in above.get(leaf.oid, ()))))
    ]


def _not_published(session: Session, publication: Publication, relation: Relation, *, whole: bool) -> PgCdcError:
    """The error for a table that is not published under its own name, or with ``whole`` False by all its partitions."""
    published = {table.relation.oid for table in publication.tables}
    what = f"publication {quoted(publication.name)}"
    alter = f"ALTER PUBLICATION {sql.Identifier(publication.name).as_string(session)}"
    add = f"{alter} ADD TABLE {relation.identifier.as_string(session)}"
    for ancestor in _read_ancestors(session, [relation.oid]).get(relation.oid, ()):
        if ancestor.oid in published:
            return OptionError(
                f"{what} sends the changes of {relation} under the name of its root, {ancestor}",
                remedy=f"stream {ancestor}, or use another publication that has {relation} and not {ancestor}",
            )
    if not any(node.relation.oid in published for node in _read_trees(session, [relation])[relation.oid]):
        return ServerSetupError(
            f"{what} does not have {relation}",
            remedy=f"{add}; or name another publication. Changes made before that are not in the stream",
        )
    if whole:
        listed = publication.all_tables or _is_listed(session, publication, relation)
        steps = [*([] if listed else [add]), f"{alter} SET (publish_via_partition_root = true)"]
        return ServerSetupError(
            f"{what} sends the changes of {relation} under the names of its partitions",
            remedy=f"{'; '.join(steps)}; or stream the partitions with the option tables",
        )
    return ServerSetupError(
        f"{what} has some partitions of {relation}, but not {_listed(_lacking(session, published, relation))}",
        remedy=f"{add}; or name the partitions wanted in tables",
    )


def _is_listed(session: Session, publication: Publication, relation: Relation) -> bool:
    """Whether the publication has the table by its own name, and not only partitions of it."""
    with translated(f"reading publication {quoted(publication.name)}"), session.cursor() as cursor:
        cursor.execute(
            "SELECT EXISTS (SELECT FROM pg_catalog.pg_publication_rel AS r"
            " JOIN pg_catalog.pg_publication AS p ON p.oid = r.prpubid WHERE p.pubname = %s AND r.prrelid = %s)",
            (publication.name, relation.oid),
        )
        return bool(cursor.fetchone()[0])


def _refuse_unstreamable(tree: Sequence[_Node]) -> None:
    """Raise OptionError for a relation whose changes, or some of them, never reach a stream."""
    root, *below = tree
    relation = root.relation
    kinds = {"v": "a view", "m": "a materialized view", "f": "a foreign table"}
    persistences = {"t": "a temporary table", "u": "an unlogged table"}
    if relation.kind in kinds:
        where = "stream it from its own server" if relation.kind == "f" else "stream the tables that it reads"
        raise OptionError(f"{relation} is {kinds[relation.kind]}: it has no changes of its own", remedy=where)
    if root.persistence in persistences:
        raise OptionError(
            f"{relation} is {persistences[root.persistence]}: its changes are not in the write-ahead log",
            remedy="ALTER TABLE ... SET LOGGED" if root.persistence == "u" else "stream an ordinary table",
        )
    if not root.publishable:
        raise OptionError(
            f"{relation} is a table of PostgreSQL's own, which is never published", remedy="stream a table of yours"
        )
    if relation.kind == "r" and below:
        raise OptionError(
            f"{relation} has tables that inherit from it ({_listed([node.relation for node in below])}), whose changes "
            "come under their own names, while their rows are among its own",
            remedy="stream the inheriting tables, by name, in tables",
        )
    for node in below:
        if node.relation.kind == "f" or node.persistence == "u":
            what = "a foreign table" if node.relation.kind == "f" else "unlogged"
            raise OptionError(
                f"{node.relation}, a partition of {relation}, is {what}: its changes would be missing without a sign",
                remedy="stream the other partitions, published one by one"
                + ("" if node.relation.kind == "f" else "; or ALTER TABLE ... SET LOGGED"),
            )


def _refuse_other_layouts(session: Session, roots: Sequence[int]) -> None:
    with translated("reading partitions"), session.cursor() as cursor:
        cursor.execute(
            "SELECT c.oid, n.nspname, c.relname, c.relkind FROM unnest(%s::oid[]) AS root (oid)"
            " JOIN pg_catalog.pg_class AS r ON r.oid = root.oid AND r.relkind = 'p'"
            " CROSS JOIN pg_partition_tree(r.oid) AS t JOIN pg_catalog.pg_class AS c ON c.oid = t.relid"
            " JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
            f" WHERE t.isleaf AND {_layout('c.oid')} IS DISTINCT FROM {_layout('r.oid')}",
            (list(roots),),
        )
        others = [Relation(*row) for row in cursor]
    if others:
        raise ServerSetupError(
            f"partitions have another layout than their root (the columns' order, or that of dropped ones): "
            f"{_listed(others)}. PostgreSQL before 15 may send values of one column under the name of another",
            remedy="use a publication WITH (publish_via_partition_root = false) and the option tables, or PostgreSQL "
            "15 or later",
        )


def read_stream_tables(
    session: Session, publication: Publication, relations: Sequence[Relation]
) -> tuple[StreamTable, ...]:
    """The facts of each table that reading its changes depends on.

    Raises ServerSetupError where old values of a partition would be taken for those of its root's identity.
    """
    trees = _read_trees(session, relations)
    identities = read_identities(session, [node.relation.oid for tree in trees.values() for node in tree])
    unpublished = _read_unpublished(session, publication, relations)
    filters = {table.relation.oid: table.row_filter for table in publication.tables}
    tables = []
    for relation in relations:
        if publication.updates or publication.deletes:
            _refuse_lesser_identities(session, [node.relation for node in trees[relation.oid]], identities)
        identity, missing = identities[relation.oid], unpublished[relation.oid]
        columns = tuple(column for column in identity.columns if column not in missing)
        if identity.kind != "f" and columns != identity.columns:
            columns = ()
        key = () if set(identity.primary_key) & set(missing) else identity.primary_key
        tables.append(StreamTable(relation, identity.kind, columns, key, missing, filters[relation.oid]))
    return tuple(tables)


def _refuse_lesser_identities(
    session: Session, tree: Sequence[Relation], identities: dict[int, ReplicaIdentity]
) -> None:
    root, *below = tree
    of_root = identities[root.oid]
    lesser = [leaf for leaf in below if leaf.kind == "r" and _is_less(identities[leaf.oid], of_root)]
    if lesser:
        of_leaf = identities[lesser[0].oid]
        raise ServerSetupError(
            f"partitions have another replica identity than their root {root}, by which PostgreSQL labels old values: "
            f"{_listed(lesser)}; of {lesser[0]} WAL has {_named(of_leaf)}, and it would be taken for {_named(of_root)}",
            remedy="; ".join(_identity_sql(session, leaf, "FULL") for leaf in _few(lesser))
            + "; such a statement on the root does not reach its partitions",
        )


def _is_less(of_leaf: ReplicaIdentity, of_root: ReplicaIdentity) -> bool:
    # Without a usable identity PostgreSQL refuses UPDATE and DELETE there, and no old values come.
    if of_leaf.kind == "f" or not of_leaf.columns:
        return False
    return of_root.kind == "f" or not set(of_root.columns) <= set(of_leaf.columns)


def _named(identity: ReplicaIdentity) -> str:
    return "the whole row" if identity.kind == "f" else ", ".join(map(quoted, identity.columns))


def _read_unpublished(
    session: Session, publication: Publication | None, relations: Sequence[Relation]
) -> dict[int, tuple[str, ...]]:
    """Names of columns that are not sent, or would not be, by the table's oid."""
    lists = {} if publication is None else {table.relation.oid: table.columns for table in publication.tables}
    # One that is missing will be made so.
    stored_are_sent = session.server_version >= _GENERATED_VERSION if publication is None else publication.generated
    unpublished: dict[int, tuple[str, ...]] = {relation.oid: () for relation in relations}
    with translated("reading the columns that are published"), session.cursor() as cursor:
        cursor.execute(
            "SELECT attrelid, attname, attgenerated FROM pg_catalog.pg_attribute WHERE attrelid = ANY (%s::oid[])"
            " AND attnum > 0 AND NOT attisdropped ORDER BY attrelid, attnum",
            (list(unpublished),),
        )
        for oid, name, generated in cursor:
            listed = lists.get(oid)
            # A list may name stored generated columns, whatever the publication says of them otherwise.
            sent = name in listed if listed is not None else not generated or (generated == "s" and stored_are_sent)
            if not sent:
                unpublished[oid] += (name,)
    return unpublished


# --- texts -----------------------------------------------------------------------------------------------------------


def _sorted(relations: Collection[Relation]) -> list[Relation]:
    return sorted(relations, key=lambda relation: (relation.schema, relation.name))


def _few(relations: Sequence[Relation]) -> list[Relation]:
    return _sorted(relations)[:_MOST_NAMED]


def _listed(relations: Sequence[Relation]) -> str:
    text = ", ".join(map(str, _few(relations)))
    return text if len(relations) <= _MOST_NAMED else f"{text} and {len(relations) - _MOST_NAMED} more"


# --- while a stream runs ---------------------------------------------------------------------------------------------


def mark_of(publication: Publication, oids: Collection[int]) -> str:
    """What tells a publication from a later one of the same name, and what it sends of these tables.

    It is kept in checkpoints: ``16390 iudt 16384:16391 16387:16392+16394rc`` is the oid, a letter for each kind of
    change (insert, update, delete, truncate), and for each table its entries, r for a row filter, c for a column list,
    @ and the transaction of ``PublishedTable.attached``. An entry stays when names change, and is another one when
    filter or list are (pg_publication_rel).
    """
    kinds = {"i": publication.inserts, "u": publication.updates, "d": publication.deletes, "t": publication.truncates}
    listed = [
        f" {table.relation.oid}:{'+'.join(map(str, table.entries))}"
        + ("r" if table.row_filter is not None else "")
        + ("c" if table.columns is not None else "")
        + (f"@{table.attached}" if table.attached is not None else "")
        for table in publication.tables
        if (table.entries or table.attached is not None) and table.relation.oid in oids
    ]
    return f"{publication.oid} {''.join(letter for letter, sent in kinds.items() if sent)}{''.join(listed)}"


def find_change(mark: str, now: str, names: Mapping[int, str]) -> str:
    """In words what became of a publication between two marks; empty where it sends all that it did.

    ``names`` are those of the stream's tables by oid. A table that only one of the marks has is passed over.
    """
    (oid, sent, *listed), (oid_now, sent_now, *listed_now) = (f"{text} ".split(" ") for text in (mark, now))
    if oid != oid_now:
        return "was dropped and created again"
    kinds = {"i": "inserts", "u": "updates", "d": "deletes", "t": "truncates"}
    lost = [what for letter, what in kinds.items() if letter in sent and letter not in sent_now]
    if lost:
        return f"leaves out {', '.join(lost)} now"
    before = dict(_parsed_entries(listed))
    for table, (entries_now, flags_now, attached_now) in _parsed_entries(listed_now):
        entries, flags, attached = before.get(table, (entries_now, flags_now, attached_now))
        for letter, what in (("r", "row filter"), ("c", "column list")):
            if (letter in flags) != (letter in flags_now):
                return f"has {'a' if letter in flags_now else 'no'} {what} for {names[table]} now"
        if entries.isdisjoint(entries_now):
            otherwise = ", or given another row filter or column list" if flags else ""
            return f"has {names[table]} anew: it was dropped from it and added again{otherwise}"
        # Transactions are numbered in a circle. An older one is what is left when the newest partition is detached.
        if attached_now and (not attached or 0 < (attached_now - attached) % 2**32 < 2**31):
            return (
                f"has a partition that was attached to {names[table]} while it has another layout or the publication "
                "was not altered in the same transaction, as PostgreSQL before 15 needs it (ALTER PUBLICATION ... SET "
                "(publish_via_partition_root = true))"
            )
    return ""


def _parsed_entries(listed: Sequence[str]) -> Iterator[tuple[int, tuple[set[str], str, int]]]:
    for text in filter(None, listed):
        table, _, rest = text.partition(":")
        rest, _, attached = rest.partition("@")
        entries = rest.rstrip("rc")
        yield int(table), (set(entries.split("+")), rest[len(entries) :], int(attached or 0))


def find_lost(session: Session, name: str, mark: str, names: Mapping[int, str]) -> str:
    """In words what became of a publication by which a stream reads tables (names by oid); empty where nothing."""
    publication = read_publication(session, name)
    if publication is None:
        return "was dropped"
    if changed := find_change(mark, mark_of(publication, names), names):
        return changed
    published = {table.relation.oid for table in publication.tables}
    lost = [oid for oid in names if oid not in published]
    if not lost:
        return ""
    with translated(f"reading publication {quoted(name)}"), session.cursor() as cursor:
        cursor.execute("SELECT oid::bigint FROM pg_catalog.pg_class WHERE oid = ANY (%s::oid[])", (lost,))
        there = {oid for (oid,) in cursor}
    gone = [f"{names[oid]}{'' if oid in there else ', which was dropped'}" for oid in sorted(lost)[:_MOST_NAMED]]
    return f"has lost {'; '.join(gone)}"


def read_unpublished(session: Session, name: str, relation: Relation) -> tuple[str, ...]:
    """Names of a table's columns that a publication does not send, or would not if there were one."""
    return _read_unpublished(session, read_publication(session, name), [relation])[relation.oid]
