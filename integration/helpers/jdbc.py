"""Read with Spark's own JDBC source, for comparison."""

from __future__ import annotations

from pathlib import Path

from bank import ACCOUNTS
from psycopg2.extensions import parse_dsn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

JDBC_DRIVER = Path("/usr/share/java/postgresql.jar")


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
