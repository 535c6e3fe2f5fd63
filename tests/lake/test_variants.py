"""Which JSON a VARIANT holds as it is."""

from __future__ import annotations

import pytest

from pg_cdc_source.errors import OptionError
from pg_cdc_source.lake.shape import Shapes
from pg_cdc_source.lake.variants import refusal


@pytest.mark.parametrize(
    "text",
    [
        "null", '"a"', "{}", "-0", "1.10", "1e300", "1" + "0" * 60, '{"a": {"a": 1}, "b": [{"a": 1}, {"a": 2}]}',
        "12345678901234567890123456789012345678", "0." + "1" * 38, '"\\ud83d\\ude00"', r'"\\ud800"', r'"\\\""',
        "[" * 500 + "]" * 500, '"' + "[" * 600 + '"', '{"[{": "\\"[" }',
    ],
)  # fmt: skip
def test_json_that_is_held_as_it_is(text: str) -> None:
    assert refusal(text) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"b": {"a": 1, "a": 2}}', "a duplicate key"),
        ('{"a": 1, "\\u0061": 2}', "a duplicate key"),
        ("[123456789012345678901234567890123456789]", "38 digits"),
        ("-0." + "1" * 39, "38 digits"),
        ("1e400", "38 digits"),
        ("1e99999999999999999999", "38 digits"),
        ("[0e-99999999999999999999]", "38 digits"),
        ("1" + "0" * 400, "38 digits"),
        ("1.00000000000000000000001e5", "38 digits"),
        ('["\\ud800"]', "half a surrogate pair"),
        ('{"\\udc00": 1}', "half a surrogate pair"),
        ("[" * 501 + "]" * 501, "500 levels"),
        ("[" * 5000 + "]" * 5000, "500 levels"),
    ],
)
def test_json_that_is_refused(text: str, why: str) -> None:
    assert why in (refusal(text) or "")


def test_a_format_without_variants_is_refused() -> None:
    with pytest.raises(OptionError, match="deltalake cannot write VARIANT"):
        Shapes.of("merge", "hard", "deltalake", json_as="variant")
    with pytest.raises(OptionError, match="jsonAs='text' is none"):
        Shapes.of("merge", "hard", "delta", json_as="text")
    assert Shapes.of({"public.t": "append"}, "soft", "iceberg", json_as="variant")["public.u"].text == (
        "merge, soft deletes, JSON as variant"
    )
