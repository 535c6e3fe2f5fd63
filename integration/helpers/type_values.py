"""Values of every type, as text and as they arrive in both wire formats."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from psycopg2 import sql
from psycopg2.extensions import connection as Session

from pg_cdc_source.protocol.binary_copy import CopyMessages
from pg_cdc_source.values.decoder import Field
from pg_cdc_source.values.registry import Codec, Column
from pg_cdc_source.values.wire import Messages, WireBuffer


def literal(text: str) -> str:
    return "E'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def literals(texts: Sequence[str]) -> str:
    return f"(ARRAY[{', '.join(map(literal, texts))}]::text[])"


CHARACTERS = [*"aBz09.:-+()[]='eé漢🦆\"\\{},xtf \t\n\r\v\f\u00a0", "NULL", "null"]


TEXT = (
    f"(SELECT coalesce(string_agg({literals(CHARACTERS)}[1 + floor(random() * {len(CHARACTERS)})::int], ''), '')"
    " FROM generate_series(1, ({g}) % 9))"
)


MOMENT = (
    "(timestamp '0001-01-01' + make_interval(secs => floor(random() * 315537897599)) + floor(random() * 10)"
    " * ('{0s,1us,10us,100us,1ms,10ms,100ms,111111us}'::interval[])[1 + ({g}) % 8])"
)


DIGITS = "('0.' || " + " || ".join(["lpad(floor(random() * 1e13)::bigint::text, 13, '0')"] * 3) + ")::numeric"


DATES = ["0001-01-01", "9999-12-31", "1970-01-01", "1582-10-10", "2000-02-29", "1900-02-28", "0099-01-01", "0999-12-31"]


FAR_DATES = ["10000-01-01", "0001-12-31 BC", "0044-03-15 BC", "5874897-12-31", "4713-01-01 BC", "infinity", "-infinity"]


TIMES = [f"{date} {time}" for date in DATES for time in ("00:00:00", "23:59:59.999999")] + [
    *("2016-12-31 23:59:60", "1999-12-31 23:59:59.1", "2024-02-29 12:00:00.05", "1969-12-31 23:59:59.000001"),
    *("10000-01-01 00:00:00", "294276-12-31 23:59:59.999999", "0001-12-31 23:59:59.9 BC", "4713-01-01 00:00:00 BC"),
    *("infinity", "-infinity"),
]


FLOATS = ["0", "-0", "NaN", "Infinity", "-Infinity", "1", "0.1", "-1e-3", "1e15", "1e-5", "123456789", "1e22", "1e23"]


TEXTS = [
    "",
    " ",
    "NULL",
    "null",
    "nUlL",
    "NULLS",
    '"',
    "\\",
    '\\"',
    "\\\\",
    "{}",
    "{",
    "}",
    ",",
    "a,b",
    "\n\t\r\v\f",
    "ä🦆",
]


DOCUMENTS = ["null", ' {"a" :1, "a": 2} ', '""', '{"ä": ["\\\\", "\\"", "\\n"]}', "1e5", "[]", "{}"]


def decimal(precision: int, scale: int) -> tuple[str, list[str]]:
    whole, part = "9" * (precision - scale) or "0", "9" * scale
    largest = f"{whole}.{part}".rstrip(".")
    least = f"0.{'0' * (scale - 1)}1" if scale else "1"
    random = (
        f"trunc({DIGITS} * ('1e' || floor(random() * {precision - scale + 1})::int)::numeric, {scale})"
        " * CASE WHEN random() < 0.5 THEN -1 ELSE 1 END"
    )
    return random, [largest, f"-{largest}", "0", least, f"-{least}", "NaN"]


# Declared type: an expression for random values, and literals.
VALUES: dict[str, tuple[str, list[str]]] = {
    "bool": ("random() < 0.5", ["t", "f"]),
    "bytea": ("substr(decode(md5(({g})::text || random()), 'hex'), 1, ({g}) % 17)", ["\\x", "\\x00ff", "\\x5c22"]),
    "name": (f"left({TEXT}, 12)::name", ["", "n" * 63, "null"]),
    "int8": (
        "((random() * 2 - 1) * 10 ^ (random() * 18.9))::int8",
        ["9223372036854775807", "-9223372036854775808", "0", "-1"],
    ),
    "int2": ("(floor(random() * 65536) - 32768)::int2", ["32767", "-32768", "0", "-1"]),
    "int4": ("((random() * 2 - 1) * 10 ^ (random() * 9.3))::int4", ["2147483647", "-2147483648", "0", "-1"]),
    "text": (TEXT, TEXTS),
    "oid": ("floor(random() * 4294967296)::int8::oid", ["0", "4294967295", "2147483648"]),
    "json": (f"json_build_object({TEXT}, random(), 'a', {TEXT})", DOCUMENTS),
    "float4": (
        "((random() - 0.5) * 10 ^ (random() * 75 - 37))::float4",
        [*FLOATS, "1e-45", "1.17549435e-38", "3.4028235e38", "16777216"],
    ),
    "float8": (
        "(random() - 0.5) * 10 ^ (random() * 614 - 307)",
        [*FLOATS, "5e-324", "2.2250738585072014e-308", "1.7976931348623157e308", "9007199254740993"],
    ),
    "bpchar": (TEXT, TEXTS),
    "bpchar(10)": (f"left({TEXT}, 10)", ["", "a  ", "🦆"]),
    "varchar": (TEXT, TEXTS),
    "date": ("date '0001-01-01' + floor(random() * 3652059)::int", [*DATES, *FAR_DATES]),
    "timestamp": (MOMENT, TIMES),
    "timestamptz": (f"{MOMENT} AT TIME ZONE 'UTC'", [f"{t}+00" if "inf" not in t else t for t in TIMES]),
    "uuid": ("gen_random_uuid()", ["00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"]),
    "jsonb": (f"json_build_object({TEXT}, random(), 'a', {TEXT})::jsonb", DOCUMENTS),
    **{
        f"numeric({p},{s})": decimal(p, s)
        for p, s in ((1, 0), (4, 4), (9, 2), (12, 2), (18, 0), (18, 18), (19, 1), (28, 9), (38, 0), (38, 18), (38, 38))
    },
    "numeric": (
        f"trunc({DIGITS} * ('1e' || floor(random() * 25)::int)::numeric, floor(random() * 9)::int)",
        [
            *("NaN", "Infinity", "-Infinity", "1e300", "-1e-300", "1e15", "1e16", "-1e16", "9999999999999999"),
            *("123.4500", "0.1", "0.10000", "0.00001", "-0.00010", "1000000." + "0" * 43),
        ],
    ),
    "interval": ("make_interval(secs => random() * 1e9)", ["1 year -2 days", "0"]),
    "inet": ("'10.0.0.0'::inet + ({g})", ["10.0.0.1/24", "::1"]),
    "money": ("(random() * 1e9)::numeric::money", ["-12.5"]),
    "time": ("time '00:00' + make_interval(secs => random() * 86399)", ["24:00:00"]),
    "timetz": ("timetz '00:00+00' + make_interval(secs => random() * 86399)", ["24:00:00-15:59", "12:00+05:30"]),
    "bit(1)": ("(random() * 2)::int::bit(1)", ["1", "0"]),
    "bit(9)": ("(random() * 512)::int::bit(9)", ["000000000", "111111111"]),
    "varbit": ("substring((random() * 1e9)::int::bit(30), 1, ({g}) % 31)", ["", "1"]),
    "box": ("box(point(random(), 1e300), point(({g}), 0))", ["(1,1),(0,0)"]),
    "int4range": ("int4range(({g}), ({g}) + 5)", ["empty", "(,)"]),
}


def array_of(element: str) -> tuple[str, list[str]]:
    """Return the same for arrays of the type ``element``."""
    random, edges = VALUES[element]
    expression = (
        "(SELECT coalesce(array_agg(CASE WHEN random() < 0.15 THEN NULL WHEN random() < 0.2 THEN"
        f" {literals(edges)}[1 + floor(random() * {len(edges)})::int]::{element}"
        f" ELSE ({random.replace('{g}', '{g} + e')})::{element} END), '{{}}')"
        " FROM generate_series(1, (({g}) * 7919) % 6) AS e)"
    )
    bounds = ["[2:3]={NULL,NULL}", "[-1:-1]={NULL}", "{{NULL,NULL}}", "[0:0][2:3]={{NULL,NULL}}"]
    return expression, ["{}", "{NULL}", *(b.replace(",", ";") if element == "box" else b for b in bounds)]


def copied(session: Session, selected: sql.Composable, text_format: bool) -> list[bytes]:
    messages: list[bytes] = []
    how = sql.SQL("COPY (SELECT {} FROM public.t) TO STDOUT (FORMAT {})").format(
        selected, sql.SQL("text" if text_format else "binary")
    )
    with session.cursor() as cursor:
        cursor.copy_expert(how, SimpleNamespace(write=messages.append))
    return messages


_LETTERS = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}


def printed(session: Session, column: Column) -> list[bytes | None]:
    """Return what the output function prints, as COPY's text format has it."""
    lines = copied(session, sql.Identifier(column.name), text_format=True)
    return [
        None if line == b"\\N\n" else re.sub(rb"\\(.)", lambda m: _LETTERS.get(m[1], m[1]), line[:-1]) for line in lines
    ]


