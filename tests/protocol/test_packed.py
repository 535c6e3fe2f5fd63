"""Changes are packed into runs, and come out of them as they went in."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import Change, layout, packed
from trials import examples

from pg_cdc_source.offsets import Lsn
from pg_cdc_source.protocol.layout import CHANGE_FIELDS, PACKED_SCHEMA, RUNS_SCHEMA, StreamedTable
from pg_cdc_source.protocol.packed import layout_text, read_run, runs_of
from pg_cdc_source.values.arrow import one_batch

COLUMNS = [(i + 1, f"column {i}", "text") for i in range(3)]
# Layouts of two tables: one of them with another name, other columns, another key, none at all.
TABLES = [
    layout(COLUMNS, ["column 0"]),
    layout(COLUMNS, ["column 0"], name="public.renamed"),
    layout(COLUMNS[:2], ["column 0"]),
    layout(COLUMNS, ["column 1"]),
    layout(COLUMNS, ["column 0"], oid=2, name="public.u"),
    layout([], [], oid=3, name="public.empty"),
]
texts = st.one_of(st.none(), st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=5))


@st.composite
def streams(draw: st.DrawFn) -> list[tuple[StreamedTable, Change]]:
    found = []
    for seq in range(draw(st.integers(1, 12))):
        table = draw(st.sampled_from(TABLES))
        values = st.lists(texts, min_size=len(table.codecs), max_size=len(table.codecs))
        unchanged = draw(st.lists(st.sampled_from([codec.column.name for codec in table.codecs] or [""]), max_size=2))
        change = Change("update", (seq // 3 + 1, seq), draw(values), unchanged, draw(st.one_of(st.none(), values)))
        found.append((table, change))
    return found


def batch_of(stream: list[tuple[StreamedTable, Change]]) -> pa.RecordBatch:
    """One batch, as chunks become one that a task joins."""
    return one_batch([packed(table, [change]) for table, change in stream])


def read(runs: pa.RecordBatch) -> list[tuple[str, str, Change]]:
    """Each change with its table and layout."""
    found = []
    for row in runs.to_pylist():
        run = read_run(row["data"])
        run.validate(full=True)
        count = len(json.loads(row["layout"])["columns"])
        assert row["rows"] == run.num_rows
        for change in run.to_pylist():
            old = [change[f"b{i}"] for i in range(count)] if change.get("has_old") else None
            values = [change[f"c{i}"] for i in range(count)]
            place = change["_commit_lsn"], change["_seq"]
            assert change["_xid"] == change["_commit_lsn"] + 5
            found.append((row["_table"], row["layout"], Change("update", place, values, change["_unchanged"], old)))
    return found


@examples(150)
@given(streams())
def test_changes_come_out_as_they_went_in_and_in_order(stream: list[tuple[StreamedTable, Change]]) -> None:
    """No run has rows between another's of its table: whoever applies them one by one applies changes in order."""
    runs = runs_of(batch_of(stream))
    runs.validate(full=True)
    assert runs.schema == RUNS_SCHEMA
    found = read(runs)
    by_place = sorted(found, key=lambda one: one[2].place)
    assert by_place == [(table.name, layout_text(table), change) for table, change in stream]
    places = [(row["_commit_lsn"], row["_seq"]) for row in runs.to_pylist()]
    assert places == sorted(places)
    for name in {table.name for table in TABLES}:
        of_table = [change.place for table, _, change in found if table == name]
        assert of_table == sorted(of_table)
        # As few as that takes.
        layouts = [layout_text(table) for table, _ in stream if table.name == name]
        texts = [row["layout"] for row in runs.to_pylist() if row["_table"] == name]
        assert texts == [text for text, _ in groupby(layouts)]


