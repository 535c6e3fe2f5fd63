"""What a batch does with a table, part by part, in each of its shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from runs import Change, Row, announced, batch_of, changed, layout, truncated, written

from pg_cdc_source.errors import SchemaChangedError
from pg_cdc_source.lake.final_rows import final_rows
from pg_cdc_source.lake.parts import Emptied, Files, Rekeyed, parts_of
from pg_cdc_source.lake.segment import Segment
from pg_cdc_source.lake.shape import Shape

T = layout([(1, "id", "int4"), (2, "v", "text")])
SOFT, LOG, VERSIONS = Shape(is_soft=True), Shape("append"), Shape("history")


def one(lsn: int, *values: str, kind: str = "insert", table: Any = T, seq: int = 1) -> list[Row]:
    return changed(table, Change(kind, (lsn, seq), values))


def parts(shape: Shape, *rows: Row | Sequence[Row], stands_still: bool = False) -> list[Any]:
    """Of each part what it is, with its LSN or its rows' first values."""
    flat = [row for some in rows for row in ([some] if isinstance(some, dict) else some)]
    batch = batch_of(flat, shape, stands_still=stands_still)
    found: list[Any] = []
    for part in parts_of(batch):
        if isinstance(part, Emptied):
            found.append(("emptied", part.lsn))
        elif isinstance(part, Files):
            found.append(("files", len(part.files), part.again))
        elif isinstance(part, Rekeyed):
            found.append(("rekeyed", *part.key))
        else:
            found.append([row["id"] for row in part.rows.to_pylist()])
    return found


@pytest.mark.parametrize("shape", [SOFT, VERSIONS])
def test_what_stands_before_a_truncate_is_done_where_rows_stay(shape: Shape) -> None:
    # A run may have rows on both sides.
    around = changed(T, Change("insert", (10, 1), ["1", "a"]), Change("insert", (10, 9), ["2", "b"]))
    assert parts(shape, around, truncated(T, (10, 5)), one(20, "3", "c"), truncated(T, (30, 1))) == [
        *([1], ("emptied", 10), [2, 3], ("emptied", 30)),
    ]
    assert parts(Shape(), around, truncated(T, (10, 5)), one(20, "3", "c")) == [[2, 3]]


@pytest.mark.parametrize("shape", [SOFT, VERSIONS])
def test_rows_that_come_again_are_there_when_those_of_before_are_gone(shape: Shape) -> None:
    again = {**truncated(T, (38, 0)), "_xid": None}
    rows = (one(10, "1", "a"), again, written(T, (39, 0)), written(T, (39, 0)), one(40, "2", "b"))
    # The key may be another one, and deleted rows may have that of others then.
    anew = [("emptied", 39), ("files", 2, True), *([("rekeyed", "id")] if shape == SOFT else []), [2]]
    assert parts(shape, *rows) == [[1], *anew]
    # A table that was set aside has not what came before.
    assert parts(shape, *rows, stands_still=True) == anew
    # But all that came behind these rows, also where it was truncated again.
    more = (truncated(T, (50, 5)), one(60, "3", "c"))
    assert parts(shape, *rows, *more, stands_still=True) == [*anew, ("emptied", 50), [3]]
    assert parts(shape, written(T, (39, 0)), one(40, "2", "b")) == [("files", 1, False), [2]]


def test_a_log_has_every_change_in_one_part_and_needs_no_key() -> None:
    keyless = layout([(1, "id", "int4")], key=())
    rows = (one(10, "1", table=keyless), truncated(keyless, (20, 1)), one(30, "2", table=keyless))
    assert parts(LOG, *rows) == [[1, 2, None]]
    assert parts(LOG, truncated(keyless, (20, 1)), written(keyless, (39, 0))) == [("files", 1, False), [None]]
    with pytest.raises(SchemaChangedError, match="has no key"):
        parts(VERSIONS, *rows)


