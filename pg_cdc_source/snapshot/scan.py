"""What one scan reads, and the ranges it is cut into, one for each task."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import pyarrow as pa
from psycopg2 import sql
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import OptionError, SchemaChangedError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.options.declared import Unrepresentable
from pg_cdc_source.options.names import quoted
from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.options.snapshot_options import SnapshotOptions
from pg_cdc_source.postgres import catalog, slot_creation, trees
from pg_cdc_source.postgres.catalog import Relation, Server
from pg_cdc_source.postgres.columns import describe_columns, read_attnums, read_not_null_attnums
from pg_cdc_source.postgres.connection import connect, refuse_transaction_pooler
from pg_cdc_source.snapshot import ranges
from pg_cdc_source.snapshot.ranges import BlockRange
from pg_cdc_source.values import registry
from pg_cdc_source.values.registry import Codec, Column


@dataclass(frozen=True, slots=True)
class ScanSpec:
    """What a scan is to read: one of ``relation`` and ``query``, and how its rows are given.

    ``columns`` None reads all of them. ``range_bytes``, or the number ``ranges`` where it is given, says how much of a
    table each task reads. ``only`` leaves out rows of tables that inherit from ``relation``. In which snapshot the scan
    reads is not part of it: see ``source``.
    """

    connection: ConnectionOptions
    relation: Relation | None
    query: str | None
    columns: tuple[str, ...] | None
    where: str | None
    range_bytes: int
    ranges: int | None
    lsn_column: str | None
    as_string: tuple[str, ...]
    numeric_as: NumericAs
    unrepresentable: Unrepresentable
    batch_bytes: int
    only: bool = False

    @property
    def what(self) -> str:
        return str(self.relation) if self.relation else "the query"


def spec_of(options: SnapshotOptions, relation: Relation | None) -> ScanSpec:
    """The scan that the options of ``pgsnapshot`` ask for; ``relation`` is what their ``dbtable`` names."""
    return ScanSpec(
        connection=options.connection,
        relation=relation,
        query=options.query,
        columns=options.columns,
        where=options.where,
        range_bytes=options.partition_bytes,
        ranges=options.num_partitions,
        lsn_column=options.lsn_column,
        as_string=options.as_string,
        numeric_as=options.numeric_as,
        unrepresentable=options.unrepresentable,
        batch_bytes=options.batch_bytes,
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """A scan and the columns that were found. Made once per load and shipped to every task."""

    spec: ScanSpec
    columns: tuple[Column, ...]
    server: Server

    @property
    def relation(self) -> Relation | None:
        return self.spec.relation

    @property
    def what(self) -> str:
        return self.spec.what

    @property
    def codecs(self) -> list[Codec]:
        as_string = self.spec.as_string
        return [
            registry.plan(column, as_string=column.name in as_string, numeric_as=self.spec.numeric_as)
            for column in self.columns
        ]

    def arrow_schema(self) -> pa.Schema:
        fields = [pa.field(codec.column.name, codec.arrow_type) for codec in self.codecs]
        if self.spec.lsn_column:
            fields.append(pa.field(self.spec.lsn_column, pa.int64()))
        return pa.schema(fields)


@dataclass(frozen=True, slots=True)
class ScanRange:
    """What one task reads of a scan: a range of blocks of one heap, or with ``heap`` None all of the scan.

    ``attnums`` are those of the plan's columns in the heap. ``heaps`` identifies the set of heaps that was cut.
    """

    heap: Relation | None
    attnums: tuple[int, ...]
    blocks: BlockRange
    heaps: int | None


def make_plan(options: SnapshotOptions) -> Plan:
    """Look up what is to be read; raises whatever would keep a later read from being complete."""
    with contextlib.closing(connect(options.connection, "pgsnapshot:planning")) as session:
        refuse_transaction_pooler(options.connection, session, "pgsnapshot:planning")
        server = catalog.read_server(session)
        if options.consistent_point == "require" and not options.snapshot:
            slot_creation.require_consistent_point(server)
        relation = catalog.find_relation(session, options.dbtable) if options.dbtable else None
        return plan_in(session, server, spec_of(options, relation))


def plan_in(session: Session, server: Server, spec: ScanSpec) -> Plan:
    """Plan a scan in a session that is open already."""
    relation = spec.relation
    names = None
    if relation is not None:
        names = _chosen_columns(spec, relation, list(read_attnums(session, relation)))
    columns = describe_columns(session, _select(spec, names), f"reading {spec.what}")
    if relation is not None:
        not_null = read_not_null_attnums(session, relation)
        columns = [replace(column, not_null=column.attnum in not_null) for column in columns]
    _check_names(spec, [column.name for column in columns])
    if not columns and not spec.lsn_column:
        # Rows without values would not even be counted.
        raise OptionError(f"{spec.what} has no columns to read", remedy="leave it out, or add a column")
    return Plan(spec, tuple(columns), server)


def _chosen_columns(spec: ScanSpec, relation: Relation, existing: list[str]) -> list[str]:
    for option, names in (("columns", spec.columns or ()), ("asString", spec.as_string)):
        for name in names:
            if name not in existing:
                raise OptionError(
                    f"{relation} has no column {quoted(name)}, which the option {option} names",
                    remedy=f"its columns are {', '.join(map(quoted, existing))}",
                )
    return existing if spec.columns is None else list(spec.columns)


def _check_names(spec: ScanSpec, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise OptionError(
            f"the query gives several columns of the same name: {', '.join(twice)}", remedy="name them apart with AS"
        )
    for name in spec.as_string:
        if name not in names:
            raise OptionError(f"the option asString names a column that is not read: {name}")
    if spec.lsn_column and spec.lsn_column.lower() in {name.lower() for name in names}:
        raise OptionError(
            f"the option lsnColumn names a column that exists: {spec.lsn_column}", remedy="choose another name"
        )


def _select(spec: ScanSpec, names: list[str] | None) -> sql.Composable:
    """The scan as a SELECT of plain columns, for looking at its columns."""
    if spec.relation is None or names is None:
        return sql.SQL("SELECT * FROM ({}\n) AS query").format(sql.SQL(spec.query or ""))
    return sql.SQL("SELECT {} FROM {}{}").format(
        sql.SQL(", ").join(map(sql.Identifier, names)), _table(spec, spec.relation), _where(spec, None)
    )


def _table(spec: ScanSpec, relation: Relation) -> sql.Composable:
    return sql.SQL("ONLY {}" if spec.only else "{}").format(relation.identifier)


def _where(spec: ScanSpec, blocks: BlockRange | None) -> sql.Composable:
    conditions: list[sql.Composable] = []
    if blocks is not None:
        # Also from block 0: an index-only scan, which would read in another order, cannot check a ctid.
        conditions.append(sql.SQL("ctid >= {}::tid").format(sql.Literal(f"({blocks.start_block},0)")))
    if blocks is not None and blocks.end_block_exclusive is not None:
        conditions.append(sql.SQL("ctid < {}::tid").format(sql.Literal(f"({blocks.end_block_exclusive},0)")))
    if spec.where is not None and blocks is None:
        conditions.append(sql.SQL("({}\n)").format(sql.SQL(spec.where)))
    elif spec.where is not None:
        # IS TRUE keeps the same rows and keeps the planner from turning the predicate into an index scan or a join,
        # either of which would read in another order.
        conditions.append(sql.SQL("(({}\n) IS TRUE)").format(sql.SQL(spec.where)))
    return sql.SQL(" WHERE {}").format(sql.SQL(" AND ").join(conditions)) if conditions else sql.SQL("")


def ranges_in(session: Session, plan: Plan) -> list[ScanRange]:
    """Cut a scan into ranges as the session's transaction sees its heaps."""
    if plan.relation is None:
        return [whole(plan)]
    _expect_same_columns(session, plan, plan.relation)
    heaps = trees.read_heaps(
        session, plan.server, plan.relation, [column.name for column in plan.columns], only=plan.spec.only
    )
    if not heaps:
        return [whole(plan)]
    identity = identify_heaps(session, plan)
    size = ranges.blocks_per_range(
        [heap.blocks for heap in heaps], plan.server.block_size, plan.spec.range_bytes, plan.spec.ranges
    )
    return [
        ScanRange(heap.relation, heap.attnums, blocks, identity)
        for heap in heaps
        for blocks in ranges.cut(heap.blocks, size)
    ]