def test_old_rows_are_there_where_a_change_has_one() -> None:
    table = TABLES[0]
    plain, old = Change("insert", (1, 1), ["1", "a", None]), ["1", None, "o"]
    (run,) = runs_of(packed(table, [plain])).to_pylist()
    names = [field.name for field in CHANGE_FIELDS]
    assert read_run(run["data"]).schema.names == ["c0", "c1", "c2", *names]
    (run,) = runs_of(packed(table, [plain, Change("delete", (1, 2), old, (), old)])).to_pylist()
    found = read_run(run["data"])
    assert found.schema.names == ["c0", "c1", "c2", "b0", "b1", "b2", "has_old", *names]
    assert found.select(["b0", "b1", "b2", "has_old"]).to_pylist() == [
        {"b0": None, "b1": None, "b2": None, "has_old": False},
        {"b0": "1", "b1": None, "b2": "o", "has_old": True},
    ]


def test_a_run_says_where_it_ends_and_what_it_is() -> None:
    changes = [Change("insert", (1, 1), ["1", "a", None]), Change("insert", (2, 3), ["2", "b", None])]
    (run,) = runs_of(packed(TABLES[0], changes)).to_pylist()
    shown: dict[str, Any] = {name: run[name] for name in ("_table", "_change_type", "_commit_lsn", "_seq", "_xid")}
    assert shown == {"_table": "public.t", "_change_type": "changes", "_commit_lsn": 2, "_seq": 3, "_xid": 7}
    assert (run["rows"], run["after"], run["key"]) == (2, None, None)
    snapshot = packed(TABLES[0], [Change("snapshot", (2, 0), ["1", "a", None])])
    assert [row["_change_type"] for row in runs_of(snapshot).to_pylist()] == ["snapshot"]
    assert [row["after"] for row in runs_of(snapshot, Lsn(99)).to_pylist()] == ["99"]


def test_old_rows_and_the_changes_behind_them_are_not_of_one_run() -> None:
    """As where a table joins before the stream's position, and its rows are read again after a crash."""
    table = TABLES[0]
    olds = [Change("snapshot", (9, 0), [key, "old", None]) for key in "12"]
    changes = [Change("update", (20, 1), ["1", "new", None]), Change("delete", (20, 2), ["2", None, None])]
    runs = runs_of(packed(table, [*olds, *changes])).to_pylist()
    told = [tuple(run[name] for name in ("_change_type", "_commit_lsn", "_seq", "rows")) for run in runs]
    assert told == [("snapshot", 9, 0, 2), ("changes", 20, 2, 2)]


def test_a_run_ends_where_its_table_is_truncated() -> None:
    rows = [
        packed(TABLES[0], [Change("insert", (1, 1), ["1", None, None])]),
        packed(TABLES[4], [Change("insert", (1, 2), ["1", None, None])]),
        pa.RecordBatch.from_pylist(
            [{"_table": "public.t", "_change_type": "truncate", "_commit_lsn": 1, "_seq": 3}], PACKED_SCHEMA
        ),
        packed(TABLES[0], [Change("insert", (1, 4), ["2", None, None])]),
        packed(TABLES[4], [Change("insert", (1, 5), ["2", None, None])]),
    ]
    found = runs_of(one_batch(rows)).to_pylist()
    assert [(run["_table"], run["_change_type"], run["_seq"], run["rows"]) for run in found] == [
        ("public.t", "changes", 1, 1),
        ("public.t", "truncate", 3, 1),
        ("public.t", "changes", 4, 1),
        ("public.u", "changes", 5, 2),
    ]


@pytest.mark.parametrize("layouts", [[TABLES[0]], []])
def test_other_rows_stay_as_they_are(layouts: list[StreamedTable]) -> None:
    """A row that says a layout is not of a run of that layout."""
    said = layout_text(TABLES[0])
    row = {"_table": "public.t", "_change_type": "schema", "_commit_lsn": 1, "_seq": 1, "after": "{}", "layout": said}
    message = {"_change_type": "message", "_commit_lsn": 1, "_seq": 9, "key": "p", "after": "{}"}
    batch = pa.RecordBatch.from_pylist([row, message], PACKED_SCHEMA)
    for table in layouts:
        batch = one_batch([batch, packed(table, [Change("insert", (2, 1), ["1", None, None])])])
    found = [{k: v for k, v in row.items() if v is not None} for row in runs_of(batch).to_pylist()]
    assert found[:2] == [{**row, "rows": 1}, {**message, "rows": 1}]
    assert [row["_change_type"] for row in found[2:]] == ["changes"] * len(layouts)
