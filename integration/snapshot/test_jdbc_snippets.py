"""A program for Spark's JDBC source runs with ``pgsnapshot`` instead, and reads the same rows."""

from __future__ import annotations

import shutil

import pytest
from driving import copied
from frames import load
from psycopg2.extensions import connection as Session
from psycopg2.extensions import parse_dsn
from pyspark.sql import DataFrame, SparkSession
from refusals import refusal
from sessions import SparkSessions

from pg_cdc_source.options.habits import HABITS
from pg_cdc_source.options.spark_jdbc import TAKEN
from pg_cdc_source.spark import pgsnapshot
from pg_cdc_source.spark.pgsnapshot import PgSnapshotDataSource

ROWS = 2000
TABLES = f"""
CREATE TABLE items (item_id int PRIMARY KEY, name text NOT NULL);
INSERT INTO items SELECT i, 'item ' || i FROM generate_series(0, 9) AS i;
CREATE TABLE orders (
    order_id bigint PRIMARY KEY, item_id int, amount numeric(12,2), paid boolean, at timestamptz, day date,
    note text, weight float8
);
INSERT INTO orders
SELECT i, i % 10, i / 8.0, i % 2 = 0, timestamptz '2026-01-01 00:00+00' + i * interval '1 hour', date '2026-01-01' + i,
    CASE WHEN i % 5 = 0 THEN NULL ELSE repeat('note ', 20) || i END, i / 3.0
FROM generate_series(1, {ROWS}) AS i;
ANALYZE
"""
RANGES = {"partitionColumn": "order_id", "lowerBound": "1", "upperBound": "1500", "numPartitions": "4"}
OPTION_SETS = {
    "a table": {"dbtable": "orders"},
    "a table of a schema": {"dbtable": "public.orders", "fetchsize": "100"},
    "in ranges": {"dbtable": "orders", **RANGES},
    "push-down": {
        "dbtable": "orders",
        **dict.fromkeys(
            (
                *("pushDownPredicate", "pushDownAggregate", "pushDownLimit", "pushDownOffset", "pushDownTableSample"),
                "pushDownJoin",
            ),
            "true",
        ),
    },
    "for writing": {
        **{"dbtable": "orders", "batchsize": "10", "truncate": "true", "cascadeTruncate": "true"},
        **{"isolationLevel": "READ_COMMITTED", "createTableOptions": "UNLOGGED", "tableComment": "a comment"},
    },
    "of the driver": {
        **{"dbtable": "orders", "queryTimeout": "60", "socketTimeout": "60", "loginTimeout": "60"},
        **{"ApplicationName": "a report", "reWriteBatchedInserts": "true", "defaultRowFetchSize": "10"},
    },
    "a sub-select": {"dbtable": "(SELECT order_id, amount FROM orders WHERE order_id % 3 = 0) AS t"},
    "a sub-select in ranges": {
        "dbtable": """(
            SELECT order_id, name, amount -- what an item brought
            FROM orders JOIN items USING (item_id)
        ) t""",
        **RANGES,
    },
    "a join": {"dbtable": "(orders JOIN items USING (item_id))"},
    "a query": {
        "query": "SELECT item_id, sum(amount)::numeric(12,2) AS amount FROM orders GROUP BY 1",
        "fetchsize": "3",
    },
    "a query and a number": {"query": "SELECT order_id FROM orders", "numPartitions": "4"},
    "times": {
        **{"query": "SELECT order_id, at::timestamp AS at FROM orders", "preferTimestampNTZ": "true"},
        "preferTimestampNanos": "true",
    },
}


def given(db: str, options: dict[str, str]) -> dict[str, str]:
    """What a user of Spark's JDBC source has written."""
    server = parse_dsn(db)
    url = f"jdbc:postgresql://{server['host']}:{server['port']}/{server['dbname']}"
    login = {"user": server["user"], "password": server["password"]}
    return {"url": url, **login, "driver": "org.postgresql.Driver", **options}


def program(spark: SparkSession, format: str, db: str, options: dict[str, str]) -> DataFrame:
    """A program of which only the format's name differs."""
    return spark.read.format(format).options(**given(db, options)).load()


@pytest.mark.debian
@pytest.mark.usefixtures("jdbc_driver")
@pytest.mark.parametrize("name", OPTION_SETS)
def test_the_same_program_reads_the_same_rows(name: str, db: str, pg: Session, spark: SparkSession) -> None:
    pg.cursor().execute(TABLES)
    ours, theirs = (program(spark, format, db, OPTION_SETS[name]) for format in ("pgsnapshot", "jdbc"))
    assert ours.schema.simpleString() == theirs.schema.simpleString()
    rows = sorted(map(repr, theirs.collect()))
    assert sorted(map(repr, ours.collect())) == rows
    assert len(rows) >= 10


