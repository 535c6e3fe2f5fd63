"""What a batch has of one table: rows of several layouts in the last one, what is void, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from runs import Change, Row, announced, batch_of, changed, layout, truncated, written

from pg_cdc_source.errors import SchemaChangedError, UnrepresentableError
from pg_cdc_source.lake.segment import KIND, LSN, SEQ, UNCHANGED
from pg_cdc_source.lake.shape import Shape
from pg_cdc_source.lake.table_batch import TableBatch
from pg_cdc_source.protocol.layout import StreamedTable

ID, V = (1, "id", "int4"), (2, "v", "text")
T = layout([ID, V])


def of(*rows: Row | Sequence[Row]) -> TableBatch:
    return batch_of([row for some in rows for row in ([some] if isinstance(some, dict) else some)])


def one(table: StreamedTable, lsn: int, *values: str | None, kind: str = "insert", unchanged: Any = ()) -> list[Row]:
    return changed(table, Change(kind, (lsn, 1), values, unchanged))


def rows_of(batch: TableBatch) -> list[list[Any]]:
    """Of each segment, its rows without the change columns, behind its key and whether the table is emptied."""
    shown: list[list[Any]] = []
    for segment in batch.segments:
        names = [name for name in segment.rows.column_names if len(name) < 64]
        rows = [tuple(row.values()) for row in segment.rows.select(names).to_pylist()]
        shown.append([segment.key, segment.is_emptied, *rows])
    return shown


def refused(*rows: Row | Sequence[Row]) -> str:
    with pytest.raises(SchemaChangedError) as caught:
        of(*rows)
    assert "pg-cdc resnapshot" in str(caught.value)
    return str(caught.value)


def test_runs_become_rows_in_the_order_of_the_stream() -> None:
    first = changed(T, Change("insert", (10, 1), ["1", "a"]), Change("update", (10, 3), ["1", None], ["v"]))
    batch = of(one(T, 20, "2", None, kind="delete"), first)
    (segment,) = batch.segments
    assert segment.rows.to_pydict() == {
        "id": [1, 1, 2],
        "v": ["a", None, None],
        KIND: ["insert", "update", "delete"],
        LSN: [10, 10, 20],
        SEQ: [1, 3, 1],
        UNCHANGED: [[], ["v"], []],
    }
    assert (segment.key, batch.comes_whole, batch.files, batch.changes.fills) == (("id",), False, [], {})


def test_rows_of_layouts_that_change_are_in_the_last_one() -> None:
    added = layout([ID, V, (3, "n", "int4")])
    renamed = layout([ID, (2, "w", "text"), (3, "n", "int4")])
    dropped = layout([ID, (2, "w", "text"), (4, "v", "bool")])
    batch = of(
        one(T, 10, "1", "a"),
        announced(added, (20, 1), {"change": "added", "attnum": 3, "name": "n", "fill": "7"}),
        one(added, 20, "2", None, "8", kind="update", unchanged=["v"]),
        one(renamed, 30, "3", None, None, kind="update", unchanged=["n", "w"]),
        announced(dropped, (40, 1), {"change": "added", "attnum": 4, "name": "v", "fill": "t"}),
        one(dropped, 40, "4", "d", "f"),
    )
    assert rows_of(batch) == [[("id",), False, (1, "a", True), (2, None, True), (3, None, True), (4, "d", False)]]
    # The column that is called v in the end is another one than that which did not travel.
    assert batch.segments[0].rows[UNCHANGED].to_pylist() == [[], ["w"], [None, "w"], []]
    assert batch.changes.fills == {3: "7", 4: "t"}


def test_rows_of_before_a_column_that_came_and_went_have_what_it_gave_them() -> None:
    wide = layout([ID, V, (3, "n", "int4")])
    rows = [
        *one(T, 10, "1", "a"),
        announced(wide, (20, 1), {"change": "added", "attnum": 3, "name": "n", "fill": "7"}),
        *one(wide, 20, "2", "b", "8"),
        announced(T, (30, 1), {"change": "dropped", "attnum": 3, "name": "n"}),
        *one(T, 30, "3", "c"),
    ]
    batch = batch_of(rows, Shape("history"))
    assert rows_of(batch) == [[("id",), False, (1, "a", 7), (2, "b", 8), (3, "c", None)]]
    assert batch.changes.fills == {3: "7"}
    # What a row has behind the drop depends on the row that was there: to a merge, that is another segment.
    additive = batch_of(rows, Shape(on_schema_change="additive"))
    assert rows_of(additive) == [[("id",), False, (1, "a", 7), (2, "b", 8)], [("id",), False, (3, "c")]]
    assert additive.layout == batch.layout
    with pytest.raises(SchemaChangedError, match="column n was changed right behind the rows that came anew"):
        batch_of([written(T, (9, 0)), *rows], Shape("history"))


OTHERS = {
    "added anew": layout([ID, V, (4, "n", "int4")]),
    "added in other letters": layout([ID, V, (4, "N", "int4")]),
    "renamed to it": layout([ID, (2, "n", "text")]),
}


@pytest.mark.parametrize("mode", ["history", "append", "additive"])
@pytest.mark.parametrize("other", OTHERS)
def test_values_of_a_dropped_column_are_not_lost_to_another_one_of_its_name(other: str, mode: str) -> None:
    shape = Shape(on_schema_change="additive") if mode == "additive" else Shape(mode)
    wide, then = layout([ID, V, (3, "n", "int4")]), OTHERS[other]
    last = one(then, 40, *["4", "d", "9"][: len(then.codecs)])
    rows = [*one(T, 10, "1", "a"), *one(wide, 20, "2", "b", "77"), *one(T, 30, "3", "c"), *last]
    if mode == "append" and other == "added anew":
        # A log goes on in the same column.
        assert [row["n"] for row in batch_of(rows, shape).segments[0].rows.to_pylist()] == [*(None, 77, None, 9)]
        return
    with pytest.raises(SchemaChangedError, match="column n was dropped, and another one has its name, within a batch"):
        batch_of(rows, shape)
    # Behind rows that come anew, nobody takes them.
    again = batch_of([*rows, truncated(then, (50, 1)), *last], shape, stands_still=True)
    assert rows_of(again) == []


def test_values_of_a_log_are_as_postgresql_widens_them() -> None:
    rows = [
        *one(layout([ID, (2, "x", "float4")]), 10, "1", "0.1"),
        *one(layout([ID, (2, "x", "float8")]), 20, "2", "0.1"),
    ]
    values = [row["x"] for row in batch_of(rows, Shape("append")).segments[0].rows.to_pylist()]
    assert values == [0.10000000149011612, 0.1]


def test_a_column_that_is_not_known_by_its_number_is_known_by_its_name() -> None:
    """PostgreSQL's catalog may be ahead of the change; then all numbers may be missing."""
    later = layout([(0, "id", "int4"), (0, "v", "text"), (0, "w", "text")])
    batch = of(one(T, 10, "1", "a"), one(later, 20, "2", "b", "c"))
    assert rows_of(batch) == [[("id",), False, (1, "a", None), (2, "b", "c")]]


