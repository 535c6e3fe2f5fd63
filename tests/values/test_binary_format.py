"""Every type's binary format, value by value: what it decodes to, what is refused, what is malformed."""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import struct
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from columns import OIDS, codec, decode, joined, row, typmod
from hypothesis import given
from hypothesis import strategies as st

from pg_cdc_source.errors import WireError
from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.protocol.binary_copy import CopyDecoder
from pg_cdc_source.protocol.refused import RefusedValueError
from pg_cdc_source.values.decoder import Field, MalformedError
from pg_cdc_source.values.registry import TYPES, CatalogType, Codec, Column, plan
from pg_cdc_source.values.wire import WireBuffer

pytestmark = pytest.mark.usefixtures("accelerated")

UTC = dt.timezone.utc


def numeric(text: str, dscale: int | None = None) -> bytes:
    """Encode as ``numeric_send`` does: no zero digits at either end."""
    special = {"NaN": 0xC000, "Infinity": 0xD000, "-Infinity": 0xF000}
    if text in special:
        return struct.pack(">hhHH", 0, 0, special[text], 0)
    sign, digits, exponent = Decimal(text).as_tuple()
    assert isinstance(exponent, int)
    plain = "".join(map(str, digits)) + "0" * (exponent % 4)
    power = exponent // 4
    plain = plain.zfill(-(-len(plain) // 4) * 4)
    groups = [int(plain[i : i + 4]) for i in range(0, len(plain), 4)]
    while groups and groups[-1] == 0:
        groups.pop()
        power += 1
    while groups and groups[0] == 0:
        groups.pop(0)
    weight = power + len(groups) - 1 if groups else 0
    scale = max(0, -exponent) if dscale is None else dscale
    return struct.pack(f">hhHH{len(groups)}H", len(groups), weight, 0x4000 if sign else 0, scale, *groups)


def array(oid: int, *elements: bytes | None, lower_bound: int = 1) -> bytes:
    if not elements:
        return struct.pack(">iiI", 0, 0, oid)
    parts = [struct.pack(">iiIii", 1, None in elements, oid, len(elements), lower_bound)]
    for element in elements:
        parts.append(struct.pack(">i", -1) if element is None else struct.pack(">i", len(element)) + element)
    return b"".join(parts)


def vector(form: str, *floats: float, unused: int = 0) -> bytes:
    """Encode as ``vector_send`` ("f") and ``halfvec_send`` ("e") do."""
    return struct.pack(f">HH{len(floats)}{form}", len(floats), unused, *floats)


MICROSECONDS_TO_END_OF_9999 = 252_455_615_999_999_999
MICROSECONDS_TO_YEAR_1 = -63_082_281_600_000_000

GOOD: list[tuple[str, list[tuple[bytes, Any]]]] = [
    ("bool", [(b"\0", False), (b"\1", True)]),
    ("int2", [(struct.pack(">h", n), n) for n in (0, 1, -1, 2**15 - 1, -(2**15))]),
    ("int4", [(struct.pack(">i", n), n) for n in (0, 1, -1, 2**31 - 1, -(2**31))]),
    ("int8", [(struct.pack(">q", n), n) for n in (0, 1, -1, 2**63 - 1, -(2**63))]),
    ("oid", [(struct.pack(">I", n), n) for n in (0, 1, 2**31, 2**32 - 1)]),
    ("float4", [(struct.pack(">f", n), n) for n in (0.0, 1.5, 2.0**-149, 3.4028234663852886e38, math.inf, -math.inf)]),
    ("float8", [(struct.pack(">d", n), n) for n in (0.0, 0.1, 5e-324, 1.7976931348623157e308, math.inf, -math.inf)]),
    ("text", [(b"", ""), (b"a", "a"), ("é漢😀".encode(), "é漢😀"), (b"x" * 9000, "x" * 9000)]),
    ("varchar", [(b"", ""), (b"abc", "abc")]),
    ("bpchar", [(b"ab   ", "ab   "), (b"  ", "  ")]),
    ("name", [(b"pg_class", "pg_class")]),
    ("json", [(b'{"b": 1,  "a":2}', '{"b": 1,  "a":2}')]),
    ("jsonb", [(b'\x01{"a": 2}', '{"a": 2}'), (b"\x01", "")]),
    ("bytea", [(b"", b""), (bytes(range(256)), bytes(range(256)))]),
    ("date", [(struct.pack(">i", n), dt.date(2000, 1, 1) + dt.timedelta(n)) for n in (0, -1, -10957, 60)]),
    ("date", [(struct.pack(">i", -730119), dt.date(1, 1, 1)), (struct.pack(">i", 2921939), dt.date(9999, 12, 31))]),
    (
        "timestamp",
        [
            (struct.pack(">q", 0), dt.datetime(2000, 1, 1)),
            (struct.pack(">q", -1), dt.datetime(1999, 12, 31, 23, 59, 59, 999999)),
            (struct.pack(">q", MICROSECONDS_TO_YEAR_1), dt.datetime(1, 1, 1)),
            (struct.pack(">q", MICROSECONDS_TO_END_OF_9999), dt.datetime.max),
        ],
    ),
    (
        "timestamptz",
        [
            (struct.pack(">q", 1), dt.datetime(2000, 1, 1, microsecond=1, tzinfo=UTC)),
            (struct.pack(">q", MICROSECONDS_TO_YEAR_1), dt.datetime(1, 1, 1, tzinfo=UTC)),
            (struct.pack(">q", MICROSECONDS_TO_END_OF_9999), dt.datetime.max.replace(tzinfo=UTC)),
        ],
    ),
    (
        "uuid",
        [
            (bytes(16), "00000000-0000-0000-0000-000000000000"),
            (bytes.fromhex("0123456789abcdef" * 2), "01234567-89ab-cdef-0123-456789abcdef"),
            (b"\xff" * 16, "ffffffff-ffff-ffff-ffff-ffffffffffff"),
        ],
    ),
    ("citext", [(b"MiXed", "MiXed")]),
    ("vector", [(vector("f", 1.0), [1.0]), (vector("f", 0.0, -2.5, 1e20), [0.0, -2.5, 1.0000000200408773e20])]),
    ("halfvec", [(vector("e", 65504.0, 2.0**-24, -0.5), [65504.0, 2.0**-24, -0.5]), (vector("e", 1.0), [1.0])]),
    ("geometry", [(bytes(range(21)), bytes(range(21))), (b"", b"")]),
    ("geography", [(b"\1\1\0\0\0", b"\1\1\0\0\0")]),
]


@pytest.mark.parametrize(("name", "cases"), GOOD)
def test_values_decode_exactly_with_and_without_nulls_around_them(name: str, cases: list[tuple[bytes, Any]]) -> None:
    sent, expected = [case[0] for case in cases], [case[1] for case in cases]
    assert decode(codec(name), *sent) == expected
    assert decode(codec(name), None, *sent, None) == [None, *expected, None]
    assert decode(codec(name), *[item for value in sent for item in (value, None)])[::2] == expected
    assert decode(codec(name), None, None) == [None, None]
    assert decode(codec(name)) == []


@pytest.mark.parametrize(("name", "cases"), GOOD)
def test_arrays_decode_exactly_with_and_without_null_elements(name: str, cases: list[tuple[bytes, Any]]) -> None:
    sent, expected = [case[0] for case in cases], [case[1] for case in cases]
    oid, how = OIDS[name], codec(name, array=True)
    rows = [
        array(oid, *sent),
        array(oid),
        None,
        array(oid, None),
        array(oid, sent[0]),
        array(oid, None, *sent, None),
        array(oid, *sent, *sent),
    ]
    lists = [expected, [], None, [None], expected[:1], [None, *expected, None], expected * 2]
    assert decode(how, *rows) == lists
    assert decode(how, *rows * 100) == lists * 100
    assert decode(how, None, array(oid)) == [None, []]


def test_floats_keep_negative_zero_and_the_bits_of_nan() -> None:
    for name, integer, bits in (
        ("float4", ">I", [0x80000000, 0x7FC00001, 0x7FA00000, 0xFFC00000]),
        ("float8", ">Q", [1 << 63, 0x7FF8000000000001, 0x7FF4000000000000, 0xFFF8 << 48]),
    ):
        (decoded,) = CopyDecoder([codec(name)], "error").decode(joined([row(struct.pack(integer, n)) for n in bits]))
        assert decoded.buffers()[1].to_pybytes() == b"".join(
            n.to_bytes(decoded.type.bit_width // 8, "little") for n in bits
        )


DECIMALS = [
    (5, 2, ["0", "0.01", "-0.01", "999.99", "-999.99", "1.50", "1.5", "100"]),
    (4, 0, ["9999", "-1", "0"]),
    (12, 2, ["0", "1234567890.12", "-9999999999.99", "0.10", "10000", "100000000"]),
    (18, 0, ["999999999999999999", "-999999999999999999", "10000"]),
    (18, 9, ["999999999.999999999", "0.000000001", "-1.000000001"]),
    (18, 18, ["0.999999999999999999", "-0.000000000000000001"]),
    (19, 4, ["999999999999999.9999", "1"]),
    (38, 0, ["9" * 38, "-" + "9" * 38, "1" + "0" * 37, "0", "-18446744073709551616", "-4294967296", "-1"]),
    (38, 10, ["9" * 28 + "." + "9" * 10, "0.0000000001", "-1.5"]),
    (38, 19, ["9" * 19 + "." + "9" * 19, "-" + "0." + "0" * 18 + "1"]),
    (38, 38, ["0." + "9" * 38, "-0." + "0" * 37 + "1"]),
]


@pytest.mark.parametrize(("precision", "scale", "texts"), DECIMALS)
def test_numeric_is_the_decimal_it_is_declared_as(precision: int, scale: int, texts: list[str]) -> None:
    how = codec("numeric", typmod(precision, scale))
    assert how.arrow_type == pa.decimal128(precision, scale)
    assert how.select_sql == "{0}"
    expected = [Decimal(text) for text in texts]
    assert decode(how, *map(numeric, texts)) == expected
    assert decode(how, None, *map(numeric, texts), None) == [None, *expected, None]
    for text in texts:
        assert decode(how, numeric(text)) == [Decimal(text)]
    elements = codec("numeric", typmod(precision, scale), array=True)
    assert decode(elements, array(1700, None, *map(numeric, texts))) == [[None, *expected]]


@given(st.data())
def test_every_decimal_survives(data: st.DataObject) -> None:
    precision = data.draw(st.integers(1, 38))
    scale = data.draw(st.integers(0, precision))
    limit = 10**precision - 1
    unscaled = data.draw(st.lists(st.none() | st.integers(-limit, limit), min_size=1, max_size=20))
    texts = [
        None if n is None else f"{Decimal(n).scaleb(-scale):f}" if abs(n) < 10**28 else _text(n, scale)
        for n in unscaled
    ]
    got = decode(codec("numeric", typmod(precision, scale)), *[None if t is None else numeric(t) for t in texts])
    assert got == [None if t is None else Decimal(t) for t in texts]


def _text(unscaled: int, scale: int) -> str:
    digits = str(abs(unscaled)).zfill(scale + 1)
    whole, fraction = digits[: len(digits) - scale], digits[len(digits) - scale :]
    return ("-" if unscaled < 0 else "") + whole + ("." + fraction if scale else "")


@pytest.mark.parametrize(
    ("precision", "scale", "arrow"),
    [
        (3, -2, pa.decimal128(5, 0)),
        (3, 5, pa.decimal128(5, 5)),
        (36, -2, pa.decimal128(38, 0)),
        (1, 38, pa.decimal128(38, 38)),
        (38, 38, pa.decimal128(38, 38)),
        (39, 0, pa.string()),
        (37, -2, pa.string()),
        (3, 39, pa.string()),
        (1000, -1000, pa.string()),
        (1000, 1000, pa.string()),
    ],
)
def test_declared_numeric_becomes_a_decimal_where_one_holds_it(precision: int, scale: int, arrow: pa.DataType) -> None:
    how = codec("numeric", typmod(precision, scale))
    assert how.arrow_type == arrow
    assert how.select_sql == ("{0}" if pa.types.is_decimal(arrow) else "{0}::pg_catalog.text")
    elements = codec("numeric", typmod(precision, scale), array=True)
    assert elements.arrow_type.value_type == arrow
    assert elements.select_sql == how.select_sql


def test_numeric_with_negative_scale_and_with_scale_beyond_precision() -> None:
    assert decode(codec("numeric", typmod(3, -2)), numeric("99900"), numeric("-100")) == [Decimal(99900), Decimal(-100)]
    assert decode(codec("numeric", typmod(3, 5)), numeric("0.00999")) == [Decimal("0.00999")]


def test_display_scale_and_trailing_zeros_do_not_change_a_value() -> None:
    how = codec("numeric", numeric_as=NumericAs("decimal", 10, 2))
    assert decode(how, numeric("1", dscale=9), numeric("0", dscale=16383)) == [Decimal(1), Decimal(0)]


TOO_MUCH = [
    ("NaN", "NaN"),
    ("Infinity", "infinity"),
    ("-Infinity", "infinity"),
    ("0.001", "more than 2 digits after"),
    ("0.00001", "more than 2 digits after"),
    ("-1.005", "more than 2 digits after"),
    ("1000", "more than 3 digits before"),
    ("10000", "more than 3 digits before"),
    ("-1000.001", "more than 3 digits before"),
    ("1" + "0" * 60, "more than 3 digits before"),
    ("1e-60", "more than 2 digits after"),
]


@pytest.mark.parametrize(("text", "reason"), TOO_MUCH)
@pytest.mark.parametrize(
    "how", [codec("numeric", typmod(5, 2)), codec("numeric", numeric_as=NumericAs("decimal", 5, 2))]
)
def test_numeric_is_never_rounded(how: Codec, text: str, reason: str) -> None:
    with pytest.raises(RefusedValueError, match=reason) as refused:
        decode(how, numeric("1.25"), None, numeric(text))
    assert refused.value.row == 2
    assert decode(how, numeric("1.25"), numeric(text), None, numeric("-7"), unrepresentable="null") == [
        Decimal("1.25"), None, None, Decimal(-7),
    ]  # fmt: skip


def test_a_wide_decimal_refuses_one_digit_too_many_on_either_side() -> None:
    how = codec("numeric", numeric_as=NumericAs("decimal", 38, 18))
    sent = ["9" * 20, "1" + "0" * 20, "0." + "0" * 18 + "1", "9" * 38]
    assert decode(how, *map(numeric, sent), unrepresentable="null") == [Decimal("9" * 20), None, None, None]


def test_numeric_as_double_takes_the_nearest_and_refuses_overflow() -> None:
    how = codec("numeric", numeric_as=NumericAs("double"))
    assert (how.arrow_type, how.select_sql) == (pa.float64(), "{0}::pg_catalog.text")
    texts = ["0.1", "-0.0", "123456789012345678901234567890", "Infinity", "-Infinity", "0." + "0" * 400 + "1"]
    assert decode(how, None, *[t.encode() for t in texts]) == [None, *map(float, texts)]
    assert math.isnan(decode(how, b"NaN")[0])
    huge = b"-1" + b"0" * 400
    with pytest.raises(RefusedValueError, match="too large for a double"):
        decode(how, b"Infinity", huge)
    assert decode(how, b"Infinity", huge, None, unrepresentable="null") == [math.inf, None, None]
    for wrong in (b"", b"12x", b"1_0"):
        with pytest.raises(WireError, match="numeric"):
            decode(how, wrong)


def test_numeric_without_an_equivalent_is_text() -> None:
    assert decode(codec("numeric"), b"1.500", b"NaN") == ["1.500", "NaN"]
    assert decode(codec("numeric", array=True), b"{1.500,NULL}") == [["1.500", None]]


UNREPRESENTABLE = [
    ("date", struct.pack(">i", 2**31 - 1), "infinity"),
    ("date", struct.pack(">i", -(2**31)), "infinity"),
    ("date", struct.pack(">i", 2921940), "a year outside"),
    ("date", struct.pack(">i", -730120), "a year outside"),
    *(
        (name, struct.pack(">q", n), reason)
        for name in ("timestamp", "timestamptz")
        for n, reason in (
            (2**63 - 1, "infinity"),
            (-(2**63), "infinity"),
            (MICROSECONDS_TO_END_OF_9999 + 1, "a year outside"),
            (MICROSECONDS_TO_YEAR_1 - 1, "a year outside"),
            (9_223_371_331_199_999_999, "a year outside"),
        )
    ),
]


@pytest.mark.parametrize(("name", "sent", "reason"), UNREPRESENTABLE)
def test_moments_that_spark_cannot_hold_are_errors_or_null(name: str, sent: bytes, reason: str) -> None:
    fine = bytes(len(sent))
    (today,) = decode(codec(name), fine)
    with pytest.raises(RefusedValueError, match=reason) as refused:
        decode(codec(name), None, fine, sent, sent)
    assert (refused.value.row, refused.value.column.name) == (2, "c")
    assert decode(codec(name), fine, sent, None, fine, unrepresentable="null") == [today, None, None, today]
    elements, oid = codec(name, array=True), OIDS[name]
    rows = [None, array(oid), array(oid, fine, fine), array(oid, fine, None, sent)]
    with pytest.raises(RefusedValueError, match=f"an element: {reason}") as refused:
        decode(elements, *rows)
    assert refused.value.row == 3
    assert decode(elements, *rows, unrepresentable="null") == [None, [], [today, today], [today, None, None]]


def test_arrays_of_other_dimensions_or_bounds_are_errors_or_null() -> None:
    how = codec("int4", array=True)
    one = struct.pack(">i", 1)
    two_dimensions = struct.pack(">iiIiiii", 2, 0, 23, 1, 1, 1, 1) + struct.pack(">ii", 4, 7)
    for sent, reason in (
        (array(23, one, lower_bound=0), "lower bound is not 1"),
        (array(23, None, one, lower_bound=2), "lower bound is not 1"),
        (two_dimensions, "more than one dimension"),
        (array(25, one), "elements are not of the column's type"),
        (array(25), "elements are not of the column's type"),
        (array(25, one, lower_bound=0), "elements are not of the column's type"),
    ):
        with pytest.raises(RefusedValueError, match=reason) as refused:
            decode(how, array(23, one), None, sent)
        assert refused.value.row == 2
        rows = [array(23, one), None, sent, array(23, None), sent]
        assert decode(how, *rows, unrepresentable="null") == [[1], None, None, [None], None]
    # So an int2vector without elements becomes an array.
    begins_at_0 = struct.pack(">iiIii", 1, 0, 23, 0, 0)
    assert decode(how, array(23, one), begins_at_0, None) == [[1], [], None]


@pytest.mark.parametrize("oid", [2**31 - 1, 2**31, 2**32 - 1])
def test_an_elements_oid_has_no_sign(oid: int) -> None:
    of_domain = CatalogType(99_999, element=CatalogType(23), element_oid=oid)
    how = plan(Column("c", 1, of_domain, "d[]", False), as_string=False, numeric_as=NumericAs("string"))
    assert decode(how, array(oid), array(oid, struct.pack(">i", -7), None)) == [[], [-7, None]]


def test_one_very_long_array_among_short_ones() -> None:
    texts = [str(n).encode() if n % 7 else None for n in range(20_000)]
    rows = [array(25, b"a", b"b"), array(25, *texts), None, array(25)] * 2
    expected = [["a", "b"], [None if t is None else t.decode() for t in texts], None, []] * 2
    assert decode(codec("text", array=True), *rows) == expected


MALFORMED = [
    *((pg_type.name, b"x" * n) for pg_type in TYPES if (w := codec(pg_type.name).width) for n in (0, w - 1, w + 1)),
    ("bool", b"\2"),
    ("jsonb", b""),
    ("jsonb", b"\2{}"),
    *((name, sent) for name in ("vector", "halfvec") for sent in (b"", bytes(3), bytes(4), struct.pack(">HH", 1, 0))),
    ("vector", vector("f", 1.0)[:-1]),
    ("vector", vector("f", 1.0) + b"\0"),
    ("vector", vector("e", 1.0)),
    ("vector", vector("f", 1.0, unused=1)),
    *(("vector", vector("f", 1.0, x)) for x in (math.nan, math.inf, -math.inf)),
    *(("halfvec", vector("e", 1.0, x)) for x in (math.nan, math.inf, -math.inf)),
    ("halfvec", vector("f", 1.0)),
]


@pytest.mark.parametrize(("name", "sent"), MALFORMED)
def test_malformed_values_name_column_and_type(name: str, sent: bytes) -> None:
    good = GOOD[[case[0] for case in GOOD].index(name)][1][0][0]
    for values in ([sent], [good, None, sent], [sent, good]):
        with pytest.raises(WireError, match=rf"column c \({name}\): .*expected"):
            decode(codec(name), *values, unrepresentable="null")
    with pytest.raises(WireError, match=rf"column c \({name}\[\]\): .*expected"):
        decode(codec(name, array=True), array(OIDS[name], good), array(OIDS[name], good, sent), unrepresentable="null")


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("text", b"\xff"),
        ("text", b"\xc3"),
        ("name", b"\xed\xa0\x80"),
        ("json", b"\xff"),
        ("jsonb", b"\1\xff"),
    ],
)
def test_text_that_is_not_utf_8_is_refused_by_its_row_alone(name: str, sent: bytes) -> None:
    good = GOOD[[case[0] for case in GOOD].index(name)][1][0][0]
    for values in ([sent], [good, None, sent, good], [sent, good, sent]):
        with pytest.raises(RefusedValueError, match="not UTF-8") as refused:
            decode(codec(name), *values)
        assert refused.value.row == values.index(sent)
        others = [None if value is sent else value for value in values]
        assert decode(codec(name), *values, unrepresentable="null") == decode(codec(name), *others)
    arrays = [array(OIDS[name], good), array(OIDS[name], good, sent)]
    assert decode(codec(name, array=True), *arrays, unrepresentable="null")[1] is None


def test_an_empty_jsonb_does_not_borrow_its_version_from_what_follows() -> None:
    at, length = np.array([0, 0]), np.array([0, 3])
    with pytest.raises(MalformedError, match="got 0 bytes"):
        codec("jsonb").decode(Field(WireBuffer([b"\1{}"]), at, length))


@pytest.mark.parametrize("how", [codec("numeric", typmod(5, 2)), codec("numeric", typmod(38, 10))])
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        bytes(7),
        bytes(9),
        struct.pack(">hhHH", 1, 0, 0, 0),
        struct.pack(">hhHHhh", 1, 0, 0, 0, 1, 1),
        struct.pack(">hhHH", -1, 0, 0, 0),
        struct.pack(">hhHHH", 1, 0, 0, 0, 10000),
        struct.pack(">hhHHH", 1, 0, 0, 0, 0xFFFF),
        struct.pack(">hhHHH", 1, 0, 0x8000, 0, 1),
        struct.pack(">hhHHH", 1, 0, 0x0001, 0, 1),
        struct.pack(">hhHHH", 1, 0, 0xC001, 0, 1),
        struct.pack(">hhHHH", 1, 0, 0, 0x4000, 1),
    ],
)
def test_malformed_numerics_are_wire_errors(how: Codec, sent: bytes) -> None:
    for values in ([sent], [numeric("1.5"), None, sent, numeric("2")]):
        with pytest.raises(WireError, match=r"column c \(numeric\): expected"):
            decode(how, *values, unrepresentable="null")