def test_the_number_of_partitions_means_what_it_says(db: str, pg: Session, spark: SparkSession) -> None:
    pg.cursor().execute(TABLES)
    assert program(spark, "pgsnapshot", db, OPTION_SETS["in ranges"]).rdd.getNumPartitions() == 4
    assert program(spark, "pgsnapshot", db, OPTION_SETS["a sub-select in ranges"]).rdd.getNumPartitions() == 1


@pytest.mark.usefixtures("own_driver")
def test_one_warning_says_what_happens_instead(
    db: str, pg: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As Spark calls it: each step is another process's, which gets what the last one has made."""
    pg.cursor().execute(TABLES)
    monkeypatch.setattr(pgsnapshot, "execution", lambda: "1")

    def warnings(options: dict[str, str]) -> list[str]:
        caplog.clear()
        source = PgSnapshotDataSource(options)
        schema = source.schema()
        reader = copied(source).reader(schema)
        # Spark 4.0 plans anew for each action.
        for _ in range(2):
            partitions = copied(reader).partitions()
            assert sum(batch.num_rows for part in partitions for batch in copied(reader).read(copied(part))) == ROWS
        return [message for message in caplog.messages if "JDBC" in message]

    assert warnings({"url": db, "dbtable": "orders"}) == []
    [warning] = warnings(given(db, {**OPTION_SETS["in ranges"], "fetchSize": "100"}))
    assert "fetchsize: rows are streamed" in warning
    assert "1500" not in warning


def test_every_option_of_the_running_spark_has_an_answer(spark: SparkSession) -> None:
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    theirs = jvm.org.apache.spark.sql.execution.datasources.jdbc.JDBCOptions
    names = {getattr(theirs, method)() for method in dir(theirs) if method.startswith("JDBC_")}
    assert len(names) > 30
    taken = {name for together, _ in TAKEN for name in together}
    refused = HABITS["connection"].keys() | HABITS["pgsnapshot"].keys()
    assert names - taken - refused == {"url", "dbtable", "query", "numPartitions"}


def test_what_would_change_rows_or_types_is_refused(db: str, pg: Session, spark: SparkSession) -> None:
    pg.cursor().execute(TABLES)
    options = {
        **{"dbtable": "orders", "sessionInitStatement": "SET ROLE other", "customSchema": "order_id STRING"},
        **{"predicates": "order_id < 5", "prepareQuery": "WITH t AS (SELECT 1)", "preferTimestampNTZ": "false"},
    }
    with pytest.raises(Exception, match="5 things are wrong with the options") as caught:
        program(spark, "pgsnapshot", db, options)
    text = str(caught.value)
    assert all(name in text for name in options if name != "dbtable")


def test_writing_is_refused(db: str, pg: Session, spark: SparkSession) -> None:
    pg.cursor().execute(TABLES)
    writer = spark.range(1).write.format("pgsnapshot").options(url=db, dbtable="orders").mode("append")
    refusal(writer.save, "OptionError", "only reads", 'format("jdbc")')


@pytest.mark.parametrize("columns", ["", "(order_id bigint)"])
def test_a_table_of_the_catalog_says_why_it_cannot_work(
    columns: str, db: str, pg: Session, spark: SparkSession, spark_sessions: SparkSessions
) -> None:
    pg.cursor().execute(TABLES)
    create = f"CREATE TABLE kept {columns} USING pgsnapshot OPTIONS (url '{db}', dbtable 'orders')"

    def read() -> None:
        # Spark 4.0 to 4.3 asks nobody when the statement lists columns.
        spark.sql(create)
        spark.table("kept").collect()

    try:
        text = refusal(read, "CREATE TABLE", "CREATE TEMPORARY VIEW")
        assert ("neither dbtable nor query is given" in text) == bool(columns)
    finally:
        spark.sql("DROP TABLE IF EXISTS kept")
        shutil.rmtree(spark_sessions.scratch / "spark-warehouse", ignore_errors=True)
    spark.sql(create.replace(f"TABLE kept {columns}", "TEMPORARY VIEW kept"))
    try:
        assert spark.table("kept").count() == load(spark, db, dbtable="orders").count() == ROWS
    finally:
        spark.catalog.dropTempView("kept")
