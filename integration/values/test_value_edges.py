"""Edge values, domains, the options for values, and the many types that come as text."""

from __future__ import annotations

import struct
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

import psycopg2.extras
import pytest
from frames import load
from psycopg2.extensions import connection as Session
from pyspark.sql import DataFrame, SparkSession
from type_edges import (
    _CHARACTERS,
    AS_READERS_SET_IT,
    NATIVE,
    PRINTED,
    Native,
    array_of,
    chance,
    decimals,
    domain_of,
    make_types,
    printed_array,
)

ROWS = 300


# --- what is written ------------------------------------------------------------------------------------------------


_CHARACTERS += ["e\u0301", "🦆", "\u202e", "\u2028"]


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
        # All but the domains once more without NULLs: these are read in another way.
        strict = kinds[: 2 * len(NATIVE)]
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
