"""The envelope by columns: ``envelope=arrow``. A row is a run of one table's changes as Arrow IPC.

Up to the task that hands rows to Spark, a change is a row of :data:`PACKED_SCHEMA`, so that batches are cut between
changes as in every other stream: its values are one list, PostgreSQL's texts in the order of the layout's columns. The
task puts the changes of each table together, column by column (:func:`runs_of`), because a row costs Spark much and a
value in Arrow little. Texts become values of Spark's types where they are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.offsets import Lsn
from pg_cdc_source.protocol.ipc import from_ipc, to_ipc
from pg_cdc_source.protocol.layout import CHANGE_FIELDS, PACKED_SCHEMA, RUNS_SCHEMA, StreamedTable
from pg_cdc_source.values import registry
from pg_cdc_source.values.arrow import from_numpy, from_texts, null, to_numpy
from pg_cdc_source.values.ndarrays import Flags, Ints

# What ``_change_type`` says of runs; a snapshot's rows say the same. Other rows are as in the JSON envelope.
CHANGES, SNAPSHOT = "changes", "snapshot"

_CHANGE_NAMES = tuple(field.name for field in CHANGE_FIELDS)


# --- a change as a row -----------------------------------------------------------------------------------------------


def packed_rows(
    table: StreamedTable,
    changes: Sequence[pa.Array],
    texts: Sequence[pa.Array],
    before: Sequence[pa.Array] | None = None,
    has_old: Flags | None = None,
) -> pa.RecordBatch:
    """Return rows of ``PACKED_SCHEMA``: ``texts`` are those of the table's columns, ``before`` those of old rows.

    A value that did not travel is null in ``texts`` and listed in ``_unchanged``. ``has_old`` says which rows have an
    old one.
    """
    n = len(changes[0])
    zeros = np.zeros(n, np.int32)
    layout = pa.DictionaryArray.from_arrays(from_numpy(zeros), from_texts([layout_text(table)]))
    given = dict(zip(_CHANGE_NAMES, changes, strict=True))
    given["_table"] = from_texts([table.name]).take(from_numpy(zeros))
    given["layout"] = layout
    given["values"] = _interleaved(texts, n)
    if before is not None and has_old is not None:
        given["before"] = pc.if_else(from_numpy(has_old), _interleaved(before, n), null(pa.list_(pa.string())))
    columns = [given[field.name] if field.name in given else pa.nulls(n, field.type) for field in PACKED_SCHEMA]
    return pa.RecordBatch.from_arrays(columns, schema=PACKED_SCHEMA)


def _interleaved(texts: Sequence[pa.Array], n: int) -> pa.ListArray:
    """Return a list for each row with its value of each column."""
    k = len(texts)
    offsets = np.arange(0, n * k + 1, k, dtype=np.int32) if k else np.zeros(n + 1, np.int32)
    order = np.arange(n * k).reshape(k, n).T.ravel()
    items = pa.concat_arrays(texts).take(from_numpy(order)) if k else pa.nulls(0, pa.string())
    return pa.ListArray.from_arrays(from_numpy(offsets), items)


def layout_text(table: StreamedTable) -> str:
    """Return what a run says of its columns, as JSON: names, numbers and types, and which tell rows apart."""
    columns = [
        {
            "name": codec.column.name,
            "attnum": codec.column.attnum or None,
            "type": codec.column.type_name,
            "type_oid": type_oid,
            "typmod": typmod,
            "catalog": registry.plain_type(codec.column.type),
            "nullable": not codec.column.not_null,
            "key": codec.column.name in table.key,
        }
        for codec, (type_oid, typmod) in zip(table.codecs, table.type_oids, strict=True)
    ]
    what = {"oid": table.oid, "identity": table.identity, "columns": columns}
    return json.dumps(what, ensure_ascii=False, separators=(",", ":"))


# --- a run as a row --------------------------------------------------------------------------------------------------


def runs_of(batch: pa.RecordBatch, through: Lsn | None = None) -> pa.RecordBatch:
    """Return rows of ``RUNS_SCHEMA`` for rows of ``PACKED_SCHEMA``: runs of each table and layout, and other rows.

    ``through``: rows of a snapshot may be as of a later point, up to this one, which ``after`` then has as a number.
    ``_commit_lsn``, ``_seq``, ``_commit_ts`` and ``_xid`` are those of the run's last change.
    """
    layouts = batch.column("layout")
    codes = np.asarray(pc.fill_null(layouts.indices, -1).to_numpy(zero_copy_only=False))
    # A row that says a layout is not of a run of that layout.
    codes = np.where(to_numpy(batch.column("values").is_valid()), codes, -1)
    others = batch.take(from_numpy(np.flatnonzero(codes == -1))).drop_columns(["values", "before"])
    found: list[Mapping[str, Any]] = [{**row, "rows": 1, "data": None} for row in others.to_pylist()]
    is_snapshot = to_numpy(pc.equal(batch.column("_change_type"), SNAPSHOT))
    for rows in _runs(batch.column("_table"), codes, is_snapshot):
        part = batch if len(rows) == batch.num_rows else batch.take(from_numpy(rows))
        run = _run(part, layouts.dictionary[codes[rows[0]]].as_py())
        found.append(run if through is None else {**run, "after": str(int(through))})
    found.sort(key=lambda row: (row["_commit_lsn"], row["_seq"]))
    columns = [pa.array([row[field.name] for row in found], field.type) for field in RUNS_SCHEMA]
    return pa.RecordBatch.from_arrays(columns, schema=RUNS_SCHEMA)


def _runs(tables: pa.Array, codes: Ints, is_snapshot: Flags) -> Iterator[Ints]:
    """Return the rows of each run: those of a table that follow each other there, have one layout, and are of one kind.

    A row whose code is -1 is of no run, and ends that of its table: what stands before a truncate row is void.
    """
    of_table = to_numpy(pc.fill_null(tables.dictionary_encode().indices, -1))
    rows = np.argsort(of_table, kind="stable")
    tells = [values[rows] for values in (of_table, codes, is_snapshot)]
    is_first = np.ones(len(rows), np.bool_)
    is_first[1:] = np.logical_or.reduce([values[1:] != values[:-1] for values in tells])
    for run in np.split(rows, np.flatnonzero(is_first)[1:]):
        if len(run) and codes[run[0]] != -1:
            yield run


def _run(part: pa.RecordBatch, layout: str) -> Mapping[str, Any]:
    count = len(json.loads(layout)["columns"])
    arrays, names = _columns(part.column("values"), count), [f"c{i}" for i in range(count)]
    olds = part.column("before")
    if olds.null_count < len(olds):
        # A row without an old one has no items, so its places are filled first.
        has_old = to_numpy(olds.is_valid())
        arrays += _columns(olds, count, has_old)
        names += [f"b{i}" for i in range(count)]
        arrays.append(from_numpy(has_old))
        names.append("has_old")
    arrays += [part.column(name) for name in _CHANGE_NAMES]
    names += _CHANGE_NAMES
    run = pa.RecordBatch.from_arrays(arrays, names=names)
    last = {name: part.column(name)[-1].as_py() for name in ("_table", "_commit_lsn", "_seq", "_commit_ts", "_xid")}
    is_snapshot = part.column("_change_type")[0].as_py() == SNAPSHOT
    return {
        **last,
        "_change_type": SNAPSHOT if is_snapshot else CHANGES,
        "rows": part.num_rows,
        "layout": layout,
        "data": to_ipc(run),
        "key": None,
        "after": None,
    }


def _columns(lists: pa.ListArray, count: int, has_items: Flags | None = None) -> list[pa.Array]:
    """Return the columns of :func:`_interleaved`."""
    items = lists.flatten()
    n = len(lists)
    if has_items is None:
        return [items.take(from_numpy(np.arange(i, n * count, count))) for i in range(count)]
    first: Ints = (np.cumsum(has_items) - 1) * count
    # Not some item in the place of none: it may be large, and be there as often as there are rows.
    return [items.take(pa.array(first + i, mask=~has_items)) for i in range(count)]


def read_run(data: bytes) -> pa.RecordBatch:
    """Return a run's changes: ``c0``, ``c1``, … are the texts of the layout's columns, behind them the change columns.

    Where any change has an old row, there are ``b0``, ``b1``, … and ``has_old`` as well.
    """
    return from_ipc(data)
