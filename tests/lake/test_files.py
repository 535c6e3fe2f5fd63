"""Rows of a snapshot become files, whichever way their values came."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs import Change, changed, layout

from pg_cdc_source.lake import files as lake_files
from pg_cdc_source.lake.columns import read_layout
from pg_cdc_source.lake.files import FileWriter, with_own_columns
from pg_cdc_source.lake.first_files import FIRST_FILES, FirstFiles
from pg_cdc_source.lake.shape import Shape, Shapes
from pg_cdc_source.lake.targets import Targets
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.protocol.layout import CHANGE_FIELDS, RUNS_SCHEMA, StreamedTable
from pg_cdc_source.protocol.packed import layout_text

LSN = Lsn(7)
TABLE = layout([(1, "id", "int4"), (2, "v", "text")], ["id"])
OTHER = layout([(1, "id", "int4")], ["id"], oid=2, name="public.u")


def as_texts(table: StreamedTable, *rows: tuple[str | None, ...]) -> pa.RecordBatch:
    (row,) = changed(table, *(Change("snapshot", (LSN, 0), values) for values in rows))
    return pa.RecordBatch.from_pylist([row], RUNS_SCHEMA)


def texts_of(directory: Path, *batches: pa.RecordBatch) -> list[dict[str, Any]]:
    writer = FileWriter(FirstFiles(Targets.of(f"{directory}/{{table}}", None)))
    return [row for batch in writer.take(iter(batches)) for row in batch.to_pylist()]


# Rows of a table, with their values, and up to which position they may be.
Values = tuple[StreamedTable, list[tuple[Any, ...]], Lsn | None]


def values_of(directory: Path, *batches: Values) -> list[dict[str, Any]]:
    writer = FileWriter(FirstFiles(directory=str(directory)))
    found: list[dict[str, Any]] = []
    for table, rows, through in batches:
        text = layout_text(table)
        of = {"_table": table.name, "layout": text, "after": None if through is None else str(int(through))}
        schema = read_layout(text).arrow_schema()
        arrays = [pa.array(values, field.type) for values, field in zip(zip(*rows, strict=True), schema, strict=True)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        found += [row for out in writer.write(of, batch) for row in out.to_pylist()]
    return found + [row for out in writer.close() for row in out.to_pylist()]


def test_values_and_texts_are_the_same_rows(tmp_path: Path) -> None:
    (texts,) = texts_of(tmp_path, as_texts(TABLE, ("1", "a"), ("2", None)))
    (values,) = values_of(tmp_path, (TABLE, [(1, "a"), (2, None)], None))
    said = [json.loads(row["after"]) for row in (texts, values)]
    first, second = (pq.read_table(file["place"]) for file in said)
    assert first.equals(second)
    assert first.to_pydict() == {"id": [1, 2], "v": ["a", None]}
    assert [row["_change_type"] for row in (texts, values)] == ["file", "file"]
    # Without a number for each column, delta-rs takes columns of NULLs alone for such without any.
    stats = {"numRecords": 2, "nullCount": {"id": 0, "v": 1}, "minValues": {"id": 1}, "maxValues": {"id": 2}}
    assert [file["stats"] for file in said] == [stats, stats]


def test_a_file_says_between_which_numbers_its_rows_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake_files, "ROW_GROUP_BYTES", 0)
    kinds = ["int8", "int4", "date", "int4[]", "int4"]
    table = layout([(i, f"c{i}", kind) for i, kind in enumerate(kinds, 1)], ["c1"])
    rows = [(2**62, None, None, None, 1), (-5, None, date(2026, 1, 1), [1], 2)]
    (row,) = values_of(tmp_path, *((table, [row], None) for row in rows))
    file = json.loads(row["after"])
    assert pq.read_metadata(file["place"]).num_row_groups == 2
    nulls = {"c1": 0, "c2": 2, "c3": 1, "c4": 1, "c5": 0}
    bounds = {"minValues": {"c1": -5}, "maxValues": {"c1": 2**62}}
    assert file["stats"] == {"numRecords": 2, "nullCount": nulls, **bounds}


def test_a_file_says_of_which_columns_a_row_group_has_no_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake_files, "ROW_GROUP_BYTES", 0)
    # A row group of nothing but NULLs has none to say.
    rows = [(1, "a" * 4096), (2, None), (3, "b" * 4097)]
    (row,) = values_of(tmp_path, *((TABLE, [row], None) for row in rows))
    file = json.loads(row["after"])
    assert pq.read_metadata(file["place"]).num_row_groups == 3
    assert file["unbounded"] == ["v"]
    (row,) = values_of(tmp_path, *((TABLE, [row], None) for row in rows[:2]))
    assert json.loads(row["after"])["unbounded"] == []


def test_columns_have_the_numbers_of_a_new_table(tmp_path: Path) -> None:
    (row,) = values_of(tmp_path, (TABLE, [(1, "a")], None))
    schema = pq.read_schema(json.loads(row["after"])["place"])
    assert [field.metadata[b"PARQUET:field_id"] for field in schema] == [b"1", b"2"]


def test_a_file_is_of_one_table_and_of_one_point(tmp_path: Path) -> None:
    found = values_of(
        tmp_path,
        (TABLE, [(1, "a")], None),
        (TABLE, [(2, "b")], None),
        (TABLE, [(3, "c")], Lsn(9)),
        (OTHER, [(4,)], None),
    )
    said = [json.loads(row["after"]) for row in found]
    assert [(row["_table"], row["rows"]) for row in found] == [("public.t", 2), ("public.t", 1), ("public.u", 1)]
    assert [file["through"] for file in said] == [None, "9", None]
    assert [pq.read_table(file["place"])["id"].to_pylist() for file in said] == [[1, 2], [3], [4]]
    # One group, though its rows came in two batches.
    assert [pq.read_metadata(file["place"]).num_row_groups for file in said] == [1, 1, 1]


def test_where_files_go_is_told_to_the_stream() -> None:
    shapes = Shapes.of({"*": "merge", "public.log": "append"}, "soft", "iceberg")
    for files in (
        FirstFiles(Targets.of("/lake/{schema}/{table}", "/lake/ledger"), shapes=shapes),
        FirstFiles(directory="/staging"),
    ):
        assert FirstFiles.of({FIRST_FILES: files.text}) == files
    assert FirstFiles.of({}) is None


def test_a_log_has_the_rows_of_a_table_without_columns() -> None:
    changes = pa.RecordBatch.from_arrays([pa.nulls(2, f.type) for f in CHANGE_FIELDS], schema=pa.schema(CHANGE_FIELDS))
    nothing = pa.RecordBatch.from_arrays([], names=[])
    assert with_own_columns(nothing, Shape("append"), changes).num_rows == 2
