"""How rows of a relation are to be understood at a commit: its columns then, matched with those that were planned.

The stream describes the columns of a relation as they were when its rows were written. The plan has them as they are
now. ``match_relation`` brings both together, by name, and finds out what changed in between.

::

    commit before the plan        history: a column that is gone now is left out, one that came later has no value
    ─────────────── the plan (its horizon) ───────────────
    commit after it               a change: onSchemaChange says which are taken, the rest is an error

- The relation comes from the stream, never from a live query: the catalog may be ahead of the commit by any time.
- Only what a new type is, and whether a new table is wanted, has to be looked up: by the thread that decodes, which may
  be the one that reads the slot, in a session of its own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import START_OVER, PgCdcError, SchemaChangedError, TransientError
from pg_cdc_source.offsets import Lsn, Member
from pg_cdc_source.options.names import dotted, listed_names, quoted
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres import publication
from pg_cdc_source.postgres.answers import answered_within
from pg_cdc_source.postgres.catalog import Relation
from pg_cdc_source.postgres.columns import read_types
from pg_cdc_source.postgres.connection import connect
from pg_cdc_source.postgres.horizon import wait_until_seen
from pg_cdc_source.postgres.publication import Publication
from pg_cdc_source.protocol.changes import Described
from pg_cdc_source.protocol.envelope import json_kind
from pg_cdc_source.protocol.layout import StreamedTable
from pg_cdc_source.protocol.pgoutput import RelationColumn, RelationMessage
from pg_cdc_source.protocol.transactions import SentRelation
from pg_cdc_source.stream.tables.refused_tables import find_refused
from pg_cdc_source.stream.tables.stream_plan import PlannedTable, StreamPlan, session_name
from pg_cdc_source.values import registry

log = logging.getLogger(__name__)

LOAD_AGAIN = (
    "start the query again with the same checkpoint: its DataFrame, loaded anew, has the table's present columns, and "
    "it goes on exactly here"
)
# Where changes of a table are missing.
READ_AGAIN = (
    "start the query again with the same checkpoint and onNewTable=snapshot: the table's rows come again, after a "
    f"truncate row, and then its changes; or {START_OVER}"
)
# Where a table is new.
FOLLOW = (
    "start the query again with the same checkpoint and onNewTable=snapshot, which reads the table's rows and then "
    "follows it, or onNewTable=changes, which only follows it"
)
_OLD_TYPE = f"changes from before cannot be read as the new type: read the column as text (asString), or {START_OVER}"


class NewTableError(SchemaChangedError):
    """A table that joined has its first row, and is to be followed from there on (onNewTable=changes)."""


def match_relation(plan: StreamPlan, sent: SentRelation) -> Described | None:
    """Find the planned columns among those that a relation had when it was sent; None for one not read.

    Raises SchemaChangedError where its rows cannot be understood, or ``onSchemaChange`` says that they are not wanted.
    """
    relation, lsn = sent.relation, sent.lsn
    since = plan.since.get(relation.oid, Lsn(0))
    planned = plan.find(relation.oid)
    if planned is None:
        gone = next((member for member in plan.gone if member.oid == relation.oid), None)
        if plan.layout.envelope and gone is not None:
            return _describe_gone(plan.options, relation, gone, since)
        _refuse_wanted(plan, sent)
        return None
    name = dotted(relation.schema, relation.name)
    is_history = planned.horizon.has(lsn, sent.xid)
    if name != planned.name and not is_history:
        raise SchemaChangedError(f"{planned.name} was renamed to {name} before the commit at {lsn}", remedy=LOAD_AGAIN)
    place = {column.name: i for i, column in enumerate(relation.columns)}
    refused = None
    try:
        _refuse_other_types(plan, planned, sent, place, is_history)
        _refuse_other_columns(plan, planned, sent, place, is_history)
        _refuse_other_identity(plan, planned, sent, is_history)
    except SchemaChangedError as error:
        if lsn >= since:
            raise
        # The same description may be that of rows which are not left out.
        refused = error
    table = planned.table
    index = tuple(place.get(codec.column.name) for codec in table.codecs)
    return Described(table, relation, index, since=since, refused=refused)


def _describe_gone(options: StreamOptions, relation: RelationMessage, gone: Member, since: Lsn) -> Described:
    """Describe a table that the catalog does not have any more, or not as it was, by what the stream says of it."""
    types = _catalog_types(options, relation.columns)
    columns = [
        registry.Column(column.name, 0, found, found.name, not_null=False)
        for column, found in zip(relation.columns, types, strict=True)
    ]
    table = StreamedTable(
        relation.oid,
        dotted(relation.schema, relation.name),
        tuple(registry.plan(column, as_string=True, numeric_as=options.numeric_as) for column in columns),
        tuple((column.type_oid, column.typmod) for column in relation.columns),
        tuple(c.name for c in relation.columns if (c.is_key if relation.identity in "di" else c.name in gone.key)),
        relation.identity,
    )
    return Described(table, relation, tuple(range(len(columns))), since=since)


def _refuse_wanted(plan: StreamPlan, sent: SentRelation) -> None:
    """Raise where a relation that was not planned should be read: it replaces one that was, or is new.

    With onNewTable=snapshot these rows are left out: the table joins at a later point, with all its rows.
    """
    relation, options, where = sent.relation, plan.options, f"before the commit at {sent.lsn}"
    name = dotted(relation.schema, relation.name)
    if options.on_new_table == "snapshot":
        return
    is_later = not plan.horizon.has(sent.lsn, sent.xid)
    former = next((planned.oid for planned in plan.planned if planned.name == name), None)
    # With emit, the table that had the name may have another one by now, and goes on.
    may_be_renamed = is_later and options.on_schema_change == "emit"
    if former is not None and not (may_be_renamed and _is_published_still(options, former, sent.xid)):
        raise SchemaChangedError(f"{name} was dropped and created again {where}", remedy=READ_AGAIN)
    if not is_later or not options.tables or not _is_wanted_now(options, sent):
        return
    if options.on_new_table == "fail":
        raise SchemaChangedError(f"{name} was added to the stream's tables {where}", remedy=FOLLOW)
    raise NewTableError(f"{name} was added to the stream's tables {where}", remedy=FOLLOW)


def _refuse_other_types(
    plan: StreamPlan, planned: PlannedTable, sent: SentRelation, place: dict[str, int], is_history: bool
) -> None:
    """Raise where a column's text would be read another way than it was planned."""
    table = planned.table
    for codec, type_and_modifier in zip(table.codecs, table.type_oids, strict=True):
        if codec.column.name not in place:
            continue
        found = sent.relation.columns[place[codec.column.name]]
        if (found.type_oid, found.typmod) != type_and_modifier and not _reads_alike(plan.options, codec, found):
            raise SchemaChangedError(
                f"{table.name}: the type of column {quoted(codec.column.name)} was changed "
                f"{'after' if is_history else 'before'} the commit at {sent.lsn}",
                remedy=_OLD_TYPE if is_history else LOAD_AGAIN,
            )