FIVE = struct.pack(">i", 5)


def test_arrays_of_texts_may_say_another_one_of_the_types_of_texts() -> None:
    """As extensions write them; PostgreSQL reads them so."""
    how = codec("text", array=True)
    rows = [array(oid, b"abc", None) for oid in (25, 1043, 1042)]
    assert decode(how, *rows) == [["abc", None]] * 3
    with pytest.raises(RefusedValueError, match="elements are not of the column's type"):
        decode(how, array(23, b"abcd"))


BAD_ARRAYS = [
    b"",
    bytes(11),
    struct.pack(">iiI", -1, 0, 23),
    struct.pack(">iiI", 7, 0, 23),
    struct.pack(">iiI", 0, 2, 23),
    struct.pack(">iiI", 1, 0, 23),
    struct.pack(">iiI", 6, 0, 23) + bytes(40),
    array(23) + b"\0",
    array(23, FIVE)[:-1],
    array(23, FIVE) + b"\0",
    array(23, FIVE) + bytes(4),
    struct.pack(">iiIii", 1, 0, 23, -1, 1),
    struct.pack(">iiIii", 1, 0, 23, 2**31 - 1, 1) + bytes(8),
    struct.pack(">iiIii", 1, 0, 23, 2, 1) + struct.pack(">ii", 4, 5),
    struct.pack(">iiIii", 1, 0, 23, 0, 1) + bytes(4),
    struct.pack(">iiIii", 1, 0, 23, 1, 1) + struct.pack(">ii", 3, 5),
    struct.pack(">iiIii", 1, 0, 23, 1, 1) + struct.pack(">ii", -2, 5),
    struct.pack(">iiIii", 1, 0, 23, 1, 1) + struct.pack(">ii", 2**31 - 1, 5),
    struct.pack(">iiIii", 1, 1, 23, 1, 1) + struct.pack(">i", -2),
    struct.pack(">iiIii", 1, 1, 23, 1, 1) + struct.pack(">ii", -1, 5),
    struct.pack(">iiIii", 1, 1, 23, 1, 1) + struct.pack(">ii", -2, 5),
    struct.pack(">iiIii", 1, 1, 23, 2, 1) + struct.pack(">ii", 2**31 - 1, -1),
    struct.pack(">iiIii", 1, 0, 23, 1, 1) + struct.pack(">i", -1),
    struct.pack(">iiIii", 1, 0, 23, 3, 1) + struct.pack(">iii", -1, 8, 5) + bytes(4) + struct.pack(">i", -1),
    struct.pack(">iiIii", 1, 1, 23, 2, 1) + struct.pack(">i", -1) + struct.pack(">iii", 8, 5, 5),
]


