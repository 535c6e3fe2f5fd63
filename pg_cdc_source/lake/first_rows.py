"""Rows of a snapshot on their way into a lake: the task that reads them writes them.

PostgreSQL sends values in binary, and the lake's types are those that they become: nothing is printed and parsed, and
no row passes through the JVM.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from pg_cdc_source.errors import OptionError, UnrepresentableError
from pg_cdc_source.lake.columns import (
    MirroredColumn,
    as_wanted,
    is_kept_as_text,
    read_layout,
    unrepresentable_error,
)
from pg_cdc_source.lake.files import FileWriter, with_own_columns
from pg_cdc_source.lake.first_files import FirstFiles
from pg_cdc_source.lake.rows_of_batch import INEXACT, REFUSED
from pg_cdc_source.lake.unfollowed import altered_later_error
from pg_cdc_source.lake.variants import require_exact
from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.protocol.layout import CHANGE_FIELDS, RUNS_SCHEMA, StreamedTable
from pg_cdc_source.protocol.packed import layout_text
from pg_cdc_source.protocol.refused import in_words
from pg_cdc_source.protocol.stream_rows import columns_of_snapshot, with_unsent
from pg_cdc_source.snapshot.reader import read_range
from pg_cdc_source.stream.first_rows.held_snapshot import SnapshotPart


class _ChangedBehindError(Exception):
    """A table's columns are not any more what its layout says."""


def written(parts: Iterable[SnapshotPart], files: FirstFiles, execution: str) -> Iterator[pa.RecordBatch]:
    """Read ranges of tables into files; rows of ``RUNS_SCHEMA`` that say which. ``execution`` is that of `read_range`.

    A table of which the lake cannot have a value, or whose name leads elsewhere, has a row ``refused``.
    """
    writer = FileWriter(files)
    for part in parts:
        layout = as_wanted(part.table.name, layout_text(part.table), files.shapes[part.table.name])
        of = {
            **dict.fromkeys(RUNS_SCHEMA.names),
            "_table": part.table.name,
            "_commit_lsn": int(part.lsn),
            "_seq": 0,
            "layout": layout,
            "after": str(int(part.through)) if part.through > part.lsn else None,
        }
        try:
            files.directory_of(part.table.name)
        except OptionError as error:
            yield _refused(of, str(error))
            continue
        has_rows = False
        try:
            for rows in _values(part, files, layout, execution):
                has_rows = True
                yield from writer.write(of, rows, part.table.unsent)
        except UnrepresentableError as error:
            yield _refused(of, str(unrepresentable_error(error.what)))
        except _ChangedBehindError as error:
            yield _refused(of, str(error))
        else:
            # They may have been deleted since the point, and no file says so.
            if not has_rows and of["after"] is not None:
                yield pa.RecordBatch.from_pylist([{**of, "_change_type": INEXACT, "rows": 0}], RUNS_SCHEMA)
    yield from writer.close()


def _values(part: SnapshotPart, files: FirstFiles, layout: str, execution: str) -> Iterator[pa.RecordBatch]:
    """Rows of a range, with all columns of the lake's table."""
    shape, columns = files.shapes[part.table.name], read_layout(layout).columns
    as_text = (c.name for c in part.scan.columns if c.name in shape.as_string or is_kept_as_text(c))
    spec = replace(
        part.scan.spec,
        as_string=tuple(as_text),
        numeric_as=NumericAs.parse(shape.numeric_as),
        unrepresentable=shape.unrepresentable,
    )
    plan = replace(part.scan, spec=spec)
    types = [column.type for column in columns]
    for batch in read_range(plan, part.source, part.range, execution):
        found = with_unsent(batch, part.table, types) if part.table.unsent else batch
        # Where a table has no columns, its rows are counted by one.
        arrays = [
            _as_described(part.table.name, column, values)
            for column, values in zip(columns, found.columns[: len(columns)], strict=True)
        ]
        _require_keys(part.table, columns, arrays)
        rows = pa.RecordBatch.from_arrays(arrays, names=[column.name for column in columns])
        for column, values in zip(columns, rows.columns, strict=True):
            if shape.has_variants and column.is_json:
                require_exact(part.table.name, column, values, lambda _: "a row of the snapshot")
        if shape.columns:
            changes = columns_of_snapshot(batch.num_rows, part.lsn, part.table)
            names = [field.name for field in CHANGE_FIELDS]
            rows = with_own_columns(rows, shape, pa.RecordBatch.from_arrays(changes, names=names))
        yield rows


def _require_keys(table: StreamedTable, columns: Iterable[MirroredColumn], arrays: Iterable[pa.Array]) -> None:
    """Raise UnrepresentableError where a key is NULL: with unrepresentable=null, two of them would become one."""
    for column, values in zip(columns, arrays, strict=True):
        if column.key and values.null_count and column.name not in table.unsent:
            raise UnrepresentableError(
                f"{table.name}, {in_words(column.codec.column)}: a value of its key cannot be kept as {column.type}"
            )


def _as_described(table: str, column: MirroredColumn, values: pa.Array) -> pa.Array:
    """Values as the layout has them: the column may have been altered since, and is read as it is now."""
    if values.type.id == column.type.id:
        if not pa.types.is_decimal(values.type):
            return values
        with contextlib.suppress(pa.ArrowInvalid):
            return values.cast(column.type)
    raise _ChangedBehindError(str(altered_later_error(table, column.name)))


def _refused(of: Mapping[str, Any], why: str) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{**of, "_change_type": REFUSED, "rows": 0, "after": why}], RUNS_SCHEMA)
