"""A client of Spark Connect: append what a stream of the table ``t`` has to Parquet files, in two runs, and end.

Arguments: conninfo, directory.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import psycopg2
from pyspark.sql import SparkSession

from pg_cdc_source import read, stream


def run(spark: SparkSession, url: str, directory: Path) -> None:
    (
        stream(spark, url=url, dbtable="t", slot="connect")
        .writeStream.format("parquet")
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(directory / "rows"))
        .awaitTermination()
    )


def main(url: str, directory: Path) -> None:
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    assert read(spark, url=url, dbtable="t", columns=["id"], where="id < 0").collect() == []
    run(spark, url, directory)
    with contextlib.closing(psycopg2.connect(url)) as session, session, session.cursor() as cursor:
        cursor.execute("UPDATE t SET x = 'changed' WHERE id = 1; DELETE FROM t WHERE id = 2")
    run(spark, url, directory)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