def _refuse_other_columns(
    plan: StreamPlan, planned: PlannedTable, sent: SentRelation, place: dict[str, int], is_history: bool
) -> None:
    """Raise where columns are missing, new or in other places, and that is not history or not wanted."""
    table, lsn, fails = planned.table, sent.lsn, plan.options.on_schema_change == "fail"
    known = [codec.column.name for codec in table.codecs]
    added = [column for column in place if column not in known]
    missing = [column for column in known if column not in place and column not in table.unsent]
    # PostgreSQL keeps columns in the order in which they were added, whatever they are called.
    common = zip([column for column in known if column in place], [c for c in place if c in known], strict=True)
    others = {column for column, found in common if column != found}
    new, gone = (missing, added) if is_history else (added, missing)
    if not gone:
        others |= _taken_over(planned, sent.relation, new, is_history)
    if is_history:
        if others and fails:
            raise SchemaChangedError(
                f"{table.name}: after the commit at {lsn} the names {listed_names(sorted(others))} went to other "
                "columns, which had been renamed, or dropped and added again (or a generated column became a plain "
                "one)",
                remedy=f"{START_OVER}; or, with onSchemaChange=ignore, take these changes under the old names",
            )
        if added and missing and fails:
            raise SchemaChangedError(
                f"{table.name}: after the commit at {lsn} {_were(added)} replaced or renamed to "
                f"{listed_names(missing)}, whose earlier values the stream would not have",
                remedy=f"{START_OVER}; or, with onSchemaChange=ignore, take these changes without the new column, "
                "which _unchanged then lists",
            )
        return
    if missing:
        raise SchemaChangedError(
            f"{table.name}: {_were(missing)} dropped or renamed before the commit at {lsn}", remedy=LOAD_AGAIN
        )
    if others:
        raise SchemaChangedError(
            f"{table.name}: before the commit at {lsn} the names {listed_names(sorted(others))} went to other columns, "
            "which were renamed, or dropped and added again (or a generated column came to be published); rows from "
            "before have the values of the old ones",
            remedy=f"{LOAD_AGAIN}; pg-cdc resnapshot reads the table's rows again",
        )
    if added and fails:
        raise SchemaChangedError(
            f"{table.name}: {_were(added)} added before the commit at {lsn}",
            remedy=f"{LOAD_AGAIN}; or onSchemaChange=ignore goes on without it",
        )


def _taken_over(planned: PlannedTable, sent: RelationMessage, new: Sequence[str], is_history: bool) -> set[str]:
    """Return the names that went to columns which were added, where none was dropped.

    None that is ``new``, in the later of the plan and what is sent, stands before one that was there. So it was there,
    under the next one's name, if it has that one's type. (A generated column that came to be published looks the same.)
    """
    described = zip(planned.table.codecs, planned.table.type_oids, strict=True)
    known = {codec.column.name: types for codec, types in described}
    found = {column.name: (column.type_oid, column.typmod) for column in sent.columns}
    later, earlier = (known, found) if is_history else (found, known)
    names = list(later)
    behind = [name for name in names[names.index(new[0]) :] if name in earlier] if new else []
    return set(behind) if behind and later[new[0]] == earlier[behind[0]] else set()


