"""Which tables' rows a batch has, besides changes: of the initial snapshot, and of tables that join in it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from pg_cdc_source.errors import START_OVER, DefiniteError, SchemaChangedError
from pg_cdc_source.offsets import Lsn, Member, Position, StreamOffset
from pg_cdc_source.protocol.layout import StreamedTable
from pg_cdc_source.stream.tables.stream_plan import PlannedTable, StreamPlan


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows as of ``point`` that a batch has.

    ``wanted`` are the oids of their tables with the names that these had when the batch was planned, ``tables`` those
    of them that are still there, and ``unread`` all of which rows as of this point are still to come. ``again``: the
    stream had begun before, so each table is emptied first. ``since`` is from where on these tables' changes come:
    those before the point do where the batch ends there, and the stream had the table before.
    """

    point: Lsn
    wanted: dict[int, str]
    tables: tuple[PlannedTable, ...]
    unread: tuple[PlannedTable, ...]
    again: bool
    since: dict[int, Lsn]

    @property
    def missing(self) -> dict[int, str]:
        """The tables that have left since the batch was planned: the names that they had, by their oids."""
        there = {planned.oid for planned in self.tables}
        return {oid: name for oid, name in self.wanted.items() if oid not in there}

    def begin(self, position: Position) -> Position:
        """Where the batch's changes begin: at the point, if that is before its other tables' ``position``."""
        return min(position, Position.before(self.point)) if self.again and self.wanted else position

    def plan_from(self, plan: StreamPlan, begin: Position, position: Position) -> StreamPlan:
        """The plan for changes after ``begin``: of these tables since they joined, all else after ``position``."""
        since = {}
        if begin < position:
            since = dict.fromkeys((member.oid for member in plan.members), position.next_lsn)
            plan = replace(plan, messages_since=position.next_lsn)
        return replace(plan, since=since | self.since)

    def emptied(self) -> list[StreamedTable]:
        """The tables that are emptied; of those that are gone there is only the name."""
        there = {planned.oid: planned.table for planned in self.tables}
        return [there.get(oid, StreamedTable(0, name, (), (), (), "")) for oid, name in self.wanted.items()]

    def without(self, oids: Collection[int]) -> BatchRows:
        """The same without the rows of tables that are gone."""
        tables, unread = (tuple(p for p in some if p.oid not in oids) for some in (self.tables, self.unread))
        return replace(self, tables=tables, unread=unread)


def rows_of(start: StreamOffset | None, end: StreamOffset, joined: Sequence[Member], plan: StreamPlan) -> BatchRows:
    """The rows that the batch from ``start`` to ``end`` has; ``joined`` are tables whose rows it ends with.

    Rows of tables that have left do not come: no snapshot has them any more.
    """
    planned = {p.oid: p for p in plan.planned}
    if joined:
        tables = tuple(planned[member.oid] for member in joined if member.oid in planned)
        wanted, since = {m.oid: m.name for m in joined}, {m.oid: m.since for m in joined}
        return BatchRows(end.position.next_lsn, wanted, tables, tables, True, since)
    first = _first_of(start, end)
    # A table that was renamed since is still the same one.
    oids = {member.name: member.oid for member in end.members or plan.members}
    if not oids.keys() >= set(end.tables[first:]):
        # Of release 0.1.0, whose offsets do not say which tables they were.
        raise SchemaChangedError(
            "the stream's tables are not those that its initial snapshot began with",
            remedy=START_OVER,
        )
    listed = [(oids[name], name) for name in end.tables[first:]]
    wanted = dict(listed[: end.done - first])
    again = start is not None and end.at is not None
    return BatchRows(
        end.point,
        wanted,
        tuple(planned[oid] for oid in wanted if oid in planned),
        tuple(planned[oid] for oid, _ in listed if oid in planned),
        again,
        dict.fromkeys(wanted, end.point) if again else {},
    )


def _first_of(start: StreamOffset | None, end: StreamOffset) -> int:
    """The first of ``end``'s tables that a batch reads: those before were done at its start."""
    if start is None:
        return 0
    if start.is_reading and start.point == end.point:
        if start.tables != end.tables:
            raise DefiniteError(
                "the checkpoint's offsets name other tables of the initial snapshot than before",
                remedy=START_OVER,
            )
        return start.done
    # Its snapshot is over. A Spark that gives no start gets an end that names the tables all the same.
    return end.done if end.at is None else 0
