"""A table's runs in the layouts of their time become rows in the last one.

- Columns are told apart by their numbers. A row from before a column was added has in it what PostgreSQL says that old
  rows got (``fill``); a row from before a column was renamed has the new name.
- Where dropped columns stay, rows from before a drop have their values. What rows behind it have is the lake's to say.
- What cannot be told raises SchemaChangedError, and never makes a wrong row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.errors import RESNAPSHOT, SchemaChangedError
from pg_cdc_source.lake.columns import MirroredColumn, MirroredLayout
from pg_cdc_source.lake.kept_columns import is_wider
from pg_cdc_source.lake.rows_of_batch import BEGINNING, BatchRow, Place
from pg_cdc_source.lake.schema_changes import SchemaChanges
from pg_cdc_source.lake.segment import CHANGE_NAMES, UNCHANGED, Segment, change_fields
from pg_cdc_source.lake.shape import Shape
from pg_cdc_source.lake.unfollowed import keyless_error
from pg_cdc_source.lake.variants import require_exact
from pg_cdc_source.protocol.layout import UNCHANGED_TYPE
from pg_cdc_source.values.arrow import from_numpy, from_texts
from pg_cdc_source.values.wire import MAX_OFFSET


@dataclass(frozen=True, slots=True)
class LastLayout:
    """The ``layout`` that a batch ends with. Behind the ``present`` columns stand those that were dropped and stay."""

    changes: SchemaChanges
    layout: MirroredLayout
    present: int

    def segments(self, runs: Iterable[BatchRow], begin: Place) -> list[Segment]:
        """Return the rows behind ``begin`` of runs that follow each other: none has rows between those of another.

        Raises SchemaChangedError for rows that cannot be told apart, or not be had in the layout.
        """
        groups: list[tuple[tuple[str, ...], list[pa.Table]]] = []
        for row in runs:
            if row.place <= begin:
                continue
            layout = row.layout
            if layout.oid != self.layout.oid:
                raise SchemaChangedError(f"{self._table} is not the table that had the name before", remedy=RESNAPSHOT)
            key = () if self._shape.is_log else self._key(layout)
            part = self._rows(layout, row.run, row.place)
            if not groups or groups[-1][0] != key or groups[-1][1][0].schema != part.schema:
                groups.append((key, []))
            groups[-1][1].append(part)
        found = [Segment(key, pa.concat_tables(tables)) for key, tables in groups]
        return found if begin == BEGINNING else [segment.between(begin) for segment in found]

    @property
    def _table(self) -> str:
        return self.changes.table

    @property
    def _shape(self) -> Shape:
        return self.changes.shape

    def _key(self, layout: MirroredLayout) -> tuple[str, ...]:
        """What the columns by which rows of ``layout`` are told apart are called in the end."""
        names = []
        for column in layout.columns:
            if not column.key:
                continue
            place = self.layout.place_of(column)
            if place is None:
                raise SchemaChangedError(
                    f"{self._table}: a column of its key was dropped within a batch", remedy=RESNAPSHOT
                )
            last = self.layout.columns[place]
            is_variant = self._shape.has_variants and last.is_json
            if is_variant or pa.types.is_nested(last.type):
                raise SchemaChangedError(
                    f"{self._table}: its key has the column {column.name} ({column.codec.column.type_name}), and the "
                    f"lake cannot tell rows apart by {'VARIANT' if is_variant else 'lists'}",
                    remedy=f"give it another key, or REPLICA IDENTITY USING INDEX; then {RESNAPSHOT}",
                )
            names.append(last.name)
        if not names:
            raise keyless_error(self._table)
        return tuple(names)

    def _rows(self, layout: MirroredLayout, run: pa.RecordBatch, begin: Place) -> pa.Table:
        """Return a run's rows, which have ``layout``. ``begin`` is the place of its last one."""
        arrays: list[pa.Array] = []
        fields, names = [], {}
        for i, column in enumerate(self.layout.columns):
            place = layout.place_of(column)
            if place is None and self._shape.is_log:
                place = layout.place_of_former(column, self.layout)
            if place is not None:
                values = self._sent(layout.columns[place], column, run, f"c{place}")
                names[layout.columns[place].name] = column.name
            elif self._shape.is_merge and i >= self.present and not self.changes.is_before(begin, column):
                # What a row has in it is the lake's to say.
                continue
            else:
                values = self._unsent(column, run, begin)
            arrays.append(values)
            fields.append(pa.field(column.name, column.type))
        own = change_fields(self._shape)
        changes = {padded: run.column(name) for name, padded in CHANGE_NAMES.items()}
        if not self._shape.is_log:
            changes[UNCHANGED] = _renamed(changes[UNCHANGED], names)
        arrays += (changes[field.name] for field in own)
        return pa.Table.from_arrays(arrays, schema=pa.schema([*fields, *own]))

    def _sent(self, then: MirroredColumn, column: MirroredColumn, run: pa.RecordBatch, name: str) -> pa.Array:
        """The values of a run for a column that was ``then`` another one, or is still the same."""
        # A log has values as they were, which another type may not hold.
        was = then if self._shape.is_log else column
        if was.type != column.type and not is_wider(was.type, column.type):
            raise SchemaChangedError(
                f"{self._table}: column {was.name} had the type {was.codec.column.type_name} before it got "
                f"{column.codec.column.type_name} within a batch",
                remedy=RESNAPSHOT,
            )
        values = _typed(self._table, column, run.column(name), run, self._shape, was)
        return values if was.type == column.type else values.cast(column.type)

    def _unsent(self, column: MirroredColumn, run: pa.RecordBatch, begin: Place) -> pa.Array:
        """The values of a run in a column that it does not have: rows behind a drop have nothing in it."""
        texts, fill = pa.nulls(run.num_rows, pa.string()), self.changes.fill_of(column)
        if fill is not None and self.changes.is_before(begin, column):
            if len(fill.encode()) * run.num_rows > MAX_OFFSET:
                raise SchemaChangedError(
                    f"{self._table}: the default of column {column.name} is too long for the rows from before it was "
                    "added",
                    remedy=RESNAPSHOT,
                )
            texts = from_texts([fill]).take(from_numpy(np.zeros(run.num_rows, np.int32)))
        return _typed(self._table, column, texts, run, self._shape)