@pytest.mark.parametrize("sent", BAD_ARRAYS)
def test_malformed_arrays_are_wire_errors(sent: bytes) -> None:
    how = codec("int4", array=True)
    few, many = [array(23, FIVE), None, sent], [array(23, FIVE, None)] * 100 + [sent] * 100
    for values in ([sent], few, many):
        with pytest.raises(WireError, match=r"column c \(int4\[\]\): expected"):
            decode(how, *values, unrepresentable="null")


@given(st.sampled_from([pg_type.name for pg_type in TYPES]), st.booleans(), st.binary(max_size=64), st.data())
def test_any_bytes_decode_or_raise_a_wire_error(name: str, is_array: bool, sent: bytes, data: st.DataObject) -> None:
    how = codec(name, array=is_array, numeric_as=NumericAs("decimal", 20, 4))
    if is_array and data.draw(st.booleans()):
        sent = struct.pack(">iiIii", 1, 1, OIDS[name], data.draw(st.integers(-1, 4)), 1) + sent
    with contextlib.suppress(WireError):
        decode(how, None, sent, sent, unrepresentable="null")


def test_the_table_of_good_values_has_every_type() -> None:
    assert {pg_type.name for pg_type in TYPES if pg_type.decoder is not None} == {name for name, _ in GOOD}
