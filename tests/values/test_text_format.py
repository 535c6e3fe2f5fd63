"""Every type's text, value by value: what it decodes to, what is refused, what PostgreSQL cannot have printed."""

from __future__ import annotations

import datetime as dt
import math
import pickle
import struct
import uuid
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from columns import OIDS, STRING, codec, typmod
from hypothesis import given
from hypothesis import strategies as st
from trials import examples

from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.values.decoder import Decoded, Field, MalformedError
from pg_cdc_source.values.registry import CatalogType, Codec, Column, plan
from pg_cdc_source.values.wire import WireBuffer

pytestmark = pytest.mark.usefixtures("accelerated")

UTC = dt.timezone.utc


def decimal(precision: int, scale: int, *, array: bool = False) -> Codec:
    return codec("numeric", typmod(precision, scale), array=array)


def field(texts: Sequence[str | bytes | None], between: bytes = b"n\0\0\0\x05") -> Field:
    """Lay texts into one buffer with other bytes before, between and behind them, as messages have."""
    octets = [b"" if text is None else text.encode() if isinstance(text, str) else text for text in texts]
    length = np.array([len(one) for one in octets], np.int64)
    start = np.cumsum(length + len(between)) - length
    buffer = WireBuffer([between + between.join(octets) + between])
    valid = np.array([text is not None for text in texts])
    return Field(buffer, start, length, None if valid.all() else valid)


def read(how: Codec, *texts: str | bytes | None) -> Decoded:
    decoded = how.decode_text(field(texts))
    decoded.array.validate(full=True)
    assert decoded.array.type == how.arrow_type
    assert len(decoded.array) == len(texts)
    return decoded


def decode(how: Codec, *texts: str | bytes | None) -> list[Any]:
    decoded = read(how, *texts)
    assert decoded.refused == ()
    values: list[Any] = decoded.array.to_pylist()
    return values


def refused(decoded: Decoded) -> list[tuple[int, str]]:
    return sorted((int(row), refusal.reason) for refusal in decoded.refused for row in refusal.rows)


def array_out(elements: Sequence[str | None]) -> str:
    """Print as PostgreSQL's ``array_out`` does."""
    return "{" + ",".join("NULL" if one is None else element_out(one) for one in elements) + "}"


def element_out(text: str) -> str:
    if text and text.upper() != "NULL" and not set(text) & set('{},"\\ \t\n\r\v\f'):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def moment(*parts: int) -> dt.datetime:
    return dt.datetime(*parts)  # type: ignore[arg-type]