def test_rows_with_another_key_are_another_segment() -> None:
    by_v = layout([ID, V], ["v"])
    named = layout([(1, "key", "int4"), V], ["key"])
    batch = of(one(T, 10, "1", "a"), one(by_v, 20, "2", "b"), one(named, 30, "3", "c"), one(named, 40, "4", "d"))
    assert rows_of(batch) == [
        [("key",), False, (1, "a")],
        [("v",), False, (2, "b")],
        [("key",), False, (3, "c"), (4, "d")],
    ]
    both = layout([ID, V], ["v", "id"])
    assert [segment.key for segment in of(one(both, 10, "1", "a")).segments] == [("id", "v")]


# --- what is void -----------------------------------------------------------------------------------------------------


def test_rows_before_the_last_truncate_are_left_out() -> None:
    batch = of(one(T, 10, "1", "a"), truncated(T, (20, 1)), one(T, 30, "2", "b"), truncated(T, (40, 1)))
    assert (rows_of(batch), batch.is_emptied, batch.comes_whole) == ([], True, True)
    # One run may have rows of both sides.
    run = changed(T, Change("insert", (10, 1), ["1", "a"]), Change("insert", (30, 2), ["2", "b"]))
    batch = of(run, truncated(T, (30, 1)), one(T, 40, "3", "c"))
    assert rows_of(batch) == [[("id",), True, (2, "b"), (3, "c")]]
    assert (batch.is_emptied, batch.comes_whole) == (False, True)


