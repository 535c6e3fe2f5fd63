"""Typed rows out of an envelope equal those that ``pgsnapshot`` reads of the same table."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import pytest
from frames import load
from psycopg2.extensions import connection as Session
from pyspark.sql import DataFrame, SparkSession
from refusals import refusal
from streams import TABLE, envelope
from type_edges import AS_READERS_SET_IT, NATIVE, array_of, domain_of

from pg_cdc_source import project
from pg_cdc_source.errors import OptionError

CHANGE_COLUMNS = ["_change_type", "_commit_lsn", "_seq", "_commit_ts", "_xid", "_unchanged"]


def objects(pg: Session, table: str) -> list[str]:
    """The rows of a table as JSON of PostgreSQL's own making, in which every type prints itself."""
    with pg.cursor() as cursor:
        cursor.execute(AS_READERS_SET_IT)
        cursor.execute(
            "SELECT attname, coalesce(nullif(typbasetype, 0), atttypid)::regtype::text"
            " FROM pg_attribute JOIN pg_type AS t ON t.oid = atttypid"
            " WHERE attrelid = %s::regclass AND attnum > 0 ORDER BY attnum",
            (table,),
        )
        as_it_is = ("boolean", "smallint", "integer", "bigint", "oid")
        members = []
        for name, base in cursor.fetchall():
            column = '"' + name + '"'
            # format() calls the type's output function, as the stream does; an oid is no number to jsonb.
            text = f"CASE WHEN num_nulls({column}) = 0 THEN format('%s', {column}) END"
            members.append((name, f"({text})::bigint" if base == "oid" else column if base in as_it_is else text))
        # One object for each column, since functions have 100 arguments at most.
        pairs = " || ".join(f"jsonb_build_object('{name}', {value})" for name, value in members)
        cursor.execute(f"SELECT ({pairs})::text FROM {table} ORDER BY id")
        return [row for (row,) in cursor]


def rows_of(df: DataFrame) -> list[str]:
    # By Arrow, because Python has no moments before the year 1 in any zone; as texts, because NaN is not itself.
    return [repr(row) for row in df.orderBy("id").toArrow().to_pylist()]


def test_values_of_every_type_are_those_of_the_snapshot(db: str, pg: Session, spark: SparkSession) -> None:
    kinds = [*NATIVE, *map(array_of, NATIVE), *map(domain_of, NATIVE[:3])]
    with pg.cursor() as cursor:
        cursor.execute(AS_READERS_SET_IT)
        for native in NATIVE[:3]:
            cursor.execute(f"CREATE DOMAIN {domain_of(native).pg} AS {native.pg}")
        columns = ", ".join(f"c{i} {kind.pg}" for i, kind in enumerate(kinds))
        cursor.execute(f'CREATE TABLE {TABLE} (id int, {columns}, "i v" interval, n numeric)')
        for row in range(12):
            values = [
                kind.edges[row] if row < len(kind.edges) else kind.random() if row % 3 else None for kind in kinds
            ]
            casts = ", ".join(f"%s::{kind.pg}" for kind in kinds)
            cursor.execute(
                f"INSERT INTO {TABLE} VALUES (%s, {casts}, %s::interval, %s::numeric)",
                (row, *values, f"{row} h", "1.50"),
            )
    documents = objects(pg, TABLE)
    half = len(documents) // 2
    rows = [{"_change_type": "insert", "after": document} for document in documents[:half]]
    rows += [{"_change_type": "delete", "before": document} for document in documents[half:]]
    rows += [{"_change_type": "insert", "after": '{"other": 1}', "_table": 'public."T"'}]
    df = envelope(spark, rows)
    choices: list[dict[str, Any]] = [{"numericAs": "decimal(38,9)"}, {"numericAs": "double", "asString": 'c5,"i v"'}]
    for options in choices:
        expected = load(spark, db, dbtable=TABLE, **options)
        got = project(df, TABLE, url=db, **options)
        assert got.schema.fields[:-6] == expected.schema.fields
        assert got.schema.names[-6:] == CHANGE_COLUMNS
        assert rows_of(got.drop(*CHANGE_COLUMNS)) == rows_of(expected)


@pytest.fixture
def table(pg: Session) -> str:
    with pg.cursor() as cursor:
        cursor.execute(f"CREATE TABLE {TABLE} (id int PRIMARY KEY, d date, t text)")
    return TABLE


