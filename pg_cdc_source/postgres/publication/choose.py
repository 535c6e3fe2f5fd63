"""Choose the tables that a stream reads through a publication, and refuse what cannot be streamed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from psycopg2 import sql
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import AccessError, OptionError, PgCdcError, ServerSetupError
from pg_cdc_source.options.names import QualifiedName, TablePattern, quoted
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres.catalog import Relation, find_relations
from pg_cdc_source.postgres.publication.before_15 import is_before_15, refuse_other_layouts
from pg_cdc_source.postgres.publication.listing import by_name, listed
from pg_cdc_source.postgres.publication.read import Publication
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.trees import (
    WITHOUT_EXPORTED_SNAPSHOTS,
    Node,
    read_ancestors,
    read_parents,
    read_tree,
    read_trees,
)

log = logging.getLogger(__name__)


def stream_tables(
    session: Session,
    options: StreamOptions,
    publication: Publication,
    may_lack: Callable[[TablePattern], bool] = lambda pattern: False,
    refused: Collection[int] = (),
) -> tuple[Relation, ...]:
    """The tables that the stream reads, under the names that they are published by, sorted by (schema, name).

    A table that is named one by one and does not exist, or is not published, is passed over where ``may_lack`` says so;
    those whose oids are ``refused`` are left out. Raises OptionError for what cannot be streamed and patterns that
    match nothing, ServerSetupError with the SQL to run where the publication lacks what was named.
    """
    published = {table.relation.oid: table for table in publication.tables}
    found: dict[int, Relation] = {}
    if options.dbtable is not None:
        (relation,) = find_tables(session, [options.dbtable])
        if relation.oid not in published:
            raise _not_published(session, publication, relation, whole=True)
        found[relation.oid] = relation
    named = _find_at_once(session, options.tables)
    for pattern in options.tables:
        if pattern.qualified is None:
            matches = _matches(session, publication, pattern)
        else:
            try:
                relation = named.get(pattern) or find_relations(session, [pattern.qualified])[0]
                is_whole = relation.oid in published
                matches = [relation] if is_whole else _parts_of(session, publication, relation)
            except (AccessError, ServerSetupError):
                if _is_published(session, publication, pattern) or not may_lack(pattern):
                    raise
                continue
        found.update((relation.oid, relation) for relation in matches if relation.oid not in refused)
    require_streamable(session, list(found.values()))
    if publication.via_root and is_before_15(session):
        refuse_other_layouts(session, list(found))
    return tuple(by_name(found.values()))


def listed_as(session: Session, relations: Sequence[Relation]) -> str:
    """The tables as a publication lists them: without tables that inherit from them, which it would list as well."""
    parents = read_parents(session, [relation.oid for relation in relations])
    return ", ".join(
        ("ONLY " if relation.oid in parents else "") + str(relation.identifier.as_string(session))
        for relation in relations
    )


def find_tables(session: Session, names: Sequence[QualifiedName]) -> list[Relation]:
    """The tables of these names. Raises OptionError for one that cannot be streamed."""
    relations = find_relations(session, names)
    require_streamable(session, relations)
    return relations


def _find_at_once(session: Session, patterns: Sequence[TablePattern]) -> dict[TablePattern, Relation]:
    """The tables that are named, at once; none of them where one is refused, which is then looked for alone.

    A stream may name hundreds, and looks at them whenever it begins or goes on.
    """
    names = {pattern: pattern.qualified for pattern in patterns if pattern.qualified is not None}
    try:
        return dict(zip(names, find_relations(session, list(names.values())), strict=True))
    except (AccessError, OptionError):
        return {}


def _matches(session: Session, publication: Publication, pattern: TablePattern) -> list[Relation]:
    """The published tables of a schema, and those partitions of its tables that are published by themselves."""
    relations = [table.relation for table in publication.tables]
    matches = meant_by([pattern], session, relations)
    if not matches:
        what = f"its tables are {listed(relations)}" if relations else "it has no tables"
        raise OptionError(
            f"tables: publication {quoted(publication.name)} has no table that matches {pattern}; {what}",
            remedy=f"name what it has, or add to it with ALTER PUBLICATION {quoted(publication.name)} ADD TABLE ...",
        )
    return matches


def meant_by(patterns: Sequence[TablePattern], session: Session, relations: Sequence[Relation]) -> list[Relation]:
    """Those of some relations that patterns mean: by their own names, or by those of the tables that they are parts of.

    One of which any of these names is left out is not meant by that pattern.
    """
    if not patterns:
        return []
    is_all = any(pattern.schema is None and pattern.name is None and not pattern.but for pattern in patterns)
    above = {} if is_all else read_ancestors(session, [relation.oid for relation in relations])

    def is_meant(pattern: TablePattern, relation: Relation) -> bool:
        names = [(one.schema, one.name) for one in (relation, *above.get(relation.oid, ()))]
        is_left_out = any(left_out.matches(*name) for left_out in pattern.but for name in names)
        return not is_left_out and any(pattern.matches(*name) for name in names)

    return [relation for relation in relations if any(is_meant(pattern, relation) for pattern in patterns)]


def require_no_parts(patterns: Sequence[TablePattern], session: Session, relations: Sequence[Relation]) -> None:
    """Raise OptionError where a part of one of these tables is left out by name: its rows come under the table's."""
    names = [left_out for pattern in patterns for left_out in pattern.but if left_out.name is not None]
    for tree in read_trees(session, relations).values() if names else ():
        root, *parts = (node.relation for node in tree)
        for part in parts:
            if any(name.matches(part.schema, part.name) for name in names):
                raise OptionError(
                    f"tables: -{part} cannot be left out, because its changes come under {root}",
                    remedy=f"leave out {root}; or leave out the rows where the changes are used",
                )