GOOD: dict[str, list[tuple[str, Any]]] = {
    "bool": [("t", True), ("f", False)],
    "int2": [(str(n), n) for n in (0, 1, -1, 10, 2**15 - 1, -(2**15))],
    "int4": [(str(n), n) for n in (0, 1, -1, 10, 2**31 - 1, -(2**31))],
    "int8": [(str(n), n) for n in (0, 1, -1, 10, 2**63 - 1, -(2**63))],
    "oid": [(str(n), n) for n in (0, 1, 2**31, 2**32 - 1)],
    "float4": [
        *(("0", 0.0), ("1.5", 1.5), ("-1.5", -1.5), ("1e-45", 2.0**-149), ("3.4028235e+38", 3.4028234663852886e38)),
        *(("0.1", 0.10000000149011612), ("1e+10", 1e10), ("Infinity", math.inf), ("-Infinity", -math.inf)),
    ],
    "float8": [
        *(("0", 0.0), ("0.1", 0.1), ("-100", -100.0), ("5e-324", 5e-324)),
        *(("1.7976931348623157e+308", 1.7976931348623157e308), ("1e-05", 1e-5), ("1.5e+300", 1.5e300)),
        *(("Infinity", math.inf), ("-Infinity", -math.inf)),
    ],
    **{
        name: [(text, text) for text in ("", "a", "é漢😀", "x" * 9000, ' "a\\b" ', "NULL")]
        for name in ("text", "varchar", "bpchar", "name", "json", "jsonb")
    },
    "bytea": [("\\x", b""), ("\\x00", b"\0"), ("\\x" + bytes(range(256)).hex(), bytes(range(256)))],
    "date": [
        ("2000-01-01", dt.date(2000, 1, 1)), ("1970-01-01", dt.date(1970, 1, 1)), ("0001-01-01", dt.date(1, 1, 1)),
        ("9999-12-31", dt.date(9999, 12, 31)), ("2024-02-29", dt.date(2024, 2, 29)),
        ("0987-10-20", dt.date(987, 10, 20)),
    ],
    "timestamp": [
        ("2000-01-01 00:00:00", moment(2000, 1, 1)),
        ("1999-12-31 23:59:59.999999", moment(1999, 12, 31, 23, 59, 59, 999999)),
        ("2024-02-29 12:34:56.5", moment(2024, 2, 29, 12, 34, 56, 500000)),
        ("2024-02-29 12:34:56.05", moment(2024, 2, 29, 12, 34, 56, 50000)),
        ("2024-02-29 12:34:56.000001", moment(2024, 2, 29, 12, 34, 56, 1)),
        ("0001-01-01 00:00:00", moment(1, 1, 1)),
        ("9999-12-31 23:59:59.999999", dt.datetime.max),
    ],
    "timestamptz": [
        ("2000-01-01 00:00:00.000001+00", moment(2000, 1, 1, 0, 0, 0, 1).replace(tzinfo=UTC)),
        ("0001-01-01 00:00:00+00", moment(1, 1, 1).replace(tzinfo=UTC)),
        ("9999-12-31 23:59:59.999999+00", dt.datetime.max.replace(tzinfo=UTC)),
    ],
    "uuid": [
        (text, text)
        for text in (str(uuid.UUID(int=0)), str(uuid.UUID(int=2**128 - 1)), "01234567-89ab-cdef-0123-456789abcdef")
    ],
    "numeric": [(text, text) for text in ("0", "1.500", "NaN", "Infinity", "-1e3")],
    "bit": [("10101", "10101"), ("0", "0")],
    **{name: [(text, text)] for name, text in (("time", "24:00:00"), ("timetz", "12:00:00+02"), ("interval", "P1M2D"))},
    "citext": [("MiXed", "MiXed"), ("", "")],
    "hstore": [
        ("", []), ('"a"=>"1"', [("a", "1")]), ('"a"=>NULL', [("a", None)]), ('"a"=>"NULL"', [("a", "NULL")]),
        ('""=>"", "a"=>NULL, "b"=>"=>, ", "cc"=>"x"', [("", ""), ("a", None), ("b", "=>, "), ("cc", "x")]),
        ('"\\""=>"\\\\", ","=>NULL, "é\\\\"=>"\\"=>\\""', [('"', "\\"), (",", None), ("é\\", '"=>"')]),
        ('"=>NULL"=>NULL', [("=>NULL", None)]),
        # In the order of a server's encoding in which they are 1 and 2 bytes.
        ('"é"=>"1", "ab"=>"2"', [("é", "1"), ("ab", "2")]),
    ],
    "vector": [("[1]", [1.0]), ("[1,-2.5,1e+20]", [1.0, -2.5, 1.0000000200408773e20]), ("[0,-0]", [0.0, -0.0])],
    "halfvec": [("[65504,5.9604645e-08]", [65504.0, 2.0**-24]), ("[1]", [1.0])],
    "geometry": [("0101000000000000000000F87F000000000000F87F", struct.pack("<BIdd", 1, 1, math.nan, math.nan))],
    "geography": [("0101AB", b"\x01\x01\xab")],
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_texts_decode_exactly_with_and_without_nulls_around_them(name: str) -> None:
    texts, expected = [text for text, _ in GOOD[name]], [value for _, value in GOOD[name]]
    how = codec(name)
    assert decode(how, *texts) == expected
    assert decode(how, None, *texts, None) == [None, *expected, None]
    assert decode(how, *[item for text in texts for item in (text, None)])[::2] == expected
    assert decode(how, None, None) == [None, None]
    assert [decode(how, text) for text in texts] == [[value] for value in expected]


@pytest.mark.parametrize("name", GOOD)
def test_arrays_decode_exactly_with_and_without_null_elements(name: str) -> None:
    texts, expected = [text for text, _ in GOOD[name]], [value for _, value in GOOD[name]]
    how = codec(name, array=True)
    rows = [array_out(texts), "{}", None, "{NULL}", array_out(texts[:1]), array_out([None, *texts, None])]
    lists = [expected, [], None, [None], expected[:1], [None, *expected, None]]
    assert decode(how, *rows) == lists
    assert decode(how, *rows * 50) == lists * 50
    assert [decode(how, row) for row in rows] == [[one] for one in lists]
    assert decode(how, None, "{}") == [None, []]


def test_the_table_of_good_texts_has_every_type() -> None:
    assert set(GOOD) == set(OIDS)


@pytest.mark.parametrize("name", list(OIDS))
@pytest.mark.parametrize("modifier", [-1, typmod(12, 2)])
@pytest.mark.parametrize("kind", [NumericAs("string"), NumericAs("double"), NumericAs("decimal", 20, 4)])
def test_both_formats_have_the_same_arrow_type(name: str, modifier: int, kind: NumericAs) -> None:
    for array in (False, True):
        for as_string in (False, True):
            how = codec(name, modifier, array=array, as_string=as_string, numeric_as=kind)
            assert how.text_decoder.arrow == how.decoder.arrow == how.arrow_type
            assert pickle.loads(pickle.dumps(how)) == how  # noqa: S301 (its own)


def test_what_is_read_as_string_is_the_text_as_it_is() -> None:
    for name in OIDS:
        assert decode(codec(name, as_string=True), "é {", None) == ["é {", None]
        assert decode(codec(name, array=True, as_string=True), "{{", None) == ["{{", None]
    interval = plan(Column("c", 1, CatalogType(1186), "interval", False), as_string=False, numeric_as=STRING)
    assert decode(interval, "P1Y", None, "PT0S") == ["P1Y", None, "PT0S"]


def test_one_bit_is_a_boolean_and_more_are_text() -> None:
    how = codec("bit", 1)
    assert (how.arrow_type, decode(how, "1", None, "0")) == (pa.bool_(), [True, None, False])
    assert decode(codec("bit", 1, array=True), "{1,NULL,0}", "{}") == [[True, None, False], []]
    for text in ("", "2", "t", "11", "1 "):
        with pytest.raises(MalformedError, match="expected 1 or 0"):
            read(how, "1", text)
    assert decode(codec("bit", 2), "10") == ["10"]
    assert decode(codec("bit"), "1") == ["1"]


def test_arrays_have_the_delimiter_of_their_elements_type() -> None:
    box = CatalogType(603, name="box")
    of_boxes = CatalogType(1020, element=box, element_oid=603, delimiter=";")
    how = plan(Column("c", 1, of_boxes, "box[]", False), as_string=False, numeric_as=STRING)
    assert decode(how, "{(1,1),(0,0);NULL;(2,2),(1,1)}", "{}") == [["(1,1),(0,0)", None, "(2,2),(1,1)"], []]
    with pytest.raises(MalformedError, match="expected"):
        read(how, "{(1,1);}")


def test_a_domain_over_arrays_in_an_array_is_an_array_of_arrays() -> None:
    numbers = CatalogType(1007, element=CatalogType(23), element_oid=23)
    of_numbers = CatalogType(99_999, element=numbers, element_oid=88_888)
    how = plan(Column("c", 1, of_numbers, "numbers[]", False), as_string=False, numeric_as=STRING)
    assert decode(how, '{"{1,NULL}",NULL,"{}"}', "{}", None) == [[[1, None], None, []], [], None]
    assert refused(read(how, "{NULL}", '{"{1}","{{1},{2}}"}')) == [
        (1, "an element: an array of more than one dimension")
    ]


def test_maps_in_arrays_are_split_twice() -> None:
    texts = [text for text, _ in GOOD["hstore"]]
    assert decode(codec("hstore", array=True), array_out([*texts, None]), None, "{}") == [
        [*(pairs for _, pairs in GOOD["hstore"]), None],
        None,
        [],
    ]


def test_floats_keep_negative_zero_and_are_nan() -> None:
    for name in ("float4", "float8"):
        (zero,) = decode(codec(name), "-0")
        assert math.copysign(1, zero) == -1
        assert math.isnan(decode(codec(name), "NaN")[0])
        assert refused(read(codec(name, array=True), "{NaN,-0}")) == []


DECIMALS = [
    (5, 2, ["0.00", "0.01", "-0.01", "999.99", "-999.99", "1.50", "1.5", "100", "0", "1"]),
    (4, 0, ["9999", "-1", "0"]),
    (18, 0, ["999999999999999999", "-999999999999999999", "10000"]),
    (18, 18, ["0.999999999999999999", "-0.000000000000000001", "0.000000000000000000"]),
    (38, 0, ["9" * 38, "-" + "9" * 38, "1" + "0" * 37, "0", "-18446744073709551616", "-1"]),
    (38, 10, ["9" * 28 + "." + "9" * 10, "0.0000000001", "-1.5000000000"]),
    (38, 38, ["0." + "9" * 38, "-0." + "0" * 37 + "1"]),
]


@pytest.mark.parametrize(("precision", "scale", "texts"), DECIMALS)
def test_numeric_is_the_decimal_it_is_declared_as(precision: int, scale: int, texts: list[str]) -> None:
    expected = [Decimal(text) for text in texts]
    how = decimal(precision, scale)
    assert decode(how, *texts) == expected
    assert decode(how, None, *texts, None) == [None, *expected, None]
    # Through the patterns for the rest, which a value out of the ordinary brings on.
    assert read(how, "NaN", *texts).array.to_pylist() == [None, *expected]
    assert decode(decimal(precision, scale, array=True), array_out([None, *texts])) == [[None, *expected]]


def test_zeros_behind_the_last_digit_of_the_type_do_not_change_a_value() -> None:
    assert decode(decimal(5, 2), "1.5000", "-2." + "0" * 60, "0.000", "3") == [
        Decimal(n) for n in ("1.5", "-2", "0", "3")
    ]
    assert decode(decimal(5, 0), "1.0", "-20." + "0" * 60, "0.000") == [1, -20, 0]
    assert decode(decimal(2, 2), "0.100", "-0." + "9" * 2 + "0" * 60) == [Decimal("0.1"), Decimal("-0.99")]


TOO_MUCH = [
    ("NaN", "NaN"),
    ("Infinity", "infinity"),
    ("-Infinity", "infinity"),
    ("0.001", "more than 2 digits after the decimal point"),
    ("0.0010", "more than 2 digits after the decimal point"),
    ("-1.005", "more than 2 digits after the decimal point"),
    ("-0.00001", "more than 2 digits after the decimal point"),
    ("1000", "more than 3 digits before the decimal point"),
    ("-1000.001", "more than 3 digits before the decimal point"),
    ("1" + "0" * 60, "more than 3 digits before the decimal point"),
    ("0." + "0" * 60 + "1", "more than 2 digits after the decimal point"),
]


@pytest.mark.parametrize(("text", "reason"), TOO_MUCH)
def test_numeric_is_never_rounded(text: str, reason: str) -> None:
    for how in (decimal(5, 2), codec("numeric", numeric_as=NumericAs("decimal", 5, 2))):
        decoded = read(how, "1.25", None, text, "-7.00")
        assert decoded.array.to_pylist() == [Decimal("1.25"), None, None, Decimal(-7)]
        assert refused(decoded) == [(2, reason)]
    decoded = read(decimal(5, 2, array=True), "{}", f"{{1.25,{text},NULL}}", None, f"{{{text}}}")
    assert decoded.array.to_pylist() == [[], [Decimal("1.25"), None, None], None, [None]]
    assert refused(decoded) == [(1, f"an element: {reason}"), (3, f"an element: {reason}")]


def test_a_decimal_without_digits_before_the_point_refuses_them() -> None:
    decoded = read(decimal(4, 4), "0.1234", "1.0000", "-10")
    assert decoded.array.to_pylist() == [Decimal("0.1234"), None, None]
    assert refused(decoded) == [(row, "more than 0 digits before the decimal point") for row in (1, 2)]


def test_numeric_as_double_takes_the_nearest_and_refuses_overflow() -> None:
    how = codec("numeric", numeric_as=NumericAs("double"))
    assert decode(how, "0.1", None, "Infinity", "0." + "0" * 400 + "1") == [0.1, None, math.inf, 0.0]
    assert refused(read(how, "1" + "0" * 400)) == [(0, "too large for a double")]
    assert math.isnan(decode(how, "NaN")[0])
    for text in [*NO_NUMBERS, "-NaN", "infinity", "00.1", ".5", "1.", "1.2.3", "1e2"]:
        with pytest.raises(MalformedError, match="expected"):
            how.decode_text(field(["0.1", text]))
    elements = codec("numeric", array=True, numeric_as=NumericAs("double"))
    assert decode(elements, "{0.1,NULL}") == [[0.1, None]]


FAR = {
    "date": ("2024-01-02", ["10000-01-01", "5874897-12-31", "0001-12-31 BC", "4714-11-24 BC"]),
    "timestamp": (
        "2024-01-02 03:04:05",
        ["10000-01-01 00:00:00", "294276-12-31 23:59:59.9", "0044-03-15 12:00:00.5 BC"],
    ),
    "timestamptz": ("2024-01-02 03:04:05+00", ["10000-01-01 00:00:00+00", "0044-03-15 12:00:00.5+00 BC"]),
}


@pytest.mark.parametrize("name", FAR)
def test_moments_that_spark_cannot_hold_are_refused_as_from_binary(name: str) -> None:
    fine, far = FAR[name]
    (today,) = decode(codec(name), fine)
    for text, reason in [
        *((t, "a year outside 1 to 9999") for t in far),
        ("infinity", "infinity"),
        ("-infinity", "infinity"),
    ]:
        decoded = read(codec(name), None, fine, text, text)
        assert decoded.array.to_pylist() == [None, today, None, None]
        assert refused(decoded) == [(2, reason), (3, reason)]
        decoded = read(codec(name, array=True), None, "{}", array_out([fine, fine]), array_out([fine, None, text]))
        assert decoded.array.to_pylist() == [None, [], [today, today], [today, None, None]]
        assert refused(decoded) == [(3, f"an element: {reason}")]


NO_NUMBERS = ["", " 1", "1 ", "1\n", "\t1", "+1", "--1", "-", "01", "0x1", "1,5", "1 000", "\u0661", "nan", "inf"]
INTEGERS = [*NO_NUMBERS, "-0", "00", "-01", "1e5", "1.0", "1_0", "1\0", "NaN"]
FLOATS = [*NO_NUMBERS, "-NaN", "infinity", "Infinity ", "1.", ".5", "1.0", "1.50", "1.2.3", "1e", "1E+10", "1e10"]
FLOATS += ["1e+5", "1e+1000"]
MOMENTS = ["", "2024", "2024-02-03 BC BC", "12024-02-03 BC", "0000-01-01", "Infinity", "+infinity", "infinity ", "now"]
NUMERICS = [*NO_NUMBERS, "-NaN", "infinity", "-0", "-0.00", "-0.000", "00.1", ".5", "1.", "1.2.3", "1e2"]

MALFORMED: dict[str, list[str | bytes]] = {
    "bool": ["", "true", "T", "1", "tt", " t", "\0"],
    "int2": [*INTEGERS, "32768", "-32769", "9" * 40],
    "int4": [*INTEGERS, "2147483648", "-2147483649"],
    "int8": [*INTEGERS, "9223372036854775808", "-9223372036854775809"],
    "oid": [*INTEGERS, "-1", "4294967296"],
    "float4": [*FLOATS, "1e+39", "1e-50", "3.5e+38"],
    "float8": [*FLOATS, "1e+309", "-1e+400", "1e-400", "2e-324"],
    "text": [b"\xff", b"\xc3", b"\xed\xa0\x80"],
    "jsonb": [b"\xff"],
    "bytea": ["", "\\", "x", "00", "\\x0", "\\x0g", "\\xAB", "\\X00", "\\x 0", "\\x000", "\\\\x00", b"\\x\xff\xff"],
    "uuid": [
        *("", "0" * 32, "0" * 36, "00000000-0000-0000-0000-00000000000", "00000000-0000-0000-0000-0000000000000"),
        *("A0000000-0000-0000-0000-000000000000", "g0000000-0000-0000-0000-000000000000"),
        *("00000000-0000-0000-000000000000-0000", "{00000000-0000-0000-0000-0000000000}"),
    ],
    "date": [
        *(*MOMENTS, "2024-2-03", "2024-02-3", "2024-02-30", "2023-02-29", "2024-13-01", "2024-00-01", "2024-01-00"),
        *("02024-01-01", "99999999-01-01", "2024-02-03BC", "2024-02-03 AD", "2024-02-03 00:00:00", "2024-02-03\n"),
        *("20240203", "2024/02/03", "03.02.2024"),
    ],
    "timestamp": [
        *(*MOMENTS, "2024-02-03", "10000-02-03", "2024-02-03 BC", "2024-02-30 00:00:00", "2024-02-03 04:05"),
        *("2024-02-03 24:00:00", "2024-02-03 23:60:00", "2024-02-03 23:59:60", "2024-02-03 04:05:06."),
        *("2024-02-03 04:05:06.120", "2024-02-03 04:05:06.1234567", "2024-02-03T04:05:06", "2024-02-03 04:05:06+00"),
        *("2024-02-03 04:05:06 ", "2024-02-03 04:05:06\n", "2024-02-03 04:05:06,5"),
    ],
    "timestamptz": [
        *(*MOMENTS, "2024-02-03 04:05:06", "2024-02-03 04:05:06+01", "2024-02-03 04:05:06-00", "2024-02-03 04:05:06Z"),
        *("2024-02-03 04:05:06+00:00", "2024-02-03 04:05:06 BC+00", "10000-01-01 00:00:00"),
    ],
    "numeric": [*NUMERICS],
    "hstore": [
        *("a", '"a"', '""', '"a"=>', '"a"=>"1', '"a"=>1', '"a"=>null', '"a"=>""x""', '=>"a"', 'NULL=>"a"'),
        *('"a\\"=>"b"', '"a"=>"1",', '"a"=>"1", ', '"a"=>NULL,', '"a"=>NULL, ', '"a"=>NULL, NULL', '"a"=>NULL, "b"'),
        *('"a"=>"1","b"=>"2"', '"a"=>"1"  "b"=>"2"', '"a"=>"1"=>"2"', '"a", "b"=>"c"', '"a"=>"b", "c"', '"a""b"'),
        *('"a"=>NULL"b"=>""',),
        *(' "a"=>"1"', '"a"=>"1" ', '"a" => "1"', '"a"=>"\\1"', '"a"=>"1\\', '"a"=>"1"\\', '\\"a"=>"1"', '"a"\\=>"1"'),
        *('"a"=>"1", "a"=>"2"', '"a"=>NULL, "b"=>"", "b"=>NULL'),
        *(b'"\xff"=>"1"', b'"a"=>"\xff"', b'"a\xff'),
    ],
    "vector": [
        *("", "[", "[]", "]", "1", "[1", "1]", "[1,]", "[,1]", "[1,,2]", "[1]2]", "[1][2]", "[[1]]", "{1}", "[,]"),
        *("[1, 2]", "[ 1]", "[1]\n", "[-]", "[1.50]", "[0x1]", "[1e5]", "[1e+400]", "[1;2]", "[[1]"),
        *("[NaN]", "[1,Infinity]", "[-Infinity]", b"\xff", b"[\xff]"),
    ],
    "geometry": ["0", "0G", "\\x01", "0a", " 01", "01 ", "010", b"\xff\xff"],
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_what_postgresql_cannot_have_printed_is_malformed(name: str) -> None:
    scalar = decimal(5, 2) if name == "numeric" else codec(name)
    elements = decimal(5, 2, array=True) if name == "numeric" else codec(name, array=True)
    good = "1.5" if name == "numeric" else GOOD[name][0][0]
    # Values that are refused must not keep others from being looked at.
    odd = {"numeric": "NaN", "date": "infinity", "timestamp": "infinity", "timestamptz": "infinity"}.get(name, good)
    for text in MALFORMED[name]:
        for values in ([text], [good, None, text], [text, good], [odd, text, good]):
            with pytest.raises(MalformedError, match="expected") as malformed:
                scalar.decode_text(field(values))
            assert len(text) < 3 or str(text) not in str(malformed.value)
        if isinstance(text, str):
            with pytest.raises(MalformedError, match="expected"):
                elements.decode_text(field([array_out([good]), None, array_out([good, text])]))


ARRAYS: list[tuple[str, list[str | None]]] = [
    ("{}", []),
    ("{NULL}", [None]),
    ('{"NULL"}', ["NULL"]),
    ('{"null",NULL,"nUlL",NULLS,NUL}', ["null", None, "nUlL", "NULLS", "NUL"]),
    ('{1,NULL,"a \\"b\\" \\\\ c"}', ["1", None, 'a "b" \\ c']),
    ('{""}', [""]),
    ('{"",""}', ["", ""]),
    ('{"{","}",","}', ["{", "}", ","]),
    ('{"{}","{a,b}"}', ["{}", "{a,b}"]),
    ('{"\\"","\\\\","\\\\\\"","\\"\\\\","\\\\\\\\"}', ['"', "\\", '\\"', '"\\', "\\\\"]),
    ('{" ","\t","\n","\r","\v","\f","\n\n"}', [" ", "\t", "\n", "\r", "\v", "\f", "\n\n"]),
    ("{é,漢😀,\u00a0,\u2028}", ["é", "漢😀", "\u00a0", "\u2028"]),
    ("{[1:2]=,a=b,'',-}", ["[1:2]=", "a=b", "''", "-"]),
    ("{[}", ["["]),
    ("{abcde,abcd,abc,N}", ["abcde", "abcd", "abc", "N"]),
]  # fmt: skip


def test_quotes_escapes_and_nulls_of_arrays() -> None:
    how = codec("text", array=True)
    for text, elements in ARRAYS:
        assert decode(how, text) == [elements]
        assert array_out(elements) == text
    assert decode(how, *[text for text, _ in ARRAYS] * 3) == [elements for _, elements in ARRAYS] * 3
    lines = [one for text, _ in ARRAYS for one in (text, None, "{}")]
    assert decode(how, *lines) == [one for _, elements in ARRAYS for one in (elements, None, [])]


ELSEWHERE = [
    ("{{1,2},{3,4}}", "an array of more than one dimension"),
    ('{{"}",NULL}}', "an array of more than one dimension"),
    ("{{{{{{1}}}}}}", "an array of more than one dimension"),
    ("[0:0][2:3]={{1,2}}", "an array of more than one dimension"),
    ("[1:1][-3:-2]={{1,2}}", "an array of more than one dimension"),
    ("[2:3]={1,NULL}", "an array whose lower bound is not 1"),
    ("[0:0]={7}", "an array whose lower bound is not 1"),
    ("[-5:-5]={\"\n\"}", "an array whose lower bound is not 1"),
    ("[10:11]={1,2}", "an array whose lower bound is not 1"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reason"), ELSEWHERE)
def test_arrays_of_other_dimensions_or_bounds_are_refused_as_from_binary(text: str, reason: str) -> None:
    how = codec("text", array=True)
    decoded = read(how, '{1,"a b"}', None, text, "{}", "{NULL}", text)
    assert decoded.array.to_pylist() == [["1", "a b"], None, None, [], [None], None]
    assert refused(decoded) == [(2, reason), (5, reason)]
    assert refused(read(how, text)) == [(0, reason)]


BAD_ARRAYS: list[str | bytes] = [
    *("", "{", "}", "{1", '{"', "{\\", "1,2", "{1,2", "1}", "NULL", "{1,}", "{,}", "{,1}", "{1,,2}", "{1}2", "{1}}"),
    *("}{", "{}}", "{}{}", "{1}{2}", "{1},{2}", "{1{2}", "{1,{2}}"),
    *("{1 }", "{ 1}", "{1, 2}", "{\t1}", "{1\n}", "{\r1}", "{\v1}", "{1\f}", " {1}", "{1} ", "{ }"),
    *('{"1}', '{1"}', '{"1"2}', '{1"2"}', '{"1""2"}', '{"}', '{"""}', '{"1", "2"}', '"{1}"', '{"1"}"', '{1}","{1}'),
    *("{\\1}", "{1\\}", '{"\\1"}', '{"\\n"}', '{"\\', '{"1\\"}', '{"1\\\\\\"}', "{\\\\}", '{\\"1\\"}', '{"\\\n"}'),
    *("{null}", "{Null}", "{1,nULL}", "{{1}", "{{1,2}", "{{"),
    *("[1:2]={1,2}", "[0:1]={1,2", "[0:1]", "[0:1={1,2}", "[0:1]{1,2}", "[a:b]={1}", "[0:0]={}", "[0]={1}"),
    *("[0:0]={{1}}", "[0:0][0:0]={1}", "[0:0]" * 7 + "={{1}}", "x[0:0]={1}", "[0:0]= {1}"),
    *(b"{\xff}", b"{\xc3}", b'{"\xed\xa0\x80"}', b"{{\xff}}"),
]  # fmt: skip


@pytest.mark.parametrize("text", BAD_ARRAYS)
def test_what_array_out_cannot_have_printed_is_malformed(text: str | bytes) -> None:
    for name in ("text", "bytea", "int4"):
        how = codec(name, array=True)
        for values in ([text], ["{}", None, text], [text, "{}", "{NULL}"], ["{NULL}", text], ["{{1}}", text]):
            with pytest.raises(MalformedError, match="expected"):
                how.decode_text(field(values))


def test_a_malformed_array_is_not_completed_by_the_next() -> None:
    how = codec("text", array=True)
    for one, other in (
        ('{"a', 'b"}'),
        ('{"a}', '{b"}'),
        ("{a,", "b}"),
        ('{"a\\', '"}'),
        ("{a}b", "c}"),
        ('{"}', '{"}'),
    ):
        with pytest.raises(MalformedError):
            how.decode_text(field([one, other]))


def test_one_very_long_array_among_short_ones() -> None:
    texts = [str(n) if n % 7 else None for n in range(20_000)]
    rows = ["{a,b}", array_out(texts), None, "{}"] * 2
    assert decode(codec("text", array=True), *rows) == [["a", "b"], texts, None, []] * 2


# --- any value: as PostgreSQL prints it ------------------------------------------------------------------------------


def float_out(value: float) -> str:
    if math.isinf(value) or math.isnan(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return repr(value).removesuffix(".0")


def moment_out(value: dt.datetime) -> str:
    text = value.replace(tzinfo=None).isoformat(" ")
    return (text.rstrip("0") if value.microsecond else text) + ("+00" if value.tzinfo else "")


def floats32() -> st.SearchStrategy[tuple[str, float]]:
    finite = st.floats(width=32, allow_nan=False)
    return finite.map(lambda value: (str(np.float32(value)).removesuffix(".0").replace("inf", "Infinity"), value))


def hstore_out(items: dict[str, str | None]) -> tuple[str, list[tuple[str, str | None]]]:
    def quoted(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    pairs = sorted(items.items(), key=lambda pair: (len(pair[0].encode()), pair[0].encode()))
    return ", ".join(f"{quoted(k)}=>{'NULL' if v is None else quoted(v)}" for k, v in pairs), pairs


def vectors(width: Literal[16, 32]) -> st.SearchStrategy[tuple[str, list[float]]]:
    numbers = st.lists(st.floats(width=width, allow_nan=False, allow_infinity=False), min_size=1, max_size=6)
    return numbers.map(lambda xs: ("[" + ",".join(str(np.float32(x)).removesuffix(".0") for x in xs) + "]", xs))


# PostgreSQL's text has no NUL.
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0") | st.sampled_from('{},"\\ \nNUL'))
ANY: dict[str, st.SearchStrategy[tuple[str, Any]]] = {
    "bool": st.booleans().map(lambda b: ("t" if b else "f", b)),
    **{f"int{n}": st.integers(-(2 ** (8 * n - 1)), 2 ** (8 * n - 1) - 1).map(lambda i: (str(i), i)) for n in (2, 4, 8)},
    "oid": st.integers(0, 2**32 - 1).map(lambda i: (str(i), i)),
    "float4": floats32(),
    "float8": st.floats(allow_nan=False).map(lambda x: (float_out(x), x)),
    **{name: ANY_TEXT.map(lambda t: (t, t)) for name in ("text", "varchar", "bpchar", "name", "json", "jsonb")},
    "bytea": st.binary(max_size=40).map(lambda b: ("\\x" + b.hex(), b)),
    "date": st.dates().map(lambda d: (d.isoformat(), d)),
    "timestamp": st.datetimes().map(lambda t: (moment_out(t), t)),
    "timestamptz": st.datetimes(timezones=st.just(UTC)).map(lambda t: (moment_out(t), t)),
    "uuid": st.uuids().map(lambda u: (str(u), str(u))),
    "hstore": st.dictionaries(ANY_TEXT, st.none() | ANY_TEXT, max_size=5).map(hstore_out),
    "vector": vectors(32),
    "halfvec": vectors(16),
    "geometry": st.binary(max_size=40).map(lambda b: (b.hex().upper(), b)),
}


def bits(value: Any) -> Any:
    if isinstance(value, list):
        return [bits(one) for one in value]
    return struct.pack(">d", value) if isinstance(value, float) else value


@pytest.mark.parametrize("name", ANY)
@given(data=st.data())
def test_any_value_survives_its_text(name: str, data: st.DataObject) -> None:
    pairs = data.draw(st.lists(st.none() | ANY[name], min_size=1, max_size=12))
    got = decode(codec(name), *[None if pair is None else pair[0] for pair in pairs])
    assert bits(got) == bits([None if pair is None else pair[1] for pair in pairs])
    lists = data.draw(st.lists(st.none() | st.lists(st.none() | ANY[name], max_size=4), min_size=1, max_size=6))
    rows = [None if one is None else array_out([None if pair is None else pair[0] for pair in one]) for one in lists]
    expected = [None if one is None else [None if pair is None else pair[1] for pair in one] for one in lists]
    assert bits(decode(codec(name, array=True), *rows)) == bits(expected)


@given(st.data())
def test_any_decimal_survives_its_text_or_is_refused(data: st.DataObject) -> None:
    precision = data.draw(st.integers(1, 38))
    scale = data.draw(st.integers(0, precision))
    unscaled = data.draw(st.lists(st.none() | st.integers(-(10**42), 10**42) | st.integers(-99, 99), min_size=1))
    places = data.draw(st.lists(st.integers(0, 42), min_size=len(unscaled), max_size=len(unscaled)))
    texts = [None if n is None else numeric_out(n, place) for n, place in zip(unscaled, places, strict=True)]
    expected: list[Decimal | None] = []
    reasons = []
    for row, (n, place) in enumerate(zip(unscaled, places, strict=True)):
        whole, rest = divmod(abs(n or 0) * 10**scale, 10**place)
        large, fine = abs(n or 0) >= 10 ** (precision - scale + place), rest > 0
        if n is None or large or fine:
            expected.append(None)
        else:
            sign = "-" if n < 0 else ""
            expected.append(Decimal(f"{sign}{whole}e-{scale}"))
        if large or fine:
            side = f"{precision - scale} digits before" if large else f"{scale} digits after"
            reasons.append((row, f"more than {side} the decimal point"))
    decoded = read(decimal(precision, scale), *texts)
    assert decoded.array.to_pylist() == expected
    assert refused(decoded) == reasons


def numeric_out(unscaled: int, scale: int) -> str:
    digits = str(abs(unscaled)).zfill(scale + 1)
    whole, fraction = digits[: len(digits) - scale], digits[len(digits) - scale :]
    return ("-" if unscaled < 0 else "") + whole + ("." + fraction if scale else "")


# --- any bytes --------------------------------------------------------------------------------------------------------

FRAGMENTS = st.sampled_from(
    [*b'{},"\\ -+.:0123456789eENaUuLlInfinitytxBC[]=\n\0', *(ord(c) for c in "tf"), 0xC3, 0xA9, 0xFF]
)
NEARLY = st.lists(FRAGMENTS, max_size=24).map(bytes) | st.lists(FRAGMENTS, max_size=24).map(
    lambda b: b"{%b}" % bytes(b)
)


@examples(500)
@given(st.sampled_from(list(OIDS)), st.data())
def test_any_bytes_decode_or_are_malformed_whatever_stands_around_them(name: str, data: st.DataObject) -> None:
    good = st.sampled_from([text.encode() for text, _ in GOOD[name] if len(text) < 99])
    array = data.draw(st.booleans())
    kind = data.draw(st.sampled_from([NumericAs("decimal", 20, 4), NumericAs("double")]))
    how = codec(name, array=array, numeric_as=kind)
    texts = data.draw(st.lists(st.none() | good | NEARLY | st.binary(max_size=40), min_size=1, max_size=4))
    outcomes = []
    for between in (b"", b'\\"', b"0}\xff", b"{{NULL,"):
        try:
            decoded = how.decode_text(field(texts, between))
        except MalformedError as malformed:
            outcomes.append(str(malformed))
            continue
        decoded.array.validate(full=True)
        whole = {row for row, reason in refused(decoded) if not reason.startswith("an element: ")}
        assert decoded.array.null_count == texts.count(None) + len(whole)
        outcomes.append(f"{decoded.array.to_pylist()}, {refused(decoded)}")
    assert set(outcomes) == {outcomes[0]}


@examples(500)
@given(st.sampled_from(list(OIDS)), st.data())
def test_a_changed_byte_never_touches_the_neighbours(name: str, data: st.DataObject) -> None:
    array = data.draw(st.booleans())
    how = codec(name, array=array)
    texts = [text for text, _ in GOOD[name] if 0 < len(text) < 99]
    if array:
        texts = [array_out(texts), array_out([*texts, None])]
    sound = data.draw(st.sampled_from(texts)).encode()
    changed = bytearray(sound)
    changed[data.draw(st.integers(0, len(sound) - 1))] = data.draw(st.integers(0, 255))
    (expected,) = decode(how, sound)
    try:
        decoded = how.decode_text(field([sound, bytes(changed), sound, None]))
    except MalformedError:
        return
    assert decoded.array[0].as_py() == decoded.array[2].as_py() == expected
    assert decoded.array[3].as_py() is None
