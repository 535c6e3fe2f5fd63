"""One table's part of a batch: runs in the layouts of their time become rows in the last one.

Columns are told apart by their numbers. A row from before a column was added has in it what PostgreSQL says that old
rows got (``fill``); a row from before a column was renamed has the new name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.errors import SchemaChangedError
from pg_cdc_source.lake.columns import MirroredLayout, read_layout
from pg_cdc_source.protocol.layout import CHANGE_FIELDS
from pg_cdc_source.protocol.packed import read_run
from pg_cdc_source.protocol.refused import RefusedValueError, accept
from pg_cdc_source.values.arrow import field_of
from pg_cdc_source.values.registry import Codec

CHANGE_NAMES = tuple(change.name for change in CHANGE_FIELDS)
# What ``_change_type`` says of a file that a task has written of rows of a snapshot.
FILE = "file"
_Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows that are told apart by one ``key``, in the order of the stream, in the table's last layout.

    ``rows`` has the table's columns, then the change columns.
    """

    key: tuple[str, ...]
    rows: pa.Table

    @property
    def is_emptied(self) -> bool:
        """Whether the table was emptied in between."""
        return bool(pc.any(pc.equal(self.rows["_change_type"], "truncate")).as_py())


@dataclass(slots=True)
class TableBatch:
    """What a batch has of one table. ``fills`` are what old rows have in columns that were added, by their numbers."""

    table: str
    layout: MirroredLayout | None
    segments: list[Segment]
    files: list[Mapping[str, Any]]
    fills: dict[int, str | None] = field(default_factory=dict)
    is_rewritten: bool = False
    is_emptied: bool = False  # before its files, or where no row says what its columns are

    @property
    def comes_whole(self) -> bool:
        """Whether nothing stays of what the lake's table has."""
        return self.is_emptied or any(segment.is_emptied for segment in self.segments[:1])

    @classmethod
    def of(cls, table: str, rows: Iterable[Mapping[str, Any]]) -> TableBatch:
        """Read rows of runs, and of files that were written of them. ``layout`` None: no row says one."""
        ordered = sorted(rows, key=lambda row: (row["_commit_lsn"], row["_seq"], row["_change_type"] != "schema"))
        layouts = [read_layout(row["layout"]) for row in ordered if row["layout"] is not None]
        # A table that is gone has nothing but its name.
        layout = next((found for found in reversed(layouts) if found.identity), None)
        files = [row for row in ordered if row["_change_type"] == FILE]
        batch = cls(table, layout, [], files)
        for row in ordered:
            if row["_change_type"] == "schema":
                batch._note(json.loads(row["after"]))
        batch._read(ordered)
        return batch

    def _note(self, said: Mapping[str, Any]) -> None:
        for change in said["changes"]:
            kind, attnum = change["change"], change["attnum"]
            if kind == "added" and attnum is not None:
                self.fills[attnum] = change["fill"]
            elif kind == "rewritten":
                self.is_rewritten = True

    def _read(self, ordered: Sequence[Mapping[str, Any]]) -> None:
        point = max(((row["_commit_lsn"], row["_seq"]) for row in self.files), default=None)
        truncates = [(row["_commit_lsn"], row["_seq"]) for row in ordered if row["_change_type"] == "truncate"]
        if point is not None:
            self.is_emptied = any(place < point for place in truncates)
            truncates = [place for place in truncates if place > point]
        if self.layout is None:
            self.is_emptied = bool(truncates)
            return
        parts: list[tuple[tuple[int | None, ...], pa.Table]] = []
        for row in ordered:
            if row["_change_type"] == "changes":
                layout = read_layout(row["layout"])
                parts.append((layout.key_attnums, self._in_last_layout(layout, read_run(row["data"]))))
        groups: list[tuple[tuple[int | None, ...], list[pa.Table]]] = []
        for key, part in parts:
            if not groups or groups[-1][0] != key:
                groups.append((key, []))
            groups[-1][1].append(part)
        for place in truncates:
            if not groups:
                groups.append((self.layout.key_attnums, []))
            groups[0][1].append(self._truncate(place))
        for key, tables in groups:
            rows = pa.concat_tables(tables)
            order = np.lexsort((rows["_seq"].to_numpy(), rows["_commit_lsn"].to_numpy()))
            self.segments.append(Segment(self._names(key), rows.take(pa.array(order))))

    def _names(self, key: Sequence[int | None]) -> tuple[str, ...]:
        assert self.layout is not None
        if not key:
            raise SchemaChangedError(
                f"{self.table} has no key, so its rows cannot be told apart in the lake",
                remedy="add a primary key, or set REPLICA IDENTITY USING INDEX; then have its rows come again: "
                "pg-cdc resnapshot",
            )
        names = {column.attnum: column.name for column in self.layout.columns}
        if not set(key) <= names.keys():
            raise SchemaChangedError(
                f"{self.table}: a column of its key was dropped within a batch",
                remedy="have its rows come again: pg-cdc resnapshot",
            )
        return tuple(names[attnum] for attnum in key)

    def _in_last_layout(self, layout: MirroredLayout, run: pa.RecordBatch) -> pa.Table:
        assert self.layout is not None
        n, arrays, names = run.num_rows, [], {}
        for column in self.layout.columns:
            place = layout.place_of(column)
            if place is None:
                fill = self.fills.get(column.attnum or 0)
                texts = pa.nulls(n, pa.string()) if fill is None else pa.array([fill] * n, pa.string())
            else:
                texts = run.column(f"c{place}")
                names[layout.columns[place].name] = column.name
            arrays.append(_typed(self.table, column.codec, texts, run))
        changes = {name: run.column(name) for name in CHANGE_NAMES}
        if any(old != new for old, new in names.items()):
            lists = [[names[name] for name in row if name in names] for row in changes["_unchanged"].to_pylist()]
            changes["_unchanged"] = pa.array(lists, changes["_unchanged"].type)
        return pa.Table.from_arrays(
            [*arrays, *changes.values()], schema=pa.schema([*self.layout.arrow_schema(), *CHANGE_FIELDS])
        )

    def _truncate(self, place: _Place) -> pa.Table:
        assert self.layout is not None
        schema = pa.schema([*self.layout.arrow_schema(), *CHANGE_FIELDS])
        given = {"_change_type": ["truncate"], "_commit_lsn": [place[0]], "_seq": [place[1]], "_unchanged": [[]]}
        return pa.Table.from_arrays([pa.array(given.get(f.name, [None]), f.type) for f in schema], schema=schema)


def typed_columns(table: str, layout: MirroredLayout, run: pa.RecordBatch) -> pa.RecordBatch:
    """Return a run's rows with the columns of its own layout."""
    arrays = [_typed(table, column.codec, run.column(f"c{i}"), run) for i, column in enumerate(layout.columns)]
    return pa.RecordBatch.from_arrays(arrays, schema=layout.arrow_schema())


def _typed(table: str, codec: Codec, texts: pa.Array, run: pa.RecordBatch) -> pa.Array:
    try:
        return accept(f"{table}, ", "error", codec.column, codec.decode_text, field_of(texts))
    except RefusedValueError as refused:
        lsn, seq = (run.column(name)[refused.row].as_py() for name in ("_commit_lsn", "_seq"))
        raise refused.at(table, f"change {seq} of the commit with _commit_lsn {lsn}") from None