def test_rows_with_a_key_of_before_a_truncate_are_left_out() -> None:
    by_v = layout([ID, V], ["v"])
    batch = of(one(T, 10, "1", "a"), one(by_v, 20, "2", "void"), truncated(by_v, (30, 1)), one(by_v, 40, "3", "c"))
    assert rows_of(batch) == [[("v",), True, (3, "c")]]
    # A key that is gone matters to nobody any more.
    without = layout([V], ["v"])
    batch = of(one(T, 10, "1", "a"), truncated(without, (30, 1)), one(without, 40, "c"))
    assert rows_of(batch) == [[("v",), True, ("c",)]]


def test_rows_before_those_of_a_snapshot_are_left_out() -> None:
    """They are of a table that was dropped: one of the same name has come."""
    other = layout([(1, "v", "text"), (2, "id", "int4")], oid=2)
    batch = of(one(T, 10, "1", "a"), truncated(other, (18, 0)), written(other, (19, 0)), one(other, 20, "b", "2"))
    assert rows_of(batch) == [[("id",), False, ("b", 2)]]
    assert ([f.layout_text for f in batch.files], batch.is_emptied, batch.comes_whole) == (
        [written(other, (19, 0))["layout"]],
        True,
        True,
    )


def test_rows_of_a_first_snapshot_do_not_empty_the_table() -> None:
    batch = of(one(T, 10, "1", "a"), written(T, (19, 0)), written(T, (19, 0)), one(T, 20, "2", "b"))
    assert (len(batch.files), batch.is_emptied, batch.comes_whole) == (2, False, False)
    assert rows_of(batch) == [[("id",), False, (2, "b")]]


def test_a_snapshot_is_void_behind_which_the_table_was_truncated() -> None:
    batch = of(truncated(T, (18, 0)), written(T, (19, 0)), one(T, 20, "1", "a"), truncated(T, (30, 1)))
    assert (batch.files, rows_of(batch), batch.is_emptied, batch.comes_whole) == ([], [], True, True)


def test_a_rewritten_table_is_not_whole_unless_its_rows_came_behind() -> None:
    rewritten = announced(T, (20, 1), {"change": "rewritten"})
    row = one(T, 20, "1", "a")
    for behind, expected in (
        ([], (True, False)),
        ([truncated(T, (30, 1))], (False, True)),
        ([truncated(T, (30, 0)), written(T, (31, 0))], (False, True)),
    ):
        batch = of(rewritten, row, behind)
        assert (batch.changes.is_rewritten, batch.comes_whole) == expected
    batch = of(truncated(T, (8, 0)), written(T, (9, 0)), rewritten, row)
    assert (batch.changes.is_rewritten, batch.comes_whole) == (True, False)


def test_what_is_said_right_behind_a_snapshot_that_has_no_rows_is_of_that_snapshot() -> None:
    emptied = {**truncated(T, (18, 0)), "_xid": None}
    full = layout([ID, V], identity="f")
    for change in ({"change": "rewritten"}, {"change": "renamed", "name": "public.t", "was": "public.s"},
                   {"change": "rekeyed", "name": "id", "was": "v"}):  # fmt: skip
        batch = of(emptied, announced(full, (19, 0), change))
        assert (batch.changes.is_rewritten, batch.changes.is_rekeyed, batch.comes_whole) == (False, False, True)
    # That rows are missing is said there, too.
    with pytest.raises(SchemaChangedError, match="no rows"):
        of(emptied, announced(T, (19, 0), {"change": "gap", "why": "no rows", "remedy": "wait"}))


