"""Edge values, domains, the options for values, and the many types that come as text."""

from __future__ import annotations

import json
import random
import struct
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import psycopg2.extras
import pytest
from frames import load
from psycopg2.extensions import connection as Session
from pyspark.sql import DataFrame, SparkSession

ROWS = 300

chance = random.Random(42)


# --- what is written ------------------------------------------------------------------------------------------------


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
_CHARACTERS += ["e\u0301", "🦆", "\u202e", "\u2028"]


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
    # Next to leap seconds, in the gap of a time zone, and around the change of the calendar.
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
    Native("text", "string", ["", " ", "\n\t\\", "NULL", "🦆" * 50], texts(40)),
    Native("varchar(20)", "string", ["", " ", "{}"], texts(20)),
    Native("varchar", "string", [""], texts(300)),
    Native("bpchar(10)", "string", ["", "a  ", "🦆"], texts(10)),
    Native("bpchar", "string", ["", "a  "], texts(10)),
    Native("name", "string", ["", "n" * 63], names),
    Native("bytea", "binary", ["\\x", "\\x00", "\\x" + bytes(range(256)).hex()], octets),
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


def domain_of(native: Native) -> Native:
    name = "d_" + "".join(c if c.isalnum() else "_" for c in native.pg)
    return Native(name, native.spark, native.edges, native.random, native.read_as)


# --- what is read ---------------------------------------------------------------------------------------------------


def exact(value: Any, spark_type: str) -> Any:
    """Something that is equal only where value and type are: bits of a float, scale of a DECIMAL, an instant in UTC."""
    if value is None:
        return None
    if isinstance(value, list):
        return [exact(element, spark_type[len("array<") : -1]) for element in value]
    if isinstance(value, float):
        return "NaN" if value != value else struct.pack(">f" if spark_type == "float" else ">d", value)
    if isinstance(value, Decimal):
        return value.as_tuple()
    if isinstance(value, datetime) and value.tzinfo is not None:
        return "instant", value.astimezone(timezone.utc).replace(tzinfo=None)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    return type(value), value


def columns_of(df: DataFrame, order: str = "id") -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = df.orderBy(order).toArrow().to_pydict()
    return columns


def test_edge_values_of_native_types_their_arrays_and_domains_arrive_as_they_are(
    db: str, pg: Session, spark: SparkSession
) -> None:
    kinds = [*NATIVE, *map(array_of, NATIVE), *map(domain_of, NATIVE)]
    with pg.cursor() as cursor:
        cursor.execute("SET TimeZone = 'UTC'; SET DateStyle = ISO; SET extra_float_digits = 1")
        for native in NATIVE:
            cursor.execute(f"CREATE DOMAIN {domain_of(native).pg} AS {native.pg}")
        # The scalars once more without NULLs: these are read in another way.
        strict = NATIVE
        definitions = [f"c{i} {kind.pg}" for i, kind in enumerate(kinds)]
        definitions += [f"n{i} {kind.pg} NOT NULL" for i, kind in enumerate(strict)]
        cursor.execute(f"CREATE TABLE t (id int NOT NULL, {', '.join(definitions)})")

        def written(kind: Native, row: int, nulls: bool) -> str | None:
            if row < len(kind.edges):
                return kind.edges[row]
            if nulls and chance.random() < 0.2:
                return None
            return chance.choice(kind.edges) if chance.random() < 0.1 else kind.random()

        rows = [
            [row, *(written(kind, row, True) for kind in kinds), *(written(kind, row, False) for kind in strict)]
            for row in range(ROWS)
        ]
        casts = ", ".join(["%s", *(f"%s::{kind.pg}" for kind in [*kinds, *strict])])
        psycopg2.extras.execute_values(cursor, "INSERT INTO t VALUES %s", rows, template=f"({casts})", page_size=100)
        types = [kind.spark for kind in [*kinds, *strict]]
        labels = [f"c{i}" for i in range(len(kinds))] + [f"n{i}" for i in range(len(strict))]
        reads = [
            f"{label}::{kind.read_as}" if kind.read_as else label
            for label, kind in zip(labels, [*kinds, *strict], strict=True)
        ]
        cursor.execute(f"SELECT {', '.join(reads)} FROM t ORDER BY id")
        expected = list(zip(*cursor.fetchall(), strict=True))

    df = load(spark, db, dbtable="t", numPartitions=3)
    assert [(f.name, f.dataType.simpleString()) for f in df.schema] == [
        ("id", "int"),
        *zip(labels, types, strict=True),
    ]
    got = columns_of(df)
    assert got.pop("id") == list(range(ROWS))
    for kind, label, wanted in zip([*kinds, *strict], labels, expected, strict=True):
        for row, (value, want) in enumerate(zip(got[label], wanted, strict=True)):
            assert exact(value, kind.spark) == exact(want, kind.spark), f"{kind.pg} ({label}), row {row}"


