"""Which tables' rows a batch has, besides changes: of the initial snapshot, and of tables that join in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pg_cdc_source.errors import DefiniteError, SchemaChangedError
from pg_cdc_source.offsets import Lsn, Position, StreamOffset
from pg_cdc_source.protocol.layout import StreamedTable
from pg_cdc_source.stream.stream_plan import PlannedTable, StreamPlan


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows as of ``point`` that a batch has.

    ``names`` are those of their tables, ``tables`` those of them that are still there, and ``unread`` all of which rows
    as of this point are still to come. ``again``: the stream had begun before, so each table is emptied first.
    """

    point: Lsn
    names: tuple[str, ...]
    tables: tuple[PlannedTable, ...]
    unread: tuple[PlannedTable, ...]
    again: bool

    def begin(self, position: Position) -> Position:
        """Where the batch's changes begin: at the point, if that is before its other tables' ``position``."""
        return min(position, Position.before(self.point)) if self.again and self.names else position

    def plan_from(self, plan: StreamPlan, begin: Position, position: Position) -> StreamPlan:
        """The plan for changes after ``begin``: of these tables from the point on, of the others after ``position``."""
        since = dict.fromkeys((p.oid for p in plan.planned), position.next_lsn) if begin < position else {}
        if self.again:
            since |= {member.oid: self.point for member in plan.members if member.name in self.names}
        return replace(plan, since=since)

    def emptied(self) -> list[StreamedTable]:
        """The tables that are emptied; of those that are gone there is only the name."""
        there = {planned.name: planned.table for planned in self.tables}
        return [there.get(name, StreamedTable(0, name, (), (), (), "")) for name in self.names]


def rows_of(
    start: StreamOffset | None, end: StreamOffset, joined: Sequence[PlannedTable], plan: StreamPlan
) -> BatchRows:
    """The rows that the batch from ``start`` to ``end`` has; ``joined`` are tables that join at its end."""
    if joined:
        tables = tuple(joined)
        return BatchRows(end.position.next_lsn, tuple(p.name for p in tables), tables, tables, True)
    first = _first_of(start, end)
    by_name = {planned.name: planned for planned in plan.planned}
    names, unread = end.tables[first : end.done], end.tables[first:]
    again = start is not None and end.at is not None
    if not again and not all(name in by_name for name in unread):
        raise SchemaChangedError(
            "the stream's tables are not those that its initial snapshot began with",
            remedy="start over with a new checkpoint location and a new slot",
        )
    return BatchRows(
        end.point,
        names,
        tuple(by_name[name] for name in names if name in by_name),
        tuple(by_name[name] for name in unread if name in by_name),
        again,
    )


def _first_of(start: StreamOffset | None, end: StreamOffset) -> int:
    """The first of ``end``'s tables that a batch reads: those before were done at its start."""
    if start is None:
        return 0
    if start.is_reading and start.point == end.point:
        if start.tables != end.tables:
            raise DefiniteError(
                "the checkpoint's offsets name other tables of the initial snapshot than before",
                remedy="start over with a new checkpoint location and a new slot",
            )
        return start.done
    # Its snapshot is over. A Spark that gives no start gets an end that names the tables all the same.
    return end.done if end.at is None else 0
