"""Which tables a stream reads, as the catalog has them now: for each a scan, and what its changes become."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import pyarrow as pa
from psycopg2.extensions import connection as Session

from pg_cdc_source.offsets import Horizon, Lsn, Member
from pg_cdc_source.options.names import TablePattern
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres import catalog, publication
from pg_cdc_source.postgres.catalog import Relation
from pg_cdc_source.postgres.connection import FULL_SECONDS, connect
from pg_cdc_source.postgres.publication import Publication
from pg_cdc_source.postgres.slots import stream_session_name
from pg_cdc_source.protocol.layout import Layout, StreamedTable, typed_schema
from pg_cdc_source.snapshot.scan import Plan
from pg_cdc_source.stream.tables.members import members_of
from pg_cdc_source.stream.tables.table_scans import TableScans, plan_scan


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """One table of a stream: a scan for the snapshot, what its changes become, and what checkpoints keep of it.

    ``horizon``: the catalog was read behind it, so every change of the table that it has is known to the plan.
    """

    scan: Plan
    table: StreamedTable
    member: Member
    horizon: Horizon

    @property
    def oid(self) -> int:
        return self.member.oid

    @property
    def name(self) -> str:
        return self.member.name

    def named(self, name: str, since: Lsn) -> PlannedTable:
        """The table under this name, which it has or had, with all changes since then."""
        member, table = replace(self.member, name=name, since=since), self.table
        return replace(self, member=member, table=table if table.name == name else replace(table, name=name))


@dataclass(frozen=True)
class StreamPlan:
    """What a stream reads.

    ``gone`` are tables that have left it, whose last changes are still to come. ``since`` leaves out what is before
    that LSN, by oid, and ``messages_since`` does so for logical decoding messages. ``horizon``: the catalog was read
    behind it, so tables that came before it are known.
    """

    options: StreamOptions
    layout: Layout
    planned: tuple[PlannedTable, ...]
    schema: pa.Schema
    horizon: Horizon
    gone: tuple[Member, ...] = ()
    since: Mapping[int, Lsn] = field(default_factory=dict)
    messages_since: int = 0

    @property
    def tables(self) -> tuple[StreamedTable, ...]:
        return tuple(planned.table for planned in self.planned)

    @property
    def members(self) -> tuple[Member, ...]:
        """All of them, those that are gone as well, in the order of their oids."""
        return tuple(sorted((*(planned.member for planned in self.planned), *self.gone), key=lambda m: m.oid))

    @property
    def known_through(self) -> Lsn:
        """Before this, other columns or tables may be history; behind it, they are changes."""
        return max([self.horizon.lsn, *(planned.horizon.lsn for planned in self.planned)])

    def find(self, oid: int) -> PlannedTable | None:
        return self._by_oid.get(oid)

    @cached_property
    def _by_oid(self) -> Mapping[int, PlannedTable]:
        # Each Relation message asks, and a stream may have thousands of tables.
        return {planned.oid: planned for planned in self.planned}

    def named(self, names: Collection[str]) -> tuple[PlannedTable, ...]:
        """The tables of these names."""
        wanted = frozenset(names)
        return tuple(planned for planned in self.planned if planned.name in wanted)

    def with_oids(self, oids: Collection[int]) -> tuple[PlannedTable, ...]:
        """The tables of these oids."""
        wanted = frozenset(oids)
        return tuple(planned for planned in self.planned if planned.oid in wanted)

    def following(self, members: Sequence[Member]) -> StreamPlan:
        """The plan for these members alone, by the names that they have there; those that it does not know are gone."""
        known = {planned.oid: planned for planned in self.planned}
        return replace(
            self,
            planned=tuple(
                known[member.oid].named(member.name, member.since) for member in members if member.oid in known
            ),
            gone=tuple(member for member in members if member.oid not in known),
        )

    def joined_by(self, tables: Sequence[PlannedTable], gone: Sequence[Member] = ()) -> StreamPlan:
        """The plan with these tables as well, and others that are gone, each instead of one of its oid or its name."""
        joined = [*(planned.member for planned in tables), *gone]
        oids, names = {member.oid for member in joined}, {member.name for member in joined}
        kept = [planned for planned in self.planned if planned.oid not in oids and planned.name not in names]
        left = [member for member in self.gone if member.oid not in oids and member.name not in names]
        return replace(self, planned=(*kept, *tables), gone=(*left, *gone))


def read_typed_schema(options: StreamOptions) -> pa.Schema:
    """Look up the one table of a typed stream, before there is a publication or a slot, and return its rows' schema."""
    assert options.dbtable is not None
    name = session_name(options, "planning")
    with contextlib.closing(connect(options.connection, name, full_seconds=FULL_SECONDS)) as session:
        relation = catalog.find_relation(session, options.dbtable)
        unpublished = publication.read_unpublished(session, options.publications, relation)
        scanned = plan_scan(session, options, relation, unpublished)
    return typed_schema(str(relation), scanned.codecs, before_image=options.before_image)


def layout_of(options: StreamOptions) -> Layout:
    return Layout(
        options.dbtable is None,
        options.before_image,
        options.unrepresentable,
        options.on_truncate,
        options.change_format == "changelog",
        options.envelope == "arrow",
    )


def session_name(options: StreamOptions, what: str) -> str:
    """The application_name of a session of the stream."""
    return stream_session_name(options.slot, what)


def plan_stream(
    session: Session,
    options: StreamOptions,
    published: Publication,
    horizon: Horizon,
    may_lack: Callable[[TablePattern], bool] = lambda pattern: False,
    refused: Collection[int] = (),
    scans: TableScans | None = None,
) -> StreamPlan:
    """Look up the tables of a stream; ``horizon`` was read before the publication was.

    ``may_lack`` and ``refused`` are as in :func:`pg_cdc_source.postgres.publication.stream_tables`. ``scans`` remembers
    tables from one plan to the next.
    """
    relations = publication.stream_tables(session, options, published, may_lack, refused)
    planned = plan_tables(session, options, published, relations, horizon, scans or TableScans())
    layout = layout_of(options)
    return StreamPlan(options, layout, planned, layout.schema([p.table for p in planned]), horizon)


def plan_tables(
    session: Session,
    options: StreamOptions,
    published: Publication,
    relations: Sequence[Relation],
    horizon: Horizon,
    scans: TableScans,
) -> tuple[PlannedTable, ...]:
    """As :func:`plan_stream`, of tables that are known to be streamed."""
    facts = publication.read_sent_tables(session, published, relations, whole=options.change_format == "changelog")
    members = members_of(published, relations, horizon.lsn)
    planned = []
    found = scans.plan(session, options, facts)
    for fact, member, scanned in zip(facts, members, found, strict=True):
        types_of = scanned.types
        table = StreamedTable(
            fact.relation.oid,
            str(fact.relation),
            scanned.codecs,
            tuple(types_of[column.name] for column in scanned.columns),
            fact.identity_columns if fact.kind in "di" else fact.primary_key,
            fact.kind,
            tuple(column.name for column in scanned.columns if column not in scanned.plan.columns),
        )
        member = replace(member, key=table.key if table.identity == "f" else ())
        planned.append(PlannedTable(scanned.plan, table, member, horizon))
    return tuple(planned)
