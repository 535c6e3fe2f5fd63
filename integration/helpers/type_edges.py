"""Values at the edges of every type, and how PostgreSQL prints them."""

from __future__ import annotations

import json
import random
import struct
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any

import psycopg2.extras

chance = random.Random(42)


def integers(bits: int) -> Callable[[], str]:
    # Of every magnitude, not only the greatest ones.
    return lambda: str(chance.getrandbits(chance.randint(1, bits - 1)) * chance.choice((1, -1)))


def floats(kind: str) -> Callable[[], str]:
    def one() -> str:
        (value,) = struct.unpack(f">{kind}", chance.randbytes(struct.calcsize(kind)))
        return repr(value)

    return one


def decimals(precision: int, scale: int) -> Callable[[], str]:
    def one() -> str:
        digits = str(chance.randrange(10 ** chance.randint(1, precision))).rjust(max(scale, 0) + 1, "0")
        sign = chance.choice(("", "-"))
        return f"{sign}{digits[:-scale]}.{digits[-scale:]}" if scale > 0 else f"{sign}{digits}{'0' * -scale}"

    return one


# One, two, three and four bytes of UTF-8 and a combining mark; no surrogates, no NUL.
_CHARACTERS = [chr(c) for c in (*range(1, 0x80), 0x80, 0xE9, 0x7FF, 0x800, 0x20AC, 0xFFFD, 0xFFFF, 0x10000, 0x10FFFF)]


def texts(most: int) -> Callable[[], str]:
    return lambda: "".join(chance.choices(_CHARACTERS, k=chance.randint(0, most)))[:most]


def names() -> str:
    return "".join(chance.choices("abcÄ€🦆 .\"'", k=chance.randint(0, 12)))


def octets() -> str:
    return "\\x" + chance.randbytes(chance.choice((0, 1, 7, 300))).hex()


def dates() -> str:
    return (date(1, 1, 1) + timedelta(days=chance.randrange(3652059))).isoformat()


def moments(suffix: str) -> Callable[[], str]:
    def one() -> str:
        seconds = chance.randrange(-62135596800, 253402300800)
        moment = datetime(1970, 1, 1) + timedelta(seconds=seconds, microseconds=chance.choice((0, 1, 500000, 999999)))
        return moment.isoformat(" ") + suffix

    return one


def documents() -> str:
    return json.dumps({texts(5)().replace("\0", ""): [chance.random(), None, {"ä": texts(9)()}]}, ensure_ascii=False)


FLOATS = ["0", "-0", "NaN", "Infinity", "-Infinity", "1", "0.1", "-1e-3"]


MOMENTS = [
    *("0001-01-01 00:00:00", "9999-12-31 23:59:59.999999", "1970-01-01 00:00:00", "1969-12-31 23:59:59.999999"),
    # Next to PostgreSQL's epoch and to leap seconds, in the gap of a time zone, and around the change of the calendar.
    "1999-12-31 23:59:59.999999",
    *("2016-12-31 23:59:59.999999", "2016-12-31 23:59:60", "2017-01-01 00:00:00", "2024-03-31 02:30:00"),
    *(
        "1582-10-04 12:00:00",
        "1582-10-10 12:00:00",
        "1582-10-15 12:00:00",
        "1900-02-28 23:59:59",
        "2000-02-29 00:00:00",
    ),
]


@dataclass(frozen=True)
class Native:
    """A type with a Spark type of its own: values to write, and how PostgreSQL's client reads the same."""

    pg: str
    spark: str
    edges: Sequence[str]
    random: Callable[[], str]
    read_as: str = ""  # where psycopg2 would parse it


def numeric(precision: int, scale: int) -> Native:
    whole, part = "9" * (precision - scale), "9" * scale
    edges = [f"{sign}{whole or '0'}{'.' if part else ''}{part}" for sign in ("", "-")]
    least = f"0.{'0' * (scale - 1)}1" if scale else "1"
    spark = f"decimal({precision},{scale})"
    return Native(f"numeric({precision},{scale})", spark, [*edges, "0", least, f"-{least}"], decimals(precision, scale))