def test_numeric_without_a_fitting_declaration_is_what_the_option_says(
    db: str, pg: Session, spark: SparkSession
) -> None:
    small = [decimals(29, 9)() for _ in range(500)] + ["0", "0.000000001", "12345678901234567890123456789.123456789"]
    wild = ["NaN", "Infinity", "-Infinity", "1e300", "-1e-300", "123.4500", "0.1", f"{10**60}", f"0.{'0' * 50}1"]
    with pg.cursor() as cursor:
        cursor.execute("CREATE TABLE t (id int, n numeric, w numeric, p numeric(60,20), a numeric[])")
        rows = [(i, n, chance.choice(wild) if i >= len(wild) else wild[i], n) for i, n in enumerate(small)]
        psycopg2.extras.execute_values(
            cursor, "INSERT INTO t VALUES %s", rows, template="(%s, %s, %s, %s, NULL)", page_size=500
        )
        cursor.execute("UPDATE t SET a = ARRAY[n, NULL, w]")
        cursor.execute("SELECT n::text, w::text, p::text, a::text[] FROM t ORDER BY id")
        n, w, p, a = (list(column) for column in zip(*cursor.fetchall(), strict=True))
    as_text = load(spark, db, dbtable="t")
    assert as_text.schema.simpleString() == "struct<id:int,n:string,w:string,p:string,a:array<string>>"
    got = columns_of(as_text)
    assert [got[name] for name in "nwpa"] == [n, w, p, a]

    as_double = load(spark, db, dbtable="t", numericAs="double")
    assert as_double.schema.simpleString() == "struct<id:int,n:double,w:double,p:double,a:array<double>>"
    got = columns_of(as_double)
    for name, texts_ in (("n", n), ("w", w), ("p", p)):
        assert [exact(v, "double") for v in got[name]] == [exact(float(text), "double") for text in texts_]
    assert [exact(v, "array<double>") for v in got["a"]] == [
        exact([None if e is None else float(e) for e in row], "array<double>") for row in a
    ]

    as_decimal = load(spark, db, dbtable="t", columns="id,n", numericAs="decimal(38,9)")
    assert as_decimal.schema.simpleString() == "struct<id:int,n:decimal(38,9)>"
    context = Decimal("1e-9")
    wanted = [Decimal(text) for text in n]
    assert columns_of(as_decimal)["n"] == wanted
    assert all(value.as_tuple().exponent == context.as_tuple().exponent for value in columns_of(as_decimal)["n"])


def test_a_numeric_of_unusual_scale_is_a_decimal_that_holds_it(db: str, pg: Session, spark: SparkSession) -> None:
    if pg.server_version < 150000:
        pytest.skip("numeric(5,-2) came with PostgreSQL 15")
    with pg.cursor() as cursor:
        cursor.execute("CREATE TABLE t AS SELECT 9999900::numeric(5,-2) AS a, 0.00999::numeric(3,5) AS b")
    df = load(spark, db, dbtable="t")
    assert df.schema.simpleString() == "struct<a:decimal(7,0),b:decimal(5,5)>"
    assert [tuple(row) for row in df.collect()] == [(Decimal("9999900"), Decimal("0.00999"))]


# --- types that come as text ----------------------------------------------------------------------------------------

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


def test_every_other_type_arrives_as_postgresql_prints_it(db: str, pg: Session, spark: SparkSession) -> None:
    with pg.cursor() as cursor:
        cursor.execute(AS_READERS_SET_IT)
        there = make_types(cursor)
        longest = max(map(len, PRINTED.values()))
        columns = ", ".join(f"c{i} {name}, a{i} {name}[]" for i, name in enumerate(there))
        cursor.execute(f"CREATE TABLE t (id int, {columns})")
        for row in range(longest + 1):
            values = []
            for name in there:
                values += [PRINTED[name][row] if row < len(PRINTED[name]) else None]
                values += [printed_array(name) if row == 0 else "{}" if row == 1 else None]
            casts = ", ".join(f"%s::{name}, %s::{name}[]" for name in there)
            cursor.execute(f"INSERT INTO t VALUES ({row}, {casts})", values)
        # format() calls the type's output function.
        prints = "CASE WHEN num_nulls({0}) = 0 THEN format('%s', {0}) END"
        elements = prints.format("a{0}[i]")
        each = f"{prints.format('c{0}')}, CASE WHEN a{{0}} IS NOT NULL THEN"
        each += f" ARRAY(SELECT {elements} FROM generate_subscripts(a{{0}}, 1) AS i ORDER BY i) END"
        cursor.execute(f"SELECT {', '.join(each.format(i) for i in range(len(there)))} FROM t ORDER BY id")
        expected = list(zip(*cursor.fetchall(), strict=True))
    df = load(spark, db, dbtable="t")
    assert [field.dataType.simpleString() for field in df.schema.fields[1:]] == ["string", "array<string>"] * len(there)
    got = columns_of(df)
    for i, name in enumerate(there):
        assert got[f"c{i}"] == list(expected[2 * i]), name
        assert got[f"a{i}"] == list(expected[2 * i + 1]), f"{name}[]"
        assert len(got[f"a{i}"][0]) == len(PRINTED[name]) + 1
    assert got[f"c{there.index('interval')}"][0] == "P1Y2M-3DT4H5M6.789S"
    assert got[f"c{there.index('cast_mood')}"][0] == "sad"


