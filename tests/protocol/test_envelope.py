"""Rows as JSON objects: any reader of JSON gets the values, and reading them back gives the same texts."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_cdc_source.errors import SchemaChangedError, UnrepresentableError, WireError
from pg_cdc_source.protocol import envelope
from pg_cdc_source.protocol.envelope import EnvelopeColumn, columns_from_json, json_objects

BOOL, BYTEA, INT8, INT2, INT4, TEXT, OID, JSON, FLOAT8, NUMERIC, INT4_ARRAY = (
    *(16, 17, 20, 21, 23, 25, 26, 114, 701, 1700, 1007),
)
OF_TYPE = {
    BOOL: st.sampled_from("tf"),
    INT8: st.integers(-(2**63), 2**63 - 1).map(str),
    OID: st.integers(0, 2**32 - 1).map(str),
    # PostgreSQL has every character but NUL.
    TEXT: st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    NUMERIC: st.sampled_from(["1.50", "NaN", "-Infinity", "1" * 60]),
}
NAMES = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), min_size=1, max_size=5)

Row = list[tuple[str | None, bool]]


def written(columns: list[EnvelopeColumn], rows: list[Row]) -> list[str]:
    """The objects of rows of (text, whether it is absent)."""
    texts = [pa.array([row[i][0] for row in rows], pa.string()) for i in range(len(columns))]
    absent = [pa.array([row[i][1] for row in rows], pa.bool_()) for i in range(len(columns))]
    # None where there is nothing to leave out, as callers have it.
    objects = json_objects("public.t", columns, texts, [flags if flags.true_count else None for flags in absent])
    assert objects.type == pa.string()
    assert objects.null_count == 0
    result: list[str] = objects.to_pylist()
    return result


def one(type_oid: int, text: str | None, name: str = "a") -> str:
    (document,) = written([EnvelopeColumn(name, type_oid)], [[(text, False)]])
    return document


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[EnvelopeColumn], list[Row]]:
    names = draw(NAMES.filter(lambda names: len(set(names)) == len(names)))
    columns = [EnvelopeColumn(name, draw(st.sampled_from(sorted(OF_TYPE)))) for name in names]
    row = st.tuples(*(st.tuples(st.none() | OF_TYPE[column.type_oid], st.booleans()) for column in columns))
    return columns, [list(row) for row in draw(st.lists(row, max_size=6))]


def value(type_oid: int, text: str | None) -> Any:
    if text is None or type_oid not in (BOOL, INT8, OID):
        return text
    return text == "t" if type_oid == BOOL else int(text)


@given(tables())
def test_a_reader_of_json_gets_the_values_in_the_columns_order(table: tuple[list[EnvelopeColumn], list[Row]]) -> None:
    columns, rows = table
    for document, row in zip(written(columns, rows), rows, strict=True):
        pairs = json.loads(document, object_pairs_hook=list)
        assert pairs == [
            (column.name, value(column.type_oid, text))
            for column, (text, absent) in zip(columns, row, strict=True)
            if not absent
        ]
        # True is 1 in Python.
        assert [type(got) for _, got in pairs if isinstance(got, bool)] == [bool] * sum(
            column.type_oid == BOOL and text is not None and not absent
            for column, (text, absent) in zip(columns, row, strict=True)
        )


@given(tables())
def test_reading_back_gives_the_same_texts(table: tuple[list[EnvelopeColumn], list[Row]]) -> None:
    columns, rows = table
    read = columns_from_json(pa.array(written(columns, rows), pa.string()), columns)
    assert len(read) == len(columns)
    for i, (texts, present) in enumerate(read):
        assert (texts.type, present.type) == (pa.string(), pa.bool_())
        assert texts.to_pylist() == [None if absent else text for text, absent in (row[i] for row in rows)]
        assert present.to_pylist() == [not absent for _, absent in (row[i] for row in rows)]


@pytest.mark.parametrize(
    ("type_oid", "text", "expected"),
    [
        (BOOL, "t", '{"a":true}'),
        (BOOL, "f", '{"a":false}'),
        (BOOL, None, '{"a":null}'),
        (INT2, "-32768", '{"a":-32768}'),
        (INT4, "0", '{"a":0}'),
        (INT8, "9007199254740993", '{"a":9007199254740993}'),
        (INT8, "-9223372036854775808", '{"a":-9223372036854775808}'),
        (OID, "4294967295", '{"a":4294967295}'),
        (FLOAT8, "NaN", '{"a":"NaN"}'),
        (NUMERIC, "1.50", '{"a":"1.50"}'),
        (TEXT, "", '{"a":""}'),
        (TEXT, "null", '{"a":"null"}'),
        (TEXT, None, '{"a":null}'),
        (TEXT, 'a"b\\c/d', r'{"a":"a\"b\\c/d"}'),
        (TEXT, "\\n \n \\", r'{"a":"\\n \n \\"}'),
        (TEXT, "\x01\x1f\t\r\b\f\x7f", '{"a":"\\u0001\\u001f\\t\\r\\b\\f\x7f"}'),
        (TEXT, "\u2028\u2029é🦆", '{"a":"\u2028\u2029é🦆"}'),
        (BYTEA, "\\x00ff", r'{"a":"\\x00ff"}'),
        (JSON, '{"k": [1, "x"]}', r'{"a":"{\"k\": [1, \"x\"]}"}'),
        (INT4_ARRAY, "{1,NULL}", '{"a":"{1,NULL}"}'),
    ],
)
def test_values_as_they_are_written(type_oid: int, text: str | None, expected: str) -> None:
    assert one(type_oid, text) == expected


def test_names_are_escaped() -> None:
    name = 'a"b\\c\n.\u2028`'
    assert json.loads(one(INT4, "1", name)) == {name: 1}


def test_an_object_without_its_values_is_empty() -> None:
    columns = [EnvelopeColumn("a", INT4), EnvelopeColumn("b", TEXT)]
    assert written(columns, [[("1", True), ("x", True)], [("1", True), ("x", False)]]) == ["{}", '{"b":"x"}']


def test_slices_of_arrays_are_written_as_they_are_seen() -> None:
    texts = pa.array(['"', "b", None, "d", "\\"])[1:4]
    absent = pa.array([True, False, False, True, False])[1:4]
    objects = json_objects("public.t", [EnvelopeColumn("a", TEXT)], [texts], [absent])
    assert objects.to_pylist() == ['{"a":"b"}', '{"a":null}', "{}"]
    ((read, _),) = columns_from_json(pa.concat_arrays([objects, objects])[2:5], [EnvelopeColumn("a", TEXT)])
    assert read.to_pylist() == [None, "b", None]


def test_more_json_than_an_array_holds_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow would go on with offsets that have wrapped around."""
    texts = pa.array(["\x01" * 10, 'a"b'])
    monkeypatch.setattr(envelope, "MAX_OFFSET", 64)
    json_objects("public.t", [EnvelopeColumn("a", TEXT)], [texts], [None])
    monkeypatch.setattr(envelope, "MAX_OFFSET", 63)
    with pytest.raises(UnrepresentableError, match=r"public\.t, column a: with 11 characters escaped, .* 64 bytes"):
        json_objects("public.t", [EnvelopeColumn("a", TEXT)], [texts], [None])


