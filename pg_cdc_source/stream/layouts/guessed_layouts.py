"""Layouts at the end of a batch whose rows are not here yet.

Spark 4.0 and 4.1 do not say where a batch starts. So the first offset of a process, the end of the WAL, is given before
its rows can be read, and cannot carry their layouts. It carries those that the catalog has there::

    layouts of the start      rows of the batch                      layouts that the end carries
    ─────────────────────►    found out from the start's on  ──►     said by rows at the batch's end, where they differ
                              and from the end's, each time alike

- A record of such a layout has the position of the end itself, where no row is.
- What old rows have in columns that were added is in the record's changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import TransientError
from pg_cdc_source.offsets import Member, Position, StreamOffset
from pg_cdc_source.options.names import listed
from pg_cdc_source.protocol.table_layout import (
    CatalogColumn,
    CatalogLayout,
    LayoutRecord,
    from_text,
)
from pg_cdc_source.stream.layouts.catalog_layouts import CatalogLayouts

_TRIES = 20


def read_guesses(
    catalog: CatalogLayouts, session: Session, tables: Sequence[Member], end_of_wal: Callable[[], Position]
) -> tuple[Position, tuple[LayoutRecord, ...]]:
    """Return the end of the WAL, and the layouts that tables have there. DDL between the two is noticed."""
    after = catalog.find(session, tables)
    for _ in range(_TRIES):
        before, position = after, end_of_wal()
        after = catalog.find(session, tables)
        if _seen(before) == _seen(after):
            return position, catalog.records(session, tables, after, position)
    changed = [table.name for table in tables if before.get(table.oid) != after.get(table.oid)]
    raise TransientError(f"columns of {listed(changed) or 'the tables'} change faster than they can be looked at")


def _seen(found: Mapping[int, CatalogLayout]) -> dict[int, CatalogLayout]:
    """What DDL would change. With another file alone, a table was truncated, which may go on all the time."""
    return {oid: replace(layout, files="") for oid, layout in found.items()}


def guesses_at(start: StreamOffset | None, end: StreamOffset) -> tuple[LayoutRecord, ...]:
    """Return the layouts that ``end`` carries and that no row of its batch begins.

    Where the WAL stood still they may be those that ``start`` has as well.
    """
    if not end.position.is_whole:
        return ()
    known = from_text(start.layouts) if start is not None and start.position == end.position else ()
    said = [(record.position, record.layout) for record in known]
    return tuple(
        record
        for record in from_text(end.layouts)
        if record.position == end.position and (record.position, record.layout) not in said
    )


def as_catalog(record: LayoutRecord) -> CatalogLayout:
    """What the catalog had where a record was read from it."""
    fills = {change.attnum: change.fill for change in record.changes}
    layout = record.layout
    columns = tuple(
        CatalogColumn(c.attnum, c.name, c.type_oid, c.typmod, c.nullable, fills.get(c.attnum), published=True)
        for c in layout.columns
        if c.attnum is not None
    )
    facts = layout.last or 0, layout.files or "", layout.altered or "", layout.primary, layout.insides
    return CatalogLayout(columns, layout.identity, layout.key, *facts)
