"""What one scan reads, and the ranges it is cut into, one for each task."""

from __future__ import annotations

import logging
import pickle
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from psycopg2 import sql
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import OptionError, SchemaChangedError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.options.declared import Unrepresentable
from pg_cdc_source.options.names import listed_names, quoted
from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.options.query import Query
from pg_cdc_source.options.snapshot_options import SnapshotOptions
from pg_cdc_source.postgres import catalog, slot_creation, trees
from pg_cdc_source.postgres.catalog import Relation, Server
from pg_cdc_source.postgres.columns import Attribute, describe_columns, read_attributes, read_present
from pg_cdc_source.postgres.first_look import look
from pg_cdc_source.snapshot import ranges
from pg_cdc_source.snapshot.connections import planning_session
from pg_cdc_source.snapshot.driver_files import note_lsn_wanted
from pg_cdc_source.snapshot.ranges import BlockRange
from pg_cdc_source.values import registry
from pg_cdc_source.values.registry import Codec, Column

log = logging.getLogger(__name__)

LOAD_AGAIN = "load the DataFrame again; start a stream's query again with the same checkpoint"


@dataclass(frozen=True, slots=True)
class ScanSpec:
    """What a scan is to read: one of ``relation`` and ``query``, and how its rows are given.

    ``columns`` None reads all of them. ``range_bytes``, or the number ``ranges`` where it is given, says how much of a
    table each task reads. ``only`` leaves out rows of tables that inherit from ``relation``. In which snapshot the scan
    reads is not part of it: see ``source``.
    """

    connection: ConnectionOptions
    relation: Relation | None
    query: Query | None
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

    @property
    def may_read_whole_row(self) -> bool:
        """Whether ``where`` has the table's name, which may stand for its row: ``t IS NOT NULL``, ``to_jsonb(t)``."""
        if self.where is None or self.relation is None:
            return False
        where, name = self.where.replace('""', '"').casefold(), self.relation.name.casefold()
        # A name may also be written in escapes: U&"\0074".
        return 'u&"' in where or re.search(rf"(?<![\w$]){re.escape(name)}(?![\w$])", where) is not None

    @property
    def may_read_tables(self) -> bool:
        """Whether ``where`` has a query. What a function reads is not seen here."""
        return self.where is not None and re.search(r"\b(select|table)\b", self.where.casefold()) is not None

    @property
    def written(self) -> dict[str, str]:
        """The SQL that the user has written, by option."""
        return {
            **({} if self.query is None else {self.query.option: self.query.written}),
            **({} if self.where is None else {"where": self.where}),
        }


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
    """A scan and the columns that were found. Made once per load and shipped to every task.

    ``has_virtual`` says whether the relation has virtual generated columns, read or not.
    """

    spec: ScanSpec
    columns: tuple[Column, ...]
    server: Server
    has_virtual: bool

    @property
    def relation(self) -> Relation | None:
        return self.spec.relation

    @property
    def what(self) -> str:
        return self.spec.what

    @property
    def codecs(self) -> list[Codec]:
        return [self.codec(column) for column in self.columns]

    def codec(self, column: Column) -> Codec:
        """How a column is read that has the name of one of the scan's."""
        as_string = column.name in self.spec.as_string
        return registry.plan(column, as_string=as_string, numeric_as=self.spec.numeric_as)

    def arrow_schema(self) -> pa.Schema:
        fields = [pa.field(codec.column.name, codec.arrow_type) for codec in self.codecs]
        if self.spec.lsn_column:
            fields.append(pa.field(self.spec.lsn_column, pa.int64()))
        return pa.schema(fields)


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks of one heap. ``attnums`` are those of the plan's columns in the heap."""

    heap: Relation
    attnums: tuple[int, ...]
    blocks: BlockRange


