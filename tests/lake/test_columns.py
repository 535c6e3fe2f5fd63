"""What a run says of its columns, and what a lake makes of their types."""

from __future__ import annotations

import pyarrow as pa
import pytest
from runs import layout

from pg_cdc_source.errors import UnrepresentableError
from pg_cdc_source.lake.columns import as_wanted, is_storable, read_layout
from pg_cdc_source.lake.shape import Shape
from pg_cdc_source.protocol.packed import layout_text
from pg_cdc_source.values.arrow import from_texts

TEXT = layout_text(
    layout([(1, "id", "int4"), (0, "n", "numeric"), (5, 'a "b"', "int4[]")], ["id"], oid=77, identity="f")
)


def test_a_layout_is_read_as_it_was_said() -> None:
    found = read_layout(TEXT)
    assert (found.oid, found.identity, found.key) == (77, "f", ("id",))
    assert [(column.attnum, column.name, column.key) for column in found.columns] == [
        (1, "id", True),
        (None, "n", False),
        (5, 'a "b"', False),
    ]
    assert found.arrow_schema() == pa.schema(
        [("id", pa.int32()), ("n", pa.decimal128(10, 2)), ('a "b"', pa.list_(pa.field("element", pa.int32())))]
    )


def test_columns_are_found_by_number_and_without_one_by_name() -> None:
    ours = read_layout(layout_text(layout([(1, "id", "int4"), (2, "v", "text"), (0, "w", "text")])))
    theirs = read_layout(
        layout_text(layout([(2, "id", "int4"), (3, "v", "text"), (0, "v", "text"), (4, "w", "text"), (0, "x", "text")]))
    )
    assert [ours.place_of(column) for column in theirs.columns] == [1, None, 1, 2, None]


@pytest.mark.parametrize(
    ("found", "storable"),
    [
        (pa.int32(), True),
        (pa.timestamp("us"), True),
        (pa.decimal128(38, 2), True),
        (pa.duration("us"), False),
        (pa.month_day_nano_interval(), False),
        (pa.time64("us"), False),
        (pa.list_(pa.int32()), True),
        (pa.list_(pa.time64("us")), False),
        (pa.map_(pa.string(), pa.string()), True),
        (pa.struct([("a", pa.int32()), ("b", pa.list_(pa.duration("us")))]), False),
    ],
)
def test_types_that_a_lake_has(found: pa.DataType, storable: bool) -> None:
    assert is_storable(found) == storable


def test_texts_become_values() -> None:
    numbers, amounts, lists = read_layout(TEXT).columns
    assert (numbers.value_of("7"), str(amounts.value_of("1.50")), lists.value_of("{1,NULL}")) == (7, "1.50", [1, None])
    assert numbers.values_of("t", pa.array([None, "8"], pa.string()), str).to_pylist() == [None, 8]


def test_a_value_that_its_type_cannot_hold_is_refused() -> None:
    (day,) = read_layout(layout_text(layout([(1, "d", "date")], []))).columns
    with pytest.raises(UnrepresentableError) as caught:
        day.value_of("infinity")
    assert "column d (date), rows from before it was added: " in str(caught.value)
    with pytest.raises(UnrepresentableError) as caught:
        day.values_of("public.t", from_texts(["2024-01-01", "-infinity"]), lambda row: f"row {row}")
    assert "public.t, column d (date), row 1: " in str(caught.value)


def test_a_column_that_is_not_there_is_named(caplog: pytest.LogCaptureFixture) -> None:
    text = layout_text(layout([(1, "id", "int4"), (2, "day", "date")]))
    assert read_layout(as_wanted("public.t", text, Shape(as_string=("day",)))).columns[1].type == pa.string()
    assert caplog.text == ""
    as_wanted("public.t", text, Shape(as_string=("day", "dya")))
    assert "public.t has no column dya, which asString names" in caplog.text
