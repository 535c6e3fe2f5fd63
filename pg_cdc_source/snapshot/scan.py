"""What one scan reads, and how it is cut into pieces."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import pyarrow as pa
from psycopg2 import sql
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import OptionError, SchemaChangedError
from pg_cdc_source.options.names import quoted
from pg_cdc_source.options.parse import SnapshotOptions
from pg_cdc_source.postgres import catalog, snapshots
from pg_cdc_source.postgres.catalog import Relation, Server
from pg_cdc_source.postgres.connection import connect, refuse_breaking_pooler, translated
from pg_cdc_source.snapshot import board, keeper, ranges
from pg_cdc_source.snapshot.ranges import BlockRange
from pg_cdc_source.values import registry
from pg_cdc_source.values.registry import Codec, Column


@dataclass(frozen=True, slots=True)
class Plan:
    """What a scan reads. Found out once per load and shipped to every task."""

    options: SnapshotOptions
    relation: Relation | None  # None for a query
    columns: tuple[Column, ...]
    server: Server

    @property
    def codecs(self) -> list[Codec]:
        as_string = self.options.as_string
        return [
            registry.plan(column, as_string=column.name in as_string, numeric_as=self.options.numeric_as)
            for column in self.columns
        ]

    @property
    def what(self) -> str:
        return str(self.relation) if self.relation else "the query"

    def arrow_schema(self) -> pa.Schema:
        fields = [pa.field(codec.column.name, codec.arrow_type) for codec in self.codecs]
        if self.options.lsn_column:
            fields.append(pa.field(self.options.lsn_column, pa.int64()))
        return pa.schema(fields)


@dataclass(frozen=True, slots=True)
class Piece:
    """One partition: a range of one heap, or with ``heap`` None all of a relation or query."""

    heap: Relation | None
    attnums: tuple[int, ...]
    blocks: BlockRange


@dataclass(frozen=True, slots=True)
class Source:
    """What tasks need to find their snapshot, and to see in it that planning was right.

    ``keeper`` is its name, None where the user gave a snapshot; ``heaps`` identifies the set of heaps that was planned.
    """

    keeper: str | None
    planned_at: float
    heaps: int | None


def make_plan(options: SnapshotOptions) -> Plan:
    """Look up what is to be read; raises whatever would keep a later read from being complete."""
    with contextlib.closing(connect(options.connection, "pgsnapshot:planning")) as session:
        refuse_breaking_pooler(options.connection, session, "pgsnapshot:planning")
        server = catalog.read_server(session)
        if options.consistent_point == "require" and not options.snapshot:
            snapshots.require_consistent_point(server)
        relation = catalog.find_relation(session, options.dbtable) if options.dbtable else None
        return plan_in(session, server, options, relation)


def plan_in(session: Session, server: Server, options: SnapshotOptions, relation: Relation | None) -> Plan:
    """Plan a scan in a session that is there: of a relation, or of the query where it is None."""
    names = None
    if relation is not None:
        names = _chosen_columns(options, relation, list(catalog.attnums(session, relation)))
    columns = catalog.describe(session, _select(options, relation, names), f"reading {relation or 'the query'}")
    if relation is not None:
        not_null = catalog.not_null_attnums(session, relation)
        columns = [replace(column, not_null=column.attnum in not_null) for column in columns]
    _check_names(options, [column.name for column in columns])
    if not columns and not options.lsn_column:
        # Rows without values would not even be counted.
        raise OptionError(f"{relation or 'the query'} has no columns to read", remedy="leave it out, or add a column")
    return Plan(options, relation, tuple(columns), server)


def _chosen_columns(options: SnapshotOptions, relation: Relation, existing: list[str]) -> list[str]:
    for option, names in (("columns", options.columns or ()), ("asString", options.as_string)):
        for name in names:
            if name not in existing:
                raise OptionError(
                    f"{relation} has no column {quoted(name)}, which the option {option} names",
                    remedy=f"its columns are {', '.join(map(quoted, existing))}",
                )
    return existing if options.columns is None else list(options.columns)


def _check_names(options: SnapshotOptions, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise OptionError(
            f"the query gives several columns of the same name: {', '.join(twice)}", remedy="name them apart with AS"
        )
    for name in options.as_string:
        if name not in names:
            raise OptionError(f"the option asString names a column that is not read: {name}")
    if options.lsn_column and options.lsn_column.lower() in {name.lower() for name in names}:
        raise OptionError(
            f"the option lsnColumn names a column that exists: {options.lsn_column}", remedy="choose another name"
        )


def _select(options: SnapshotOptions, relation: Relation | None, names: list[str] | None) -> sql.Composable:
    """The rows read as a SELECT of plain columns, for looking at its columns."""
    if relation is None or names is None:
        return sql.SQL("SELECT * FROM ({}\n) AS query").format(sql.SQL(options.query or ""))
    return sql.SQL("SELECT {} FROM {}{}").format(
        sql.SQL(", ").join(map(sql.Identifier, names)), relation.identifier, _where(options, None)
    )


def _where(options: SnapshotOptions, blocks: BlockRange | None) -> sql.Composable:
    conditions: list[sql.Composable] = []
    if blocks is not None:
        # Also from block 0: an index-only scan, which would read in another order, cannot check a ctid.
        conditions.append(sql.SQL("ctid >= {}::tid").format(sql.Literal(f"({blocks.start_block},0)")))
    if blocks is not None and blocks.end_block_exclusive is not None:
        conditions.append(sql.SQL("ctid < {}::tid").format(sql.Literal(f"({blocks.end_block_exclusive},0)")))
    if options.where is not None and blocks is None:
        conditions.append(sql.SQL("({}\n)").format(sql.SQL(options.where)))
    elif options.where is not None:
        # IS TRUE keeps the same rows and keeps the planner from turning the predicate into an index scan or a join,
        # either of which would read in another order.
        conditions.append(sql.SQL("(({}\n) IS TRUE)").format(sql.SQL(options.where)))
    return sql.SQL(" WHERE {}").format(sql.SQL(" AND ").join(conditions)) if conditions else sql.SQL("")


def plan_pieces(plan: Plan) -> tuple[Source, list[Piece]]:
    """Cut the scan into partitions and make sure that its tasks will find a snapshot."""
    options = plan.options
    with contextlib.closing(connect(options.connection, "pgsnapshot:planning")) as session:
        with translated(f"planning {plan.what}"), session.cursor() as cursor:
            # One transaction, so that pieces and identity are those of the same heaps.
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            pieces, heaps = pieces_in(session, plan)
            cursor.execute("SELECT extract(epoch FROM clock_timestamp())::float8")
            planned_at = float(cursor.fetchone()[0])
            cursor.execute("COMMIT")
        name = None
        if options.snapshot is None:
            name = keeper.ensure_keeper(options.connection, session, request_for(plan, "", planned_at))
    return Source(name, planned_at, heaps), pieces


def pieces_in(session: Session, plan: Plan) -> tuple[list[Piece], int | None]:
    """Cut a scan into pieces as the session's transaction sees its heaps; gives what identifies the set of them."""
    if plan.relation is None:
        return _pieces(session, plan), None
    _expect_same_columns(session, plan, plan.relation)
    return _pieces(session, plan), catalog.identify_heaps(session, plan.relation)