@pytest.mark.parametrize("stands_still", [False, True])
@pytest.mark.parametrize(
    "shape", [Shape(), Shape("history"), Shape("append"), Shape(is_soft=True)], ids=lambda shape: shape.text
)
def test_a_gap_stays_until_a_tables_rows_come_again(shape: Shape, stands_still: bool) -> None:
    gap = announced(T, (20, 1), {"change": "gap", "why": "changes may be missing", "remedy": "wait"})
    # They may be missing behind a TRUNCATE that comes after it.
    with pytest.raises(SchemaChangedError, match="changes may be missing"):
        batch_of([gap, truncated(T, (30, 1))], shape, stands_still=stands_still)
    again = {**truncated(T, (30, 0)), "_xid": None}
    batch = batch_of([gap, again, written(T, (31, 0))], shape, stands_still=stands_still)
    assert batch.has_come_again


def test_values_of_before_a_table_was_rewritten_need_not_fit_its_types() -> None:
    lists = layout([ID, (2, "v", "int4[]")])
    rewritten = announced(lists, (20, 1), {"change": "rewritten"})
    batch = of(one(T, 10, "1", "42"), rewritten, one(lists, 20, "1", "{7}"))
    assert (batch.changes.is_rewritten, batch.segments) == (True, [])


def test_a_table_that_is_gone_has_only_its_name() -> None:
    gone = layout([], [], oid=0, identity="")
    batch = of(announced(gone, (30, 0), {"change": "left"}))
    assert (batch.layout, batch.segments, batch.comes_whole) == (None, [], False)
    batch = of(truncated(gone, (30, 0)))
    assert (batch.layout, batch.segments, batch.is_emptied) == (None, [], True)
    batch = of(one(T, 10, "1", "a"), announced(gone, (30, 0), {"change": "left"}))
    assert rows_of(batch) == [[("id",), False, (1, "a")]]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_table_without_a_key_is_refused_when_it_changes() -> None:
    keyless = layout([ID, V], [])
    assert "public.t has no key" in refused(one(keyless, 10, "1", "a"))
    assert "public.t has no key" in refused(one(T, 5, "1", "a"), one(keyless, 10, "1", "a"))
    assert of(written(keyless, (9, 0))).segments == []
    assert of(truncated(keyless, (10, 1))).is_emptied


def test_a_key_whose_column_is_dropped_within_the_batch_is_refused() -> None:
    assert "a column of its key was dropped" in refused(one(T, 10, "1", "a"), one(layout([V], ["v"]), 20, "b"))


def test_a_key_of_lists_is_refused() -> None:
    assert "its key has the column id (int4[])" in refused(one(layout([(1, "id", "int4[]"), V]), 10, "{1}", "a"))


def test_columns_whose_names_differ_in_case_alone_are_refused() -> None:
    text = refused(one(layout([ID, V, (3, "V", "text")]), 10, "1", "a", "b"))
    assert "has columns v and V" in text


def test_a_renamed_table_is_refused_until_its_rows_come() -> None:
    renamed = announced(T, (20, 1), {"change": "renamed", "name": "public.t", "was": "public.s"})
    assert "public.t was called public.s before" in refused(renamed, one(T, 20, "1", "a"))
    assert of(renamed, one(T, 20, "1", "a"), truncated(T, (38, 0)), written(T, (39, 0))).comes_whole
    # A column that is renamed is not the table.
    assert of(announced(T, (20, 1), {"change": "renamed", "attnum": 2, "name": "v", "was": "w"})).layout is not None


@pytest.mark.parametrize(
    ("identity", "was", "name", "fits"),
    [("f", "id", "v", False), ("f", "", "id", False), ("f", "id", "id", True), ("d", "v", "id", True)],
)
def test_another_key_under_full_is_refused_until_rows_come(identity: str, was: str, name: str, fits: bool) -> None:
    table = layout([ID, V], identity=identity)
    rows = announced(table, (20, 1), {"change": "rekeyed", "name": name, "was": was}), one(table, 20, "1", "a")
    if fits:
        assert rows_of(of(*rows)) == [[("id",), False, (1, "a")]]
    else:
        assert "got another key under REPLICA IDENTITY FULL" in refused(*rows)
    assert of(*rows, truncated(table, (38, 0)), written(table, (39, 0))).comes_whole


