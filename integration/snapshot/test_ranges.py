"""Every kind of relation is cut as the options say, and read completely, each row once."""

from __future__ import annotations

import pickle
import time
from typing import Any, TypeVar

import psycopg2
import pytest
import scans
from frames import load
from psycopg2.extensions import connection as Session
from psycopg2.extensions import cursor, parse_dsn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType
from watch import open_transactions, wait_until

from pg_cdc_source import open_snapshot
from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.snapshot.scan import make_plan
from pg_cdc_source.snapshot.source import plan_ranges
from pg_cdc_source.spark.pgsnapshot import RangePartition

# One row of this size fills a block of 8 kB.
ONE_BLOCK = "repeat('x', 5000)"
PLANNING_SECONDS = 1.0

T = TypeVar("T")


def run(pg: Session, *statements: str) -> None:
    with pg.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def rows_of(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in frame.collect())


def make_blocks(pg: Session, table: str, blocks: int) -> None:
    """Create a table of ``blocks`` blocks with one row each, numbered from 1."""
    run(
        pg,
        f"CREATE TABLE {table} (id int, filler text) WITH (autovacuum_enabled = off)",
        f"ALTER TABLE {table} ALTER filler SET STORAGE PLAIN",
        f"INSERT INTO {table} SELECT i, {ONE_BLOCK} FROM generate_series(1, {blocks}) AS i",
    )


def ranged(pg: Session, cut: T, whole: T) -> T:
    """What is seen where a heap can be cut into ranges, from PostgreSQL 14 on, and where it is read as a whole."""
    return cut if pg.server_version >= 140000 else whole


# --- how many --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cut", "partitions"),
    [
        ({"numPartitions": "1"}, 1),
        ({"numPartitions": "4"}, 4),
        ({"numPartitions": "19"}, 19),
        ({"numPartitions": "1000"}, 20),
        ({"partitionBytes": "8kB"}, 20),
        ({"partitionBytes": "40kB"}, 4),
        ({"partitionBytes": "47kB"}, 4),
        ({"partitionBytes": "1MB"}, 1),
        ({}, 1),
    ],
)
def test_a_table_of_20_blocks_is_cut_as_the_options_say(
    cut: dict[str, str], partitions: int, db: str, pg: Session
) -> None:
    make_blocks(pg, "t", 20)
    with open_snapshot(db) as snapshot:
        scan = scans.planned(snapshot, dbtable="t", columns="id", **cut)
        assert len(scan[2]) == ranged(pg, partitions, 1)
        assert [row["id"] for row in scans.rows_of(scan)] == list(range(1, 21))


@pytest.mark.matrix("ctid ranges in parallel", since="PostgreSQL 14", before="one range")
def test_ranges_of_one_size_hold_as_many_rows(db: str, pg: Session, spark: SparkSession) -> None:
    make_blocks(pg, "t", 40)
    sizes = [len(part) for part in load(spark, db, dbtable="t", columns="id", numPartitions=4).rdd.glom().collect()]
    # Before 14, PostgreSQL reads the whole table for a range of it.
    assert sizes == ranged(pg, [10, 10, 10, 10], [40])


def test_ten_thousand_ranges_are_planned_in_a_second(db: str, pg: Session) -> None:
    make_blocks(pg, "t", 10_000)
    with open_snapshot(db) as snapshot:
        given = {"dbtable": "t", "partitionBytes": "8kB", "lsnColumn": "lsn", **snapshot.options}
        options = parse_snapshot_options(given)
        plan = make_plan(options)
        seconds: list[float] = []
        # The best of up to ten, and CPU time: other work on the machine slows planning down, and is not its own.
        while len(seconds) < 10 and min(seconds, default=PLANNING_SECONDS) >= PLANNING_SECONDS:
            start = time.process_time()
            source, ranges = plan_ranges(plan, options)
            # As Spark does: each partition on its own.
            pickled = [pickle.dumps(RangePartition(source, scan_range)) for scan_range in ranges]
            seconds.append(time.process_time() - start)
    assert len(pickled) == ranged(pg, 10_000, 1)
    assert min(seconds) < PLANNING_SECONDS, seconds