def test_more_json_of_all_columns_than_an_array_holds_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Arrow says of two columns of more than 1 GB."""

    def too_much(*args: object, **options: object) -> None:
        raise pa.ArrowCapacityError("array cannot contain more than 2147483646 bytes")

    monkeypatch.setattr(pc, "binary_join_element_wise", too_much)
    with pytest.raises(UnrepresentableError, match=r"public\.t: the JSON of a batch with \d+ bytes of values is more"):
        json_objects("public.t", [EnvelopeColumn("a", TEXT)], [pa.array(["a"])], [None])


def test_no_rows_are_no_objects() -> None:
    assert written([EnvelopeColumn("a", BOOL), EnvelopeColumn("b", INT4), EnvelopeColumn("c", TEXT)], []) == []
    ((texts, present),) = columns_from_json(pa.array([], pa.string()), [EnvelopeColumn("a", TEXT)])
    assert (len(texts), len(present)) == (0, 0)


@pytest.mark.parametrize(
    ("type_oid", "text"),
    [
        *((BOOL, text) for text in ("true", "T", "", "1")),
        *((INT4, text) for text in ("", " 1", "+1", "01", "-0", "0x10", "1.0", "1e3", "x")),
        (INT8, str(2**64)),
    ],
)
def test_a_text_that_its_type_cannot_have_is_refused(type_oid: int, text: str) -> None:
    with pytest.raises(WireError, match="column a: expected a"):
        one(type_oid, text)


@pytest.mark.parametrize(
    ("type_oid", "document"),
    [
        *((TEXT, document) for document in ("", "x", "{", '{"a":"x"', '{"a":"x"} x', '{"a":"x"},{"a":"y"}', "{'a':1}")),
        *((TEXT, document) for document in ("[]", "1", '"a"', "null", "true", '{"a":"\t"}')),
        (TEXT, "[" * 100_000),
        (INT4, f'{{"a":{"9" * 5000}}}'),
    ],
)
def test_json_that_is_not_written_so_is_refused(type_oid: int, document: str) -> None:
    good = '{"a":null}'
    with pytest.raises(WireError, match="expected"):
        columns_from_json(pa.array([good, document]), [EnvelopeColumn("a", type_oid)])


@pytest.mark.parametrize(
    ("type_oid", "document"),
    [
        (TEXT, '{"a":"\\ud800"}'),
        *((TEXT, f'{{"a":{value}}}') for value in ("1", "1.5", "true", "NaN", "-Infinity", '["x"]', "{}")),
        *((INT4, f'{{"a":{value}}}') for value in ('"1"', "true", "1.0", "1e3", "NaN", "[1]", "9223372036854775808")),
        *((BOOL, f'{{"a":{value}}}') for value in ('"t"', "1", "0", '"true"')),
    ],
)
def test_a_value_of_another_type_is_of_another_layout(type_oid: int, document: str) -> None:
    good = '{"a":null}'
    with pytest.raises(SchemaChangedError, match="expected a JSON"):
        columns_from_json(pa.array([good, document]), [EnvelopeColumn("a", type_oid)])


def test_errors_hold_no_value() -> None:
    for document in ('{"a":"secret"}', "secret"):
        with pytest.raises((SchemaChangedError, WireError)) as caught:
            columns_from_json(pa.array([document]), [EnvelopeColumn("a", INT4)])
        assert "secret" not in str(caught.value)


def test_an_object_with_another_column_is_of_another_table() -> None:
    with pytest.raises(SchemaChangedError, match='no column "B c", d,'):
        columns_from_json(pa.array(['{"a":1,"d":1,"B c":2}']), [EnvelopeColumn("a", INT4)])


def test_a_null_object_lacks_every_column() -> None:
    ((texts, present),) = columns_from_json(pa.array([None, "{}", '{"a":null}']), [EnvelopeColumn("a", INT4)])
    assert (texts.to_pylist(), present.to_pylist()) == ([None, None, None], [False, False, True])


def test_json_of_other_writers_is_read() -> None:
    document = '\n{ "b" : "\\u00e9\\/" ,\t"a": -1 }'
    read = columns_from_json(pa.array([document]), [EnvelopeColumn("a", INT4), EnvelopeColumn("b", TEXT)])
    assert [texts.to_pylist() for texts, _ in read] == [["-1"], ["é/"]]