def identify_heaps(session: Session, plan: Plan) -> int | None:
    """A number for the set of heaps that a plan is cut from; None where nothing can join them."""
    if plan.relation is None or plan.spec.only:
        return None
    return trees.identify_heaps(session, plan.relation)


def whole(plan: Plan) -> ScanRange:
    """The one range of a scan that is not cut."""
    return ScanRange(None, tuple(column.attnum for column in plan.columns), ranges.WHOLE, None)


def expect_same(session: Session, relation: Relation, doing: str) -> None:
    """Raise SchemaChangedError where a relation's name means something else than when the DataFrame was loaded."""
    if catalog.oid_of(session, relation) != relation.oid:
        raise SchemaChangedError(
            f"{doing}: {relation} was dropped, renamed or replaced after the DataFrame was loaded",
            remedy="load the DataFrame again",
        )


def _expect_same_columns(session: Session, plan: Plan, relation: Relation) -> None:
    # Ranges find their columns by name, and a name may be that of another column now.
    expect_same(session, relation, f"planning {relation}")
    attnums = read_attnums(session, relation)
    for column in plan.columns:
        if attnums.get(column.name) != column.attnum:
            raise SchemaChangedError(
                f"planning {relation}: column {quoted(column.name)} was dropped, renamed or replaced after the "
                "DataFrame was loaded",
                remedy="load the DataFrame again",
            )


def select_from(
    plan: Plan, scan_range: ScanRange, items: list[sql.Composable], blocks: BlockRange | None
) -> sql.Composable:
    """SELECT ``items`` from what a range reads, or from some of its blocks."""
    if plan.relation is None:
        source: sql.Composable = sql.SQL("({}\n) AS query").format(sql.SQL(plan.spec.query or ""))
    elif scan_range.heap is None:
        source = _table(plan.spec, plan.relation)
    else:
        source = sql.SQL("ONLY {}").format(scan_range.heap.identifier)
    return sql.SQL("SELECT {} FROM {}{}").format(sql.SQL(", ").join(items), source, _where(plan.spec, blocks))