def _parts_of(session: Session, publication: Publication, relation: Relation) -> list[Relation]:
    """The partitions that a relation is published by."""
    published = {table.relation.oid for table in publication.tables}
    parts = [node.relation for node in read_tree(session, relation) if node.relation.oid in published]
    if not parts or _lacking(session, published, relation):
        raise not_published_error(session, publication, relation)
    return parts


_FIND_NAMED = """
SELECT c.oid, n.nspname, c.relname, c.relkind
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.relname = %(name)s::pg_catalog.text
    AND (%(schema)s::pg_catalog.text IS NULL OR n.nspname = %(schema)s::pg_catalog.text)
"""


def _is_published(session: Session, publication: Publication, pattern: TablePattern) -> bool:
    """Whether the publication has a table that may be meant, or a part of it: also one that this role may not use."""
    with translated(f"looking for {pattern}"), session.cursor() as cursor:
        cursor.execute(_FIND_NAMED, {"name": pattern.name, "schema": pattern.schema})
        relations = [Relation(*row) for row in cursor]
    published = {table.relation.oid for table in publication.tables}
    trees = read_trees(session, relations)
    return any(node.relation.oid in published for tree in trees.values() for node in tree)


def _lacking(session: Session, published: set[int], relation: Relation) -> list[Relation]:
    """The tables that hold rows of a relation (itself or leaf partitions) and are published under no name."""
    stored = [node.relation for node in read_tree(session, relation) if node.relation.kind in "rf"]
    above = read_ancestors(session, [leaf.oid for leaf in stored])
    return [
        leaf
        for leaf in stored
        if published.isdisjoint((leaf.oid, *(ancestor.oid for ancestor in above.get(leaf.oid, ()))))
    ]


def not_published_error(session: Session, publication: Publication, relation: Relation) -> PgCdcError:
    """The error for a table that is published neither under its own name nor by all of its partitions."""
    unstreamable = find_unstreamable(session, [relation])
    return unstreamable.get(relation.oid) or _not_published(session, publication, relation, whole=False)


def _not_published(session: Session, publication: Publication, relation: Relation, *, whole: bool) -> PgCdcError:
    """The error for a table that is not published under its own name, nor, with ``whole`` False, by its partitions."""
    published = {table.relation.oid for table in publication.tables}
    what = f"publication {quoted(publication.name)}"
    alter = f"ALTER PUBLICATION {sql.Identifier(publication.name).as_string(session)}"
    add = f"{alter} ADD TABLE {listed_as(session, [relation])}"
    for ancestor in read_ancestors(session, [relation.oid]).get(relation.oid, ()):
        if ancestor.oid in published:
            return OptionError(
                f"{what} sends the changes of {relation} under the name of its root, {ancestor}",
                remedy=f"stream {ancestor}, or use another publication that has {relation} and not {ancestor}",
            )
    if not any(node.relation.oid in published for node in read_tree(session, relation)):
        if publication.all_tables:
            # FOR ALL TABLES EXCEPT, from 19 on; such a publication takes no ADD TABLE.
            return ServerSetupError(
                f"{what} has all tables except some, and {relation} is one of these",
                remedy=f"{alter} SET ALL TABLES EXCEPT (TABLE …) with the others, or SET ALL TABLES; or name another "
                "publication. Changes made before that are not in the stream",
            )
        return ServerSetupError(
            f"{what} does not have {relation}",
            remedy=f"{add}; or name another publication. Changes made before that are not in the stream",
        )
    if whole:
        is_listed = publication.all_tables or _is_listed(session, publication, relation)
        steps = [*([] if is_listed else [add]), f"{alter} SET (publish_via_partition_root = true)"]
        return ServerSetupError(
            f"{what} sends the changes of {relation} under the names of its partitions",
            remedy=f"{'; '.join(steps)}; or stream the partitions with the option tables",
        )
    return ServerSetupError(
        f"{what} has some partitions of {relation}, but not {listed(_lacking(session, published, relation))}",
        remedy=f"{add}; or name the partitions wanted in tables",
    )


