"""One table's part of a batch, with what counts of it in the table's last layout.

What came before the table's rows came anew, or before its last TRUNCATE, is void and left out, unless the lake keeps
what PostgreSQL gives up. It may be of another table, which was dropped and had the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import pyarrow.compute as pc

from pg_cdc_source.lake.columns import MirroredLayout, with_dropped
from pg_cdc_source.lake.last_layout import LastLayout
from pg_cdc_source.lake.rows_of_batch import BEGINNING, FILE, BatchRow, Place, taken
from pg_cdc_source.lake.schema_changes import SchemaChanges
from pg_cdc_source.lake.segment import KIND, UNCHANGED, Segment
from pg_cdc_source.lake.shape import REPLACED, Shape
from pg_cdc_source.lake.unfollowed import (
    require_exact_fills,
    require_filled_files,
    require_fitting_files,
    require_names,
    require_places,
    require_sent_values,
)
from pg_cdc_source.protocol.packed import CHANGES


@dataclass(frozen=True, slots=True)
class TableBatch:
    """What a batch has of one table.

    ``layout`` is the last one that a row says, with dropped columns where these stay; None where no row says one.
    ``truncates`` and ``files`` are rows of the batch; without those that are void. ``is_emptied``: before its files, or
    where it has no rows behind. ``has_come_again``: its rows were read again, which makes up for changes that may be
    missing.
    """

    table: str
    shape: Shape
    layout: MirroredLayout | None
    changes: SchemaChanges
    segments: Sequence[Segment]
    files: Sequence[BatchRow]
    truncates: Sequence[BatchRow]
    is_emptied: bool
    has_come_again: bool

    @property
    def comes_whole(self) -> bool:
        """Whether the batch has all rows of the table, so that nothing stays of what the lake has."""
        return bool(self.truncates) and not self.changes.is_rewritten

    @property
    def has_moved_values(self) -> bool:
        """Whether a row of the lake under a new key needs values that only the row of the old key has."""
        # A log has a change as it came, and says which values did not.
        return not self.shape.is_log and any(
            pc.any(
                pc.and_(pc.equal(s.rows[KIND], "insert"), pc.greater(pc.list_value_length(s.rows[UNCHANGED]), 0))
            ).as_py()
            for s in self.segments
            if s.rows.num_rows
        )

    @property
    def keeps_values(self) -> bool:
        """Whether a row of the lake has values that a change of it needs."""
        return any(
            pc.any(pc.greater(pc.list_value_length(s.rows[UNCHANGED]), 0)).as_py()
            for s in self.segments
            if s.rows.num_rows
        )

    @classmethod
    def of(
        cls, table: str, rows: Iterable[BatchRow], shape: Shape = REPLACED, *, stands_still: bool = False
    ) -> TableBatch:
        """Read runs, files that were written of them, and what is said of the table.

        ``stands_still``: the lake's table has not what came before, so that this is void in every shape.
        Raises SchemaChangedError for what the lake cannot follow, and UnrepresentableError.
        """
        ordered = sorted(rows, key=attrgetter("place"))
        truncates, files = ([row for row in ordered if row.kind == kind] for kind in ("truncate", FILE))
        changes = _changes_of(table, ordered, truncates, files, shape)
        # While a table stands still, it may get another key.
        changes.is_rekeyed |= stands_still and shape.is_soft
        has_come_again = any(row.comes_again for row in truncates)
        truncates, files, since = taken(truncates, files, shape, stands_still=stands_still)
        layout, segments = _read(ordered, files, since, changes)
        is_emptied = bool(truncates) and not shape.keeps
        if is_emptied and segments and not files:
            is_emptied, segments[0] = False, replace(segments[0], is_emptied=True)
        return cls(table, shape, layout, changes, segments, files, truncates, is_emptied, has_come_again)


def _changes_of(
    table: str, ordered: Sequence[BatchRow], truncates: Sequence[BatchRow], files: Sequence[BatchRow], shape: Shape
) -> SchemaChanges:
    """What rows ``schema`` say, without what is over where they say it."""
    changes = SchemaChanges(table, shape)
    again = [row.place for row in truncates if row.comes_again]
    # No transaction has a change right after these. What is said there describes rows that come again.
    anew = {(lsn + 1, 0) for lsn, _ in again}
    # Nobody knows where the changes of a gap are missing: they may be behind a TRUNCATE that comes after it.
    mended = max(again, default=BEGINNING)
    begin = max((row.place for row in (*truncates, *files)), default=BEGINNING)
    for row in ordered:
        if row.kind == "schema":
            said = [change for change in row.schema_changes if change["change"] != "gap" or row.place > mended]
            is_void, is_anew = row.place <= begin, row.place in anew
            changes.note(said, row.layout.identity, row.place, is_void=is_void, is_anew=is_anew)
    return changes


def _read(
    ordered: Sequence[BatchRow], files: Sequence[BatchRow], since: Place, changes: SchemaChanges
) -> tuple[MirroredLayout | None, list[Segment]]:
    """The last layout, and in it the rows of runs behind ``since``."""
    shape, layouts = changes.shape, [row.layout for row in ordered if row.layout_text is not None]
    # A table that is gone has nothing but its name.
    layout = next((found for found in reversed(layouts) if found.identity), None)
    # Values of a table that was rewritten are of other types, and nobody takes them.
    if layout is None or changes.is_rewritten:
        return layout, []
    require_names(layout, changes)
    require_fitting_files(layout, files, changes)
    require_exact_fills(layout, changes)
    present = len(layout.columns)
    if shape.keeps_columns:
        layout = with_dropped(layout, layouts)
        require_places(layout, (row for row in ordered if row.place > since), changes)
        require_filled_files(layout.columns[present:], files, changes)
    require_sent_values(layout.columns, files, changes)
    runs = (row for row in ordered if row.kind == CHANGES)
    return layout, LastLayout(changes, layout, present).segments(runs, since)
