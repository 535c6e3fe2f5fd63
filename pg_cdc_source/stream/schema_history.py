"""Which tables a stream reads, and how their rows are understood: now in a snapshot, and at any commit in the stream.

The stream describes the columns of a relation as they were when its rows were written. The plan has them as they are
now. ``describe`` brings both together, by name, and finds out what changed in between.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, replace

import pyarrow as pa
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import PgCdcError, SchemaChangedError
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.options.names import dotted, quoted
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres import catalog, publication
from pg_cdc_source.postgres.catalog import Relation
from pg_cdc_source.postgres.columns import read_attnums, read_raw_types, read_types
from pg_cdc_source.postgres.connection import connect, refuse_transaction_pooler
from pg_cdc_source.postgres.publication import Publication
from pg_cdc_source.protocol.changes import Described
from pg_cdc_source.protocol.envelope import EnvelopeColumn
from pg_cdc_source.protocol.layout import Layout, StreamedTable, typed_schema
from pg_cdc_source.protocol.pgoutput import RelationColumn, RelationMessage
from pg_cdc_source.snapshot import scan
from pg_cdc_source.snapshot.scan import Plan, ScanSpec
from pg_cdc_source.values import registry

log = logging.getLogger(__name__)

_LOAD_AGAIN = (
    "start the query again with the same checkpoint: its DataFrame, loaded anew, has the table's present columns, and "
    "it goes on exactly here"
)
_OLD_TYPE = (
    "changes from before cannot be read as the new type: read the column as text (asString), or start over with a new "
    "checkpoint location and a new slot"
)


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """What a stream reads: for each of its tables a scan for the snapshot and what its changes become.

    ``lsn``: the catalog was read after it, so every change of a table before it is known to the plan.
    """

    options: StreamOptions
    layout: Layout
    scans: tuple[Plan, ...]
    tables: tuple[StreamedTable, ...]
    schema: pa.Schema
    lsn: Lsn

    @property
    def names(self) -> dict[int, str]:
        """The tables' names by oid."""
        return {table.oid: table.name for table in self.tables}


def read_typed_schema(options: StreamOptions) -> pa.Schema:
    """Look up the one table of a typed stream, before there is a publication or a slot, and return its rows' schema."""
    assert options.dbtable is not None
    with contextlib.closing(connect(options.connection, session_name(options, "planning"))) as session:
        refuse_transaction_pooler(options.connection, session, session_name(options, "planning"))
        relation = catalog.find_relation(session, options.dbtable)
        unpublished = publication.read_unpublished(session, options.publication, relation)
        scanned = _plan_scan(session, options, relation, unpublished, None)
    return typed_schema(str(relation), scanned.codecs, before_image=options.before_image)


def layout_of(options: StreamOptions) -> Layout:
    return Layout(options.dbtable is None, options.before_image, options.unrepresentable, options.on_truncate)


def session_name(options: StreamOptions, what: str) -> str:
    """The application_name of a session of the stream."""
    return f"pgcdc:{options.slot}:{what}"


def _plan_scan(
    session: Session, options: StreamOptions, relation: Relation, unpublished: tuple[str, ...], row_filter: str | None
) -> Plan:
    columns = tuple(name for name in read_attnums(session, relation) if name not in unpublished)
    spec = ScanSpec(
        connection=options.connection,
        relation=relation,
        query=None,
        columns=columns,
        where=row_filter,
        range_bytes=options.partition_bytes,
        ranges=None,
        # Rows of a table without columns are counted by this one.
        lsn_column=None if columns else "lsn",
        as_string=columns if options.dbtable is None else options.as_string,
        numeric_as=options.numeric_as,
        unrepresentable=options.unrepresentable,
        batch_bytes=4 << 20,
    )
    return scan.plan_in(session, catalog.read_server(session), spec)


def plan_stream(session: Session, options: StreamOptions, published: Publication, lsn: Lsn) -> StreamPlan:
    """Look up the tables of a stream; ``lsn`` is a position that the server had reached before."""
    facts = publication.read_sent_tables(session, published, publication.stream_tables(session, options, published))
    scans = [_plan_scan(session, options, fact.relation, fact.unpublished, fact.row_filter) for fact in facts]
    raw = [read_raw_types(session, fact.relation) for fact in facts]
    tables = tuple(
        StreamedTable(
            fact.relation.oid,
            str(fact.relation),
            tuple(scanned.codecs),
            tuple(types_of[column.name] for column in scanned.columns),
            fact.identity_columns if fact.kind in "di" else fact.primary_key,
            fact.kind,
        )
        for fact, scanned, types_of in zip(facts, scans, raw, strict=True)
    )
    layout = layout_of(options)
    return StreamPlan(options, layout, tuple(scans), tables, layout.schema(tables), lsn)


