"""DataFrames of the connector, as the tests load them."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession


def load(spark: SparkSession, db: str | None, **options: str | int) -> DataFrame:
    """Load a DataFrame of ``pgsnapshot`` from ``db``; None where ``options`` say what to connect to."""
    return spark.read.format("pgsnapshot").options(**({} if db is None else {"url": db}), **options).load()