def test_rows_that_come_after_loading_are_read(db: str, pg: Session, spark: SparkSession) -> None:
    make_blocks(pg, "t", 40)
    frame = load(spark, db, dbtable="t", columns="id", numPartitions=4)
    assert frame.count() == 40
    # PySpark 4.1 and later plan once: the table is ten times as large as the ranges were cut for.
    run(pg, f"INSERT INTO t SELECT i, {ONE_BLOCK} FROM generate_series(41, 400) AS i")
    assert rows_of(frame) == [(i,) for i in range(1, 401)]


def test_a_table_that_shrinks_after_loading_is_read(db: str, pg: Session, spark: SparkSession) -> None:
    make_blocks(pg, "t", 40)
    frame = load(spark, db, dbtable="t", columns="id", numPartitions=8, snapshotIdle="3s")
    assert frame.count() == 40
    # Not while a snapshot needs what was deleted.
    wait_until(lambda: not open_transactions(pg))
    run(pg, "DELETE FROM t WHERE id > 3")

    def shrunk() -> bool:
        run(pg, "VACUUM t")
        with pg.cursor() as cursor:
            cursor.execute("SELECT pg_relation_size('t') < 40 * 8192 / 2")
            return bool(cursor.fetchone()[0])

    wait_until(shrunk)
    assert rows_of(frame) == [(1,), (2,), (3,)]


# --- kinds of relations ----------------------------------------------------------------------------------------------


@pytest.mark.matrix("partitioned tables")
def test_partitions_of_any_shape_are_read(db: str, pg: Session, spark: SparkSession) -> None:
    run(
        pg,
        "CREATE TABLE p (region text, year int, id int, gone int, note text) PARTITION BY LIST (region)",
        "ALTER TABLE p DROP COLUMN gone",
        # Two levels below the root, and one below it.
        "CREATE TABLE p_eu PARTITION OF p FOR VALUES IN ('eu') PARTITION BY RANGE (year)",
        "CREATE TABLE p_eu_old PARTITION OF p_eu FOR VALUES FROM (0) TO (2020)",
        # Columns in another order, with a dropped one in front of them.
        "CREATE TABLE p_eu_new (dropped bigint, note text, id int, year int, region text)",
        "ALTER TABLE p_eu_new DROP COLUMN dropped",
        "ALTER TABLE p_eu ATTACH PARTITION p_eu_new FOR VALUES FROM (2020) TO (3000)",
        "CREATE TABLE p_us (id int, note text, region text, year int)",
        "ALTER TABLE p ATTACH PARTITION p_us FOR VALUES IN ('us')",
        "CREATE TABLE p_none PARTITION OF p DEFAULT",
        "INSERT INTO p SELECT (ARRAY['eu', 'us'])[1 + i % 2], 2010 + i % 20, i, 'n' || i"
        " FROM generate_series(1, 1000) AS i",
        "ALTER TABLE p ADD COLUMN added date DEFAULT '2024-02-29'",
    )
    frame = load(spark, db, dbtable="p", columns="id, region, year, note")
    # Small leaves share one.
    assert frame.rdd.getNumPartitions() == 1
    expected = [(i, ("eu", "us")[i % 2], 2010 + i % 20, f"n{i}") for i in range(1, 1001)]
    assert rows_of(frame) == expected
    whole = load(spark, db, dbtable="p", numPartitions=7)
    assert whole.columns == ["region", "year", "id", "note", "added"]
    assert whole.where("added = DATE'2024-02-29'").select("id", "region", "year", "note").distinct().count() == 1000
    middle = load(spark, db, dbtable="p_eu", columns="id, region, year, note")
    assert rows_of(middle) == [row for row in expected if row[1] == "eu"]


def test_a_partitioned_table_without_partitions_is_empty(db: str, pg: Session, spark: SparkSession) -> None:
    run(pg, "CREATE TABLE p (id int) PARTITION BY RANGE (id)")
    assert rows_of(load(spark, db, dbtable="p")) == []


