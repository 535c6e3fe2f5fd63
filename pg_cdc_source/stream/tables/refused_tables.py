"""Which tables of a publication cannot be read rightly.

A table that cannot be read rightly any more ends the stream; with ``onSchemaChange=emit`` it is ``refused``, which is
as if it were not published: it leaves, the others go on, and it joins again once that is mended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import OptionError, ServerSetupError
from pg_cdc_source.options.names import quoted
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres import publication
from pg_cdc_source.postgres.publication import Publication, PublishedTable
from pg_cdc_source.stream.tables.leaving import Refused


def find_refused(session: Session, options: StreamOptions, published: Publication) -> Mapping[int, Refused]:
    """The tables that cannot be read rightly, by their oids; none where that ends the stream."""
    if options.on_schema_change != "emit":
        return {}
    wanted = _wanted(session, options, published)
    relations = [table.relation for table in wanted]
    found: dict[int, OptionError | ServerSetupError] = {}
    found |= publication.find_unstreamable(session, relations)
    found |= publication.find_lesser_identities(session, published, relations)
    found |= _find_incomplete(options, published, wanted)
    return {oid: Refused(error.what, error.remedy) for oid, error in found.items()}


def require_complete(session: Session, options: StreamOptions, published: Publication) -> None:
    """Raise ServerSetupError where a kind of change is missing that a table needs, OptionError where it is left out
    what comes all the same.

    Those that ``keyless=insertOnly`` has let in are for a later look: they do not keep the others from beginning.
    """
    wanted = _wanted(session, options, published)
    publication.require_no_parts(options.tables, session, [table.relation for table in wanted])
    inserts_only = {table.relation.oid for table in published.tables if table.inserts_only}
    for oid, error in _find_incomplete(options, published, wanted).items():
        if oid not in inserts_only:
            raise error


def _find_incomplete(
    options: StreamOptions, published: Publication, wanted: Sequence[PublishedTable]
) -> dict[int, ServerSetupError]:
    """The tables, by oid, of which a kind of change is not sent, though those who follow them need all kinds."""
    name = quoted(published.name)
    found = {}
    for table in wanted:
        lacking = ("updates", "deletes") if table.inserts_only else published.unsent
        if lacking and not options.may_lack_changes(str(table.relation)):
            found[table.relation.oid] = ServerSetupError(
                f"{table.relation}: publication {name} does not send its {' and '.join(lacking)}, so rows that "
                "follow its changes would not be PostgreSQL's",
                remedy=f"give it a primary key or REPLICA IDENTITY FULL, and ALTER PUBLICATION {name} ADD TABLE "
                f"{table.relation}"
                if table.inserts_only
                else f"ALTER PUBLICATION {name} SET (publish = 'insert, update, delete, truncate'); or have "
                "mirror() keep a log of the table's changes (mode append)",
            )
    return found


def _wanted(session: Session, options: StreamOptions, published: Publication) -> list[PublishedTable]:
    # Parts of what is named, or is left out, may be published by themselves.
    meant = publication.meant_by(options.tables, session, [table.relation for table in published.tables])
    oids = {relation.oid for relation in meant}
    return [table for table in published.tables if table.relation.oid in oids]
