"""Plan and create a publication, with everything that would prevent it found before."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import psycopg2
from psycopg2 import sql
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import AccessError, OptionError, ServerSetupError, TransientError
from pg_cdc_source.options.names import TablePattern, quoted
from pg_cdc_source.options.stream_options import Publications, StreamOptions
from pg_cdc_source.postgres.catalog import Relation, Server, read_server
from pg_cdc_source.postgres.publication.choose import find_tables, listed_as, stream_tables
from pg_cdc_source.postgres.publication.identity import keyless_of, without_identity
from pg_cdc_source.postgres.publication.listing import by_name
from pg_cdc_source.postgres.publication.read import (
    GENERATED_VERSION,
    Publication,
    PublishedTable,
    read_one,
    read_publication,
)
from pg_cdc_source.postgres.publication.sent import read_sent_tables
from pg_cdc_source.postgres.server_errors import translate, translated
from pg_cdc_source.postgres.trees import read_ancestors

# Where the publication of a stream that has begun is missing.
CREATE_AGAIN = (
    "create the publication again, and start the query again with the same checkpoint and onNewTable=snapshot: the "
    "rows of all tables come again, each table's after a truncate row, and then their changes"
)


@dataclass(frozen=True, slots=True)
class PlannedPublication:
    """A missing publication: what it would send, the tables that it would list, and the SQL that creates it."""

    publication: Publication
    listed: tuple[Relation, ...]
    create: str


def ensure_publication(session: Session, options: StreamOptions) -> Publication:
    """The stream's publication as it stands, created where it is missing and ``publicationMode`` allows it.

    Call it before the slot is created: decoding looks for the publication as of each change's own time. Nothing is
    created that PostgreSQL or ``stream_tables`` would refuse afterwards.
    """
    found = read_publication(session, options.publications)
    if found is not None:
        return found
    _create(session, options.publication, plan_publication(session, options).create)
    found = read_publication(session, options.publications)
    if found is None:
        raise TransientError(f"publication {quoted(options.publication)} was dropped as soon as it was created")
    return found


def require_publication(session: Session, names: Publications) -> Publication:
    """The publication of a slot that exists. It has to be older than the slot, so a missing one is not created."""
    found = read_publication(session, names)
    if found is None:
        raise ServerSetupError(
            f"publication {quoted(names.name)} does not exist any more, and the slot sends nothing without it",
            remedy=f"{CREATE_AGAIN}. A query without a checkpoint needs a slot that is younger than the publication: "
            "drop this one, or name another",
        )
    return found


def plan_publication(session: Session, options: StreamOptions) -> PlannedPublication:
    """What ``ensure_publication`` creates where there is none. Raises everything that prevents it, except rights."""
    server = read_server(session)
    relations = _wanted(session, options)
    kinds = _kinds_of(session, options, relations)
    create = _create_sql(session, server, options.publication, kinds.listed)
    if options.publications.inserts is not None and kinds.inserts_only:
        _refuse_leftover(session, options.publications.inserts)
        second = _create_sql(session, server, options.publications.inserts, kinds.inserts_only, "insert, truncate")
        create = f"{create}; {second}"
    missing = f"publication {quoted(options.publication)} does not exist"
    if options.publication_mode == "require":
        raise ServerSetupError(
            f"{missing}, and publicationMode=require only checks it", remedy=f"create it: {create}; or name another"
        )
    if server.in_recovery:
        raise ServerSetupError(
            f"{missing}, and a standby cannot create it", remedy=f"on the primary, as the tables' owner: {create}"
        )
    planned = Publication(
        0,
        options.publication,
        all_tables=False,
        via_root=True,
        inserts=True,
        updates=True,
        deletes=True,
        truncates=True,
        generated=server.version_num >= GENERATED_VERSION,
        tables=tuple(
            PublishedTable(relation, None, None, (), None, inserts_only=relation in kinds.inserts_only)
            for relation in kinds.roots
        ),
    )
    streamed = stream_tables(session, options, planned)
    read_sent_tables(session, planned, streamed, whole=options.change_format == "changelog")
    _refuse_without_identity(
        session, options, [relation for relation in streamed if relation not in kinds.inserts_only]
    )
    return PlannedPublication(planned, tuple(relations), create)


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Tables to be published: ``roots`` are those under whose names changes come.

    ``listed`` have a publication of all kinds of changes, ``inserts_only`` another one.
    """

    roots: tuple[Relation, ...]
    listed: tuple[Relation, ...]
    inserts_only: tuple[Relation, ...]