def test_inheritance_children_are_read_with_their_parent(db: str, pg: Session, spark: SparkSession) -> None:
    run(
        pg,
        "CREATE TABLE parent (id int, name text)",
        "CREATE TABLE child (more text) INHERITS (parent)",
        "CREATE TABLE grandchild (even_more text) INHERITS (child)",
        "CREATE TABLE other (x int, name text, id int)",
        "ALTER TABLE other INHERIT parent",
        "CREATE TABLE twice () INHERITS (child, other)",
        "INSERT INTO parent VALUES (1, 'a')",
        "INSERT INTO child VALUES (2, 'b', 'm')",
        "INSERT INTO grandchild VALUES (3, 'c', 'm', 'e')",
        "INSERT INTO other VALUES (0, 'd', 4)",
        "INSERT INTO twice (id, name) VALUES (5, 'e')",
    )
    frame = load(spark, db, dbtable="parent")
    assert frame.columns == ["id", "name"]
    assert frame.rdd.getNumPartitions() == 1
    assert rows_of(frame) == [(1, "a"), (2, "b"), (3, "c"), (4, "d"), (5, "e")]
    # Empty or not, each counts as a block.
    assert load(spark, db, dbtable="parent", numPartitions=5).rdd.getNumPartitions() == ranged(pg, 5, 1)
    assert rows_of(load(spark, db, dbtable="other", columns="id")) == [(4,), (5,)]


@pytest.mark.matrix("views, foreign tables, queries")
def test_views_and_queries_are_one_partition(db: str, pg: Session, spark: SparkSession) -> None:
    make_blocks(pg, "t", 40)
    run(
        pg,
        "CREATE VIEW odd AS SELECT id, -id AS minus FROM t WHERE id % 2 = 1",
        "CREATE MATERIALIZED VIEW kept AS SELECT id, filler FROM t WITH NO DATA",
        "ALTER MATERIALIZED VIEW kept ALTER filler SET STORAGE PLAIN",
        "REFRESH MATERIALIZED VIEW kept",
        "DELETE FROM t WHERE id > 10",
    )
    odd = load(spark, db, dbtable="odd", where="minus < -2", numPartitions=4)
    assert odd.rdd.getNumPartitions() == 1
    assert rows_of(odd) == [(3, -3), (5, -5), (7, -7), (9, -9)]
    # A materialized view has a heap.
    kept = load(spark, db, dbtable="kept", columns="id", numPartitions=4)
    assert kept.rdd.getNumPartitions() == ranged(pg, 4, 1)
    assert rows_of(kept) == [(i,) for i in range(1, 41)]
    query = load(spark, db, query="SELECT a.id, b.id * 2 AS twice FROM t AS a JOIN odd AS b USING (id); ")
    assert query.rdd.getNumPartitions() == 1
    assert rows_of(query) == [(1, 2), (3, 6), (5, 10), (7, 14), (9, 18)]
    assert rows_of(load(spark, db, query="SELECT 1 AS one -- a comment at the end")) == [(1,)]


@pytest.mark.matrix("views, foreign tables, queries")
def test_foreign_tables_are_read(db: str, pg: Session, spark: SparkSession) -> None:
    with pg.cursor() as cursor:
        cursor.execute("SELECT FROM pg_available_extensions WHERE name = 'postgres_fdw'")
        if cursor.rowcount == 0:
            pytest.skip("this server does not have the extension postgres_fdw")
        server = parse_dsn(db)
        make_blocks(pg, "t", 5)
        cursor.execute("CREATE EXTENSION postgres_fdw")
        # The address as the server itself sees it, which behind a container's port is another one.
        cursor.execute(
            "DO $$ BEGIN EXECUTE format('CREATE SERVER itself FOREIGN DATA WRAPPER postgres_fdw"
            " OPTIONS (host %L, port %L, dbname %L)', 'localhost', current_setting('port'), current_database()); END $$"
        )
        cursor.execute(
            "CREATE USER MAPPING FOR CURRENT_USER SERVER itself OPTIONS (user %s, password %s)",
            (server["user"], server["password"]),
        )
        cursor.execute("CREATE FOREIGN TABLE far (id int) SERVER itself OPTIONS (table_name 't')")
    frame = load(spark, db, dbtable="far", numPartitions=4)
    assert frame.rdd.getNumPartitions() == 1
    assert rows_of(frame) == [(1,), (2,), (3,), (4,), (5,)]


