"""The layouts that a stream's tables had and have, as its offsets carry them (``onSchemaChange=emit``).

A layout is found out when its first row is decoded: from the Relation message, the layout before it, and the catalog,
which may have moved on when the same rows are asked for again. So what was found is a record with that row's position.
An offset carries, for each table, the last record before its batch, and all records within its batch::

    records     ──a1────────b1──────a2─────────────a3────►
    batch                       start ────────── end
    its end carries a1… no: a2 where it is within; b1, the last before; never a3

- Rows up to an offset that was given out (``settled``) have the layouts that it carries. Nobody asks the catalog again.
- A record that is behind the end of a batch comes into the offset of a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.protocol.changes import Described
from pg_cdc_source.protocol.layout_match import TypeOf, find_layout
from pg_cdc_source.protocol.pgoutput import RelationMessage
from pg_cdc_source.protocol.table_layout import CatalogLayout, LayoutRecord, TableLayout, from_text, to_text

# What the catalog says of a table now, None where it is gone; and what types are.
Look = Callable[[RelationMessage], tuple[CatalogLayout | None, TypeOf]]

_NOWHERE = Position(Lsn(0), 0)


class LayoutHistory:
    """Knows the layout of each row, and what is announced before it. Used under the lock of whoever decodes."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._records: tuple[LayoutRecord, ...] = ()
        self._settled = _NOWHERE
        # Of each table the last layout, with what the catalog said of its file since.
        self._last: dict[int, TableLayout] = {}
        self._written: tuple[tuple[LayoutRecord, ...], str] = (), ""

    def begin(self, text: str, settled: Position) -> None:
        """Take over the layouts of an offset that ends at ``settled``."""
        self._records = from_text(text)
        self._settled = settled
        self._last = {record.layout.oid: record.layout for record in self._records}

    def add(self, records: Iterable[LayoutRecord]) -> None:
        """Add layouts that tables have from a snapshot on."""
        for record in records:
            self._keep(record)

    def text(self, start: Position, end: Position) -> str:
        """What the offset at ``end`` of a batch from ``start`` carries."""
        records = self._between(start, end)
        if records != self._written[0]:
            self._written = records, to_text(records)
        return self._written[1]

    def rewritten(self, start: Position, end: Position) -> tuple[LayoutRecord, ...]:
        """The tables that a batch says are rewritten: their rows have to come again, as of a point after ``end``."""
        return tuple(r for r in self._records if start < r.position <= end and r.is_rewritten)

    def describe(self, relation: RelationMessage, position: Position) -> Described:
        """Return what rows of ``relation`` are from ``position`` on."""
        record, is_new = self._find(relation, position)
        index = tuple(range(len(relation.columns)))
        return Described(record.layout.as_streamed(), relation, index, record.to_object() if is_new else None)

    def _find(self, relation: RelationMessage, position: Position) -> tuple[LayoutRecord, bool]:
        """The record that a row has, and whether it begins there."""
        of_table = [record for record in self._records if record.layout.oid == relation.oid]
        known = max((r for r in of_table if r.position <= position), key=lambda r: r.position, default=None)
        if known is not None and (known.position == position or position <= self._settled):
            return known, known.position == position
        last = None
        if known is not None:
            last = self._last[relation.oid] if known is of_table[-1] else known.layout
        layout, changes = find_layout(relation, last, *self._look(relation))
        if known is not None and not changes and layout.columns == known.layout.columns:
            if known is of_table[-1]:
                self._last[relation.oid] = layout
            return known, False
        record = LayoutRecord(position, layout, changes)
        self._keep(record)
        return record, True

    def _keep(self, record: LayoutRecord) -> None:
        self._records = (*self._records, record)
        self._last[record.layout.oid] = record.layout

    def _between(self, start: Position, end: Position) -> tuple[LayoutRecord, ...]:
        """The last record of each table up to ``start``, and all behind it up to ``end``."""
        before = {record.layout.oid: record for record in self._records if record.position <= start}
        within = [record for record in self._records if start < record.position <= end]
        return (*before.values(), *within)
