from __future__ import annotations

import pytest
from given_options import TABLE, parse, refused

from pg_cdc_source.options.numeric_as import NumericAs


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("string", NumericAs("string")),
        ("DOUBLE", NumericAs("double")),
        ("decimal(38,9)", NumericAs("decimal", 38, 9)),
        (" Decimal ( 1 , 0 ) ", NumericAs("decimal", 1, 0)),
        ("decimal(5,5)", NumericAs("decimal", 5, 5)),
    ],
)
def test_numeric_is_read_as_chosen(text: str, expected: NumericAs) -> None:
    assert parse(numericAs=text).numeric_as == expected


@pytest.mark.parametrize(
    "text", ["", "float", "decimal", "decimal(10)", "decimal(0,0)", "decimal(39,0)", "decimal(5,6)", "decimal(5,-1)"]
)
def test_decimals_that_spark_lacks_are_refused(text: str) -> None:
    assert "option numericAs:" in refused({**TABLE, "numericAs": text})