def test_a_log_that_was_set_aside_has_all_that_came_behind_rows_that_come_again() -> None:
    again = {**truncated(T, (38, 0)), "_xid": None}
    rows = (one(10, "1", "a"), again, written(T, (39, 0)), one(40, "2", "b"), truncated(T, (50, 5)), one(60, "3", "c"))
    assert parts(LOG, *rows, stands_still=True) == [("files", 1, False), [2, 3, None, None]]
    assert parts(LOG, *rows[:1], *rows[4:], stands_still=True) == [[3, None]]


def test_a_log_has_what_columns_had_before_they_were_dropped_and_nothing_that_nobody_wrote() -> None:
    later = layout([(1, "id", "int4"), (3, "w", "text")])
    added = announced(later, (20, 1), {"change": "added", "attnum": 3, "name": "w", "fill": "f"})
    batch = batch_of([*one(10, "1", "a"), added, *one(20, "2", "c", table=later, seq=2)], LOG)
    (segment,) = parts_of(batch)
    assert isinstance(segment, Segment)
    rows = final_rows(segment, lambda _: pytest.fail("nothing is needed"), LOG).rows.to_pylist()
    assert [(row["id"], row["v"], row["w"], row["_commit_lsn"], row["_change_type"]) for row in rows] == [
        (1, "a", None, 10, "insert"),
        (2, None, "c", 20, "insert"),
    ]
    # Rows that are PostgreSQL's present ones have it.
    assert batch_of([added], VERSIONS).changes.fills == {3: "f"}


def test_a_column_that_is_added_and_dropped_within_a_batch_is_null_behind() -> None:
    with_w = layout([(1, "id", "int4"), (2, "v", "text"), (3, "w", "text")])
    added = announced(with_w, (20, 1), {"change": "added", "attnum": 3, "name": "w", "fill": "f"})
    rows = [added, *changed(with_w, Change("insert", (20, 2), ["1", "a", "b"])), *one(30, "2", "c")]
    (segment,) = batch_of(rows, VERSIONS).segments
    assert [(row["id"], row["w"]) for row in segment.rows.to_pylist()] == [(1, "b"), (2, None)]


def test_a_column_of_the_mirrors_own_is_refused() -> None:
    table = layout([(1, "id", "int4"), (2, "_Seq", "int4")])
    with pytest.raises(SchemaChangedError, match=r"has the column _Seq, which the mirror itself adds \(append\)"):
        parts(LOG, one(10, "1", "2", table=table))
    assert parts(VERSIONS, one(10, "1", "2", table=table)) == [[1]]


@pytest.mark.parametrize(
    ("format", "name", "mode", "fits"),
    [
        ("iceberg", "_Deleted", "append", False),
        ("iceberg", "__row_operation", "merge", False),
        ("iceberg", "__row_operation", "append", True),
        ("delta", "_metadata", "history", False),
        ("deltalake", "__delta_rs_source", "merge", False),
        ("deltalake", "_deleted", "merge", True),
    ],
)
def test_a_column_that_the_format_has_itself_is_refused(format: str, name: str, mode: str, fits: bool) -> None:
    rows = one(10, "1", "2", table=layout([(1, "id", "int4"), (2, name, "int4")]))
    if fits:
        assert parts(Shape(mode, format=format), rows)
        return
    with pytest.raises(SchemaChangedError, match=f"has the column {name}, a name that {format} uses itself"):
        parts(Shape(mode, format=format), rows)


@pytest.mark.parametrize(
    ("was", "wanted", "fits"),
    [
        ("text", "int4", False),
        ("float8", "int4", False),
        ("int8", "int4", False),
        ("int4", "int8", True),
    ],
)
def test_values_of_a_log_keep_their_types(was: str, wanted: str, fits: bool) -> None:
    tables = [layout([(1, "id", "int4"), (2, "v", type_name)]) for type_name in (was, wanted)]
    rows = [row for i, table in enumerate(tables) for row in one(10 * i + 10, "1", "42", table=table)]
    if fits:
        assert parts(LOG, rows)
        return
    with pytest.raises(SchemaChangedError, match=r"column v had the type .* within a batch"):
        parts(LOG, rows)