def _were(columns: Sequence[str]) -> str:
    return f"columns {listed_names(columns)} were" if len(columns) > 1 else f"column {listed_names(columns)} was"


def _refuse_other_identity(plan: StreamPlan, planned: PlannedTable, sent: SentRelation, is_history: bool) -> None:
    """Raise where deletes come with other columns than the stream was planned with."""
    table, relation = planned.table, sent.relation
    keys = tuple(column.name for column in relation.columns if column.is_key)
    # Under the others a key is the primary key. Of an identity that is not sent as a whole, the plan has no column.
    is_same = relation.identity not in "di" or not table.key or set(keys) == set(table.key)
    # A changelog refuses the first change that lacks an old row.
    if (relation.identity == table.identity and is_same) or plan.options.change_format == "changelog":
        return
    if not is_history:
        raise SchemaChangedError(
            f"{table.name}: the replica identity was changed before the commit at {sent.lsn}, so deletes come with "
            "other columns",
            remedy=LOAD_AGAIN,
        )
    log.warning(
        "%s: the replica identity was changed after the commit at %s; deletes before that come with the columns %s",
        table.name,
        sent.lsn,
        listed_names(keys),
    )


def _is_wanted_now(options: StreamOptions, sent: SentRelation) -> bool:
    """Whether the stream would read this relation if it were planned now; also where that cannot be found out.

    Raises TransientError where it cannot be seen for a while what the relation's transaction has done.
    """
    oid, schema, name = sent.relation.oid, sent.relation.schema, sent.relation.name
    # A session of its own: this may be the thread that reads.
    with contextlib.closing(_connect(options)) as session, answered_within(session):
        try:
            published = publication.read_publication(session, options.publications)
            if published is not None and not _is_published(published, oid, dotted(schema, name)):
                # A table that is new looks like one that is not published any more, until its transaction is seen. So
                # do tables that it is a part of, by which it may be meant.
                wait_until_seen(session, sent.xid)
                published = publication.read_publication(session, options.publications)
                # Or it is called otherwise by now.
                if published is not None and oid not in {table.relation.oid for table in published.tables}:
                    if publication.meant_by(options.tables, session, [Relation(oid, schema, name, "r")]):
                        log.warning(
                            "rows of %s before the commit at %s are passed over: the table came and went, or left the "
                            "publication, before the stream had read so far",
                            dotted(schema, name),
                            sent.lsn,
                        )
                    return False
            if published is None:
                return True
            refused = find_refused(session, options, published)
            wanted = publication.stream_tables(session, options, published, lambda pattern: True, refused)
        except TransientError:
            raise
        except PgCdcError:
            return True
    return oid in {table.oid for table in wanted}


def _is_published_still(options: StreamOptions, oid: int, xid: int) -> bool:
    """Whether the publication has a table, under whatever name, behind the transaction that took its name.

    Raises TransientError where it cannot be seen for a while what that has done.
    """
    with contextlib.closing(_connect(options)) as session, answered_within(session):
        wait_until_seen(session, xid)
        published = publication.read_publication(session, options.publications)
    return published is not None and oid in {table.relation.oid for table in published.tables}


def _is_published(published: Publication, oid: int, name: str) -> bool:
    return any((table.relation.oid, str(table.relation)) == (oid, name) for table in published.tables)


# Types whose decoders take another type's text for one of their own: real and double precision round others' numbers,
# and text may look like bytea. Their arrays as well.
_READ_WRONG = frozenset((700, 1021, 701, 1022, 17, 1001))
_READ_RIGHT = {(701, 700), (1022, 1021)}


def _reads_alike(options: StreamOptions, codec: registry.Codec, found: RelationColumn) -> bool:
    """Whether another type's text is read the same way, as a longer varchar's is."""
    (other_type,) = _catalog_types(options, [found])
    other = replace(codec.column, type=other_type)
    if options.dbtable is None:
        # Text is read as it is, but it has to stand the same way in JSON, and project() reads it as the planned type.
        change = codec.column.type_oid, other.type_oid
        is_read_wrong = change[0] in _READ_WRONG and change[0] != change[1] and change not in _READ_RIGHT
        return not is_read_wrong and json_kind(other.type_oid) == json_kind(codec.column.type_oid)
    as_string = codec.column.name in options.as_string
    return registry.plan(other, as_string=as_string, numeric_as=options.numeric_as).text_decoder == codec.text_decoder


def _connect(options: StreamOptions) -> Session:
    """A session beside the source's own, which has looked for a pooler."""
    return connect(options.connection, session_name(options, "planning"), known_to_last=True)


def _catalog_types(options: StreamOptions, columns: Sequence[RelationColumn]) -> list[registry.CatalogType]:
    """What types are that columns did not have when they were planned; one that is gone has only its text."""
    types = [(column.type_oid, column.typmod) for column in columns]
    names = listed_names(column.name for column in columns)
    # A session of its own, as above.
    with contextlib.closing(_connect(options)) as session, answered_within(session):
        return read_types(session, types, f"looking for the type of column {names}")
