"""Random rows of every type come out as psycopg2 reads them, or as PostgreSQL prints them."""

from __future__ import annotations

import datetime as dt
import math
import random
import struct
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import psycopg2.extras
import pytest
from frames import load
from psycopg2.extensions import connection as Session
from pyspark.sql import SparkSession

ROWS = 1500
UTC = dt.timezone.utc


def _text(chance: random.Random) -> str:
    alphabets = (
        "abc XYZ,\"'\\{}",
        "äßéñ",
        "日本語",
        "\U0001f40d\U0010ffff",
        "\x01\t\n\r\x7f",
        "\u0300\u200d\ufeff\ufffe",
    )
    return "".join(chance.choice(chance.choice(alphabets)) for _ in range(chance.choice((0, 1, 2, 7, 40, 900))))


def _numeric(precision: int, scale: int) -> Callable[[random.Random], Decimal]:
    def one(chance: random.Random) -> Decimal:
        digits = chance.choice((10**precision - 1, 0, 1, chance.randrange(10 ** chance.randint(1, precision))))
        return Decimal((chance.choice((0, 1)), tuple(map(int, str(digits))), -scale))

    return one


def _float(chance: random.Random) -> float:
    edges = (0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, -2.2250738585072014e-308, 1.7976931348623157e308, 0.1)
    return chance.choice((*edges, chance.uniform(-1e9, 1e9), math.ldexp(chance.random(), chance.randint(-1000, 1000))))


def _float4(chance: random.Random) -> float:
    edges = (0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, 1.1754942e-38, 3.4028235e38, 0.1)
    value: float = struct.unpack("f", struct.pack("f", chance.choice((*edges, chance.uniform(-1e9, 1e9)))))[0]
    return value


def _moment(chance: random.Random) -> dt.datetime:
    edges = (
        dt.datetime(1, 1, 1),
        dt.datetime(9999, 12, 31, 23, 59, 59, 999999),
        dt.datetime(2016, 12, 31, 23, 59, 59, 999999),
        dt.datetime(2017, 1, 1),
        dt.datetime(1999, 12, 31, 23, 59, 59, 999999),
        dt.datetime(1582, 10, 10),
        dt.datetime(1970, 1, 1),
    )
    return chance.choice((*edges, dt.datetime(1, 1, 1) + dt.timedelta(microseconds=chance.randrange(315 * 10**15))))


def _integer(bits: int) -> Callable[[random.Random], int]:
    most = 2 ** (bits - 1)
    return lambda chance: chance.choice((-most, most - 1, 0, -1, chance.randrange(-most, most)))


NATIVE: dict[str, Callable[[random.Random], Any]] = {
    "bool": lambda chance: chance.random() < 0.5,
    "int2": _integer(16),
    "int4": _integer(32),
    "int8": _integer(64),
    "oid": lambda chance: chance.choice((0, 2**32 - 1, chance.randrange(2**32))),
    "float4": _float4,
    "float8": _float,
    "numeric(1,0)": _numeric(1, 0),
    "numeric(9,4)": _numeric(9, 4),
    "numeric(18,18)": _numeric(18, 18),
    "numeric(20,3)": _numeric(20, 3),
    "numeric(38,0)": _numeric(38, 0),
    "numeric(38,17)": _numeric(38, 17),
    "text": _text,
    "varchar(1000)": _text,
    "char(7)": lambda chance: "".join(chance.choice("ab é") for _ in range(chance.randint(0, 7))),
    "name": lambda chance: _text(chance)[:12],
    "bytea": lambda chance: chance.randbytes(chance.choice((0, 1, 5, 3000))),
    "date": lambda chance: _moment(chance).date(),
    "timestamp": _moment,
    "timestamptz": lambda chance: _moment(chance).replace(tzinfo=UTC),
    "uuid": lambda chance: uuid.UUID(int=chance.getrandbits(128)),
    "json": lambda chance: chance.choice(('{"b": 1,  "a": [null, "é"]}', "null", '"\\u0041"', " 1.50 ")),
    "jsonb": lambda chance: chance.choice(('{"b": 1,  "a": [null, "é"]}', "null", '"\\u0041"', " 1.50 ")),
}


def comparable(value: Any) -> Any:
    """A value with all that tells it from another: bits of floats, scale of decimals, kind of moments."""
    if isinstance(value, list):
        return [comparable(item) for item in value]
    if isinstance(value, float):
        return ("float", "nan" if math.isnan(value) else struct.pack("d", value))
    if isinstance(value, Decimal):
        return ("decimal", str(value) if value else "0")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ("bytes", bytes(value))
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        return ("instant", value.astimezone(UTC).replace(tzinfo=None))
    return (type(value).__name__, value)


def fill(pg: Session, types: dict[str, Callable[[random.Random], Any]], *, nulls: bool, arrays: bool) -> list[str]:
    """Create the table ``v`` with a column of each type and random rows; return the columns' types."""
    chance = random.Random(4711)
    names = [f"{name}[]" if arrays else name for name in types]
    constraint = "" if nulls else " NOT NULL"
    with pg.cursor() as cursor:
        columns = ", ".join(f"c{i} {name}{constraint}" for i, name in enumerate(names))
        cursor.execute(f"CREATE TABLE v (id int, {columns})")

        def one(make: Callable[[random.Random], Any]) -> Any:
            value = None if nulls and chance.random() < 0.1 else make(chance)
            # As text, because SQL reads -2147483648::int4 as the negative of a number that is too large.
            return str(value) if isinstance(value, int | float | Decimal) else value

        def field(make: Callable[[random.Random], Any]) -> Any:
            return [one(make) for _ in range(chance.choice((0, 1, 2, 5)))] if arrays else one(make)

        rows = [(i, *map(field, types.values())) for i in range(ROWS)]
        template = f"(%s, {', '.join(f'%s::{name}' for name in names)})"
        psycopg2.extras.execute_values(cursor, "INSERT INTO v VALUES %s", rows, template, page_size=200)
    return names


