"""Rows of a snapshot as Parquet files, written by tasks as they come: memory stays flat.

A file belongs to the table only when a commit names it. One that a task has written in vain is left to VACUUM.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pg_cdc_source.errors import PgCdcError
from pg_cdc_source.lake.columns import as_wanted, read_layout
from pg_cdc_source.lake.directories import open_directory
from pg_cdc_source.lake.first_files import FirstFiles
from pg_cdc_source.lake.last_layout import typed_columns
from pg_cdc_source.lake.rows_of_batch import FILE, REFUSED
from pg_cdc_source.lake.shape import DELETED_LSN, VALID_FROM, VALID_FROM_TS, Shape
from pg_cdc_source.protocol.layout import RUNS_SCHEMA
from pg_cdc_source.protocol.packed import SNAPSHOT, read_run
from pg_cdc_source.values.arrow import in_utc

FILE_BYTES = 128 << 20
# Of a file's rows in memory, so that a task needs not all of them at once.
ROW_GROUP_BYTES = 64 << 20
_NUMBER = "PARQUET:field_id"


class FileWriter:
    """Writes the rows of one partition's snapshot into files, one table after the other."""

    def __init__(self, files: FirstFiles) -> None:
        self._files = files
        self._waiting: list[pa.RecordBatch] = []
        self._footers: list[pq.FileMetaData] = []  # of a file that was closed
        self._nulls: Counter[str] = Counter()
        self._writer: pq.ParquetWriter | None = None
        self._last: dict[str, Any] = {}
        self._unsent: Sequence[str] = ()  # of the rows written last, as is ``_last``
        self._file: dict[str, Any] = {}

    def take(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Return rows of ``RUNS_SCHEMA`` with a row ``file`` instead of runs of a snapshot, or a row ``refused``."""
        for batch in batches:
            others = []
            for row in in_utc(batch).to_pylist():
                if row["_change_type"] != SNAPSHOT:
                    others.append(row)
                    continue
                row["layout"] = as_wanted(row["_table"], row["layout"], self._files.shapes[row["_table"]])
                try:
                    yield from self.write(row, self._rows(row))
                except PgCdcError as error:
                    others.append({**row, "_change_type": REFUSED, "rows": 0, "data": None, "after": str(error)})
            if others:
                yield _batch(others)
        yield from self.close()

    def _rows(self, row: Mapping[str, Any]) -> pa.RecordBatch:
        run, shape = read_run(row["data"]), self._files.shapes[row["_table"]]
        rows = typed_columns(row["_table"], read_layout(row["layout"]), run, shape)
        return with_own_columns(rows, shape, run)

    def write(
        self, of: Mapping[str, Any], rows: pa.RecordBatch, unsent: Sequence[str] = ()
    ) -> Iterator[pa.RecordBatch]:
        """Write rows whose table, position and layout are those of the row ``of``; the files that are complete.

        The columns ``unsent`` were altered before the rows were read, and are NULL in all of them.
        """
        names = ("_table", "layout", "after")
        if self._writer is not None and any(of[name] != self._last[name] for name in names):
            yield from self.close()
        if self._writer is None:
            self._open(of["_table"], rows.schema)
        self._last, self._unsent = {**of, "data": None}, unsent
        self._file["rows"] += rows.num_rows
        self._file["raw_bytes"] += rows.nbytes
        self._nulls.update({name: values.null_count for name, values in zip(rows.schema.names, rows, strict=True)})
        self._waiting.append(rows)
        if sum(batch.nbytes for batch in self._waiting) > ROW_GROUP_BYTES:
            self._write_waiting()
        if self._file["raw_bytes"] > FILE_BYTES:
            yield from self.close()

    def _write_waiting(self) -> None:
        assert self._writer is not None
        self._writer.write_table(pa.Table.from_batches(self._waiting))
        self._waiting = []

    def _open(self, table: str, schema: pa.Schema) -> None:
        directory = self._files.directory_of(table)
        filesystem, root = open_directory(directory)
        name = f"part-{uuid.uuid4()}.parquet"
        self._file = {"directory": directory, "name": name, "rows": 0, "raw_bytes": 0, "filesystem": filesystem}
        self._file["path"] = f"{root}/{name}"
        # As Iceberg numbers the columns of a new table; nobody else looks at the numbers.
        numbered = pa.schema([field.with_metadata({_NUMBER: str(i)}) for i, field in enumerate(schema, 1)])
        self._footers, self._nulls = [], Counter()
        self._writer = pq.ParquetWriter(
            f"{root}/{name}",
            numbered,
            filesystem=filesystem,
            compression="zstd",
            metadata_collector=self._footers,
            write_statistics=[field.name for field in schema if _has_statistics(field.type)],
        )

    def close(self) -> Iterator[pa.RecordBatch]:
        """End the file that is being written; its row."""
        if self._writer is None:
            return
        if self._waiting:
            self._write_waiting()
        self._writer.close()
        self._writer = None
        file = self._file
        action = {
            "name": file["name"],
            "place": f"{file['directory']}/{file['name']}",
            "size": file["filesystem"].get_file_info(file["path"]).size,
            "modified_ms": int(time.time() * 1000),
            "stats": {"numRecords": file["rows"], "nullCount": dict(self._nulls), **_bounds(self._footers[0])},
            "unbounded": _unbounded(self._footers[0]),
            # How far behind the point of the snapshot its rows may be, if they are not of just that point.
            "through": self._last["after"],
            "unsent": self._unsent,
        }
        row = {**self._last, "_change_type": FILE, "rows": file["rows"], "data": None, "after": json.dumps(action)}
        yield _batch([row])


def _bounds(footer: pq.FileMetaData) -> dict[str, dict[str, int]]:
    """Return the least and the greatest of each column of whole numbers, by which merges leave files out."""
    least: dict[str, int] = {}
    greatest: dict[str, int] = {}
    for field, found in _statistics(footer):
        if pa.types.is_integer(field.type) and found and all(statistics.has_min_max for statistics in found):
            least[field.name] = min(statistics.min for statistics in found)
            greatest[field.name] = max(statistics.max for statistics in found)
    return {"minValues": least, "maxValues": greatest}


def _unbounded(footer: pq.FileMetaData) -> list[str]:
    """Return the columns of which a row group does not say the least and the greatest value, as Arrow says none of more
    than 4 kB. Iceberg would take those of the other row groups for the file's.
    """
    return [field.name for field, found in _statistics(footer) if not all(group.has_min_max for group in found)]


def _statistics(footer: pq.FileMetaData) -> Iterator[tuple[pa.Field, list[pq.Statistics]]]:
    """Yield columns, each with the statistics of the row groups that have values of it."""
    for place, field in enumerate(footer.schema.to_arrow_schema()):
        # Behind a nested column, places of Parquet's columns are others.
        if pa.types.is_nested(field.type):
            return
        if not _has_statistics(field.type):
            continue
        groups = [footer.row_group(i).column(place) for i in range(footer.num_row_groups)]
        yield field, [group.statistics for group in groups if group.statistics.null_count < group.num_values]


def _has_statistics(kind: pa.DataType) -> bool:
    """Whether files say the least and the greatest value of a column.

    Not of floats: PyArrow leaves NaN out of these, and readers leave a file out by them. To Spark, as to PostgreSQL,
    NaN is the greatest.
    """
    return not (pa.types.is_nested(kind) or pa.types.is_floating(kind))


def with_own_columns(rows: pa.RecordBatch, shape: Shape, changes: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows of a snapshot with the columns that a table has beside PostgreSQL's.

    ``changes`` has the change columns of the rows.
    """
    n = changes.num_rows  # rows of a table without columns count none
    if shape.is_log:
        own = {name: changes.column(name) for name in shape.columns}
    elif shape.has_versions:
        known = {VALID_FROM: changes.column("_commit_lsn"), VALID_FROM_TS: changes.column("_commit_ts")}
        own = {name: known.get(name, pa.nulls(n, kind)) for name, kind in shape.columns.items()}
    else:
        own = {shape.deleted: pa.repeat(False, n), DELETED_LSN: pa.nulls(n, pa.int64())} if shape.is_soft else {}
    return pa.RecordBatch.from_arrays([*rows.columns, *own.values()], names=[*rows.schema.names, *own])


def _batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=RUNS_SCHEMA)
