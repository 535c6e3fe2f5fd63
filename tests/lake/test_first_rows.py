"""Rows of a snapshot as their layout describes them, where the table was altered since."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest
from runs import layout

from pg_cdc_source.lake.columns import read_layout
from pg_cdc_source.lake.first_rows import _as_described, _ChangedBehindError
from pg_cdc_source.protocol.packed import layout_text

COLUMN = read_layout(layout_text(layout([(1, "n", "numeric")]))).columns[0]


def test_decimals_that_fit_are_those_of_the_layout() -> None:
    wider = pa.array([Decimal("1.50"), None], pa.decimal128(12, 2))
    assert COLUMN.type == pa.decimal128(10, 2)
    assert _as_described("public.t", COLUMN, wider).equals(wider.cast(COLUMN.type))


@pytest.mark.parametrize(
    "values",
    [
        pa.array([Decimal("12345678901.50")], pa.decimal128(13, 2)),
        pa.array([Decimal("1.505")], pa.decimal128(10, 3)),
        pa.array(["1.50"]),
    ],
)
def test_other_values_are_refused_by_the_columns_name(values: pa.Array) -> None:
    with pytest.raises(_ChangedBehindError, match="column n was changed right behind the rows that came anew"):
        _as_described("public.t", COLUMN, values)
