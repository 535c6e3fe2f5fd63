"""Which tables a stream reads, as the catalog has them now: for each a scan, and what its changes become."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pyarrow as pa
from psycopg2.extensions import connection as Session

from pg_cdc_source.offsets import Lsn
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres import catalog, publication
from pg_cdc_source.postgres.catalog import Relation
from pg_cdc_source.postgres.columns import read_attnums, read_raw_types
from pg_cdc_source.postgres.connection import connect, refuse_transaction_pooler
from pg_cdc_source.postgres.publication import Publication
from pg_cdc_source.protocol.layout import Layout, StreamedTable, typed_schema
from pg_cdc_source.snapshot import scan
from pg_cdc_source.snapshot.scan import Plan, ScanSpec


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
        unpublished = publication.read_unpublished(session, options.publications, relation)
        scanned = _plan_scan(session, options, relation, unpublished, None)
    return typed_schema(str(relation), scanned.codecs, before_image=options.before_image)


def layout_of(options: StreamOptions) -> Layout:
    return Layout(
        options.dbtable is None,
        options.before_image,
        options.unrepresentable,
        options.on_truncate,
        options.change_format == "changelog",
    )


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
    relations = publication.stream_tables(session, options, published)
    facts = publication.read_sent_tables(session, published, relations, whole=options.change_format == "changelog")
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
