"""A refused value is an error that names its row, or NULL; bytes that are no value are a WireError."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from columns import codec

from pg_cdc_source.errors import WireError
from pg_cdc_source.protocol.refused import RefusedValueError, accept
from pg_cdc_source.values.decoder import Decoded, MalformedError, Refused

COLUMN = codec("date").column
DECODED = Decoded(
    pa.nulls(9, pa.date32()), (Refused(np.array([7, 8]), "infinity"), Refused(np.array([3]), "a year outside"))
)


def test_the_first_refused_row_is_the_one_that_is_named() -> None:
    with pytest.raises(RefusedValueError, match=r"^column c \(date\), row 3 of the chunk: a year outside$") as caught:
        accept("", "error", COLUMN, lambda: DECODED)
    error = caught.value.at("public.t", "ctid (0,4)")
    assert error.what == "public.t, column c (date), ctid (0,4): a year outside"
    assert error.remedy.startswith("asString=c reads the column as text; unrepresentable=null makes")


def test_refused_values_are_null_where_that_was_asked_for() -> None:
    assert accept("", "null", COLUMN, lambda: DECODED) is DECODED.array


@pytest.mark.parametrize("unrepresentable", ["error", "null"])
def test_malformed_bytes_are_an_error_in_any_case(unrepresentable: str) -> None:
    def malformed(got: int) -> Decoded:
        raise MalformedError(f"expected 4 bytes, got {got}")

    with pytest.raises(WireError, match=r"COPY: column c \(date\): expected 4 bytes, got 3\n  Remedy: report"):
        accept("COPY: ", unrepresentable, COLUMN, malformed, 3)  # type: ignore[arg-type]