def describe(plan: StreamPlan, relation: RelationMessage, lsn: Lsn) -> Described | None:
    """Find the planned columns among those that a relation had at the commit at ``lsn``; None for one not read.

    What differs at a commit before the plan is history: a column that is gone now is left out, one that came later has
    no value yet. What differs after it is a change, and ``onSchemaChange`` says which are taken.
    """
    options = plan.options
    name = dotted(relation.schema, relation.name)
    table = next((table for table in plan.tables if table.oid == relation.oid), None)
    history = lsn < plan.lsn
    where = f"before the commit at {lsn}"
    if table is None:
        if name in (table.name for table in plan.tables):
            raise SchemaChangedError(
                f"{name} was dropped and created again {where}",
                remedy="start over with a new checkpoint location and a new slot",
            )
        if not history and options.tables and _is_wanted_now(options, relation):
            if options.on_schema_change == "fail":
                raise SchemaChangedError(
                    f"{name} was added to the stream's tables {where}",
                    remedy="start the query again with the same checkpoint: it goes on exactly here, with every "
                    f"change of {name} from here on; rows that were there before have to be read by themselves. Or "
                    "onSchemaChange=ignore goes on without it until the next start",
                )
            log.warning("%s was added to the stream's tables %s and is ignored until the next start", name, where)
        return None
    if name != table.name and not history:
        raise SchemaChangedError(f"{table.name} was renamed to {name} {where}", remedy=_LOAD_AGAIN)
    place = {column.name: i for i, column in enumerate(relation.columns)}
    planned = [codec.column.name for codec in table.codecs]
    added = [quoted(column) for column in place if column not in planned]
    missing = [quoted(column) for column in planned if column not in place]
    for codec, type_and_modifier in zip(table.codecs, table.type_oids, strict=True):
        if codec.column.name in place:
            found = relation.columns[place[codec.column.name]]
            if (found.type_oid, found.typmod) != type_and_modifier and not _reads_alike(options, codec, found):
                raise SchemaChangedError(
                    f"{table.name}: the type of column {quoted(codec.column.name)} was changed "
                    + (f"after the commit at {lsn}" if history else where),
                    remedy=_OLD_TYPE if history else _LOAD_AGAIN,
                )
    if history and added and missing and options.on_schema_change == "fail":
        raise SchemaChangedError(
            f"{table.name}: after the commit at {lsn} column {', '.join(added)} was replaced or renamed to "
            f"{', '.join(missing)}, whose earlier values the stream would not have",
            remedy="start over with a new checkpoint location and a new slot; or, with onSchemaChange=ignore, take "
            "these changes without the new column, which _unchanged then lists",
        )
    if missing and not history:
        raise SchemaChangedError(
            f"{table.name}: column {', '.join(missing)} was dropped or renamed {where}", remedy=_LOAD_AGAIN
        )
    if added and not history and options.on_schema_change == "fail":
        raise SchemaChangedError(
            f"{table.name}: column {', '.join(added)} was added {where}",
            remedy=f"{_LOAD_AGAIN}; or onSchemaChange=ignore goes on without it",
        )
    return Described(table, relation, tuple(place.get(column) for column in planned))


def _is_wanted_now(options: StreamOptions, relation: RelationMessage) -> bool:
    """Whether the stream would read this relation if it were planned now; also where that cannot be found out."""
    try:
        # A session of its own: this may be the thread that reads.
        with contextlib.closing(connect(options.connection, session_name(options, "planning"))) as session:
            published = publication.read_publication(session, options.publication)
            if published is None:
                return True
            wanted = publication.stream_tables(session, options, published)
    except PgCdcError:
        return True
    return relation.oid in (table.oid for table in wanted)


def _reads_alike(options: StreamOptions, codec: registry.Codec, found: RelationColumn) -> bool:
    """Whether another type's text is read the same way, as a longer varchar's is."""
    other = replace(codec.column, type=_catalog_type(options, found))
    if options.dbtable is None:
        # Text is read as it is, but it has to stand the same way in JSON.
        return EnvelopeColumn("", other.type_oid).kind == EnvelopeColumn("", codec.column.type_oid).kind
    as_string = codec.column.name in options.as_string
    return registry.plan(other, as_string=as_string, numeric_as=options.numeric_as).text_decoder == codec.text_decoder


def _catalog_type(options: StreamOptions, found: RelationColumn) -> registry.CatalogType:
    """What a type is that a column did not have when it was planned; one that is gone has only its text."""
    # A session of its own, as above.
    with contextlib.closing(connect(options.connection, session_name(options, "planning"))) as session:
        (known,) = read_types(
            session, [(found.type_oid, found.typmod)], f"looking for the type of column {quoted(found.name)}"
        )
    return known
