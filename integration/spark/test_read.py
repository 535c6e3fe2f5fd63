"""``read`` and ``stream`` are the formats; a client of Spark Connect calls them in test_sparks.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from driving import drop_slots
from frames import load
from psycopg2.extensions import connection as Session
from pyspark.sql import SparkSession
from sessions import SparkSessions

import pg_cdc_source

TABLE = """
CREATE TABLE t (id int PRIMARY KEY, "Total" numeric, note text);
INSERT INTO t SELECT i, i / 4.0, 'note ' || i FROM generate_series(1, 100) AS i
"""


def test_read_is_the_format_with_keywords(db: str, pg: Session, spark: SparkSession) -> None:
    pg.cursor().execute(TABLE)
    df = pg_cdc_source.read(
        spark,
        url=db,
        dbtable="t",
        columns=["id", '"Total"'],
        where="id <= 10",
        partitionBytes=8192,
        numericAs="decimal(10,2)",
        slotTimeout=2.5,
        connect_timeout=5,
    )
    options = {"columns": 'id,"Total"', "where": "id <= 10", "numericAs": "decimal(10,2)"}
    assert df.schema == load(spark, db, dbtable="t", **options).schema
    assert sorted(df.collect()) == sorted(load(spark, db, dbtable="t", **options).collect())
    assert df.count() == 10


def test_stream_is_the_format_with_keywords(db: str, pg: Session, spark: SparkSession, tmp_path: Path) -> None:
    pg.cursor().execute(TABLE)
    rows = pg_cdc_source.stream(spark, url=db, tables=["public.t"], slot="typed", maxRowsPerBatch=50, failover=False)
    assert rows.isStreaming
    writer = rows.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.trigger(availableNow=True).start(str(tmp_path / "rows"))
    assert query.awaitTermination(120)
    assert spark.read.parquet(str(tmp_path / "rows")).count() == 100
    drop_slots(pg)


def test_the_formats_are_registered_once(
    db: str, pg: Session, spark_sessions: SparkSessions, capfd: pytest.CaptureFixture[str]
) -> None:
    pg.cursor().execute(TABLE)
    spark_sessions.end_jvm()
    try:
        spark = spark_sessions.get(**{"spark.log.level": "WARN"}).newSession()
        for _ in range(2):
            assert pg_cdc_source.read(spark, url=db, dbtable="t").count() == 100
        assert "replaced a previously registered" not in capfd.readouterr().err
    finally:
        spark_sessions.end_jvm()