def expect_same(session: Session, relation: Relation, doing: str) -> None:
    """Raise SchemaChangedError where a relation's name means something else than when the DataFrame was loaded."""
    if catalog.oid_of(session, relation) != relation.oid:
        raise SchemaChangedError(
            f"{doing}: {relation} was dropped, renamed or replaced after the DataFrame was loaded",
            remedy="load the DataFrame again",
        )


def _expect_same_columns(session: Session, plan: Plan, relation: Relation) -> None:
    # Pieces find their columns by name, and a name may be that of another column now.
    expect_same(session, relation, f"planning {relation}")
    attnums = catalog.attnums(session, relation)
    for column in plan.columns:
        if attnums.get(column.name) != column.attnum:
            raise SchemaChangedError(
                f"planning {relation}: column {quoted(column.name)} was dropped, renamed or replaced after the "
                "DataFrame was loaded",
                remedy="load the DataFrame again",
            )


def _pieces(session: Session, plan: Plan) -> list[Piece]:
    whole = [Piece(None, tuple(column.attnum for column in plan.columns), ranges.WHOLE)]
    if plan.relation is None:
        return whole
    heaps = catalog.read_heaps(session, plan.server, plan.relation, [column.name for column in plan.columns])
    if heaps is None:
        return whole
    options = plan.options
    step = ranges.blocks_per_range(
        [heap.blocks for heap in heaps], plan.server.block_size, options.partition_bytes, options.num_partitions
    )
    return [
        Piece(heap.relation, heap.attnums, blocks) for heap in heaps for blocks in ranges.cut(heap.blocks, step)
    ] or whole


def request_for(plan: Plan, execution: str, planned_at: float) -> board.Request:
    """What a task of ``plan`` asks its keeper for."""
    options = plan.options
    return board.Request(
        execution,
        planned_at,
        options.snapshot_idle_seconds,
        snapshots.SnapshotSpec(options.consistent_point, options.slot, options.slot_timeout_seconds),
    )


def select_from(plan: Plan, piece: Piece, items: list[sql.Composable], blocks: BlockRange | None) -> sql.Composable:
    if plan.relation is None:
        source: sql.Composable = sql.SQL("({}\n) AS query").format(sql.SQL(plan.options.query or ""))
    elif piece.heap is None:
        source = plan.relation.identifier
    else:
        source = sql.SQL("ONLY {}").format(piece.heap.identifier)
    return sql.SQL("SELECT {} FROM {}{}").format(sql.SQL(", ").join(items), source, _where(plan.options, blocks))
