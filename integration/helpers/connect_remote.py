"""A client of a Connect server elsewhere; its arguments are server, conninfo and directory.

It prints two lines of JSON: the sums that it sees, and then the changes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.errors.exceptions.connect import SparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from pg_cdc_source import collapse, open_snapshot, project


def load(spark: SparkSession, table: str, **options: str) -> DataFrame:
    return spark.read.format("pgsnapshot").options(dbtable=table, lsnColumn="lsn", **options).load()


def sums(spark: SparkSession, **options: str) -> list[Any]:
    """The total of all accounts, how many there are, and how many LSNs their rows have."""
    tables = [load(spark, table, numPartitions="3", **options) for table in ("checking", "savings")]
    found = tables[0].unionAll(tables[1]).agg(F.sum("balance"), F.count("*"), F.countDistinct("lsn")).collect()[0]
    return list(found)


def changes(spark: SparkSession, url: str, directory: str) -> list[list[Any]]:
    """The final state of each key that changed, as the server's workers made it of the envelope."""
    final = f"{directory}/final"

    def apply(batch: DataFrame, _: int) -> None:
        rows = collapse(project(batch, "public.t", url=url), "id")
        rows.select("id", "x", "_change_type").write.mode("append").parquet(final)

    stream = (
        spark.readStream.format("pgcdc").options(url=url, tables="public.t", slot="remote", startFrom="slot").load()
    )
    writer = stream.writeStream.foreachBatch(apply).option("checkpointLocation", f"{directory}/checkpoint")
    query = started(writer.trigger(availableNow=True))
    assert query.awaitTermination(300)
    return [list(row) for row in spark.read.parquet(final).orderBy("id").collect()]


def started(writer: DataStreamWriter) -> StreamingQuery:
    """Start a query. Spark gives its Python process 10 s, which is too little for its imports on a busy machine."""
    for _ in range(3):
        try:
            return writer.start()
        except SparkException as error:
            if "failed to connect back" not in str(error):
                raise
    return writer.start()


def main(server: str, url: str, directory: Path) -> None:
    spark = SparkSession.builder.remote(server).getOrCreate()
    with open_snapshot(url, tables=["checking", "savings"]) as snapshot:
        held = [sums(spark, **snapshot.options) for _ in range(2)]
    print(json.dumps({"sums": sums(spark, url=url), "held": held}), flush=True)
    print(json.dumps({"changes": changes(spark, url, str(directory))}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