@pytest.mark.parametrize("nulls", [False, True], ids=["not null", "with nulls"])
@pytest.mark.parametrize("arrays", [False, True], ids=["scalars", "arrays"])
def test_native_values_equal_what_psycopg2_returns(
    spark: SparkSession, db: str, pg: Session, nulls: bool, arrays: bool
) -> None:
    psycopg2.extras.register_uuid()
    psycopg2.extensions.register_type(psycopg2.extensions.UNICODE, pg)
    names = fill(pg, NATIVE, nulls=nulls, arrays=arrays)
    # psycopg2 has no reader of its own for these in arrays, and would parse JSON.
    as_text = "::text[]" if arrays else "::text"
    plain = {name: as_text for name in names if name.split("[")[0] in ("json", "jsonb", "uuid") or name == "name[]"}
    items = ", ".join(f"c{i}{plain.get(name, '')}" for i, name in enumerate(names))
    with pg.cursor() as cursor:
        cursor.execute("SET TimeZone = 'UTC'")
        cursor.execute(f"SELECT id, {items} FROM v ORDER BY id")
        expected = cursor.fetchall()
    # As Arrow, because collect() turns instants into local times, which year 1 may not have.
    table = load(spark, db, dbtable="v", numPartitions=3).orderBy("id").toArrow()
    got = list(zip(*(column.to_pylist() for column in table.columns), strict=True))
    assert len(got) == len(expected) == ROWS
    for found, wanted in zip(got, expected, strict=True):
        for name, left, right in zip(["id", *names], found, wanted, strict=True):
            if name.startswith("float4"):
                # psycopg2 makes a double of the text, whose float4 is the value.
                right = _as_float4(right)
            assert comparable(left) == comparable(right), (name, found[0])


def _as_float4(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_float4(item) for item in value]
    return None if value is None else struct.unpack("f", struct.pack("f", value))[0]


OTHERS = {
    "interval": "(i || ' mons ' || -i || ' days 01:02:03.' || i)::interval",
    "time": "('23:59:' || i % 60 || '.5')::time",
    "timetz": "'12:00:00+05:30'::timetz",
    "money": "(i * 1.25)::numeric::money",
    "inet": "('10.0.0.' || i % 256)::inet",
    "cidr": "'10.1.0.0/16'::cidr",
    "macaddr": "'08:00:2b:01:02:03'::macaddr",
    "bit(5)": "(i % 32)::bit(5)",
    "varbit": "(i % 32)::bit(5)::varbit",
    "point": "point(i, 0.1)",
    "int4range": "int4range(i, i + 5, '[]')",
    "tsvector": "to_tsvector('simple', 'cat dog ' || i)",
    "mood": "(ARRAY['sad', 'très heureux'])[1 + i % 2]::mood",
    "pair": "ROW(i, 'a,b \"' || i)::pair",
    "mood[]": "ARRAY['sad', NULL]::mood[]",
    "int4_list": "ARRAY[i, NULL]::int4_list",
    '"char"': "'x'::\"char\"",
    "pg_lsn": "'16/B374D848'::pg_lsn",
    "jsonpath": "'$.a[*]'::jsonpath",
    "regclass": "'pg_class'::regclass",
}


def test_other_values_are_what_postgresql_prints(spark: SparkSession, db: str, pg: Session) -> None:
    arrays = ("int4_list", "mood[]")
    names = [name for name in OTHERS if name not in arrays]
    with pg.cursor() as cursor:
        cursor.execute(
            "CREATE TYPE mood AS ENUM ('sad', 'très heureux'); CREATE TYPE pair AS (a int, b text);"
            " CREATE DOMAIN int4_list AS int4[]"
        )
        columns = ", ".join(f"{make} AS c{i}" for i, make in enumerate(OTHERS.values()))
        cursor.execute(f"CREATE TABLE v AS SELECT i AS id, {columns} FROM generate_series(1, 300) AS i")
        cursor.execute("SET IntervalStyle = iso_8601; SET TimeZone = 'UTC'; SET lc_monetary = 'C'")
        # format() prints with the types' own output functions, as psql does.
        items = ", ".join(f"format('%s', c{list(OTHERS).index(name)})" for name in names)
        cursor.execute(f"SELECT id, {items} FROM v ORDER BY id")
        expected = cursor.fetchall()
    df = load(spark, db, dbtable="v", numPartitions=2).orderBy("id")
    got = df.selectExpr("id", *(f"c{list(OTHERS).index(name)}" for name in names)).collect()
    assert [tuple(row) for row in got] == expected
    lists = df.selectExpr("id", *(f"c{list(OTHERS).index(name)}" for name in arrays)).collect()
    assert [tuple(row) for row in lists] == [(i, [i, None], ["sad", None]) for i in range(1, 301)]


def test_the_schema_says_what_the_types_are(spark: SparkSession, db: str, pg: Session) -> None:
    fill(pg, NATIVE, nulls=True, arrays=False)
    found = load(spark, db, dbtable="v").schema
    assert [field.dataType.simpleString() for field in found][1:] == [
        *("boolean", "smallint", "int", "bigint", "bigint", "float", "double"),
        *("decimal(1,0)", "decimal(9,4)", "decimal(18,18)", "decimal(20,3)", "decimal(38,0)", "decimal(38,17)"),
        *("string", "string", "string", "string", "binary", "date", "timestamp_ntz", "timestamp"),
        *("string", "string", "string"),
    ]
