"""Batches that the lake cannot follow, though it can follow each change of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pg_cdc_source.errors import RESNAPSHOT, SchemaChangedError
from pg_cdc_source.lake.columns import MirroredColumn, MirroredLayout
from pg_cdc_source.lake.rows_of_batch import BatchRow
from pg_cdc_source.lake.schema_changes import SchemaChanges
from pg_cdc_source.lake.variants import require_exact
from pg_cdc_source.protocol.packed import CHANGES
from pg_cdc_source.values.arrow import from_texts


def require_names(layout: MirroredLayout, changes: SchemaChanges) -> None:
    """Raise SchemaChangedError for columns whose names the lake's table cannot have."""
    table, shape = changes.table, changes.shape
    for column in layout.columns:
        if column.name.lower() in shape.columns:
            raise SchemaChangedError(
                f"{table} has the column {column.name}, which the mirror itself adds ({shape.text})",
                remedy=f"rename it in PostgreSQL, and {RESNAPSHOT}; or mirror the table in another mode",
            )
        if column.name.lower() in shape.reserved:
            raise SchemaChangedError(
                f"{table} has the column {column.name}, a name that {shape.format} uses itself",
                remedy=f"rename it in PostgreSQL, and {RESNAPSHOT}; or mirror the table in another format",
            )
    names: dict[str, str] = {}
    for column in layout.columns:
        if (other := names.setdefault(column.name.lower(), column.name)) != column.name:
            raise SchemaChangedError(
                f"{table} has columns {other} and {column.name}, which are one name to Spark and the lake",
                remedy=f"rename one of them in PostgreSQL, and {RESNAPSHOT}",
            )


def require_fitting_files(layout: MirroredLayout, files: Iterable[BatchRow], changes: SchemaChanges) -> None:
    """Raise SchemaChangedError where files have other columns than the table has in the end.

    Columns of files are told by their names: those of the table have to be the same, or NULL in all rows.
    """
    for written in {row.layout_text: row.layout for row in files}.values():
        names = {column.name for column in written.columns}
        for column in layout.columns:
            if (place := written.place_of(column)) is not None:
                was = written.columns[place]
                fits = (was.name, was.type) == (column.name, column.type)
            else:
                fits = column.name not in names and changes.fill_of(column) is None
            if not fits:
                raise altered_later_error(changes.table, column.name)


def require_filled_files(dropped: Iterable[MirroredColumn], files: Sequence[BatchRow], changes: SchemaChanges) -> None:
    """Raise SchemaChangedError where ``dropped`` columns were added behind rows of files, which lack their values."""
    for column in dropped:
        if changes.fill_of(column) is not None and any(changes.is_before(row.place, column) for row in files):
            raise altered_later_error(changes.table, column.name)


def require_sent_values(columns: Sequence[MirroredColumn], files: Iterable[BatchRow], changes: SchemaChanges) -> None:
    """Raise SchemaChangedError where files lack values of columns that were altered before their rows were read.

    A log says so of each.
    """
    for row in () if changes.shape.is_log else files:
        unsent, written = row.unsent, row.layout
        for column in columns if unsent else ():
            if (place := written.place_of(column)) is not None and written.columns[place].name in unsent:
                raise altered_later_error(changes.table, column.name)


def require_exact_fills(layout: MirroredLayout, changes: SchemaChanges) -> None:
    """Raise UnrepresentableError for what old rows have in a new column, where VARIANT cannot hold it."""
    for column in layout.columns:
        fill = changes.fill_of(column)
        if changes.shape.has_variants and column.is_json and fill is not None:
            require_exact(changes.table, column, from_texts([fill]), lambda _: "rows from before it was added")


def require_places(last: MirroredLayout, rows: Iterable[BatchRow], changes: SchemaChanges) -> None:
    """Raise SchemaChangedError for a column that rows have, where another one has its name by now."""
    for row in rows:
        if row.kind != CHANGES:
            continue
        layout = row.layout
        for column in layout.columns if layout.oid == last.oid else ():
            if last.place_of(column) is not None:
                continue
            # A log goes on in the same column, if the other one is new.
            goes_on = any(c.name == column.name and layout.place_of(c) is None for c in last.columns)
            if not (changes.shape.is_log and goes_on):
                raise SchemaChangedError(
                    f"{changes.table}: column {column.name} was dropped, and another one has its name, within a batch",
                    remedy=RESNAPSHOT,
                )


def altered_later_error(table: str, column: str) -> SchemaChangedError:
    """Return the error for rows that came anew, and whose columns are not those that the stream goes on with."""
    return SchemaChangedError(
        f"{table}: column {column} was changed right behind the rows that came anew", remedy=RESNAPSHOT
    )


def keyless_error(table: str) -> SchemaChangedError:
    """Return the error for a table whose rows nothing tells apart, or nothing did at some time since the last ones."""
    return SchemaChangedError(
        f"{table} has no key, or got another one under FULL, so its rows cannot be told apart in the lake",
        remedy="where it has none, add a primary key that is not DEFERRABLE, or set REPLICA IDENTITY USING INDEX; "
        f"then {RESNAPSHOT}",
    )