@dataclass(frozen=True, slots=True)
class ScanRange:
    """What one task reads of a scan: pieces, one after the other, or where there are none all of the scan.

    ``heaps`` identifies the set of heaps that was cut. ``size_bytes`` is what the pieces had when they were cut, each a
    block at least; None where there are none.
    """

    pieces: tuple[Piece, ...]
    heaps: int | None
    size_bytes: int | None

    def __reduce__(self) -> tuple[Callable[..., ScanRange], tuple[object, ...]]:
        # Spark ships it with its task. Names of partitions are much alike: 2,000 take 9 kB instead of 160.
        if len(self.pieces) > 1:
            return _unpacked, (zlib.compress(pickle.dumps((self.pieces, self.heaps, self.size_bytes))),)
        return ScanRange, (self.pieces, self.heaps, self.size_bytes)


def _unpacked(packed: bytes) -> ScanRange:
    return ScanRange(*pickle.loads(zlib.decompress(packed)))  # noqa: S301 - its own bytes, out of a pickle


def make_plan(options: SnapshotOptions) -> Plan:
    """Look up what is to be read; raises whatever would keep a later read from being complete."""
    with planning_session(options.connection, options.max_connections) as planning:
        return look_up(planning.session, options)


def look_up(session: Session, options: SnapshotOptions) -> Plan:
    """As ``make_plan``, in a session for planning."""
    if options.without_effect:
        log.warning("options of Spark's JDBC source without an effect here: %s", options.without_effect)
    shows_lsn = options.lsn_column is not None and options.consistent_point != "off"
    if options.snapshot is None and (shows_lsn or options.consistent_point == "require"):
        note_lsn_wanted(session)
    found = look(session, options.dbtable)
    if options.consistent_point == "require" and not options.snapshot:
        slot_creation.require_consistent_point(found.server)
    relation = found.relation(session, options.dbtable) if options.dbtable else None
    return plan_in(session, found.server, spec_of(options, relation), found.attributes)


def plan_in(
    session: Session,
    server: Server,
    spec: ScanSpec,
    attributes: Sequence[Attribute] | None = None,
    columns: Sequence[Column] | None = None,
) -> Plan:
    """Plan a scan in a session that is open already.

    ``attributes`` are the relation's, and ``columns`` what the scan gives, where they have been read.
    """
    relation = spec.relation
    names = None
    if relation is None:
        attributes = ()
    else:
        attributes = read_attributes(session, relation) if attributes is None else attributes
        names = _chosen_columns(spec, relation, [attribute.name for attribute in attributes])
    if columns is None:
        select = _select(spec, names)
        columns = describe_columns(session, select, f"reading {spec.what}", written=spec.written)
    not_null = {attribute.attnum for attribute in attributes if attribute.not_null}
    columns = [replace(column, not_null=relation is not None and column.attnum in not_null) for column in columns]
    _check_names(spec, [column.name for column in columns])
    if not columns and not spec.lsn_column:
        # Rows without values would not even be counted.
        raise OptionError(f"{spec.what} has no columns to read", remedy="leave it out, or add a column")
    return Plan(spec, tuple(columns), server, any(attribute.is_virtual for attribute in attributes))