def test_a_key_whose_columns_were_renamed_is_the_same_key() -> None:
    table = layout([(1, "Id, 2", "int4"), V], key=("Id, 2",), identity="f")
    renamed = {"change": "renamed", "attnum": 1, "name": "Id, 2", "was": "id"}
    rekeyed = {"change": "rekeyed", "attnum": None, "name": '"Id, 2"', "was": "id"}
    assert rows_of(of(announced(table, (20, 1), renamed, rekeyed), one(table, 20, "1", "a")))
    other = {**renamed, "attnum": 2, "was": "k"}
    assert "got another key" in refused(announced(table, (20, 1), other, rekeyed), one(table, 20, "1", "a"))


def test_rows_of_two_tables_under_one_name_are_refused() -> None:
    assert "not the table that had the name" in refused(one(T, 10, "1", "a"), one(layout([ID, V], oid=2), 20, "1", "b"))


@pytest.mark.parametrize(
    ("columns", "change", "fits"),
    [
        ([ID, V], {}, True),
        ([ID], {"change": "dropped", "attnum": 2, "name": "v"}, True),
        ([ID, V, (3, "n", "int4")], {"change": "added", "attnum": 3, "name": "n", "fill": None}, True),
        ([V, ID], {}, True),
        ([ID, V, (3, "n", "int4")], {"change": "added", "attnum": 3, "name": "n", "fill": "7"}, False),
        ([ID, (2, "w", "text")], {"change": "renamed", "attnum": 2, "name": "w", "was": "v"}, False),
        ([ID, (3, "v", "text")], {"change": "added", "attnum": 3, "name": "v", "fill": None}, False),
        ([ID, (2, "v", "bool")], {"change": "retyped", "attnum": 2, "name": "v", "was": "text"}, False),
    ],
)
def test_files_have_to_have_the_columns_of_the_table(columns: Any, change: dict[str, Any], fits: bool) -> None:
    last = layout(columns)
    values = ["1" if kind == "int4" else "t" for _, _, kind in columns]
    rows = [written(T, (9, 0)), announced(last, (20, 1), *([change] if change else [])), *one(last, 20, *values)]
    if fits:
        assert len(of(*rows).files) == 1
    else:
        assert "was changed right behind the rows that came anew" in refused(*rows)


def test_files_have_to_have_the_values_of_columns_that_stay_or_are_kept() -> None:
    """One that was dropped before the rows were read: what says so may come with a later batch."""
    file, gone = written(T, (9, 0), unsent=["v"]), layout([ID])
    assert "column v was changed right behind the rows that came anew" in refused(file)
    dropped = [file, announced(gone, (20, 1), {"change": "dropped", "attnum": 2, "name": "v"}), *one(gone, 20, "1")]
    assert len(of(*dropped).files) == 1
    with pytest.raises(SchemaChangedError, match="column v was changed right behind the rows that came anew"):
        batch_of(dropped, Shape("history"))
    # A log's rows say so themselves.
    assert len(batch_of(dropped, Shape("append")).files) == 1


def test_a_value_that_its_type_cannot_hold_is_refused_with_its_place() -> None:
    table = layout([ID, (2, "d", "date")])
    rows = changed(table, Change("insert", (10, 1), ["1", "2024-01-01"]), Change("insert", (10, 2), ["2", "infinity"]))
    with pytest.raises(UnrepresentableError) as caught:
        of(rows)
    text = str(caught.value)
    assert "public.t, column d (date), the change with _commit_lsn 10, _seq 2: " in text
    assert "pg-cdc resnapshot" in text
    assert "asString=schema.table.column" in text


def test_values_that_a_row_has_only_under_its_old_key_are_told() -> None:
    gone = Change("delete", (10, 1), ["1", None])
    assert of(changed(T, gone, Change("insert", (10, 2), ["2", None], ["v"]))).has_moved_values
    assert not of(changed(T, gone, Change("insert", (10, 2), ["2", "a"]))).has_moved_values
    assert not of(changed(T, Change("update", (10, 1), ["1", None], ["v"]))).has_moved_values