def test_each_kind_of_change_has_the_values_that_came(db: str, table: str, spark: SparkSession) -> None:
    df = envelope(
        spark,
        [
            {"_change_type": "snapshot", "after": '{"id":1,"d":"2024-01-02","t":""}', "_xid": None, "_commit_ts": None},
            {"_change_type": "update", "after": '{"id":2,"d":null}', "_unchanged": ["t"], "before": '{"id":9,"t":"x"}'},
            {"_change_type": "delete", "before": '{"id":3}', "key": '{"id":3}'},
            {"_change_type": "delete", "key": '{"id":4}'},
            {"_change_type": "truncate"},
        ],
    )
    got = project(df, '"T able"', url=db, beforeImage=True)
    assert got.schema.names == ["id", "d", "t", *CHANGE_COLUMNS, "_before"]
    rows = got.orderBy("_seq").collect()
    day = datetime(2024, 1, 2).date()
    assert [tuple(row)[:3] for row in rows] == [
        (1, day, ""),
        (2, None, None),
        (3, None, None),
        (4, None, None),
        (None, None, None),
    ]
    assert [row["_unchanged"] for row in rows] == [[], ["t"], [], [], []]
    assert [row["_before"] and tuple(row["_before"]) for row in rows] == [
        None,
        (9, None, "x"),
        (3, None, None),
        None,
        None,
    ]
    changes = df.orderBy("_seq").select(*CHANGE_COLUMNS).collect()
    assert got.orderBy("_seq").select(*CHANGE_COLUMNS).collect() == changes
    assert "_before" not in project(df, table, url=db).schema.names


def test_rows_that_say_what_the_columns_are_are_left_out(db: str, table: str, spark: SparkSession) -> None:
    said = {"_change_type": "schema", "after": '{"columns":[],"changes":[]}'}
    row = {"_change_type": "insert", "after": '{"id":1,"d":null,"t":"x"}'}
    assert [r["id"] for r in project(envelope(spark, [said, row]), table, url=db).collect()] == [1]


def test_a_stream_is_projected_as_a_batch_is(db: str, table: str, spark: SparkSession, tmp_path: Any) -> None:
    documents = [{"_change_type": "insert", "after": f'{{"id":{i},"d":"2024-01-02","t":"x"}}'} for i in range(5)]
    df = envelope(spark, documents)
    df.write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema(df.schema).parquet(str(tmp_path / "in"))
    query = (
        project(stream, table, url=db)
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "out"))
    )
    assert query.awaitTermination(120)
    assert rows_of(spark.read.parquet(str(tmp_path / "out"))) == rows_of(project(df, table, url=db))


def test_a_value_without_a_place_in_its_type_is_an_error_or_null(db: str, table: str, spark: SparkSession) -> None:
    df = envelope(spark, [{"_change_type": "insert", "after": '{"id":1,"d":"infinity"}', "_commit_lsn": 2**33}])
    refusal(
        project(df, table, url=db).collect,
        'public."T able", column d (date), the change at 0/0 in the commit at 2/0 '
        "(_commit_lsn 8589934592, _seq 0): infinity",
        "asString=d",
    )
    assert project(df, table, url=db, unrepresentable="null").collect()[0]["d"] is None
    assert project(df, table, url=db, asString="d").collect()[0]["d"] == "infinity"


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ('{"id":"1"}', "SCHEMA_CHANGED] envelope: column id: expected a JSON integer"),
        ('{"id":20000000000}', "column id (integer): expected the text of an integer, got one out of range"),
        ('{"id":1,"d":"yesterday"}', "column d (date): expected"),
        ("{", "WIRE] envelope: expected a JSON object"),
    ],
)
def test_what_does_not_fit_the_table_is_refused(
    after: str, expected: str, db: str, table: str, spark: SparkSession
) -> None:
    df = envelope(spark, [{"_change_type": "insert", "after": after}])
    with pytest.raises(Exception, match=re.escape(expected)) as caught:
        project(df, table, url=db).collect()
    assert "start again, so that the table is looked at anew" in str(caught.value) or after == "{"


def test_a_column_that_the_table_does_not_have_is_an_error(db: str, table: str, spark: SparkSession) -> None:
    df = envelope(spark, [{"_change_type": "insert", "after": '{"id":1,"added":"x"}'}])
    refusal(project(df, table, url=db).collect, "SchemaChangedError", "no column added")


def test_options_and_columns_that_are_not_meant_are_refused(
    db: str, table: str, pg: Session, spark: SparkSession
) -> None:
    df = envelope(spark, [])
    choices: list[dict[str, Any]] = [{"where": "id = 1"}, {"slot": "s"}, {"DBTABLE": "t"}]
    for options in choices:
        with pytest.raises(OptionError, match=r"project\(\) does not use the option"):
            project(df, table, url=db, **options)
    with pytest.raises(OptionError, match="did you mean asString"):
        project(df, table, url=db, asStrin="id")
    with pytest.raises(OptionError, match="no column _table"):
        project(df.drop("_table"), table, url=db)
    with pg.cursor() as cursor:
        cursor.execute('CREATE TABLE clash ("_Seq" int)')
    with pytest.raises(OptionError, match='column "_Seq"'):
        project(df, "clash", url=db)