def sent(session: Session, codec: Codec) -> list[bytes]:
    """Return the rows of a binary COPY of one column."""
    selected = sql.SQL(codec.select_sql).format(sql.Identifier(codec.column.name))
    messages = CopyMessages()
    rows = messages.rows(Messages.joined(copied(session, selected, text_format=False), padding=0))
    messages.finish()
    return [rows.octets(i) for i in range(len(rows))]


def field(values: Sequence[bytes | None]) -> Field:
    length = np.array([len(value or b"") for value in values], np.int64)
    buffer = WireBuffer([value or b"" for value in values])
    return Field(buffer, np.cumsum(length) - length, length, np.array([value is not None for value in values]))


def assert_identical(one: pa.Array, other: pa.Array) -> None:
    assert one.type == other.type
    for array in (one, other):
        array.validate(full=True)
    if pa.types.is_list(one.type):
        assert pc.list_value_length(one).equals(pc.list_value_length(other))
        assert_identical(pc.list_flatten(one), pc.list_flatten(other))
    elif pa.types.is_floating(one.type):
        assert pc.is_nan(one).equals(pc.is_nan(other))
        bits = pa.int32() if one.type == pa.float32() else pa.int64()
        number = pc.invert(pc.is_nan(one))
        assert one.filter(number).view(bits).equals(other.filter(number).view(bits))
    else:
        assert one.equals(other)