NATIVE = [
    Native("bool", "boolean", ["t", "f"], lambda: chance.choice("tf")),
    Native("int2", "smallint", ["-32768", "32767", "0", "-1"], integers(16)),
    Native("int4", "int", ["-2147483648", "2147483647", "0", "-1"], integers(32)),
    Native("int8", "bigint", ["-9223372036854775808", "9223372036854775807", "0", "-1"], integers(64)),
    Native("oid", "bigint", ["0", "4294967295", "2147483648"], lambda: str(chance.getrandbits(32)), "bigint"),
    Native("float4", "float", [*FLOATS, "1e-45", "1.17549435e-38", "3.4028235e38"], floats("f")),
    Native("float8", "double", [*FLOATS, "5e-324", "2.2250738585072014e-308", "1.7976931348623157e308"], floats("d")),
    *(
        numeric(precision, scale)
        for precision, scale in (
            *((1, 0), (4, 4), (9, 2), (10, 10), (18, 0), (18, 6), (19, 0)),
            *((19, 1), (28, 9), (37, 5), (38, 0), (38, 18), (38, 37), (38, 38)),
        )
    ),
    Native("text", "string", ["", " ", "\n\t\\", "NULL", "🦆" * 50, "aß本🐍" * 225], texts(40)),
    Native("varchar(20)", "string", ["", " ", "{}"], texts(20)),
    Native("varchar", "string", [""], texts(300)),
    Native("bpchar(10)", "string", ["", "a  ", "🦆"], texts(10)),
    Native("bpchar", "string", ["", "a  "], texts(10)),
    Native("name", "string", ["", "n" * 63], names),
    Native("bytea", "binary", ["\\x", "\\x00", "\\x" + bytes(range(256)).hex(), "\\x" + "00ff5c" * 1000], octets),
    Native("date", "date", ["0001-01-01", "9999-12-31", "1970-01-01", "1582-10-10", "2000-02-29"], dates),
    Native("timestamp", "timestamp_ntz", MOMENTS, moments("")),
    Native("timestamptz", "timestamp", [f"{moment}+00" for moment in MOMENTS], moments("+00")),
    Native(
        "uuid",
        "string",
        [str(uuid.UUID(int=0)), str(uuid.UUID(int=2**128 - 1))],
        lambda: str(uuid.UUID(int=chance.getrandbits(128))),
        "text",
    ),
    Native("json", "string", ["null", ' {"a" :1, "a": 2} ', '""'], documents, "text"),
    Native("jsonb", "string", ["null", ' {"a" :1, "a": 2} ', '""', "1e5"], documents, "text"),
]


def array_literal(elements: Sequence[str | None], delimiter: str = ",") -> str:
    quoted = ('"' + e.replace("\\", "\\\\").replace('"', '\\"') + '"' if e is not None else "NULL" for e in elements)
    return "{" + delimiter.join(quoted) + "}"


def domain_of(native: Native) -> Native:
    name = "d_" + "".join(c if c.isalnum() else "_" for c in native.pg)
    return Native(name, native.spark, native.edges, native.random, native.read_as)