def _kinds_of(session: Session, options: StreamOptions, relations: Sequence[Relation]) -> _Kinds:
    ancestors = read_ancestors(session, [relation.oid for relation in relations])

    def outside(others: Collection[Relation]) -> tuple[Relation, ...]:
        """Those that are no partitions of others."""
        oids = {other.oid for other in others}
        return tuple(r for r in relations if oids.isdisjoint(above.oid for above in ancestors.get(r.oid, ())))

    roots = outside(relations)
    inserts_only = tuple(keyless_of(session, roots)) if options.keyless == "insertOnly" else ()
    listed = tuple(relation for relation in outside(inserts_only) if relation not in inserts_only)
    return _Kinds(roots, listed, inserts_only)


def _refuse_leftover(session: Session, name: str) -> None:
    if read_one(session, name) is not None:
        raise ServerSetupError(
            f"publication {quoted(name)} exists, and the one that it belongs to does not",
            remedy=f"DROP PUBLICATION {sql.Identifier(name).as_string(session)}; or name another publication",
        )


_FIND_LACKING_RIGHTS = """
SELECT
    CASE
        WHEN NOT has_database_privilege(current_database(), 'CREATE')
        THEN 'permission denied for database ' || current_database()
    END,
    (
        SELECT 'must be owner of table ' || min(c.oid::regclass::text)
        FROM pg_catalog.pg_class AS c
        WHERE c.oid = ANY (%s::oid[]) AND NOT pg_has_role(c.relowner, 'USAGE')
    )
"""


def require_rights(session: Session, planned: PlannedPublication) -> None:
    """Raise AccessError where PostgreSQL would not let this role create the publication. Nothing is created."""
    with translated("looking for the rights of this role"), session.cursor() as cursor:
        cursor.execute(_FIND_LACKING_RIGHTS, ([relation.oid for relation in planned.listed],))
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
    """The tables that the options name, sorted by name, where there is no publication yet to choose them from."""
    if options.dbtable is not None:
        return find_tables(session, [options.dbtable])
    found: dict[int, Relation] = {}
    for pattern in options.tables:
        if pattern.qualified is not None:
            matches = find_tables(session, [pattern.qualified])
        else:
            matches = _publishable_tables(session, pattern)
        found.update((relation.oid, relation) for relation in matches)
    return by_name(found.values())


_READ_PUBLISHABLE = """
SELECT c.oid, n.nspname, c.relname, c.relkind
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p')
    AND NOT c.relispartition
    AND pg_relation_is_publishable(c.oid)
    AND coalesce(n.nspname = %s, true)
    AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_depend AS d
        WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = c.oid
            AND d.refclassid = 'pg_catalog.pg_extension'::pg_catalog.regclass AND d.deptype = 'e'
    )
"""


def _publishable_tables(session: Session, pattern: TablePattern) -> list[Relation]:
    """What a publication for ``schema.*`` has to list: every table that can be published, partitions by their root.

    Tables of extensions (PostGIS' ``spatial_ref_sys``) are not the user's data, and often not theirs to publish.
    """
    with translated(f"looking for {pattern}"), session.cursor() as cursor:
        cursor.execute(_READ_PUBLISHABLE, (pattern.schema,))
        found = [Relation(*row) for row in cursor]
    relations = [relation for relation in found if pattern.matches(relation.schema, relation.name)]
    if not relations:
        raise OptionError(
            f"tables: {pattern} matches no table that can be published",
            remedy="check the schema's name; quote it if it is not all lower case; name the tables of an extension",
        )
    return relations


def _create_sql(
    session: Session, server: Server, name: str, relations: Sequence[Relation], publish: str | None = None
) -> str:
    settings = ["publish_via_partition_root = true"]
    if publish is not None:
        settings.insert(0, f"publish = '{publish}'")
    if server.version_num >= GENERATED_VERSION:
        # Snapshots have these columns too. Without them, PostgreSQL refuses UPDATE and DELETE where an identity has
        # such a column.
        settings.append("publish_generated_columns = stored")
    create = sql.SQL("CREATE PUBLICATION {}{} WITH ({})").format(
        sql.Identifier(name),
        sql.SQL(f" FOR TABLE {listed_as(session, relations)}" if relations else ""),
        sql.SQL(", ".join(settings)),
    )
    return str(create.as_string(session))


def _create(session: Session, name: str, create: str) -> None:
    try:
        with session.cursor() as cursor:
            # The slot that is created next is on disk at once, and of no use without its publication.
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


def _refuse_without_identity(session: Session, options: StreamOptions, relations: Sequence[Relation]) -> None:
    without, steps = without_identity(session, relations)
    if not without:
        return
    raise ServerSetupError(
        f"publication {quoted(options.publication)} is not created, because from then on PostgreSQL would "
        f"refuse every UPDATE and DELETE on {without}: no primary key or other usable replica identity",
        remedy=f"add a primary key; or {steps}; or keyless=insertOnly publishes the inserts of such tables alone; or "
        "leave them out, as in tables=public.*, -public.audit",
    )