def test_an_empty_table_is_an_empty_dataframe_with_its_schema(db: str, pg: Session, spark: SparkSession) -> None:
    run(pg, "CREATE TABLE t (id int NOT NULL, big bigint, name text)")
    for options in ({}, {"numPartitions": 4}, {"where": "id > 1"}):
        frame = load(spark, db, dbtable="t", **options)
        assert [(field.name, field.dataType) for field in frame.schema] == [
            ("id", IntegerType()),
            ("big", LongType()),
            ("name", StringType()),
        ]
        assert frame.collect() == []
        assert frame.count() == 0


# --- names -----------------------------------------------------------------------------------------------------------


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


NAMES = (
    ("Sales", "Orders", "OrderId"),
    ("my schema", "my table", "my column"),
    ("a.b", "c.d", "e.f"),
    ('say "hi"', 'a "quoted" table', 'a "quoted" column'),
    ("größe", "表", "колонка 🐘"),
    ("it's", "100% \\ table", "a%s{}?:b"),
    ("select", "from", "where"),
    ("s" * 63, "t" * 63, "c" * 63),
)


@pytest.mark.parametrize(("schema", "table", "column"), NAMES)
def test_any_name_is_read(schema: str, table: str, column: str, db: str, pg: Session) -> None:
    name = f"{quoted(schema)}.{quoted(table)}"
    with pg.cursor() as cursor:
        # Without arguments, psycopg2 leaves percent signs alone.
        cursor.execute(f"CREATE SCHEMA {quoted(schema)}; CREATE TABLE {name} (id int, {quoted(column)} text)")
        cursor.execute(f"INSERT INTO {name} SELECT i, 'v' || i FROM generate_series(1, 5) AS i")
    with open_snapshot(db) as snapshot:
        rows = scans.rows_of(scans.planned(snapshot, dbtable=name, numPartitions="2"))
        assert rows == [{"id": i, column: f"v{i}"} for i in range(1, 6)]
        chosen = scans.planned(
            snapshot,
            dbtable=name,
            columns=quoted(column),
            asString=quoted(column),
            where=f"{quoted(column)} <> 'v1' -- % the first",
            lsnColumn=f"{column[:40]} of lsn",
        )
        assert [tuple(row) for row in scans.rows_of(chosen)] == [(column, f"{column[:40]} of lsn")] * 4
        assert [row[column] for row in scans.rows_of(chosen)] == ["v2", "v3", "v4", "v5"]


def test_columns_of_any_name_come_to_spark(db: str, pg: Session, spark: SparkSession) -> None:
    names = [column for _, _, column in NAMES]
    run(
        pg,
        f"CREATE TABLE t ({', '.join(f'{quoted(name)} int' for name in names)})",
        f"INSERT INTO t VALUES ({', '.join(str(number) for number in range(len(names)))})",
    )
    frame = load(spark, db, dbtable="t")
    assert frame.columns == names
    assert rows_of(frame) == [tuple(range(len(names)))]


def test_an_unquoted_name_folds_and_follows_the_search_path(db: str, pg: Session, spark: SparkSession) -> None:
    run(pg, "CREATE SCHEMA other; CREATE TABLE other.orders AS SELECT 1 AS id; CREATE TABLE orders AS SELECT 2 AS id")
    assert rows_of(load(spark, db, dbtable="ORDERS")) == [(2,)]
    assert rows_of(load(spark, db, dbtable="Other.Orders")) == [(1,)]
    assert rows_of(load(spark, db, dbtable="orders", options="-c search_path=other")) == [(1,)]


# --- options ---------------------------------------------------------------------------------------------------------


def test_columns_come_in_the_order_asked_for(db: str, pg: Session, spark: SparkSession) -> None:
    run(pg, "CREATE TABLE t AS SELECT 1 AS a, 'x'::text AS b, 2::bigint AS c, now() AS d")
    frame = load(spark, db, dbtable="t", columns="c, b, a")
    assert frame.columns == ["c", "b", "a"]
    assert rows_of(frame) == [(2, "x", 1)]


