"""What the rows of a stream look like."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest
from messages import BY_KEY, ENVELOPE, FULL, TYPED, streamed

from pg_cdc_source.errors import OptionError
from pg_cdc_source.protocol.layout import BEFORE, CHANGE_FIELDS, ENVELOPE_SCHEMA, typed_schema

COLUMNS = [pa.field("id", pa.int32()), pa.field("a", pa.string()), pa.field("b", pa.decimal128(10, 2))]


def test_typed_rows_have_the_tables_columns_then_the_change_columns() -> None:
    assert typed_schema(BY_KEY.name, BY_KEY.codecs, before_image=False) == pa.schema([*COLUMNS, *CHANGE_FIELDS])
    with_before = pa.schema([*COLUMNS, *CHANGE_FIELDS, pa.field(BEFORE, pa.struct(COLUMNS))])
    assert typed_schema(BY_KEY.name, BY_KEY.codecs, before_image=True) == with_before
    assert TYPED.schema([BY_KEY]) == with_before
    assert replace(TYPED, before_image=False).schema([BY_KEY]).names == with_before.names[:-1]


def test_the_envelope_is_the_same_for_any_tables() -> None:
    assert ENVELOPE.schema([]) is ENVELOPE.schema([BY_KEY, FULL]) is ENVELOPE_SCHEMA


@pytest.mark.parametrize("name", ["_seq", "_SEQ", "_before", "_Commit_Lsn"])
def test_a_column_with_the_name_of_a_change_column_is_refused(name: str) -> None:
    table = streamed(1, "public.t", {"id": "int4", name: "text"})
    with pytest.raises(OptionError, match="which is the name of one of the change columns") as caught:
        TYPED.schema([table])
    assert caught.value.what.startswith("public.t has a column ")
    # The envelope keeps the table's columns apart.
    assert ENVELOPE.schema([table]) is ENVELOPE_SCHEMA