PRINTED = {
    "interval": ["1 year 2 mons -3 days 04:05:06.789", "-00:00:00.000001", "0", "178000000 years"],
    "time": ["00:00:00", "24:00:00", "23:59:59.999999"],
    "timetz": ["04:05:06.7+02", "00:00:00-15:59"],
    "inet": ["10.0.0.1", "10.0.0.1/24", "::1", "2001:db8::/32"],
    "cidr": ["10.0.0.0/8", "192.168.1.1/32", "::/0"],
    "macaddr": ["08:00:2b:01:02:03"],
    "macaddr8": ["08:00:2b:01:02:03:04:05"],
    "money": ["-12345.67", "0"],
    "bit(5)": ["10101"],
    "varbit": ["", "1", "1010101010101"],
    "point": ["(0.1,-2e300)"],
    "line": ["{1,2.5,-3}"],
    "lseg": ["[(0,0),(1,1)]"],
    "box": ["(1,1),(0,0)"],
    "path": ["[(0,0),(1,1)]", "((0,0),(1,1))"],
    "polygon": ["((0,0),(1,1),(2,0))"],
    "circle": ["<(0.5,0),3>"],
    "tsvector": ["'a':1A 'fat':2B,4C", ""],
    "tsquery": ["'fat' & ( 'rat' | !'cat' )"],
    "int4range": ["[1,10)", "empty", "(,)"],
    "numrange": ["[1.50,2.0]", "(,-1]"],
    "tstzrange": ["[2024-02-03 04:05:06+05,)"],
    "daterange": ["[2024-02-03,infinity]"],
    "pg_lsn": ["16/B374D848", "0/0"],
    "xid": ["4294967295"],
    "tid": ["(4294967295,65535)"],
    '"char"': ["a", ""],
    "jsonpath": ["$.a[*] ? (@ > 1)"],
    "regtype": ["integer", "timestamp with time zone"],
    "regclass": ["pg_class", 'mixed."Table name"'],
    "int2vector": ["1 2 3", ""],
    "mood": ["sad", 'it\'s "ok"'],
    "pair": ['(1,"a,b")', "(,)", '(2,"")'],
    "flags": ["(t,10.0.0.1)"],
    "d_mood": ["sad"],
    "d_inet": ["10.0.0.1"],
    "d_pair": ['(1,"a,b")', "(,)"],
    "cast_mood": ["sad"],
    "scores": ["[1.5,2)"],
    "int4multirange": ["{[1,3),[5,8)}", "{}"],
    "xml": ["<a>ä</a>", "x<b/>", '<?xml version="1.0" encoding="UTF-8"?><a/>'],
    "citext": ["MiXed"],
    "ltree": ["a.b.c"],
    "isbn": ["1-937985-06-7"],
    "xid8": ["18446744073709551615"],
}


TYPES_AND_TABLES = """
CREATE SCHEMA mixed; CREATE TABLE mixed."Table name" ();
CREATE TYPE mood AS ENUM ('sad', 'it''s "ok"');
CREATE TYPE pair AS (number int, "a text" text);
CREATE TYPE flags AS (flag bool, address inet);
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CREATE DOMAIN d_mood AS mood;
CREATE DOMAIN d_inet AS inet;
CREATE DOMAIN d_pair AS pair;
CREATE TYPE cast_mood AS ENUM ('sad');
CREATE FUNCTION cast_mood(cast_mood) RETURNS text LANGUAGE sql AS $$ SELECT 'cast' $$;
CREATE CAST (cast_mood AS text) WITH FUNCTION cast_mood(cast_mood);
CREATE TYPE scores AS RANGE (subtype = numeric);
"""


# Not in every server's binaries: the wheel's lacks libxml, 13 has no multiranges.
MAYBE_LACKING = {"citext", "ltree", "isbn", "xml", "int4multirange"}


def make_types(cursor: Any) -> list[str]:
    """Make the types that are none of PostgreSQL's own; give all types of ``PRINTED`` that there are then."""
    cursor.execute(TYPES_AND_TABLES)
    cursor.execute("SELECT name FROM pg_available_extensions WHERE name IN ('citext', 'ltree', 'isn')")
    for (name,) in cursor.fetchall():
        cursor.execute(f"CREATE EXTENSION {name}")
    there = []
    for name in PRINTED:
        cursor.execute("SELECT to_regtype(%s) IS NOT NULL", (name.split("(")[0],))
        (found,) = cursor.fetchone()
        if name == "xml":
            try:
                cursor.execute("SELECT '<a/>'::xml")
            except psycopg2.errors.FeatureNotSupported:
                found = False
        if found:
            there.append(name)
    assert set(PRINTED) - set(there) <= MAYBE_LACKING
    return there


def printed_array(name: str) -> str:
    """One array with all texts of a type."""
    return array_literal([*PRINTED[name], None], ";" if name == "box" else ",")


AS_READERS_SET_IT = (
    "SET TimeZone = 'UTC'; SET DateStyle = 'ISO, YMD'; SET IntervalStyle = 'iso_8601'; SET extra_float_digits = 1;"
    " SET bytea_output = 'hex'; SET lc_monetary = 'C'"
)


def array_of(native: Native) -> Native:
    edges = [None, *native.edges]

    def one() -> str:
        count = chance.choice((0, 1, 2, 3, 8))
        return array_literal([chance.choice(edges) if chance.random() < 0.3 else native.random() for _ in range(count)])

    return Native(
        f"{native.pg}[]",
        f"array<{native.spark}>",
        ["{}", "{NULL}", array_literal(edges), array_literal(native.edges)],
        one,
        f"{native.read_as}[]" if native.read_as else "",
    )