_IS_LISTED = """
SELECT EXISTS (
    SELECT
    FROM pg_catalog.pg_publication_rel AS r
    JOIN pg_catalog.pg_publication AS p ON p.oid = r.prpubid
    WHERE p.pubname = %s AND r.prrelid = %s
)
"""


def _is_listed(session: Session, publication: Publication, relation: Relation) -> bool:
    """Whether the publication has the table by its own name, and not only partitions of it."""
    with translated(f"reading publication {quoted(publication.name)}"), session.cursor() as cursor:
        cursor.execute(_IS_LISTED, (publication.name, relation.oid))
        return bool(cursor.fetchone()[0])


# PostgreSQL's own, and Percona's encrypted one, which writes the same WAL.
_DECODED_METHODS = ("heap", "tde_heap")
_warned: set[Relation] = set()


def _warn_of_method(node: Node) -> None:
    """Say, once in this process, that changes of a table may never come. PostgreSQL publishes it all the same."""
    method = node.access_method
    if method is not None and method not in _DECODED_METHODS and node.relation not in _warned:
        _warned.add(node.relation)
        log.warning(
            "%s has the access method %s: PostgreSQL decodes changes of heap tables, and of others only where their "
            "extension writes them to the WAL for that. See whether a change comes, before you rely on it",
            node.relation,
            method,
        )
        if method in WITHOUT_EXPORTED_SNAPSHOTS:
            log.warning(
                "%s: its first rows are not those of the stream's point, so changes from behind that come again", method
            )


def find_unstreamable(session: Session, relations: Sequence[Relation]) -> dict[int, OptionError]:
    """Those of the relations, by oid, whose changes, or some of them, never reach a stream. Warn where that may be."""
    trees = read_trees(session, relations)
    for tree in trees.values():
        for node in tree:
            _warn_of_method(node)
    errors = ((oid, _unstreamable_error(tree)) for oid, tree in trees.items())
    return {oid: error for oid, error in errors if error is not None}


def require_streamable(session: Session, relations: Sequence[Relation]) -> None:
    """Raise OptionError for a relation whose changes, or some of them, never reach a stream."""
    for error in find_unstreamable(session, relations).values():
        raise error


def find_unpublished_parts(
    session: Session, options: StreamOptions, publication: Publication
) -> dict[Relation, list[Relation]]:
    """By their roots, partitions that are published under no name; of tables that are named, and published by others.

    A publication stays as it was when such a partition is created.
    """
    names = [pattern for pattern in options.tables if pattern.qualified is not None]
    published = {table.relation.oid for table in publication.tables}
    above = read_ancestors(session, list(published)).values() if names else ()
    roots = {root for roots in above for root in roots if root.oid not in published}
    named = (root for root in roots if any(name.matches(root.schema, root.name) for name in names))
    found = {root: _lacking(session, published, root) for root in named}
    return {root: parts for root, parts in found.items() if parts}


def _unstreamable_error(tree: Sequence[Node]) -> OptionError | None:
    root, *below = tree
    relation = root.relation
    kinds = {"v": "a view", "m": "a materialized view", "f": "a foreign table"}
    persistences = {"t": "a temporary table", "u": "an unlogged table"}
    if relation.kind in kinds:
        where = "stream it from its own server" if relation.kind == "f" else "stream the tables that it reads"
        return OptionError(f"{relation} is {kinds[relation.kind]}: it has no changes of its own", remedy=where)
    if root.persistence in persistences:
        return OptionError(
            f"{relation} is {persistences[root.persistence]}: its changes are not in the write-ahead log",
            remedy=f"ALTER TABLE {relation} SET LOGGED" if root.persistence == "u" else "stream an ordinary table",
        )
    if not root.publishable:
        return OptionError(
            f"{relation} is a table of PostgreSQL's own, which is never published", remedy="stream a table of yours"
        )
    if root.is_hypertable:
        return OptionError(
            f"{relation} is a hypertable of TimescaleDB: its rows and changes are those of its chunks, and none comes "
            "under its own name",
            remedy=f"read it with the format pgsnapshot; where a pattern has it, leave it out (tables=…, -{relation})",
        )
    for node in below:
        if node.relation.kind == "f" or node.persistence == "u":
            what = "a foreign table" if node.relation.kind == "f" else "unlogged"
            return OptionError(
                f"{node.relation}, a partition of {relation}, is {what}: its changes would be missing without a sign",
                remedy="stream the other partitions, published one by one"
                + ("" if node.relation.kind == "f" else f"; or ALTER TABLE {node.relation} SET LOGGED"),
            )
    return None
