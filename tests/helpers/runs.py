"""Rows of the envelope by columns, as the tests put them together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from messages import catalog_type

from pg_cdc_source.lake.rows_of_batch import BatchRow
from pg_cdc_source.lake.shape import REPLACED, Shape, Shapes
from pg_cdc_source.lake.table_batch import TableBatch
from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.protocol.layout import CHANGE_TYPES, PACKED_SCHEMA, UNCHANGED_TYPE, Layout, StreamedTable
from pg_cdc_source.protocol.packed import packed_rows, runs_of
from pg_cdc_source.protocol.stream_rows import change_columns, schema_rows, truncate_rows
from pg_cdc_source.values.registry import Column, plan

Row = dict[str, Any]
ENVELOPE = Layout(True, False, "error", "emit", packed=True)
# A column's number, name and type.
Given = tuple[int, str, str]


def layout(
    columns: Iterable[Given], key: Sequence[str] = ("id",), *, oid: int = 1, name: str = "public.t", identity: str = "d"
) -> StreamedTable:
    """A table whose values come as PostgreSQL's texts."""
    planned = [Column(name, attnum, catalog_type(kind), kind, False) for attnum, name, kind in columns]
    codecs = tuple(plan(column, as_string=True, numeric_as=NumericAs("string")) for column in planned)
    types = tuple((column.type_oid, column.type.typmod) for column in planned)
    return StreamedTable(oid, name, codecs, types, tuple(key), identity)


@dataclass(frozen=True)
class Change:
    """A row of the stream. ``old`` None: it has no old one."""

    kind: str
    place: tuple[int, int]
    values: Sequence[str | None]
    unchanged: Sequence[str] = ()
    old: Sequence[str | None] | None = None


def packed(table: StreamedTable, changes: Sequence[Change]) -> pa.RecordBatch:
    """Rows of ``PACKED_SCHEMA``."""
    texts = [pa.array([c.values[i] for c in changes], pa.string()) for i in range(len(table.codecs))]
    before, has_old = None, np.array([c.old is not None for c in changes])
    if has_old.any():
        olds = [c.old if c.old is not None else [None] * len(texts) for c in changes]
        before = [pa.array([old[i] for old in olds], pa.string()) for i in range(len(table.codecs))]
    return packed_rows(table, _change_columns(changes), texts, before, has_old)


def _change_columns(changes: Sequence[Change]) -> list[pa.Array]:
    kinds = np.array([CHANGE_TYPES.index(c.kind) for c in changes])
    lsn, seq = np.array([c.place for c in changes], np.int64).T.copy()
    unchanged = pa.array([list(c.unchanged) for c in changes], UNCHANGED_TYPE)
    return change_columns(kinds, lsn, seq, lsn * 1000, lsn + 5, unchanged)


def changed(table: StreamedTable, *changes: Change) -> list[Row]:
    """Runs of changes as Spark hands them on."""
    rows: list[Row] = runs_of(packed(table, changes)).to_pylist()
    return rows


def truncated(table: StreamedTable, place: tuple[int, int]) -> Row:
    rows = truncate_rows([table], _change_columns([Change("truncate", place, ())]), ENVELOPE, PACKED_SCHEMA)
    (row,) = runs_of(rows).to_pylist()
    return dict(row)


def announced(table: StreamedTable, place: tuple[int, int], *changes: Mapping[str, Any]) -> Row:
    """A row ``schema`` that says ``changes``."""
    said = [{"attnum": None, "name": None, "was": None, "fill": None, **change} for change in changes]
    text = json.dumps({"columns": [], "changes": said})
    rows = schema_rows([table], [text], _change_columns([Change("schema", place, ())]), PACKED_SCHEMA)
    (row,) = runs_of(rows).to_pylist()
    return dict(row)


def written(
    table: StreamedTable, place: tuple[int, int], *, through: int | None = None, unsent: Sequence[str] = ()
) -> Row:
    """A file of a snapshot's rows, each as of some point up to ``through``; None: as of the snapshot's.

    ``unsent``: columns that were altered before the rows were read.
    """
    (row,) = changed(table, Change("snapshot", place, [None] * len(table.codecs)))
    said = {"path": "p", "through": through, "unsent": list(unsent)}
    return {**row, "_change_type": "file", "data": None, "after": json.dumps(said)}


def batch_of(rows: Iterable[Row], shape: Shape = REPLACED, *, stands_still: bool = False) -> TableBatch:
    """What rows of one batch are of the table ``public.t``."""
    found = (BatchRow.of(row, Shapes(shape)) for row in rows)
    return TableBatch.of("public.t", found, shape, stands_still=stands_still)