@pytest.mark.parametrize(
    ("where", "ids"),
    [
        ("id <= 3", [1, 2, 3]),
        ("id <= 3 -- the first three", [1, 2, 3]),
        ("id = 1 OR id = 40", [1, 40]),
        ("id = 1 OR id = 40 /* not ) this */", [1, 40]),
        ("id % 20 = 0", [20, 40]),
        ("NULLIF(id, 7) > 38 OR id = 7", [7, 39, 40]),
        ("id IN (SELECT max(id) FROM t)", [40]),
        ("filler LIKE '%y%'", []),
    ],
)
def test_a_predicate_selects_the_same_rows_in_ranges(where: str, ids: list[int], db: str, pg: Session) -> None:
    make_blocks(pg, "t", 40)
    run(pg, "CREATE INDEX ON t (id)")
    with open_snapshot(db) as snapshot:
        scan = scans.planned(snapshot, dbtable="t", columns="id", where=where, numPartitions="8")
        assert len(scan[2]) == ranged(pg, 8, 1)
        assert [row["id"] for row in scans.rows_of(scan)] == ids


def test_as_string_gives_postgresqls_own_text(db: str, pg: Session, spark: SparkSession) -> None:
    run(
        pg,
        "CREATE TABLE t AS SELECT 1 AS id, '{1,NULL,3}'::int[] AS numbers, '1 day 02:00'::interval AS time,"
        " 'infinity'::timestamp AS never, 'NaN'::numeric AS nothing, NULL::date AS missing",
    )
    frame = load(spark, db, dbtable="t", asString="numbers, never, nothing, missing")
    assert [field.dataType for field in frame.select("numbers", "never", "nothing").schema] == [StringType()] * 3
    assert rows_of(frame.drop("time")) == [(1, "{1,NULL,3}", "infinity", "NaN", None)]


def test_the_lsn_column_is_one_bigint(db: str, pg: Session, spark: SparkSession) -> None:
    make_blocks(pg, "t", 40)
    frame = load(spark, db, dbtable="t", columns="id", numPartitions=8, lsnColumn="Snapshot LSN")
    assert frame.schema == StructType([StructField("id", IntegerType()), StructField("Snapshot LSN", LongType())])
    ((lsn,),) = frame.select("Snapshot LSN").distinct().collect()
    assert lsn > 0


# With the role's search_path: one more for a name without a schema, and one for the names of types of users.
@pytest.mark.parametrize(
    ("dbtable", "columns", "round_trips"), [("public.t", "id,n", 3), ("t", "id,n", 4), ("public.t", "id,of", 4)]
)
def test_planning_takes_three_round_trips_after_connecting_and_as_many_for_the_ranges(
    dbtable: str, columns: str, round_trips: int, db: str, pg: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Counting(cursor):  # type: ignore[misc]  # psycopg2 has no types
        def execute(self, query: Any, vars: Any = None) -> None:
            asked.append(str(query))
            super().execute(query, vars)

    def counted(*arguments: Any, **keywords: Any) -> Session:
        return connect(*arguments, **keywords, cursor_factory=Counting)

    with pg.cursor() as own:
        own.execute("CREATE TYPE mood AS ENUM ('glad')")
        own.execute("CREATE TABLE t (id int PRIMARY KEY, of mood, n numeric(5, 2)[]) PARTITION BY RANGE (id)")
        own.execute("CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (9)")
    connect = psycopg2.connect
    monkeypatch.setattr(psycopg2, "connect", counted)
    with open_snapshot(db, tables=["t"]) as snapshot:
        given = {"url": db, "dbtable": dbtable, "columns": columns, "snapshot": snapshot.options["snapshot"]}
        options = parse_snapshot_options(given)
        asked.clear()
        plan = make_plan(options)
        assert len(asked) == 1 + round_trips, asked
        asked.clear()
        assert len(plan_ranges(plan, options)[1]) == 1
        assert len(asked) == 1 + 3, asked