def _chosen_columns(spec: ScanSpec, relation: Relation, existing: list[str]) -> list[str]:
    for option, names in (("columns", spec.columns or ()), ("asString", spec.as_string)):
        for name in names:
            if name not in existing:
                raise OptionError(
                    f"{relation} has no column {quoted(name)}, which the option {option} names",
                    remedy=f"its columns are {listed_names(existing)}",
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
            raise OptionError(
                f"the option asString names a column that is not read: {name}",
                remedy=f"the columns are {listed_names(names)}",
            )
    if spec.lsn_column and spec.lsn_column.lower() in {name.lower() for name in names}:
        raise OptionError(
            f"the option lsnColumn names a column that exists: {spec.lsn_column}", remedy="choose another name"
        )


def _select(spec: ScanSpec, names: list[str] | None) -> sql.Composable:
    """The scan as a SELECT of plain columns, for looking at its columns."""
    if spec.relation is None or names is None:
        return sql.SQL("SELECT * FROM ({}\n) AS query").format(sql.SQL(spec.query.sql if spec.query else ""))
    # PostgreSQL plans no partition of a SELECT that gives no row: 2,000 would take it 0.1 s.
    where = _where(spec, None, [sql.SQL("false")])
    return _select_items(list(map(sql.Identifier, names)), _table(spec, spec.relation), where)


def _table(spec: ScanSpec, relation: Relation) -> sql.Composable:
    return _named(spec, sql.SQL("ONLY {}" if spec.only else "{}").format(relation.identifier))


def _named(spec: ScanSpec, table: sql.Composable) -> sql.Composable:
    """A table or heap in FROM, by the table's name where the user's predicate may qualify columns with that."""
    if spec.where is None or spec.relation is None:
        return table
    return sql.SQL("{} AS {}").format(table, sql.Identifier(spec.relation.name))


def _where(spec: ScanSpec, blocks: BlockRange | None, conditions: Sequence[sql.Composable] = ()) -> sql.Composable:
    conditions = [*conditions]
    if blocks is not None:
        # Also from block 0: an index-only scan, which would read in another order, cannot check a ctid.
        conditions.append(_ctid(">=", blocks.start_block))
        if blocks.end_block_exclusive is not None:
            conditions.append(_ctid("<", blocks.end_block_exclusive))
    if spec.where is not None and blocks is None:
        conditions.append(sql.SQL("({}\n)").format(sql.SQL(spec.where)))
    elif spec.where is not None:
        # IS TRUE keeps the same rows and keeps the planner from turning the predicate into an index scan or a join,
        # either of which would read in another order.
        conditions.append(sql.SQL("(({}\n) IS TRUE)").format(sql.SQL(spec.where)))
    return sql.SQL(" WHERE {}").format(sql.SQL(" AND ").join(conditions)) if conditions else sql.SQL("")


def _ctid(operator: str, block: int) -> sql.Composable:
    condition = sql.SQL("ctid OPERATOR(pg_catalog.{}) {}::pg_catalog.tid")
    return condition.format(sql.SQL(operator), sql.Literal(f"({block},0)"))


def ranges_in(session: Session, plan: Plan, *, begins: bool = False) -> list[ScanRange]:
    """Cut a scan into ranges as the session's transaction sees its heaps. With ``begins``, it begins one for that.

    Raises ServerSetupError where the server does not keep the rows of a snapshot.
    """
    plan.server.require_lasting_snapshots()
    if plan.relation is None:
        return [WHOLE]
    _expect_same_columns(session, plan, plan.relation, begins=begins)
    found = trees.read_heaps(
        session,
        plan.server,
        plan.relation,
        [column.name for column in plan.columns],
        only=plan.spec.only,
        virtual=plan.has_virtual,
        whole_row=plan.spec.may_read_whole_row,
    )
    if found is None:
        return [WHOLE]
    heaps, identity = found
    sizes = [heap.blocks for heap in heaps]
    count = ranges.range_count(sizes, plan.server.block_size, plan.spec.range_bytes, plan.spec.ranges)
    return [
        ScanRange(
            tuple(Piece(heaps[i].relation, heaps[i].attnums, blocks) for i, blocks in pieces),
            None if plan.spec.only else identity,
            sum(max(1, ranges.length(blocks, heaps[i].blocks)) for i, blocks in pieces) * plan.server.block_size,
        )
        for pieces in ranges.cut(sizes, count)
    ]


def identify_heaps(session: Session, plan: Plan) -> int | None:
    """A number for the set of heaps that a plan is cut from; None where nothing can join them."""
    if plan.relation is None or plan.spec.only:
        return None
    return trees.identify_heaps(
        session, plan.relation, virtual=plan.has_virtual, whole_row=plan.spec.may_read_whole_row
    )


# The one range of a scan that is not cut.
WHOLE = ScanRange((), None, None)


def steps_of(
    pieces: Iterable[Piece], blocks_now: Mapping[int, int], blocks_per_step: int, heaps_per_step: int
) -> Iterator[tuple[Piece, ...]]:
    """Cut the pieces of a range into the steps that are read by a COPY each: of a large heap, or of several small ones.

    ``blocks_now`` has the sizes of heaps by oid, for those whose piece is open.
    """
    step: list[Piece] = []
    step_blocks = 0
    for piece in pieces:
        for blocks in ranges.steps(piece.blocks, blocks_now.get(piece.heap.oid, 0), blocks_per_step):
            size = ranges.length(blocks, blocks_now.get(piece.heap.oid, 0))
            if step and (step_blocks + size > blocks_per_step or len(step) == heaps_per_step):
                yield tuple(step)
                step, step_blocks = [], 0
            step.append(replace(piece, blocks=blocks))
            step_blocks += size
    yield tuple(step)


def reading(plan: Plan, pieces: Sequence[Piece]) -> str:
    """In words what is done when pieces are read, or where there are none all of the scan."""
    if not pieces:
        return f"reading {plan.what}"
    if len(pieces) == 1:
        return f"reading {pieces[0].heap}, {pieces[0].blocks}"
    return f"reading {plan.what}, {len(pieces)} tables from {pieces[0].heap} to {pieces[-1].heap}"


def expect_same(session: Session, relations: Sequence[Relation], doing: str) -> None:
    """Raise SchemaChangedError where a relation's name means something else than when the DataFrame was loaded."""
    for relation, oid in zip(relations, catalog.oids_of(session, relations), strict=True):
        _expect_oid(relation, oid, doing)


def _expect_oid(relation: Relation, oid: int | None, doing: str) -> None:
    if oid != relation.oid:
        raise SchemaChangedError(
            f"{doing}: {relation} was dropped, renamed or replaced after the DataFrame was loaded",
            remedy=LOAD_AGAIN,
        )


def _expect_same_columns(session: Session, plan: Plan, relation: Relation, *, begins: bool) -> None:
    # Ranges find their columns by name, and a name may be that of another column now.
    oid, attnums = read_present(session, relation, begins=begins)
    _expect_oid(relation, oid, f"planning {relation}")
    for column in plan.columns:
        if attnums.get(column.name) != column.attnum:
            raise another_column(column.name, f"planning {relation}")


def another_column(name: str, doing: str) -> SchemaChangedError:
    return SchemaChangedError(
        f"{doing}: column {quoted(name)} was dropped, renamed or replaced after the DataFrame was loaded",
        remedy=LOAD_AGAIN,
    )


def select_from(plan: Plan, pieces: Sequence[Piece], items: Sequence[sql.Composable]) -> sql.Composable:
    """SELECT ``items`` from each of the pieces, in their order, or where there are none from all of the scan."""
    if pieces:
        # One backend appends them as they stand here.
        return sql.SQL(" UNION ALL ").join(
            _select_items(items, _heap(plan.spec, piece.heap), _where(plan.spec, piece.blocks)) for piece in pieces
        )
    if plan.relation is not None:
        return _select_items(items, _table(plan.spec, plan.relation), _where(plan.spec, None))
    query = sql.SQL("({}\n) AS query").format(sql.SQL(plan.spec.query.sql if plan.spec.query else ""))
    return _select_items(items, query, _where(plan.spec, None))


def _heap(spec: ScanSpec, heap: Relation) -> sql.Composable:
    return _named(spec, sql.SQL("ONLY {}").format(heap.identifier))


def _select_items(items: Sequence[sql.Composable], source: sql.Composable, where: sql.Composable) -> sql.Composable:
    return sql.SQL("SELECT {} FROM {}{}").format(sql.SQL(", ").join(items), source, where)
