"""``read`` and ``stream`` are the formats; a client of Spark Connect calls them in test_sparks.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from driving import drop_slots
from frames import load
from psycopg2.extensions import connection as Session
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource
from sessions import CONF

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


@pytest.fixture
def logged(spark: SparkSession) -> Iterator[Callable[[], str]]:
    """What the JVM logs from now on."""
    jvm: Any = spark._jvm
    log4j, writer = jvm.org.apache.logging.log4j, jvm.java.io.StringWriter()
    layout = log4j.core.layout.PatternLayout.createDefaultLayout()
    appender = log4j.core.appender.WriterAppender.createAppender(layout, None, writer, "test", False, True)
    appender.start()
    root = log4j.LogManager.getRootLogger()
    root.addAppender(appender)
    spark.sparkContext.setLogLevel("WARN")
    yield writer.toString
    spark.sparkContext.setLogLevel(CONF["spark.log.level"])
    root.removeAppender(appender)


class Again(DataSource):
    @classmethod
    def name(cls) -> str:
        return "again"


def test_the_formats_are_registered_once(db: str, pg: Session, spark: SparkSession, logged: Callable[[], str]) -> None:
    pg.cursor().execute(TABLE)
    session = spark.newSession()
    for _ in range(2):
        assert pg_cdc_source.read(session, url=db, dbtable="t").count() == 100
    said = "replaced a previously registered"
    assert said not in logged()
    # It would be there.
    for _ in range(2):
        session.dataSource.register(Again)
    assert said in logged()
