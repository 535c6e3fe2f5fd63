"""Read with Spark's own JDBC source, for comparison."""

from __future__ import annotations

from pathlib import Path

import pytest
from bank import ACCOUNTS
from psycopg2.extensions import parse_dsn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sessions import SparkSessions

JDBC_DRIVER = Path("/usr/share/java/postgresql.jar")


@pytest.fixture(scope="module")
def jdbc_jar(spark_sessions: SparkSessions) -> str:
    """Path of PostgreSQL's JDBC driver, which a JVM has to be started with."""
    if not JDBC_DRIVER.exists():
        pytest.fail(f"{JDBC_DRIVER} is missing: apt-get install libpostgresql-jdbc-java")
    spark_sessions.end_jvm()
    return str(JDBC_DRIVER)


def jdbc(spark: SparkSession, db: str, table: str) -> DataFrame:
    """Read a table with Spark's own JDBC source, in as many partitions."""
    server = parse_dsn(db)
    return spark.read.jdbc(
        f"jdbc:postgresql://{server['host']}:{server['port']}/{server['dbname']}",
        table,
        column="id",
        lowerBound=1,
        upperBound=ACCOUNTS,
        numPartitions=3,
        properties={"user": server["user"], "password": server["password"], "driver": "org.postgresql.Driver"},
    ).withColumn("lsn", F.lit(0))