def _renamed(lists: pa.ListArray, names: Mapping[str, str]) -> pa.ListArray:
    """Return lists of columns with their last names; NULL for columns that are gone."""
    if not len(lists.values):
        return lists
    places = pc.index_in(lists.values, from_texts(list(names)))
    return pa.ListArray.from_arrays(lists.offsets, from_texts(list(names.values())).take(places), type=UNCHANGED_TYPE)


def typed_columns(table: str, layout: MirroredLayout, run: pa.RecordBatch, shape: Shape) -> pa.RecordBatch:
    """Return a run's rows with the columns of its own layout."""
    arrays = [_typed(table, column, run.column(f"c{i}"), run, shape) for i, column in enumerate(layout.columns)]
    return pa.RecordBatch.from_arrays(arrays, schema=layout.arrow_schema())


def _typed(
    table: str,
    column: MirroredColumn,
    texts: pa.Array,
    run: pa.RecordBatch,
    shape: Shape,
    was: MirroredColumn | None = None,
) -> pa.Array:
    """The values of a column; of one that ``was`` another before, in its type."""

    def place(row: int) -> str:
        lsn, seq = (run.column(name)[row].as_py() for name in ("_commit_lsn", "_seq"))
        return f"the change with _commit_lsn {lsn}, _seq {seq}"

    if shape.has_variants and column.is_json:
        require_exact(table, column, texts, place)
    return (was or column).values_of(table, texts, place)
