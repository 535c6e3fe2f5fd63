"""Rows of a snapshot as Parquet files beside a table, written by tasks as they come: memory stays flat.

A file belongs to the table only when a commit names it. One that a task has written in vain is left to VACUUM.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pg_cdc_source.errors import PgCdcError
from pg_cdc_source.lake.batch_of_table import FILE, REFUSED, typed_columns
from pg_cdc_source.lake.columns import read_layout
from pg_cdc_source.lake.shape import DELETED_LSN, VALID_FROM, VALID_FROM_TS, Shape, Shapes
from pg_cdc_source.protocol.layout import RUNS_SCHEMA
from pg_cdc_source.protocol.packed import SNAPSHOT, read_run

FILE_BYTES = 128 << 20


class FileWriter:
    """Writes the runs of one partition's snapshot, which are of one table, into files."""

    def __init__(
        self, directory_of: Callable[[str], str], shapes: Shapes | None = None, compression: str = "zstd"
    ) -> None:
        """``directory_of`` says in which directory the files of a table go."""
        self._directory_of = directory_of
        self._shapes = shapes or Shapes()
        self._compression = compression
        self._writer: pq.ParquetWriter | None = None
        self._last: dict[str, Any] = {}
        self._file: dict[str, Any] = {}

    def take(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Return rows of ``RUNS_SCHEMA`` with a row ``file`` instead of runs of a snapshot, or a row ``refused``."""
        for batch in batches:
            others = []
            for row in batch.to_pylist():
                if row["_change_type"] != SNAPSHOT:
                    others.append(row)
                    continue
                if self._writer is not None and (row["_table"], row["layout"], row["after"]) != self._of:
                    yield from self._close()
                try:
                    self._write(row)
                except PgCdcError as error:
                    refused = {"_change_type": REFUSED, "rows": 0, "data": None, "after": str(error)}
                    others.append({**row, **refused})
                    continue
                if self._file["raw_bytes"] > FILE_BYTES:
                    yield from self._close()
            if others:
                yield _batch(others)
        yield from self._close()

    @property
    def _of(self) -> tuple[str, str, str | None]:
        return self._last["_table"], self._last["layout"], self._last["after"]

    def _write(self, row: Mapping[str, Any]) -> None:
        layout = read_layout(row["layout"])
        run = read_run(row["data"])
        rows = typed_columns(row["_table"], layout, run, self._shapes[row["_table"]])
        for name, values in own_columns(self._shapes[row["_table"]], run).items():
            rows = rows.append_column(name, values)
        if self._writer is None:
            self._open(row["_table"], rows.schema)
        assert self._writer is not None
        self._writer.write_batch(rows)
        self._last = dict(row)
        self._file["rows"] += rows.num_rows
        self._file["raw_bytes"] += rows.nbytes

    def _open(self, table: str, schema: pa.Schema) -> None:
        directory = self._directory_of(table)
        filesystem, root = open_directory(directory)
        name = f"part-{uuid.uuid4()}.parquet"
        self._file = {"directory": directory, "name": name, "rows": 0, "raw_bytes": 0, "filesystem": filesystem}
        self._file["path"] = f"{root}/{name}"
        self._writer = pq.ParquetWriter(f"{root}/{name}", schema, filesystem=filesystem, compression=self._compression)

    def _close(self) -> Iterator[pa.RecordBatch]:
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        file = self._file
        action = {
            "name": file["name"],
            "place": f"{file['directory']}/{file['name']}",
            "layout": self._last["layout"],
            "size": file["filesystem"].get_file_info(file["path"]).size,
            "modified_ms": int(time.time() * 1000),
            "stats": {"numRecords": file["rows"]},
            # How far behind the point of the snapshot its rows may be, if they are not of just that point.
            "through": self._last["after"],
        }
        row = {**self._last, "_change_type": FILE, "rows": file["rows"], "data": None, "after": json.dumps(action)}
        yield _batch([row])


def own_columns(shape: Shape, run: pa.RecordBatch) -> dict[str, pa.Array]:
    """Return what rows of a snapshot have in the columns that a table has beside PostgreSQL's."""
    n = run.num_rows
    if shape.is_log:
        return {name: run.column(name) for name in shape.columns}
    if shape.has_versions:
        known = {VALID_FROM: run.column("_commit_lsn"), VALID_FROM_TS: run.column("_commit_ts")}
        return {name: known.get(name, pa.nulls(n, kind)) for name, kind in shape.columns.items()}
    return {shape.deleted: pa.repeat(False, n), DELETED_LSN: pa.nulls(n, pa.int64())} if shape.is_soft else {}


def open_directory(directory: str) -> tuple[pafs.FileSystem, str]:
    """Create a directory of a file system or an object store; its file system, and its path there."""
    # Hadoop's names are not Arrow's.
    place = re.sub("^s3[an]://", "s3://", re.sub("^file:/+", "/", directory))
    filesystem, root = pafs.FileSystem.from_uri(place) if "://" in place else (pafs.LocalFileSystem(), place)
    filesystem.create_dir(root, recursive=True)
    return filesystem, root


def _batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=RUNS_SCHEMA)
