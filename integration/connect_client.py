"""A client of Spark Connect: append what a stream of the table ``t`` has to Parquet files, once, and end.

Arguments: conninfo, directory.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import SparkSession

from pg_cdc_source import register


def run(url: str, directory: Path) -> None:
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    register(spark)
    stream = spark.readStream.format("pgcdc").option("url", url).option("dbtable", "t").option("slot", "connect").load()
    (
        stream.writeStream.format("parquet")
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(directory / "rows"))
        .awaitTermination()
    )
    spark.stop()


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]))