def test_domains_are_what_they_are_over_wherever_they_stand(db: str, pg: Session, spark: SparkSession) -> None:
    with pg.cursor() as cursor:
        cursor.execute(
            "CREATE DOMAIN positive AS int CHECK (VALUE > 0); CREATE DOMAIN small AS positive CHECK (VALUE < 100);"
            " CREATE DOMAIN price AS numeric(12, 2); CREATE DOMAIN numbers AS int[]; CREATE DOMAIN prices AS price[];"
            " CREATE DOMAIN flag AS bit(1); CREATE DOMAIN flags AS bit(1)[]"
        )
        cursor.execute(
            "CREATE TABLE t (a small, b small[], c price[], d numbers, e numbers[], f prices, g flag, h flag[],"
            " i flags, j bit(1), k bit(2), l numeric(5, 1)[])"
        )
        cursor.execute(
            "INSERT INTO t VALUES (7, '{1,NULL}', '{1.5,NULL}', '{1,NULL,3}', '{\"{1,2}\",NULL,\"{}\"}', '{0.25}',"
            "  '1', '{1,NULL,0}', '{0}', '0', '01', '{1.25}')"
        )
    types = "int array<int> array<decimal(12,2)> array<int> array<array<int>> array<decimal(12,2)> boolean"
    types += " array<boolean> array<boolean> boolean string array<decimal(5,1)>"
    wanted = (
        *(7, [1, None], [Decimal("1.50"), None], [1, None, 3], [[1, 2], None, []], [Decimal("0.25")], True),
        *([True, None, False], [False], False, "01", [Decimal("1.3")]),
    )
    # A query's columns are no table's, which the catalog would describe.
    columns = ", ".join(f"coalesce({c}) AS {c}" for c in "abcdefghijkl")
    for source in ({"dbtable": "t"}, {"query": f"SELECT {columns} FROM t"}):
        df = load(spark, db, **source)
        assert [field.dataType.simpleString() for field in df.schema] == types.split()
        assert [tuple(row) for row in df.collect()] == [wanted]


def test_native_types_as_text_are_what_postgresql_prints(db: str, pg: Session, spark: SparkSession) -> None:
    kinds = [*NATIVE, *map(array_of, NATIVE)]
    with pg.cursor() as cursor:
        cursor.execute(AS_READERS_SET_IT)
        cursor.execute(f"CREATE TABLE t (id int, {', '.join(f'c{i} {kind.pg}' for i, kind in enumerate(kinds))})")
        more = {"date": ["infinity", "0044-03-15 BC"], "timestamptz": ["-infinity", "20000-01-01+00"]}
        for row in range(6):
            values = []
            for kind in kinds:
                edges = [*more.get(kind.pg, ()), *kind.edges]
                values.append(edges[row] if row < len(edges) else None)
            casts = ", ".join(f"%s::{kind.pg}" for kind in kinds)
            cursor.execute(f"INSERT INTO t VALUES ({row}, {casts})", values)
        prints = ", ".join(f"CASE WHEN num_nulls(c{i}) = 0 THEN format('%s', c{i}) END" for i in range(len(kinds)))
        cursor.execute(f"SELECT {prints} FROM t ORDER BY id")
        expected = list(zip(*cursor.fetchall(), strict=True))
    df = load(spark, db, dbtable="t", asString=",".join(f"c{i}" for i in range(len(kinds))))
    got = columns_of(df)
    for i, kind in enumerate(kinds):
        assert got[f"c{i}"] == list(expected[i]), kind.pg


@pytest.mark.parametrize("rows", [0, 1])
def test_tables_of_no_column_or_row_are_read(rows: int, db: str, pg: Session, spark: SparkSession) -> None:
    with pg.cursor() as cursor:
        cursor.execute(f"CREATE TABLE t AS SELECT 1 AS a, ARRAY['x'] AS b, 1.5::numeric(3,1) AS c LIMIT {rows}")
    df = load(spark, db, dbtable="t")
    assert df.schema.simpleString() == "struct<a:int,b:array<string>,c:decimal(3,1)>"
    assert df.count() == rows
